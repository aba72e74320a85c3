"""Peers to compare with: each in an environment of its own under .bench/, installed once from the package registry.

They get the same load on the same stand-in engine, over HTTP, and know nothing of money. One that cannot be installed
or started here is named on standard error, and its ratio left out.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from marketplace.children import Child
from marketplace.local import free_port

CACHE = Path(__file__).parents[2] / ".bench"
INSTALL_WITHIN_S = 600
START_WITHIN_S = 90.0
CHECK_WITHIN_S = 2.0


@dataclass(frozen=True)
class Peer:
    """How to install and to start one."""

    name: str
    package: str
    program: str
    arguments: Callable[[int, int, Path], list[str]]
    """Of its port, the engine's port, and a folder for its files."""

    @property
    def home(self) -> Path:
        return CACHE / self.name


def _vllm_router(port: int, engine: int, folder: Path) -> list[str]:
    address = ["--host", "127.0.0.1", "--port", str(port), "--prometheus-port", str(free_port())]
    return [*address, "--worker-urls", f"http://127.0.0.1:{engine}", "--policy", "round_robin", "--log-level", "error"]


def _litellm(port: int, engine: int, folder: Path) -> list[str]:
    file = folder / "litellm.yaml"
    file.write_text(
        "model_list:\n  - model_name: bench\n    litellm_params:\n      model: openai/bench\n"
        f"      api_base: http://127.0.0.1:{engine}/v1\n      api_key: none\n"
        # Without keys, on loopback: it is compared for what it relays.
        "general_settings:\n  dangerously_permit_weak_or_unset_master_key: true\n"
    )
    return ["--config", str(file), "--host", "127.0.0.1", "--port", str(port), "--num_workers", "1"]


PEERS = (
    Peer("vllm_router", "vllm-router", "vllm-router", _vllm_router),
    Peer("litellm", "litellm[proxy]", "litellm", _litellm),
)


def installed(peer: Peer) -> bool:
    """Install it unless it is there; False, with a line on standard error, if that cannot be."""
    stamp = peer.home / ".installed"
    if stamp.exists():
        return True
    try:
        for command in (
            [sys.executable, "-m", "venv", str(peer.home)],
            [str(peer.home / "bin/python"), "-m", "pip", "install", "--quiet", peer.package],
        ):
            subprocess.run(command, check=True, capture_output=True, timeout=INSTALL_WITHIN_S)
    except (subprocess.SubprocessError, OSError) as error:
        _leave_out(peer, f"it could not be installed: {error}")
        return False
    stamp.touch()
    return True


@contextmanager
def running(peer: Peer, folder: Path, *, rate: float) -> Iterator[tuple[int, subprocess.Popen[bytes]] | None]:
    """The peer before an engine at that rate: its port and process; None where it cannot be had."""
    if not installed(peer):
        yield None
        return
    port, engine_port = free_port(), free_port()
    command = [str(peer.home / "bin" / peer.program), *peer.arguments(port, engine_port, folder)]
    with ExitStack() as stack:
        engine = Child(
            "engine", [sys.executable, "-m", "tests.bench.engine", str(engine_port), str(rate)], folder / "engine.log"
        )
        engine.start()
        stack.callback(engine.stop)
        # LiteLLM takes a hundred equal chunks for a model that is stuck; the stand-in's are all equal.
        environment = {**os.environ, "REPEATED_STREAMING_CHUNK_LIMIT": "1000000"}
        child = Child(peer.name, command, folder / f"{peer.name}.log", environment)
        if _answers_in_time(engine_port):
            child.start()
            stack.callback(child.stop)
        if child.process is None or not _answers_in_time(port):
            _leave_out(peer, f"it did not start: see {folder / (peer.name + '.log')}")
            yield None
        else:
            yield port, child.process


def _answers_in_time(port: int) -> bool:
    limit = time.monotonic() + START_WITHIN_S
    while time.monotonic() < limit:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/v1/models", timeout=CHECK_WITHIN_S):
                return True
        except urllib.error.HTTPError:
            return True
        except (urllib.error.URLError, OSError):
            time.sleep(0.25)
    return False


def _leave_out(peer: Peer, why: str) -> None:
    print(f"  {peer.name} is left out: {why}", file=sys.stderr, flush=True)
