"""An engine that we run: one child process, reached over a Unix socket that only we can open, gone when we are gone.

The child gets its configuration, key included, as one JSON line on its standard input, which stays open as a lifeline:
its end tells the child that the agent is gone. It answers with one JSON line on standard output once it serves. Its
standard error is read for the reason of a failure, kept in memory, and never written anywhere: it may quote prompts.
"""

from __future__ import annotations

import asyncio
import os
import re
import secrets
import shutil
import signal
import socket
import sys
import tempfile
from collections import deque
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from agent.engines.chat_wire import Dialect
from agent.engines.openai_http import HttpEngine
from agent.engines.port import STOP_GRACE_S, EngineError
from agent.engines.sandbox import BUBBLEWRAP, NO_NETWORK, bubblewrap, runtime_paths, wrapped

KILL_WAIT_S: Final = 5.0
DEATH_NOTICE_S: Final = 0.5
"""A connection may break a moment before the process is known to be dead."""
MAX_SOCKET_PATH_BYTES: Final = 100
"""The kernel's limit is 107."""
MAX_LOG_LINES: Final = 50
MAX_LINE_BYTES: Final = 64 * 1024
MAX_REASON_CHARS: Final = 400

_PASSED_ON: Final = frozenset({"PATH", "HOME", "LANG", "TZ", "TMPDIR", "VIRTUAL_ENV"})
_PASSED_ON_PREFIXES: Final = ("CUDA_", "NVIDIA_", "GGML_", "OMP_", "LD_", "LC_", "HIP_", "ROCR_", "PYTHON", "COV_")
_CRASH: Final = re.compile(r"GGML_ASSERT|ggml_abort|CUDA error|out of memory|terminate called|Segmentation fault", re.I)
_COMPLAINT: Final = re.compile(r"error|fail|unable|cannot|invalid|not (found|supported)|corrupt|exceed", re.IGNORECASE)


class _Ready(msgspec.Struct):
    ready: bool = False
    version: str = ""
    error: str = ""
    protection: list[str] = []


class ManagedEngine(HttpEngine):
    """Common half of the engines that live in a child process of ours."""

    def __init__(
        self,
        dialect: Dialect,
        module: str,
        *,
        run_dir: Path,
        load_timeout_s: float,
        stall_timeout_s: float,
        isolate: bool = True,
        device_id: str = "cpu",
        readable: tuple[Path, ...] = (),
    ) -> None:
        """`readable`: files of the owner's that the engine needs, its model above all. `device_id`: the only card that
        it may see."""
        super().__init__(dialect, stall_timeout_s=stall_timeout_s)
        self._module = module
        self._isolate = isolate
        self._device_id = device_id
        self._readable = readable
        self._run_dir = run_dir
        self._load_timeout_s = load_timeout_s
        self._process: asyncio.subprocess.Process | None = None
        self._log: deque[str] = deque(maxlen=MAX_LOG_LINES)
        self._log_task: asyncio.Task[None] | None = None
        self._serving = False
        self._socket: Path | None = None
        self._private_dir: Path | None = None
        self._protection = ""

    @property
    def protection(self) -> str:
        """What encloses the engine's process; empty if nothing does."""
        return self._protection

    async def _launch(self, options: dict[str, Any]) -> str:
        """Start the child and wait until it serves. Returns the engine's version. Raises EngineError."""
        await self.stop()
        address, key = self._new_socket(), secrets.token_urlsafe(32)
        self._log.clear()
        self._serving = False
        enclosure = self._enclosure(address) if self._isolate else None
        process = await self._spawn(enclosure)
        self._process = process
        self._log_task = asyncio.create_task(self._read_log(process))
        try:
            told = {**options, "socket": str(address), "api_key": key}
            version = await self._await_ready(process, told if enclosure is None else {**told, "enclosure": enclosure})
            self._open("http://engine", aiohttp.UnixConnector(str(address), force_close=True, limit=0), key)
            if not await self.healthy():
                raise EngineError("engine_error", "the engine says it is ready, and does not answer")
        except BaseException:
            await self.stop()
            raise
        self._serving = True
        return version

    def _enclosure(self, address: Path) -> dict[str, list[str]]:
        """What the engine may touch, for the sandbox."""
        readable = [*runtime_paths(), *(str(path) for path in self._readable)]
        return {
            "readable": readable,
            "writable": [str(address.parent.resolve())],
            "outside": [BUBBLEWRAP, NO_NETWORK] if bubblewrap() else [],
        }

    async def _spawn(self, enclosure: dict[str, list[str]] | None) -> asyncio.subprocess.Process:
        argv = [sys.executable, "-P", "-m", self._module]
        program = bubblewrap() if enclosure is not None else None
        if enclosure is not None and program is not None:
            argv = wrapped(argv, program, readable=enclosure["readable"], writable=enclosure["writable"])
        try:
            return await asyncio.create_subprocess_exec(
                *argv,
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.PIPE,
                limit=MAX_LINE_BYTES,
                cwd="/",
                env=_environment() | _visible(self._device_id),
                # A Ctrl-C at the terminal is the agent's to handle: llama.cpp hangs on SIGINT with a request in flight.
                start_new_session=True,
            )
        except OSError as error:
            raise EngineError("engine_error", f"the engine's process cannot start: {error}") from None

    async def _await_ready(self, process: asyncio.subprocess.Process, options: dict[str, Any]) -> str:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(self._load_timeout_s):
                process.stdin.write(msgspec.json.encode(options) + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
        except TimeoutError:
            raise EngineError("engine_timeout", f"the engine did not load in {self._load_timeout_s:.0f} s") from None
        except (OSError, ValueError):
            line = b""
        answer = _parse_ready(line)
        if not answer.ready:
            raise EngineError("engine_error", await self._reason(process, answer.error))
        self._protection = ", ".join(answer.protection)
        return answer.version

    def _note_protection(self, line: bytes) -> None:
        """Take what the child says about its enclosure."""
        self._protection = ", ".join(_parse_ready(line).protection)

    async def _reason(self, process: asyncio.subprocess.Process, said: str) -> str:
        """Why it did not load, in its own words: llama.cpp's exception says nothing, its log does."""
        with suppress(TimeoutError):
            async with asyncio.timeout(STOP_GRACE_S):
                await process.wait()
                if self._log_task is not None:
                    await asyncio.shield(self._log_task)
        complaints = [line for line in self._log if _COMPLAINT.search(line)]
        told = [*(complaints[:2] or list(self._log)[-3:]), said]
        reason = "; ".join(part for part in told if part)[:MAX_REASON_CHARS]
        if reason:
            return reason
        code = process.returncode
        return "the engine ended without a word" + (f" (exit status {code})" if code is not None else "")

    async def _read_log(self, process: asyncio.subprocess.Process) -> None:
        assert process.stderr is not None
        while True:
            try:
                line = await process.stderr.readline()
            except ValueError:
                continue  # A line over the limit: dropped.
            if not line:
                return
            text = _clean(line)
            # Once it serves, a line may quote a prompt: only the marks of a crash are kept.
            if text and (not self._serving or _CRASH.search(text)):
                self._log.append(text)

    async def healthy(self) -> bool:
        """True if the process lives and answers. Bounded by two seconds."""
        process = self._process
        return process is not None and process.returncode is None and await super().healthy()

    async def _has_died(self) -> bool:
        process = self._process
        if process is None:
            return True
        with suppress(TimeoutError):
            async with asyncio.timeout(DEATH_NOTICE_S):
                await process.wait()
        return process.returncode is not None

    @property
    def pid(self) -> int | None:
        """The child's process id while it lives."""
        process = self._process
        return process.pid if process is not None and process.returncode is None else None

    async def stop(self, *, grace_s: float = STOP_GRACE_S) -> None:
        """End the child: SIGTERM, SIGKILL after the grace. Frees its memory and its socket. Never raises."""
        process, self._process = self._process, None
        if process is not None and grace_s <= 0 and process.returncode is None:
            with suppress(ProcessLookupError):
                process.kill()  # before anything that waits: its memory is wanted
        await self._close()
        if process is not None:
            await _end(process, grace_s)
        task, self._log_task = self._log_task, None
        if task is not None:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
        self._drop_socket()

    def _new_socket(self) -> Path:
        name = f"{secrets.token_hex(4)}.sock"
        self._run_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
        for left_behind in self._run_dir.glob("*.sock"):
            _unlink_if_dead(left_behind)
        path = self._run_dir / name
        if len(os.fsencode(path)) > MAX_SOCKET_PATH_BYTES:
            self._private_dir = Path(tempfile.mkdtemp(prefix="fallow-"))
            path = self._private_dir / name
        self._socket = path
        return path

    def _drop_socket(self) -> None:
        if self._socket is not None:
            with suppress(OSError):
                self._socket.unlink(missing_ok=True)
        if self._private_dir is not None:
            shutil.rmtree(self._private_dir, ignore_errors=True)
        self._socket = self._private_dir = None


def _unlink_if_dead(path: Path) -> None:
    """Remove a socket that an agent which was killed could not remove: nobody listens there."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            return


async def _end(process: asyncio.subprocess.Process, grace_s: float) -> None:
    for number, patience_s in ((signal.SIGTERM, grace_s), (signal.SIGKILL, KILL_WAIT_S)):
        if process.returncode is not None:
            break
        with suppress(ProcessLookupError):
            process.send_signal(number)
        with suppress(TimeoutError):
            async with asyncio.timeout(patience_s):
                await process.wait()
    if process.stdin is not None:
        process.stdin.close()


def _environment() -> dict[str, str]:
    """What an engine needs of ours, and none of our secrets."""
    return {
        name: value for name, value in os.environ.items() if name in _PASSED_ON or name.startswith(_PASSED_ON_PREFIXES)
    }


def _visible(device_id: str) -> dict[str, str]:
    """One card by its UUID: NVML's order is not CUDA's, and an index changes at a reboot."""
    if not device_id.startswith("GPU-"):
        return {}
    return {"CUDA_VISIBLE_DEVICES": device_id, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}


def _parse_ready(line: bytes) -> _Ready:
    try:
        return msgspec.json.decode(line, type=_Ready)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return _Ready()


def _clean(line: bytes) -> str:
    """A log line without its time stamp and control characters."""
    text = "".join(char for char in line.decode("utf-8", errors="replace") if char.isprintable())
    return re.sub(r"^[\d.]+ [A-Z] ", "", text).strip()[:MAX_REASON_CHARS]
