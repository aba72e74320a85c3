"""Engines that the owner installed and that we start: llama-server and vLLM, on a Unix socket that only we can open."""

from __future__ import annotations

import asyncio
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import aiohttp
import msgspec

from agent.engines.chat_wire import Dialect
from agent.engines.dialects import DIALECTS
from agent.engines.llamacpp import CONTEXT_GRAIN_TOKENS, default_threads, gpu_layers, verify_model
from agent.engines.managed import ManagedEngine
from agent.engines.port import EngineError, EngineFacts

PREFILL_BATCH_TOKENS: Final = 128
"""llama.cpp looks between two batches of a prompt whether its reader is still there."""
POLL_S: Final = 0.25
VERSION_TIMEOUT_S: Final = 30.0
SERVED_NAME: Final = "fallow"


@dataclass(frozen=True, slots=True)
class Launch:
    """What to start, and how it is to be used."""

    program: str
    model_path: Path
    run_dir: Path
    slots: int
    context_per_slot: int
    device_id: str = "cpu"
    threads: int | None = None
    gpu_layers: int = 0
    memory_share: float = 0.85
    arguments: tuple[str, ...] = ()
    prefix_cache_s: float = 0.0
    load_timeout_s: float = 600.0
    stall_timeout_s: float = 120.0
    isolate: bool = True


def llama_server_arguments(launch: Launch, socket: str) -> list[str]:
    """The command line of llama.cpp's own server, with the defaults that would hurt a shared machine turned off."""
    threads = str(launch.threads or default_threads())
    context = _rounded(launch.context_per_slot)
    return [
        *(launch.program, "--host", socket, "--model", str(launch.model_path), "--alias", SERVED_NAME),
        *("--parallel", str(launch.slots), "--ctx-size", str(context * launch.slots)),
        *("--n-gpu-layers", str(_layers(launch)), "--threads", threads, "--threads-batch", threads),
        *("--batch-size", str(PREFILL_BATCH_TOKENS), "--ubatch-size", str(PREFILL_BATCH_TOKENS)),
        *("--cache-ram", "0", "--slot-prompt-similarity", "0", "--no-context-shift", "--no-kv-unified", "--fit", "off"),
        *("--jinja", "--no-prefill-assistant", "--no-webui", "--no-slots", "--metrics", "--offline"),
        *launch.arguments,
    ]


def vllm_arguments(launch: Launch, socket: str) -> list[str]:
    """The command line of vLLM's server: one card, its slots as sequences, usage told, requests not logged."""
    return [
        *(launch.program, "serve", str(launch.model_path), "--uds", socket, "--served-model-name", SERVED_NAME),
        *("--max-model-len", str(launch.context_per_slot), "--max-num-seqs", str(launch.slots)),
        *("--gpu-memory-utilization", f"{launch.memory_share:.3f}", "--tensor-parallel-size", "1"),
        *("--enable-prompt-tokens-details", "--generation-config", "vllm"),
        *("--no-enable-log-requests", "--disable-uvicorn-access-log"),
        *launch.arguments,
    ]


class LaunchedEngine(ManagedEngine):
    """One of them as a child of ours. See agent.engines.port.Engine."""

    def __init__(self, launch: Launch, dialect: Dialect) -> None:
        super().__init__(
            dialect,
            "agent.engines.launch_child",
            run_dir=launch.run_dir,
            load_timeout_s=launch.load_timeout_s,
            stall_timeout_s=launch.stall_timeout_s,
            isolate=launch.isolate,
            device_id=launch.device_id,
            readable=(launch.model_path.resolve(), Path(launch.program)),
        )
        self._launched = launch
        self._model = SERVED_NAME

    async def start(self) -> EngineFacts:
        """Start it, wait until it serves, and learn its context. Raises EngineError with what its log says."""
        launch = self._launched
        if self._dialect.name == "llama-server":
            await asyncio.to_thread(verify_model, launch.model_path)
        version = await self._launch({"program": launch.program})
        self._facts = EngineFacts(
            name=self._dialect.name,
            version=version,
            slots=launch.slots,
            context_per_slot=min(await self._context() or launch.context_per_slot, _rounded(launch.context_per_slot)),
            simulated=False,
            prefix_cache_s=launch.prefix_cache_s,
            pid=self.pid,
            protection=self.protection,
        )
        return self._facts

    async def _context(self) -> int | None:
        """What it gives one request: it may be less than asked for, where memory is short."""
        listing = await self._probe("/v1/models")
        if self._dialect.name == "vllm" and listing is not None:
            try:
                return msgspec.json.decode(listing, type=_Listing).data[0].max_model_len
            except (msgspec.DecodeError, IndexError):
                return None
        return None

    async def _await_ready(self, process: asyncio.subprocess.Process, options: dict[str, Any]) -> str:
        """Hand over the command line, then ask until it answers: such programs do not say when they are ready."""
        socket, key = options["socket"], options["api_key"]
        make = vllm_arguments if self._dialect.name == "vllm" else llama_server_arguments
        told = {key_: value for key_, value in options.items() if key_ == "enclosure"}
        told |= {"argv": make(self._launched, socket), "environment": _environment(key, socket)}
        await self._tell(process, told)
        session = aiohttp.ClientSession("http://engine", connector=aiohttp.UnixConnector(socket, force_close=True))
        async with session:
            try:
                async with asyncio.timeout(self._load_timeout_s):
                    while process.returncode is None:
                        if await _answers(session, self._dialect.health_path):
                            return await self._read_version(session, key)
                        await asyncio.sleep(POLL_S)
            except TimeoutError:
                message = f"the engine did not load in {self._load_timeout_s:.0f} s"
                raise EngineError("engine_timeout", message) from None
        raise EngineError("engine_error", await self._reason(process, ""))

    async def _tell(self, process: asyncio.subprocess.Process, told: dict[str, Any]) -> None:
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            async with asyncio.timeout(VERSION_TIMEOUT_S):
                process.stdin.write(msgspec.json.encode(told) + b"\n")
                await process.stdin.drain()
                self._note_protection(await process.stdout.readline())
        except (TimeoutError, OSError, ValueError):
            raise EngineError("engine_error", await self._reason(process, "it could not be started")) from None

    async def _read_version(self, session: aiohttp.ClientSession, key: str) -> str:
        path = "/version" if self._dialect.name == "vllm" else "/props"
        try:
            async with asyncio.timeout(VERSION_TIMEOUT_S):
                async with session.get(path, headers={"Authorization": f"Bearer {key}"}) as response:
                    text = (await response.content.read(1 << 20)).decode("utf-8", "replace")
        except (TimeoutError, aiohttp.ClientError, OSError):
            return "unknown"
        found = re.search(r'"(?:version|build_info)"\s*:\s*"([^"]{1,40})"', text)
        return found[1] if found else "unknown"


class _Entry(msgspec.Struct):
    max_model_len: int | None = None


class _Listing(msgspec.Struct):
    data: list[_Entry]


async def _answers(session: aiohttp.ClientSession, path: str) -> bool:
    try:
        async with asyncio.timeout(POLL_S * 8), session.get(path) as response:
            return response.status == 200
    except (TimeoutError, aiohttp.ClientError, OSError):
        return False


def _environment(key: str, socket: str) -> dict[str, str]:
    """The key goes by the environment, where no list of processes shows it. Caches go where the engine may write."""
    folder = str(Path(socket).parent)
    return {
        "LLAMA_API_KEY": key,
        "VLLM_API_KEY": key,
        "HOME": folder,
        "TMPDIR": folder,
        "XDG_CACHE_HOME": folder,
        "HF_HUB_OFFLINE": "1",
        "VLLM_NO_USAGE_STATS": "1",
        "DO_NOT_TRACK": "1",
    }


def _rounded(context: int) -> int:
    return -(-context // CONTEXT_GRAIN_TOKENS) * CONTEXT_GRAIN_TOKENS


def _layers(launch: Launch) -> int:
    layers = gpu_layers(launch.gpu_layers, launch.device_id)
    return 999 if layers < 0 else layers


def llama_server(launch: Launch) -> LaunchedEngine:
    """llama.cpp's own server."""
    return LaunchedEngine(launch, DIALECTS["llama-server"])


def vllm(launch: Launch) -> LaunchedEngine:
    """vLLM."""
    return LaunchedEngine(launch, DIALECTS["vllm"])
