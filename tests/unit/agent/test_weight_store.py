"""The store of weights: named by hash, fetched in pieces, within a budget, never a byte off."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest
from aiohttp import web

from agent import weights
from agent.errors import ConfigError
from agent.weights import HashStore, WeightStore, verify

BYTES = bytes(range(256)) * 8_192
SHA = hashlib.sha256(BYTES).hexdigest()


class FileServer:
    """Serves BYTES, with ranges; `break_after` cuts each answer."""

    def __init__(self) -> None:
        self.data = BYTES
        self.break_after: int | None = None
        self.ranges = True
        self.status = 0
        self.asked: list[str] = []
        self.sent = 0

    async def serve(self, request: web.Request) -> web.StreamResponse:
        wanted = request.headers.get("Range", "")
        self.asked.append(wanted)
        if self.status:
            return web.Response(status=self.status)
        start = int(wanted[6:-1]) if wanted and self.ranges else 0
        if start >= len(self.data):
            return web.Response(status=416)
        response = web.StreamResponse(status=206 if start else 200)
        response.content_length = len(self.data) - start
        if start:
            response.headers["Content-Range"] = f"bytes {start}-{len(self.data) - 1}/{len(self.data)}"
        await response.prepare(request)
        end = len(self.data) if self.break_after is None else min(start + self.break_after, len(self.data))
        await response.write(self.data[start:end])
        self.sent += end - start
        if end < len(self.data):
            assert request.transport is not None
            request.transport.abort()
        return response


def play(folder: Path, act: Callable[[FileServer, WeightStore, str], Awaitable[None]], budget: int = 1 << 30) -> None:
    async def scene() -> None:
        server = FileServer()
        app = web.Application()
        app.router.add_get("/model.gguf", server.serve)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        try:
            store = WeightStore(folder / "store", budget, HashStore(folder / "hashes.json"))
            await act(server, store, f"http://127.0.0.1:{runner.addresses[0][1]}/model.gguf?token=secret")
        finally:
            await runner.cleanup()

    asyncio.run(scene())


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weights, "FETCH_PAUSE_S", 0.01)


class TestFetching:
    def test_gives_a_file_its_hash_as_its_name(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            heard: list[tuple[int, int | None]] = []
            path = await store.fetch(url, SHA, told=lambda have, of: heard.append((have, of)))
            assert (path.name, path.read_bytes()) == (f"{SHA}.gguf", BYTES)
            assert heard[-1] == (len(BYTES), len(BYTES))
            assert await store.fetch(url, SHA) == path
            assert len(server.asked) == 1, "what is here is not fetched again"

        play(tmp_path, act)

    def test_goes_on_where_it_was_cut(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            server.break_after = 700_000
            path = await store.fetch(url, SHA)
            assert path.read_bytes() == BYTES
            assert len(server.asked) > 1
            assert server.asked[0] == ""
            assert server.asked[1].startswith("bytes=")
            assert server.sent == len(BYTES)

        play(tmp_path, act)

    def test_starts_over_where_the_server_knows_no_ranges(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            server.ranges = False
            (tmp_path / "store").mkdir()
            (tmp_path / "store" / f"{SHA}.part").write_bytes(b"half")
            assert (await store.fetch(url, SHA)).read_bytes() == BYTES

        play(tmp_path, act)

    def test_refuses_other_bytes_and_keeps_none_of_them(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            server.data = BYTES[:-1] + b"\0"
            with pytest.raises(ConfigError, match="is not the file that is meant") as caught:
                await store.fetch(url, SHA)
            assert "secret" not in str(caught.value)
            assert list((tmp_path / "store").iterdir()) == []

        play(tmp_path, act)

    def test_gives_up_with_a_sentence(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            server.status = 404
            with pytest.raises(ConfigError, match="answers 404"):
                await store.fetch(url, SHA)
            server.status = 500
            with pytest.raises(ConfigError, match="could not be fetched"):
                await store.fetch(url, SHA)
            assert len(server.asked) == 1 + weights.FETCH_TRIES

        play(tmp_path, act)


class TestTheBudget:
    def test_evicts_what_was_not_used_for_longest(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            old = add(store, b"a" * 1_000_000, used=1)
            new = add(store, b"b" * 1_000_000, used=2)
            await store.fetch(url, SHA)
            assert not store.path(old).exists()
            assert store.path(new).exists()

        play(tmp_path, act, budget=len(BYTES) + 1_500_000)

    def test_never_evicts_what_is_named(self, tmp_path: Path) -> None:
        async def act(server: FileServer, store: WeightStore, url: str) -> None:
            old = add(store, b"a" * 1_000_000, used=1)
            with pytest.raises(ConfigError, match="budget_gib"):
                await store.fetch(url, SHA, keep=[old])
            assert store.path(old).exists()

        play(tmp_path, act, budget=len(BYTES) + 500_000)


def add(store: WeightStore, data: bytes, used: int) -> str:
    sha256 = hashlib.sha256(data).hexdigest()
    path = store.path(sha256)
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(data)
    path.with_suffix(".used").touch()
    os.utime(path.with_suffix(".used"), (used, used))
    return sha256


class TestAChangedByte:
    def test_is_seen_when_the_file_is_used_again(self, tmp_path: Path) -> None:
        store = WeightStore(tmp_path / "store", 1 << 30, HashStore(tmp_path / "hashes.json"))
        sha256 = add(store, b"weights" * 1_000, used=1)
        assert store.find(sha256) is not None
        store.path(sha256).write_bytes(b"weightz" + b"weights" * 999)
        assert store.find(sha256) is None
        assert not store.path(sha256).exists()

    def test_behind_the_file_systems_back_is_seen_by_reading_again(self, tmp_path: Path) -> None:
        path, hashes = tmp_path / "model.gguf", HashStore(tmp_path / "hashes.json")
        path.write_bytes(b"weights" * 1_000)
        sha256 = verify(hashes, path, None)
        stat = path.stat()
        with path.open("r+b") as file:
            file.write(b"W")
        os.utime(path, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert verify(hashes, path, sha256) == sha256, "size, time and inode are as they were"
        with pytest.raises(ConfigError, match="is not the file"):
            verify(hashes, path, sha256, afresh=True)
        with pytest.raises(ConfigError, match="is not the file"):
            verify(hashes, path, sha256)

    def test_of_a_file_that_is_gone_is_a_sentence(self, tmp_path: Path) -> None:
        with pytest.raises(ConfigError, match="cannot be read"):
            verify(HashStore(tmp_path / "hashes.json"), tmp_path / "nothing", "0" * 64)
