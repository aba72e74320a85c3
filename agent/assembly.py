"""Puts the agent together out of its folder: the only place that knows every part."""

from __future__ import annotations

import asyncio
import gc
import logging
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import msgspec

from agent import config as configuration
from agent import home as folder
from agent import identity as identities
from agent.config import AgentConfig, ConfigError, ModelTable, check_url
from agent.daemon import Daemon
from agent.engines.factory import EngineConfig, make_engine
from agent.engines.port import Engine
from agent.records import Served
from agent.telemetry import nvml
from agent.telemetry.cpu import CpuSource, DeclaredPower
from agent.telemetry.port import Source
from agent.telemetry.watched import Watched
from agent.weights import HashStore, locate, verify

log = logging.getLogger("fallow.agent")


def engine_config(model: ModelTable, weights: Path | None, run_dir: Path) -> EngineConfig:
    """What config.toml says, for the engine's factory. Raises ConfigError if the key file cannot be read."""
    api_key = None
    if model.api_key_file is not None:
        try:
            api_key = Path(model.api_key_file).expanduser().read_text(encoding="utf-8").strip()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"api_key_file {model.api_key_file} cannot be read: {error}.") from error
    return EngineConfig(
        kind=model.engine,
        run_dir=run_dir,
        slots=model.slots,
        context_per_slot=model.context_per_slot,
        model_path=weights,
        threads=model.threads,
        gpu_layers=model.gpu_layers,
        prefix_cache_s=model.prefix_cache_s,
        load_timeout_s=model.load_timeout_s,
        url=model.url,
        api_key=api_key,
        served_model=model.served_model,
        simulation=dict(model.simulation),
    )


def _prepare(home: Path, number: int, model: ModelTable, hashes: HashStore) -> tuple[Served, EngineConfig]:
    weights = None if model.weights is None else locate(model.weights)
    if weights is None:
        assert model.sha256 is not None  # checked when the configuration was parsed
        variant = model.sha256
    else:
        variant = verify(hashes, weights, model.sha256)
    ask = model.ask_usd_per_mtok.parse()
    served = Served(
        variant=variant,
        device_id=model.device,
        slots=model.slots,
        context_per_slot=model.context_per_slot,
        input_nano_usd_per_mtok=ask.input,
        cached_input_nano_usd_per_mtok=ask.cached_input,
        output_nano_usd_per_mtok=ask.output,
    )
    settings = engine_config(model, weights, home / "run" / str(number))
    try:
        make_engine(settings)
    except ValueError as error:
        raise ConfigError(f"models[{number}]: {error}.") from error
    return served, settings


def _sources(config: AgentConfig) -> list[Source]:
    sources: list[Source] = [CpuSource(DeclaredPower(config.power.idle_watts, config.power.load_watts))]
    if not nvml.has_library():
        log.info("no_gpu reason='no NVIDIA driver on this machine'")
        return sources
    gpus = Watched(nvml.NvmlSource())
    gpus.start()
    if gpus.problem:
        log.warning("no_gpu reason=%r", gpus.problem)
    return [*sources, gpus]


def build(home: Path, url: str | None = None) -> Daemon:
    """Read the folder and put the daemon together. Hashes weights that are new here, which takes a second per GB or so.
    Raises ConfigError and identity.IdentityError; call it on the running event loop."""
    identity = identities.load(home)
    if url is not None:
        identity = replace(identity, file=msgspec.structs.replace(identity.file, url=check_url(url)))
    config = configuration.load(home)
    if not config.models:
        raise ConfigError(f"{home / 'config.toml'} names no model to serve: add a [[models]] table.")
    hashes = HashStore(home / "weights.json")
    prepared = [_prepare(home, number, model, hashes) for number, model in enumerate(config.models)]
    if len({served.key for served, _ in prepared}) != len(prepared):
        raise ConfigError("config.toml: two models have the same weights on the same device.")
    return Daemon(
        home=home,
        identity=identity,
        config=config,
        served=[served for served, _ in prepared],
        makers={served.key: _maker(settings) for served, settings in prepared},
        sources=_sources(config),
    )


def _maker(settings: EngineConfig) -> Callable[[], Engine]:
    return lambda: make_engine(settings)


async def serve(home: Path, url: str | None = None) -> int:
    """Run the agent of this folder until SIGTERM or SIGINT; `url` overrides the marketplace's address at enrolment.
    Returns the exit code. Raises what build and Lock raise."""
    lock = folder.Lock(home)
    lock.take()
    try:
        daemon = build(home, url)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, daemon.stop)
        # Imports leave much that lives for ever: take it out of the collector's rounds.
        gc.collect()
        gc.freeze()
        return await daemon.run()
    finally:
        lock.release()
