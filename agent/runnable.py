"""What can run on this machine: each model on each device, whether it fits, how fast, and what it would earn."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agent.calibration import SpeedBook
from agent.errors import ConfigError
from agent.protocol import DeviceReport
from agent.sizing.devices import find_device
from agent.sizing.fit import MIB, fits, gpu_margin_bytes, largest_slots, llamacpp_need
from agent.sizing.gguf import GgufError
from agent.sizing.shape import ModelShape, read_shape
from agent.sizing.speed import Load, SpeedModel

MAX_FILES: Final = 200
PRICES_TIMEOUT_S: Final = 15.0
MAX_PRICES_BYTES: Final = 8 * 1024 * 1024
INPUT_TOKENS: Final = 512
OUTPUT_TOKENS: Final = 256
"""The request that speeds are told for."""


@dataclass(frozen=True, slots=True)
class Price:
    """Today's lowest ask in USD per million tokens."""

    input: Decimal
    output: Decimal


@dataclass(frozen=True, slots=True)
class Candidate:
    """A model file. `variant` is its hash, where that is known without reading it all."""

    name: str
    path: Path
    variant: str | None
    shape: ModelShape


@dataclass(frozen=True, slots=True)
class Verdict:
    """One model on one device."""

    model: str
    device: str
    need_bytes: int
    free_bytes: int | None
    """None: the device does not say."""
    fits: bool
    slots: int
    """Most that fit at this context; 0 if none does."""
    decode_tokens_per_s: float | None
    """Of all slots together; None where neither a measurement nor the device's own figures tell."""
    measured: bool
    usd_per_hour: Decimal | None
    """If every slot worked all the time at today's lowest ask, before the fee; None without a price or a speed."""


def candidates(paths: Iterable[Path], known: Mapping[Path, str]) -> tuple[list[Candidate], list[str]]:
    """Readable models among files and folders, and a sentence for each file that is none."""
    found: list[Candidate] = []
    problems: list[str] = []
    files = [file for path in paths for file in (sorted(path.glob("**/*.gguf")) if path.is_dir() else [path])]
    for file in files[:MAX_FILES]:
        try:
            found.append(Candidate(file.stem, file, known.get(file), read_shape(file)))
        except (GgufError, OSError) as error:
            problems.append(f"{file} is no model that can be read: {error}.")
    if len(files) > MAX_FILES:
        problems.append(f"Only the first {MAX_FILES} of {len(files)} files were looked at.")
    return found, problems


def judge(
    candidate: Candidate, device: DeviceReport, *, slots: int, context: int, book: SpeedBook, price: Price | None
) -> Verdict:
    """Whether and how a model runs on a device with so many slots of so many tokens each."""
    on_gpu = device.kind == "gpu"
    total, used = device.memory_total_bytes, device.memory_used_bytes
    free = None if total is None or used is None else total - used - (device.memory_reserved_bytes or 0)
    margin = gpu_margin_bytes(total) if on_gpu and total is not None else 0
    need = llamacpp_need(candidate.shape, slots=slots, context_per_slot=context, on_gpu=on_gpu)
    usable = device.state == "ok" and free is not None
    most = (
        largest_slots(candidate.shape, free_bytes=free, context_per_slot=context, on_gpu=on_gpu, margin_bytes=margin)
        if usable and free is not None
        else 0
    )
    speed, measured = _speed(candidate, device, slots, book)
    earning = None
    if price is not None and speed is not None:
        rate = price.output + price.input * INPUT_TOKENS / OUTPUT_TOKENS
        earning = (Decimal(str(speed)) * 3600 * rate / 1_000_000).quantize(Decimal("0.000001"))
    return Verdict(
        model=candidate.name,
        device=device.device_id,
        need_bytes=need.total,
        free_bytes=free,
        fits=usable and free is not None and fits(need, free, margin),
        slots=most,
        decode_tokens_per_s=speed,
        measured=measured,
        usd_per_hour=earning,
    )


def _speed(candidate: Candidate, device: DeviceReport, slots: int, book: SpeedBook) -> tuple[float | None, bool]:
    spec = find_device(device.name)
    known = None if candidate.variant is None else book.of_variant(device.device_id, candidate.variant)
    one = known.decode_tokens_per_s if known is not None else None
    if spec is None:
        # A processor is bound by its arithmetic: slots share what one gets.
        return one, one is not None
    model = SpeedModel(candidate.shape, spec)
    predicted = model.output_tokens_per_s(Load(slots, INPUT_TOKENS, OUTPUT_TOKENS))
    if one is None:
        return predicted, False
    alone = 1.0 / model.decode_step_s(1, INPUT_TOKENS)
    return predicted * one / alone, True


class _Pricing(msgspec.Struct):
    input: str
    output: str


class _Model(msgspec.Struct):
    weights_sha256: str
    task: str = "chat"
    pricing: _Pricing | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


async def prices(url: str, api_key: str) -> dict[str, Price]:
    """Today's lowest asks by variant, from the marketplace's list of models. Raises ConfigError."""
    timeout = aiohttp.ClientTimeout(total=PRICES_TIMEOUT_S)
    headers = {"Authorization": f"Bearer {api_key}"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.get(url + "/v1/models", headers=headers) as response,
        ):
            body = await response.content.read(MAX_PRICES_BYTES)
            while chunk := await response.content.read(MAX_PRICES_BYTES - len(body)):
                body += chunk
            if response.status != 200:
                raise ConfigError(f"{urlsplit(url).hostname} answers {response.status} when asked for its prices.")
        listed = msgspec.json.decode(body, type=_Models).data
    except (aiohttp.ClientError, TimeoutError, OSError, msgspec.DecodeError) as error:
        raise ConfigError(f"{url} does not tell its prices: {str(error) or 'no answer in time'}.") from error
    return {
        model.weights_sha256: Price(Decimal(model.pricing.input), Decimal(model.pricing.output))
        for model in listed
        if model.pricing is not None and model.task == "chat"
    }


def gib(value: int | None) -> str:
    """`1.5 GiB`; small ones in MiB."""
    if value is None:
        return "unknown"
    return f"{value / 2**30:.1f} GiB" if value >= 2**30 else f"{value / MIB:.0f} MiB"
