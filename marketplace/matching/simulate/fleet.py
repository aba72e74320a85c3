"""The machines of a simulation, read from a TOML file: cards, asks, owners' hours, failures, and what power costs.

A node is one card that serves one variant with an engine of paged cache and continuous batching. What it can do follows
from the sizes of its card and model (agent.sizing); `speed` in the file may say what was measured instead.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path
from random import Random
from typing import Any, Final

from agent.sizing.devices import DEVICES, DeviceSpec
from agent.sizing.fit import paged_kv_tokens
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Efficiency, Load, SpeedModel
from marketplace.metering.pricing import Rates

MAX_NODES: Final = 10_000
MAX_SLOTS: Final = 256
USUAL_SLOTS: Final = 128
"""Of an engine with a paged cache, where the file does not say: memory is the bound that matters."""
MAX_CONTEXT_TOKENS: Final = 131_072
NANO_PER_USD: Final = 10**9
DAY_S: Final = 86_400.0
PACE_PART: Final = 0.95
"""Of the targeted time per token that an engine's step may take."""
IDLE_PART: Final = 0.06
"""Of the card's own power that it draws with a model loaded and nothing to do, where the file does not say: measured
were 10-25 W on an RTX 4090 of 450."""
SERVER_IDLE_PART: Final = 0.17
"""The same for server cards: 115-120 W on an H100 of 700."""


class FleetError(ValueError):
    """The file is no fleet; the text says where and why."""


@dataclass(frozen=True, slots=True)
class Target:
    """What counts as good service."""

    ttft_base_s: float = 1.0
    ttft_tokens_per_s: float = 4_000.0
    tpot_s: float = 0.08

    def ttft_s(self, prompt_tokens: float) -> float:
        """Latest useful first token of a prompt."""
        return self.ttft_base_s + prompt_tokens / self.ttft_tokens_per_s


DEFAULT_TARGET: Final = Target()


@dataclass(frozen=True, slots=True)
class Hours:
    """When an owner offers a node. Neither sessions nor windows: always."""

    on_s: float = 0.0
    """Mean length of a session; with `off_s`, both exponential."""
    off_s: float = 0.0
    windows: tuple[tuple[float, float], ...] = ()
    """Of each day, in seconds from its start; an end before its beginning is past midnight."""

    def intervals(self, duration_s: float, rng: Random) -> list[tuple[float, float]]:
        """Half-open intervals of offered time within the run, in order. The run begins at midnight, mid-session."""
        if self.windows:
            return _daily(self.windows, duration_s)
        if self.off_s <= 0:
            return [(0.0, duration_s)]
        found: list[tuple[float, float]] = []
        at = 0.0
        offered = rng.random() < self.on_s / (self.on_s + self.off_s)
        while at < duration_s:
            # Exponential sessions forget how long they have lasted, so the first needs no correction.
            until = at + rng.expovariate(1.0 / (self.on_s if offered else self.off_s))
            if offered:
                found.append((at, min(until, duration_s)))
            at, offered = until, not offered
        return found

    @property
    def share(self) -> float:
        """Part of the time that it is offered, on average."""
        if self.windows:
            return sum((end - start) % DAY_S or DAY_S for start, end in self.windows) / DAY_S
        return self.on_s / (self.on_s + self.off_s) if self.off_s > 0 else 1.0


@dataclass(frozen=True, slots=True)
class NodeSpec:
    """One node."""

    name: str
    owner: str
    kind: str
    """Card and cap: nodes of one kind are compared with each other."""
    model: SpeedModel
    rates: Rates
    slots: int
    context_per_slot: int
    kv_tokens: int
    pace_s: float
    """How long its engine lets one step become: the token budget of a batch, as a time."""
    hours: Hours = Hours()
    failures_per_day: float = 0.0
    repair_s: float = 300.0
    power_fraction: float = 1.0
    load_w: float = 0.0
    idle_w: float = 0.0
    energy_usd_per_kwh: float = 0.0
    capital_usd: float = 0.0
    region: str = ""


@dataclass(frozen=True, slots=True)
class Fleet:
    """All of it."""

    shape: ModelShape
    nodes: tuple[NodeSpec, ...]
    target: Target = DEFAULT_TARGET
    network_s: float = 0.02
    load_bytes_per_s: float = 2e9
    """At which a node reads weights that it has not loaded."""

    @property
    def cold_load_s(self) -> float:
        """From an owner's return to the first prompt."""
        return self.shape.weight_bytes / self.load_bytes_per_s


def make_node(
    shape: ModelShape,
    device: DeviceSpec,
    *,
    name: str,
    rates: Rates,
    target: Target = DEFAULT_TARGET,
    owner: str = "",
    power_fraction: float = 1.0,
    slots: int = 0,
    efficiency: Efficiency | None = None,
    **more: Any,
) -> NodeSpec:
    """A node from its card. Slots 0: the usual number. Raises FleetError if the model does not fit the card."""
    card = device.capped(power_fraction)
    model = SpeedModel(shape, card, 1, efficiency or Efficiency())
    kv_tokens = paged_kv_tokens(shape, memory_bytes=device.memory_bytes)
    if kv_tokens < 1:
        raise FleetError(f"{name}: the model does not fit a {device.name}")
    idle_part = SERVER_IDLE_PART if device.server else IDLE_PART
    more.setdefault("load_w", card.tdp_w or 0.0)
    more.setdefault("idle_w", (device.tdp_w or 0.0) * idle_part)
    return NodeSpec(
        name=name,
        owner=owner or name,
        kind=card.name,
        model=model,
        rates=rates,
        slots=slots or max(1, min(USUAL_SLOTS, kv_tokens // 512)),
        context_per_slot=min(MAX_CONTEXT_TOKENS, kv_tokens),
        kv_tokens=kv_tokens,
        pace_s=PACE_PART * target.tpot_s,
        power_fraction=power_fraction,
        **more,
    )


def capacity_requests_per_s(node: NodeSpec, load: Load, target: Target) -> float:
    """What a node could serve at the target, by the formulas: at the largest batch that fits and keeps the pace."""
    largest = max(1, min(MAX_SLOTS, int(node.kv_tokens / (load.input_tokens + load.output_tokens))))
    best = 0.0
    for batch in range(1, largest + 1):
        steady = replace(load, batch=batch)
        if node.model.per_output_token_s(steady) > target.tpot_s and batch > 1:
            break
        best = max(best, node.model.requests_per_s(steady))
    return best


# --- the file ---------------------------------------------------------------------------------------------------------


def read_fleet(path: Path) -> Fleet:
    """The fleet in a TOML file. Raises FleetError for what it cannot mean, OSError if unreadable."""
    try:
        return parse_fleet(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise FleetError(f"{path.name}: {error}") from None


def parse_fleet(text: str) -> Fleet:
    """The same from a text."""
    table = _Table(tomllib.loads(text), "")
    shape = _shape(table.table("model"))
    target = _target(table.table("target", {}))
    network_s = table.number("network_ms", 20, least=0) / 1e3
    load_rate = table.number("load_gb_per_s", 2, above=0) * 1e9
    nodes: list[NodeSpec] = []
    for number, entry in enumerate(table.tables("node"), start=1):
        nodes += _nodes(entry, shape, target, number)
        if len(nodes) > MAX_NODES:
            raise FleetError(f"at most {MAX_NODES} nodes")
    table.done()
    if not nodes:
        raise FleetError("a fleet needs at least one [[node]]")
    return Fleet(shape, tuple(nodes), target, network_s, load_rate)


_MISSING: Final = object()


@dataclass(slots=True)
class _Table:
    """One table of the file: what is asked of it is checked, and what is left over is an error."""

    raw: Mapping[str, Any]
    place: str
    asked: set[str] = field(default_factory=set)

    def _get(self, key: str, default: Any) -> Any:
        self.asked.add(key)
        value = self.raw.get(key, default)
        if value is _MISSING:
            raise FleetError(f"{self.place}{key} is missing")
        return value

    def text(self, key: str, default: Any = _MISSING) -> str:
        value = self._get(key, default)
        if not isinstance(value, str):
            raise FleetError(f"{self.place}{key} must be a text")
        return value

    def number(
        self, key: str, default: Any = _MISSING, *, least: float | None = None, above: float | None = None
    ) -> float:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or value != value or abs(value) > 1e18:  # noqa: PLR0124 - NaN
            raise FleetError(f"{self.place}{key} must be a number")
        if least is not None and value < least:
            raise FleetError(f"{self.place}{key} must be at least {least:g}")
        if above is not None and value <= above:
            raise FleetError(f"{self.place}{key} must be above {above:g}")
        return float(value)

    def whole(self, key: str, default: Any = _MISSING, *, least: int = 1) -> int:
        value = self._get(key, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < least:
            raise FleetError(f"{self.place}{key} must be a whole number, at least {least}")
        return value

    def price(self, key: str, default: Any = _MISSING) -> int:
        """A decimal text in USD per million tokens, as nano-USD."""
        value = self._get(key, default)
        try:
            amount = Decimal(value) * NANO_PER_USD
        except (InvalidOperation, TypeError, ValueError):
            raise FleetError(f"{self.place}{key} must be a decimal in quotes, USD per million tokens") from None
        if not isinstance(value, str) or not amount.is_finite() or amount < 0 or amount != int(amount):
            raise FleetError(f"{self.place}{key} must be a decimal in quotes, at most nine digits after the point")
        return int(amount)

    def table(self, key: str, default: Any = _MISSING) -> _Table:
        value = self._get(key, default)
        if not isinstance(value, Mapping):
            raise FleetError(f"{self.place}{key} must be a table")
        return _Table(value, f"{self.place}{key}.")

    def tables(self, key: str) -> Iterable[_Table]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, Mapping) for entry in value):
            raise FleetError(f"{self.place}{key} must be an array of tables")
        return [_Table(entry, f"{key} {number}: ") for number, entry in enumerate(value, start=1)]

    def texts(self, key: str) -> list[str]:
        value = self._get(key, [])
        if not isinstance(value, list) or not all(isinstance(entry, str) for entry in value):
            raise FleetError(f"{self.place}{key} must be a list of texts")
        return value

    def done(self) -> None:
        unknown = sorted(set(self.raw) - self.asked)
        if unknown:
            raise FleetError(f"{self.place}{unknown[0]} is unknown; known are {', '.join(sorted(self.asked))}")


def _shape(table: _Table) -> ModelShape:
    parameters = round(table.number("parameters_b", above=0) * 1e9)
    hidden = table.whole("hidden")
    layers = table.whole("layers")
    shape = ModelShape(
        weight_bytes=round(table.number("weights_gb", above=0) * 1e9),
        parameters=parameters,
        active_parameters=round(table.number("active_parameters_b", parameters / 1e9, above=0) * 1e9),
        layers=layers,
        hidden=hidden,
        feed_forward=table.whole("feed_forward", 4 * hidden),
        vocabulary=table.whole("vocabulary", 128_256),
        kv_elements_per_token=2 * layers * table.whole("kv_heads") * table.whole("head_size"),
        context_train=table.whole("context", MAX_CONTEXT_TOKENS),
        kv_type=table.text("kv_type", "f16"),
    )
    table.done()
    if shape.active_parameters > shape.parameters:
        raise FleetError("model.active_parameters_b cannot exceed model.parameters_b")
    try:
        _ = shape.kv_bytes_per_token
    except KeyError:
        raise FleetError(f"model.kv_type {shape.kv_type!r} is unknown") from None
    return shape


def _target(table: _Table) -> Target:
    target = Target(
        table.number("first_token_s", 1.0, least=0),
        table.number("first_token_prompt_tokens_per_s", 4000, above=0),
        table.number("per_token_ms", 80, above=0) / 1e3,
    )
    table.done()
    return target


def _nodes(table: _Table, shape: ModelShape, target: Target, number: int) -> list[NodeSpec]:
    card = table.text("device")
    if card not in DEVICES:
        raise FleetError(f"node {number}: unknown device {card!r}; known are {', '.join(DEVICES)}")
    count = table.whole("count", 1)
    name = table.text("name", f"{card} {number}")
    owner = table.text("owner", "")
    ask_input = table.price("ask_input")
    rates = Rates(ask_input, table.price("ask_cached_input", _usd(ask_input // 2)), table.price("ask_output"))
    fraction = table.number("power_cap", 1.0, above=0)
    slots = table.whole("slots", 0, least=0)
    hours = _hours(table)
    efficiency = _efficiency(table.table("speed", {}))
    device = DEVICES[card]
    more = {
        key: value
        for key, value in (
            ("load_w", table.number("load_w", 0, least=0)),
            ("idle_w", table.number("idle_w", 0, least=0)),
        )
        if value
    }
    shared: dict[str, Any] = {
        "hours": hours,
        "failures_per_day": table.number("failures_per_day", 0, least=0),
        "repair_s": table.number("repair_min", 5, above=0) * 60,
        "energy_usd_per_kwh": table.number("energy_usd_per_kwh", 0, least=0),
        "capital_usd": table.number("capital_usd", 0, least=0),
        "region": table.text("region", ""),
        **more,
    }
    table.done()
    if fraction > 1 or count > MAX_NODES or slots > MAX_SLOTS:
        raise FleetError(f"node {number}: power_cap is at most 1, count {MAX_NODES}, slots {MAX_SLOTS}")
    return [
        make_node(
            shape,
            device,
            name=name if count == 1 else f"{name} #{index}",
            owner=owner or (name if count == 1 else f"{name} #{index}"),
            rates=rates,
            target=target,
            power_fraction=fraction,
            slots=slots,
            efficiency=efficiency,
            **shared,
        )
        for index in range(1, count + 1)
    ]


def _usd(nano: int) -> str:
    return str(Decimal(nano) / NANO_PER_USD)


def _efficiency(table: _Table) -> Efficiency:
    prior = Efficiency()
    found = Efficiency(
        table.number("memory", prior.memory, above=0),
        table.number("compute", prior.compute, above=0),
        table.number("step_ms", prior.step_overhead_s * 1e3, least=0) / 1e3,
        table.number("all_reduce_us", prior.all_reduce_s * 1e6, least=0) / 1e6,
    )
    table.done()
    return found


_CLOCK: Final = re.compile(r"([01]\d|2[0-4]):([0-5]\d)-([01]\d|2[0-4]):([0-5]\d)")


def _hours(table: _Table) -> Hours:
    windows: list[tuple[float, float]] = []
    for text in table.texts("offered"):
        match = _CLOCK.fullmatch(text)
        if not match:
            raise FleetError(f"{table.place}offered must name windows like '22:00-08:00', not {text!r}")
        h0, m0, h1, m1 = (int(part) for part in match.groups())
        windows.append((h0 * 3600.0 + m0 * 60.0, h1 * 3600.0 + m1 * 60.0))
    on_s = table.number("session_on_min", 0, least=0) * 60
    off_s = table.number("session_off_min", 0, least=0) * 60
    if windows and (on_s or off_s):
        raise FleetError(f"{table.place}offered and session_* exclude each other")
    if off_s and not on_s:
        raise FleetError(f"{table.place}session_on_min is missing")
    return Hours(on_s, off_s, tuple(windows))


def _daily(windows: Iterable[tuple[float, float]], duration_s: float) -> list[tuple[float, float]]:
    pieces: list[tuple[float, float]] = []
    for day in range(-1, int(duration_s // DAY_S) + 1):
        for start, end in windows:
            length = (end - start) % DAY_S or DAY_S
            begin = day * DAY_S + start
            pieces.append((max(0.0, begin), min(duration_s, begin + length)))
    merged: list[tuple[float, float]] = []
    for begin, end in sorted(piece for piece in pieces if piece[1] > piece[0]):
        if merged and begin <= merged[-1][1]:
            merged[-1] = (merged[-1][0], max(merged[-1][1], end))
        else:
            merged.append((begin, end))
    return merged
