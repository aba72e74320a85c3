"""Weights are known by their hash: finds a file, hashes it, and remembers the hash while the file stays the same."""

from __future__ import annotations

import hashlib
import importlib.util
from pathlib import Path
from typing import Final

import msgspec

from agent.config import ConfigError
from agent.identity import write_private

PACKAGE_PREFIX: Final = "package:"
MAX_REMEMBERED: Final = 256


class Remembered(msgspec.Struct, frozen=True):
    """A hash, and the file's state when it was taken."""

    size_bytes: int
    modified_ns: int
    inode: int
    sha256: str


def locate(weights: str) -> Path:
    """`package:NAME/FILE` or a path -> an existing file. The package is found, never imported. Raises ConfigError."""
    path = _in_package(weights.removeprefix(PACKAGE_PREFIX)) if weights.startswith(PACKAGE_PREFIX) else Path(weights)
    path = path.expanduser()
    if not path.is_file():
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

    def sha256(self, path: Path) -> str:
        """Hash of the file's bytes, hex. Reads the whole file unless its size, time and inode are as remembered."""
        stat = path.stat()
        known = self._known.get(str(path))
        if known and (known.size_bytes, known.modified_ns, known.inode) == (
            stat.st_size,
            stat.st_mtime_ns,
            stat.st_ino,
        ):
            return known.sha256
        with path.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        self._remember(str(path), Remembered(stat.st_size, stat.st_mtime_ns, stat.st_ino, digest))
        return digest

    def _remember(self, path: str, entry: Remembered) -> None:
        self._known[path] = entry
        while len(self._known) > MAX_REMEMBERED:
            self._known.pop(next(iter(self._known)))
        write_private(self._path, msgspec.json.encode(self._known))


def verify(store: HashStore, path: Path, expected: str | None) -> str:
    """Hash the file, compare with what the owner wrote, and return it. Raises ConfigError if they differ."""
    actual = store.sha256(path)
    if expected is not None and actual != expected:
        raise ConfigError(f"{path} is not the file that config.toml names: sha256 is {actual}, expected {expected}.")
    return actual
