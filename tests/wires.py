"""A TCP wire that a test can cut, silence and mend: a partition without root."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from enum import StrEnum

CHUNK_BYTES = 64 * 1024


class Mode(StrEnum):
    OPEN = "open"
    CUT = "cut"
    """Connections break, new ones are refused at once."""
    SILENT = "silent"
    """Connections stay, nothing passes."""


class Wire:
    """Forwards a free port of 127.0.0.1 to another one."""

    def __init__(self, target_port: int) -> None:
        self._target_port = target_port
        self._mode = Mode.OPEN
        self._writers: set[asyncio.StreamWriter] = set()
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._loop = asyncio.new_event_loop()
        self._passing = asyncio.Event()
        self._passing.set()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),), daemon=True)
        self._ending = asyncio.Event()
        self._thread.start()

    def cut(self) -> None:
        """Break what is connected; refuse what comes."""
        self._loop.call_soon_threadsafe(self._set, Mode.CUT)

    def silence(self) -> None:
        """Let nothing pass, in either direction."""
        self._loop.call_soon_threadsafe(self._set, Mode.SILENT)

    def mend(self) -> None:
        """As at the start. What was held back passes."""
        self._loop.call_soon_threadsafe(self._set, Mode.OPEN)

    def close(self) -> None:
        self._loop.call_soon_threadsafe(self._ending.set)
        self._thread.join(5)

    def _set(self, mode: Mode) -> None:
        self._mode = mode
        if mode is Mode.SILENT:
            self._passing.clear()
        else:
            self._passing.set()
        if mode is Mode.CUT:
            for writer in list(self._writers):
                writer.transport.abort()

    async def _serve(self) -> None:
        server = await asyncio.start_server(self._connected, sock=self._listener)
        await self._ending.wait()
        server.close()
        self._set(Mode.CUT)
        for task in asyncio.all_tasks():
            if task is not asyncio.current_task():
                task.cancel()

    async def _connected(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if self._mode is Mode.CUT:
            writer.transport.abort()
            return
        try:
            there_reader, there = await asyncio.open_connection("127.0.0.1", self._target_port)
        except OSError:
            writer.transport.abort()
            return
        pair = {writer, there}
        self._writers |= pair
        try:
            with contextlib.suppress(OSError):
                await asyncio.gather(self._pass(reader, there), self._pass(there_reader, writer))
        finally:
            self._writers -= pair
            for end in pair:
                end.transport.abort()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(CHUNK_BYTES):
            await self._passing.wait()
            writer.write(data)
            await writer.drain()
        await self._passing.wait()
        if writer.can_write_eof():
            writer.write_eof()
