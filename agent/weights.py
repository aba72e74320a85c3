"""Weights are known by their hash: finds or fetches a file, hashes it, and looks again later whether it is the same.

What comes from the network lies in a store where a file's name is its hash; nothing gets that name before every byte
was checked. A file that was found elsewhere stays where it is.
"""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agent.errors import ConfigError
from agent.identity import write_private

log = logging.getLogger("fallow.agent.weights")

PACKAGE_PREFIX: Final = "package:"
URL_PREFIXES: Final = ("https://", "http://")
MAX_REMEMBERED: Final = 256
CHUNK_BYTES: Final = 1024 * 1024
FETCH_TRIES: Final = 8
FETCH_PAUSE_S: Final = 1.0
FETCH_PAUSE_MAX_S: Final = 30.0
STALL_S: Final = 60.0
MAX_WEIGHTS_BYTES: Final = 4 << 40
RECHECK_BYTES_PER_S: Final = 200_000_000
"""Reading again what is in use must not starve the owner's disk."""


class Remembered(msgspec.Struct, frozen=True):
    """A hash, and the file's state when it was taken."""

    size_bytes: int
    modified_ns: int
    inode: int
    sha256: str


def is_url(weights: str) -> bool:
    """True if the weights come from the network."""
    return weights.startswith(URL_PREFIXES)


def locate(weights: str) -> Path:
    """`package:NAME/FILE` or a path -> an existing file or folder. The package is found, never imported. Raises
    ConfigError."""
    path = _in_package(weights.removeprefix(PACKAGE_PREFIX)) if weights.startswith(PACKAGE_PREFIX) else Path(weights)
    path = path.expanduser()
    if not path.exists():
        raise ConfigError(f"The weights {weights} are not there: {path} is not a file.")
    return path.resolve()


def _in_package(reference: str) -> Path:
    package, slash, relative = reference.partition("/")
    if not slash or not package.isidentifier() or ".." in Path(relative).parts or Path(relative).is_absolute():
        raise ConfigError(f"{PACKAGE_PREFIX}{reference} is not of the form package:NAME/FILE.")
    spec = importlib.util.find_spec(package)
    if spec is None or not spec.submodule_search_locations:
        raise ConfigError(f"The Python package {package}, which holds the weights, is not installed here.")
    return Path(next(iter(spec.submodule_search_locations))) / relative


class HashStore:
    """Hashes of files, kept in one small file that may be deleted at any time."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._known = self._read()

    def _read(self) -> dict[str, Remembered]:
        try:
            return msgspec.json.decode(self._path.read_bytes(), type=dict[str, Remembered])
        except (OSError, msgspec.DecodeError):
            return {}

    def sha256(self, path: Path, *, afresh: bool = False) -> str:
        """Hash of the file's bytes, hex. Reads the whole file unless its size, time and inode are as remembered;
        `afresh` always reads, slowly, and believes nothing. Raises OSError."""
        stat = path.stat()
        known = self._known.get(str(path))
        state = (stat.st_size, stat.st_mtime_ns, stat.st_ino)
        if not afresh and known and (known.size_bytes, known.modified_ns, known.inode) == state:
            return known.sha256
        digest = _read_slowly(path) if afresh else _read_fast(path)
        self._remember(str(path), Remembered(*state, digest))
        return digest

    def _remember(self, path: str, entry: Remembered) -> None:
        self._known.pop(path, None)
        self._known[path] = entry
        while len(self._known) > MAX_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        with suppress(OSError):  # a note that cannot be kept costs only another reading of the file
            write_private(self._path, msgspec.json.encode(self._known))


def _read_fast(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _read_slowly(path: Path) -> str:
    digest, read, began = hashlib.sha256(), 0, time.monotonic()
    with path.open("rb") as file:
        while chunk := file.read(CHUNK_BYTES):
            digest.update(chunk)
            read += len(chunk)
            time.sleep(max(0.0, read / RECHECK_BYTES_PER_S - (time.monotonic() - began)))
    return digest.hexdigest()


def verify(store: HashStore, path: Path, expected: str | None, *, afresh: bool = False) -> str:
    """Hash the file, compare with what is expected, and return it. Raises ConfigError if they differ, or if the file
    cannot be read."""
    try:
        actual = store.sha256(path, afresh=afresh)
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error
    if expected is not None and actual != expected:
        raise ConfigError(f"{path} is not the file that is meant: sha256 is {actual}, expected {expected}.")
    return actual


class WeightStore:
    """Files from the network, each named by its hash, within a budget of bytes."""

    def __init__(self, folder: Path, budget_bytes: int, hashes: HashStore) -> None:
        self._folder = folder
        self._budget_bytes = budget_bytes
        self._hashes = hashes

    def path(self, sha256: str) -> Path:
        """Where the file of this hash lies, or will."""
        return self._folder / f"{sha256}.gguf"

    def files(self) -> list[Path]:
        """Every complete file that is here."""
        return sorted(self._folder.glob("*.gguf"))

    def find(self, sha256: str) -> Path | None:
        """The checked file, noted as used now; None if it is not here. One whose bytes changed is deleted."""
        path = self.path(sha256)
        if not path.is_file():
            return None
        try:
            verify(self._hashes, path, sha256)
        except ConfigError as error:
            log.warning("weights_changed reason=%r", str(error))
            path.unlink(missing_ok=True)
            return None
        _used(path).touch()
        return path

    async def fetch(
        self,
        url: str,
        sha256: str,
        *,
        keep: Collection[str] = (),
        told: Callable[[int, int | None], None] | None = None,
    ) -> Path:
        """The file of this hash, from the store or the network, going on where an earlier try ended.

        `keep` are hashes that are not to be evicted; `told(bytes, of)` hears of progress. Raises ConfigError.
        """
        found = await asyncio.to_thread(self.find, sha256)
        if found is not None:
            return found
        self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        part = self._folder / f"{sha256}.part"
        pause_s = FETCH_PAUSE_S
        for remaining in reversed(range(FETCH_TRIES)):
            try:
                await self._load(url, part, {*keep, sha256}, told)
                break
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                reason = str(error) or type(error).__name__
                if not remaining:
                    raise ConfigError(f"{_public(url)} could not be fetched: {reason}.") from error
                log.info("fetch_again host=%s reason=%r", urlsplit(url).hostname, reason)
                await asyncio.sleep(pause_s)
                pause_s = min(pause_s * 2, FETCH_PAUSE_MAX_S)
        return await asyncio.to_thread(self._admit, url, part, sha256)

    async def _load(self, url: str, part: Path, keep: set[str], told: Callable[[int, int | None], None] | None) -> None:
        have = _size(part)
        headers = {"Range": f"bytes={have}-", "Accept-Encoding": "identity"} if have else {}
        timeout = aiohttp.ClientTimeout(total=None, sock_connect=STALL_S, sock_read=STALL_S)
        async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url, headers=headers) as response:
            if response.status == 416:  # nothing is left to send
                return
            if response.status in (401, 403, 404, 410):
                raise ConfigError(f"{_public(url)} answers {response.status}: these weights are not to be had there.")
            response.raise_for_status()
            resumed = response.status == 206 and _starts_at(response.headers.get("Content-Range", ""), have)
            have = have if resumed else 0
            total = None if response.content_length is None else have + response.content_length
            if total is not None and total > MAX_WEIGHTS_BYTES:
                raise ConfigError(f"{_public(url)} is larger than any model.")
            await asyncio.to_thread(self._make_room, (total or 0) - have, keep)
            with part.open("ab" if resumed else "wb") as file:
                async for chunk in response.content.iter_chunked(CHUNK_BYTES):
                    file.write(chunk)
                    have += len(chunk)
                    if told is not None:
                        told(have, total)
            if total is not None and have < total:
                raise aiohttp.ClientPayloadError("the connection ended early")

    def _admit(self, url: str, part: Path, sha256: str) -> Path:
        """Give the file its name, if its bytes are the ones that were meant."""
        actual = _read_fast(part)
        if actual != sha256:
            part.unlink()
            raise ConfigError(f"{_public(url)} is not the file that is meant: sha256 is {actual}, expected {sha256}.")
        path = self.path(sha256)
        part.replace(path)
        _used(path).touch()
        return path

    def room_bytes(self, keep: Collection[str]) -> int:
        """What the budget leaves for one more file, once everything but `keep` was evicted."""
        return self._budget_bytes - sum(_size(self.path(sha256)) for sha256 in set(keep))

    def _make_room(self, wanted_bytes: int, keep: set[str]) -> None:
        """Evict what was not used for longest until `wanted_bytes` more fit the budget. Raises ConfigError."""
        kept = {self.path(sha256) for sha256 in keep}
        files = sorted(self._folder.glob("*.gguf"), key=_last_used)
        size = sum(file.stat().st_size for file in (*files, *self._folder.glob("*.part")))
        for file in files:
            if size + wanted_bytes <= self._budget_bytes:
                break
            if file not in kept:
                size -= file.stat().st_size
                log.info("weights_evicted sha256=%s", file.stem)
                file.unlink()
                _used(file).unlink(missing_ok=True)
        if size + wanted_bytes > self._budget_bytes:
            raise ConfigError(
                f"The weights need {wanted_bytes / 2**30:.1f} GiB more than weights.budget_gib leaves: "
                f"{self._budget_bytes / 2**30:.1f} GiB, of which {size / 2**30:.1f} are in use."
            )


def _used(path: Path) -> Path:
    return path.with_suffix(".used")


def _last_used(path: Path) -> float:
    try:
        return _used(path).stat().st_mtime
    except OSError:
        return path.stat().st_mtime


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _starts_at(content_range: str, offset: int) -> bool:
    return content_range.startswith(f"bytes {offset}-")


def _public(url: str) -> str:
    """The address without what may be a secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname}{parts.path}"
