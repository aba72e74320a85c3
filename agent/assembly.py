"""Puts the agent together out of its folder: the only place that knows every part."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Final
from urllib.parse import urlsplit

import msgspec

from agent import config as configuration
from agent import home as folder
from agent import identity as identities
from agent import trim
from agent.calibration import Calibrator, SpeedBook
from agent.config import AgentConfig, ConfigError, ModelTable, check_url
from agent.daemon import Daemon
from agent.engines.factory import EngineConfig, make_engine
from agent.engines.port import Engine
from agent.planning import Fetch, needed_bytes
from agent.records import LoadMode, Served
from agent.sizing.gguf import GgufError, read_header
from agent.sizing.variants import DEFAULT_POOLING, EMBED, pooling_of, variant_sha256
from agent.telemetry import nvml
from agent.telemetry.cpu import CpuSource, DeclaredPower
from agent.telemetry.port import Source
from agent.telemetry.watched import Watched
from agent.weights import HashStore, WeightStore, is_url, locate, verify

log = logging.getLogger("fallow.agent")

SETTLED_AFTER_S: Final = 3.0
"""By then the engines are being loaded, and everything that the agent needs was imported."""


def engine_config(
    model: ModelTable, weights: Path | None, run_dir: Path, device_id: str = "cpu", pooling: str = ""
) -> EngineConfig:
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
        dialect=model.dialect,
        device_id=device_id,
        program=model.command,
        arguments=tuple(model.arguments),
        memory_share=model.memory_share,
        task=model.task,
        pooling=pooling,
        isolate=model.isolate,
        simulation=dict(model.simulation),
    )


@dataclass(frozen=True, slots=True)
class _Prepared:
    served: Served
    settings: EngineConfig
    check: Callable[[bool], None] | None
    """Raises ConfigError if the weights are not what they were; True reads them afresh."""
    fetch: Fetch | None
    """Has the weights here, where a plan may ask for what is not."""


def _find_weights(model: ModelTable, hashes: HashStore, store: WeightStore) -> tuple[str, Path | None]:
    """(variant, file) of a model whose weights are here. Raises ConfigError."""
    if model.weights is None:
        assert model.sha256 is not None  # checked when the configuration was parsed
        return model.sha256, None
    if is_url(model.weights):
        assert model.sha256 is not None
        path = store.find(model.sha256)
        if path is None and model.load == "plan":
            return model.sha256, store.path(model.sha256)  # fetched once a plan asks for it
        if path is None:
            raise ConfigError(f"The weights {model.sha256[:12]} are not here yet: run `fallow agent fetch`.")
        return model.sha256, path
    path = locate(model.weights)
    if path.is_dir():
        if model.sha256 is None:
            raise ConfigError(f"{path} is a folder: set sha256 to the hash of the variant that it holds.")
        return model.sha256, path
    return verify(hashes, path, model.sha256), path


def _prepare(
    home: Path, number: int, model: ModelTable, *, hashes: HashStore, store: WeightStore, cards: list[str]
) -> list[_Prepared]:
    """One model's engines: a replica on every card that is meant."""
    weights_sha256, weights = _find_weights(model, hashes, store)
    pooling = _pooling(model, weights) if model.task == EMBED else ""
    variant = variant_sha256(weights_sha256, model.task, pooling)
    ask = model.ask_usd_per_mtok.parse()
    devices = cards if model.device == "gpu" else [model.device]
    if not devices:
        raise ConfigError(
            f"models[{number}]: device is gpu, and no usable GPU is here; `fallow agent doctor` says why."
        )
    check = fetch = None
    if weights is not None and not weights.is_dir():
        check = _checker(hashes, weights, weights_sha256)
    if model.load == "plan" and model.weights is not None and is_url(model.weights):
        fetch = Fetch(store, model.weights, weights_sha256)
    prepared = []
    for place, device_id in enumerate(devices):
        served = Served(
            variant=variant,
            device_id=device_id,
            slots=model.slots,
            context_per_slot=model.context_per_slot,
            input_nano_usd_per_mtok=ask.input,
            cached_input_nano_usd_per_mtok=ask.cached_input,
            output_nano_usd_per_mtok=ask.output,
            model=number,
            attached=model.engine == "openai",
            load=LoadMode(model.load),
            engine=model.engine,
            needed_bytes=needed_bytes(model, weights, on_gpu=device_id != "cpu"),
            weights_bytes=weights.stat().st_size if weights is not None and weights.is_file() else 0,
            task=model.task,
            name=_name(model),
        )
        try:
            settings = engine_config(model, weights, home / "run" / f"{number}-{place}", device_id, pooling)
            make_engine(settings)
        except ValueError as error:
            raise ConfigError(f"models[{number}]: {error}.") from error
        prepared.append(_Prepared(served, settings, check, fetch))
    return prepared


def _name(model: ModelTable) -> str:
    """By which the owner knows what is sold: of its weights file or folder."""
    source = model.weights or ""
    return PurePosixPath(urlsplit(source).path if is_url(source) else source).name.removesuffix(".gguf")


def _pooling(model: ModelTable, weights: Path | None) -> str:
    """How this model's vectors are made. Raises ConfigError for a file that cannot be read."""
    if model.pooling is not None:
        return model.pooling
    if weights is None or not weights.is_file():
        return DEFAULT_POOLING
    try:
        return pooling_of(read_header(weights))
    except (GgufError, OSError) as error:
        raise ConfigError(f"{weights} does not say how its vectors are made ({error}): set pooling.") from error


def _checker(hashes: HashStore, path: Path, weights_sha256: str) -> Callable[[bool], None]:
    def check(afresh: bool) -> None:
        verify(hashes, path, weights_sha256, afresh=afresh)

    return check


def weight_store(home: Path, config: AgentConfig) -> WeightStore:
    """The store that the configuration names."""
    table = config.weights
    folder_ = Path(table.folder).expanduser() if table.folder else home / "weights"
    return WeightStore(folder_, int(table.budget_gib * 2**30), HashStore(home / "weights.json"))


async def fetch_missing(
    home: Path, config: AgentConfig, told: Callable[[int, int | None], None] | None = None
) -> list[Path]:
    """Have every model's weights here that come from the network, but those of plans. Raises ConfigError."""
    store = weight_store(home, config)
    meant = [model for model in config.models if model.sha256 is not None and model.load != "plan"]
    named = [model.sha256 for model in meant if model.sha256 is not None]
    return [
        await store.fetch(model.weights, model.sha256, keep=named, told=told)
        for model in meant
        if model.weights is not None and model.sha256 is not None and is_url(model.weights)
    ]


def _sources(config: AgentConfig) -> list[Source]:
    sources: list[Source] = [CpuSource(DeclaredPower(config.power.idle_watts, config.power.load_watts))]
    if not nvml.has_library():
        log.info("no_gpu reason='no NVIDIA driver on this machine'")
        return sources
    driver = nvml.NvmlSource()
    if config.power.gpu_limit_watts is not None:
        refused = driver.limit_power(config.power.gpu_limit_watts)
        if refused:
            log.warning("power_limit_not_set reason=%r", refused)
    gpus = Watched(driver)
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
    store = weight_store(home, config)
    sources = _sources(config)
    cards = [report.device_id for source in sources for report in source.sample() if report.kind == "gpu"]
    prepared = [
        entry
        for number, model in enumerate(config.models)
        for entry in _prepare(home, number, model, hashes=hashes, store=store, cards=cards)
    ]
    if len({entry.served.key for entry in prepared}) != len(prepared):
        raise ConfigError("config.toml: two models have the same weights and task on the same device.")
    return Daemon(
        home=home,
        identity=identity,
        config=config,
        served=[entry.served for entry in prepared],
        makers={entry.served.key: _maker(entry.settings) for entry in prepared},
        sources=sources,
        checks={entry.served.key: entry.check for entry in prepared if entry.check is not None},
        calibrator=Calibrator(SpeedBook(home / "speeds.json")),
        fetches={entry.served.key: entry.fetch for entry in prepared if entry.fetch is not None},
    )


def _maker(settings: EngineConfig) -> Callable[[], Engine]:
    return lambda: make_engine(settings)


async def serve(home: Path, url: str | None = None) -> int:
    """Run the agent of this folder until SIGTERM or SIGINT; `url` overrides the marketplace's address at enrolment.
    Returns the exit code. Raises what build and Lock raise."""
    lock = folder.Lock(home)
    lock.take()
    try:
        await fetch_missing(home, configuration.load(home))
        daemon = build(home, url)
        loop = asyncio.get_running_loop()
        for signum in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(signum, daemon.stop)
        loop.call_later(SETTLED_AFTER_S, trim.settle)
        return await daemon.run()
    finally:
        lock.release()
