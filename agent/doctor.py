"""Checks that an owner can run when something is wrong: each has a name, what was found, and what would help."""

from __future__ import annotations

import asyncio
import importlib.util
import os
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import Final, Literal

import aiohttp
import psutil

from agent import config as configuration
from agent import home as folder
from agent import identity as identities
from agent.assembly import weight_store
from agent.config import AgentConfig, ModelTable
from agent.engines import sandbox
from agent.enrol import is_private
from agent.errors import ConfigError
from agent.identity import IdentityError
from agent.protocol import SOCKET_PATH
from agent.runnable import gib
from agent.sizing.fit import fits, gpu_margin_bytes, llamacpp_need
from agent.sizing.gguf import GgufError, read_header, require_complete
from agent.sizing.shape import read_shape
from agent.telemetry import nvml
from agent.telemetry.cpu import CpuSource
from agent.weights import HashStore, is_url, locate, verify

REACH_TIMEOUT_S: Final = 10.0
MAX_CLOCK_ERROR_S: Final = 60.0
FREE_DISK_BYTES: Final = 1 << 30

Grade = Literal["ok", "note", "problem"]


@dataclass(frozen=True, slots=True)
class Check:
    """What one check found. A `note` needs no action; a `problem` has a remedy."""

    name: str
    grade: Grade
    found: str
    remedy: str = ""


def examine(home: Path) -> Iterator[Check]:
    """All checks, one after the other. Never raises: what goes wrong is what is told."""
    checks: tuple[Callable[[Path], Iterator[Check]], ...] = (
        *(_python, _identity, _configuration, _agent, _devices, _weights, _engines, _sandbox, _disk, _marketplace),
    )
    for check in checks:
        try:
            yield from check(home)
        except Exception as error:  # noqa: BLE001 - the edge of a check: a broken one must not hide the others
            yield Check(check.__name__.strip("_"), "problem", f"the check itself broke: {error!r}", "Report this.")


def _python(_: Path) -> Iterator[Check]:
    yield Check("python", "ok", f"{sys.version.split()[0]} at {sys.executable}")


def _identity(home: Path) -> Iterator[Check]:
    try:
        identity = identities.load(home)
    except IdentityError as error:
        yield Check("identity", "problem", str(error), "Run `fallow agent enroll` with a token of the marketplace.")
        return
    yield Check("identity", "ok", f"node {identity.file.node_id} of {identity.file.organisation}")
    if not is_private(identity.file.url):
        remedy = "Enroll at the marketplace's https address."
        yield Check("transport", "problem", f"{identity.file.url} is not https: others can read what passes", remedy)


def _load(home: Path) -> AgentConfig | None:
    try:
        return configuration.load(home)
    except ConfigError:
        return None


def _configuration(home: Path) -> Iterator[Check]:
    try:
        config = configuration.load(home)
    except ConfigError as error:
        yield Check("configuration", "problem", str(error), f"Edit {home / 'config.toml'}.")
        return
    if not config.models:
        yield Check(
            "configuration", "problem", "it names no model", "Add a [[models]] table; see `fallow agent models`."
        )
    else:
        yield Check("configuration", "ok", f"{len(config.models)} model(s)")


def _agent(home: Path) -> Iterator[Check]:
    status = folder.read_status(home)
    if not folder.is_running(home):
        yield Check("agent", "note", "not running", "Start it: `fallow agent run`, or `fallow agent install`.")
    elif status is None or not folder.is_fresh(status):
        yield Check("agent", "problem", "it runs and says nothing", "Look at its log; then stop and start it.")
    elif not status.connected:
        yield Check("agent", "problem", f"not connected: {status.last_error}", "See the check named marketplace.")
    else:
        takes_work, reason = folder.standing(status)
        why = "taking work" if takes_work else f"taking no work: {reason}"
        yield Check("agent", "ok" if takes_work or not status.available else "note", f"connected, {why}")
        for offer in status.offers:
            if status.available and offer.phase != "ready" and offer.last_error:
                yield Check("engine", "problem", offer.last_error, "It is tried again, ever less often; see the log.")
    for problem in status.problems if status is not None else ():
        yield Check("agent", "problem", problem, "See the checks below.")


def _devices(_: Path) -> Iterator[Check]:
    for report in CpuSource().sample():
        total, used = report.memory_total_bytes, report.memory_used_bytes
        free = None if total is None or used is None else total - used
        yield Check("cpu", "ok", f"{report.name}, {gib(free)} of {gib(total)} free")
    if not nvml.has_library():
        yield Check("gpu", "note", "no NVIDIA driver: the processor is used", "For a GPU install NVIDIA's driver.")
        return
    source = nvml.NvmlSource()
    try:
        reports = source.sample()
        if source.problem:
            yield Check("gpu", "problem", source.problem, "Install or repair NVIDIA's driver, then reboot.")
            return
        yield Check("driver", "ok", f"NVIDIA {source.driver_version}, {len(reports)} card(s)")
        for report in reports:
            total, used = report.memory_total_bytes, report.memory_used_bytes
            free = None if total is None or used is None else total - used - (report.memory_reserved_bytes or 0)
            told = f"{report.device_id} {report.name}, {gib(free)} of {gib(total)} free"
            if report.state == "ok":
                yield Check("gpu", "ok", f"{told}{f' ({report.reason})' if report.reason else ''}")
            else:
                yield Check("gpu", "problem", f"{report.device_id} {report.name}: {report.state}", report.reason)
    finally:
        source.close()


def _weights(home: Path) -> Iterator[Check]:
    config = _load(home)
    if config is None:
        return
    hashes, store = HashStore(home / "weights.json"), weight_store(home, config)
    for model in config.models:
        if model.weights is None:
            continue
        try:
            if is_url(model.weights):
                path = store.find(model.sha256 or "")
                if path is None:
                    remedy = "Run `fallow agent fetch`, or just start the agent."
                    yield Check("weights", "note", f"{(model.sha256 or '')[:12]} is not here yet", remedy)
                    continue
            else:
                path = locate(model.weights)
            if path.is_file():
                verify(hashes, path, model.sha256)
                require_complete(read_header(path))
                yield from _fit(model, path)
        except (ConfigError, GgufError, OSError) as error:
            yield Check("weights", "problem", str(error), "Get the file again, or correct config.toml.")


def _fit(model: ModelTable, path: Path) -> Iterator[Check]:
    """Whether a processor's memory holds it; on cards `fallow agent models` tells."""
    need = llamacpp_need(
        read_shape(path), slots=model.slots, context_per_slot=model.context_per_slot, on_gpu=model.device != "cpu"
    )
    total = psutil.virtual_memory().total
    if model.device == "cpu" and not fits(need, total):
        remedy = "Lower slots or context_per_slot, or take a smaller model."
        yield Check("weights", "problem", f"{path.name} needs {gib(need.total)} of {gib(total)} memory", remedy)
    else:
        margin = gpu_margin_bytes(0) if model.device != "cpu" else 0
        yield Check("weights", "ok", f"{path.name} needs {gib(need.total + margin)}")


def _engines(home: Path) -> Iterator[Check]:
    config = _load(home)
    for kind in sorted({model.engine for model in config.models}) if config is not None else ():
        if kind == "llama.cpp":
            found = importlib.util.find_spec("xllamacpp") is not None
            remedy = "pip install 'fallow[engine]'"
            yield Check("engine", "ok" if found else "problem", f"llama.cpp {'is' if found else 'is not'} here", remedy)
        elif kind in ("llama-server", "vllm"):
            programs = [model.command or kind for model in config.models if model.engine == kind] if config else []
            for program in programs:
                found = shutil.which(program) is not None
                told = f"{program} {'is' if found else 'is not'} here"
                yield Check("engine", "ok" if found else "problem", told, "Install it, or set command to its path.")


def _sandbox(home: Path) -> Iterator[Check]:
    status = folder.read_status(home) if folder.is_running(home) else None
    active = {offer.protection for offer in status.offers if offer.protection} if status is not None else set()
    if active:
        yield Check("sandbox", "ok", f"active: {'; '.join(sorted(active))}")
    elif sandbox.bubblewrap() is not None:
        yield Check("sandbox", "ok", "bubblewrap is here, and encloses engines when they start")
    else:
        remedy = "Install bubblewrap (bwrap) for a file system of its own; without it the kernel's own means are used."
        yield Check("sandbox", "note", "no bubblewrap", remedy)


def _disk(home: Path) -> Iterator[Check]:
    if not home.exists():
        return
    free = shutil.disk_usage(home).free
    if free < FREE_DISK_BYTES:
        yield Check("disk", "problem", f"only {gib(free)} are free below {home}", "Make room, or lower budget_gib.")
    else:
        yield Check("disk", "ok", f"{gib(free)} free")
    if os.name == "posix" and home.stat().st_mode & 0o077:
        yield Check("permissions", "problem", f"{home} can be read by others", f"chmod 700 {home}")


def _marketplace(home: Path) -> Iterator[Check]:
    known = identities.find(home)
    if known is None:
        return
    began = time.monotonic()
    try:
        status, date = asyncio.run(_reach(known.url))
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        remedy = "Check the network, a proxy, a firewall that forbids outgoing connections, and the address."
        yield Check("marketplace", "problem", f"{known.url} does not answer: {error or 'no answer in time'}", remedy)
        return
    answered = f"{known.url} answers in {(time.monotonic() - began) * 1000:.0f} ms"
    if status >= HTTPStatus.INTERNAL_SERVER_ERROR:
        yield Check("marketplace", "problem", f"{answered}, with error {status}", "It is in trouble: try again later.")
    else:
        yield Check("marketplace", "ok", answered)
    if date is not None and abs(date - time.time()) > MAX_CLOCK_ERROR_S:
        told = f"this machine's clock is {time.time() - date:+.0f} s off"
        yield Check("clock", "problem", told, "Switch on time synchronisation: hours and tariffs go by this clock.")


async def _reach(url: str) -> tuple[int, float | None]:
    """Status of a plain request to the agents' door, and the server's own time."""
    from email.utils import parsedate_to_datetime  # noqa: PLC0415 - heavy, and needed by the doctor alone

    timeout = aiohttp.ClientTimeout(total=REACH_TIMEOUT_S)
    async with aiohttp.ClientSession(timeout=timeout) as session, session.get(url + SOCKET_PATH) as response:
        said = response.headers.get("Date")
        return response.status, None if said is None else parsedate_to_datetime(said).timestamp()
