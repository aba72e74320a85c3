"""When idle is idle, and what of the machine then works. Pure: one look a second in, holds out.

A hold is about a scope: the whole machine (empty), one device, or one variant. What the owner says outright (a pause,
hours, a tariff, one of his programs) counts at once. What is only seen (memory, heat, somebody on the card, a circuit)
needs two samples to make the node yield, and quiet time to let it return; the quiet time doubles when it has to yield
again soon, so that a borderline machine does not flap. What is not known decides nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from decimal import ROUND_CEILING, Decimal
from typing import Final

from agent.foreign import ForeignWatch, Known
from agent.hours import inside, parse_window
from agent.protocol import DeviceReport
from agent.telemetry.nvml_faults import FATAL_XIDS
from agent.telemetry.port import Processes
from agent.terms import Action, CircuitTable, Terms, usd

SAMPLES_TO_YIELD: Final = 2
MAX_RETURN_S: Final = 3_600.0
SHED_EVERY_S: Final = 5.0
"""Between two cards that a circuit makes rest: power follows a change within a second or two."""
DRAIN_S: Final = 600.0
"""How long `fallow agent drain` waits for what runs."""
MACHINE: Final = ""
HOURS_AHEAD: Final = timedelta(hours=12)
HOURS_STEP: Final = timedelta(minutes=5)
"""How far, and how finely, the owner's hours are looked at in advance."""


@dataclass(frozen=True, slots=True)
class Sold:
    """One engine, as far as the rules look at it."""

    variant: str
    device_id: str
    ask_output_nano: int
    """Of an embedding model, which has no output, what it asks for input; and its speed is that of reading."""
    slots: int
    decode_tokens_per_s: float | None = None
    """Of one request; None where it was not measured."""
    stamp: object = None
    """Changes when the engine starts, serves or ends."""
    attached: bool = False


@dataclass(frozen=True, slots=True)
class Sight:
    """What the policy looks at, once a second. None: not known, and then it decides nothing."""

    now: float
    """Monotonic seconds."""
    local: datetime
    """The owner's wall clock."""
    asked: str = ""
    """`pause`, `drain` or `evict`, while the owner says so."""
    devices: list[DeviceReport] = field(default_factory=list)
    processes: Processes = field(default_factory=dict)
    known: Mapping[int, Known] = field(default_factory=dict)
    program: str = ""
    """One of the owner's programs that runs."""
    input_idle_s: float | None = None
    on_battery: bool | None = None
    sold: tuple[Sold, ...] = ()


@dataclass(frozen=True, slots=True)
class Verdict:
    """What holds a scope."""

    action: Action
    reason: str
    grace_s: float = 0.0
    fault: bool = False
    """The device failed; nobody wished it."""


@dataclass(frozen=True, slots=True)
class _Signal:
    scope: str
    rule: str
    action: Action
    reason: str
    seen: bool
    """Only seen, not said: it needs two samples, and quiet time to end."""
    grace_s: float | None = None
    fault: bool = False


@dataclass(slots=True)
class _Rest:
    """One rule's memory of one scope."""

    signal: _Signal
    return_s: float
    samples: int = 0
    holding: bool = False
    quiet_since: float = 0.0
    returned_at: float | None = None


class Policy:
    """One owner's terms. Raises ConfigError for terms that mean nothing."""

    def __init__(self, terms: Terms) -> None:
        terms.check()
        self._terms = terms
        owner = terms.owner
        self._hours = [parse_window(text) for text in owner.hours]
        self._quiet = [parse_window(text) for text in owner.quiet_hours]
        self._tariff = [(parse_window(entry.hours), Decimal(entry.usd_per_kwh)) for entry in terms.tariff]
        self._foreign = ForeignWatch(owner.ignore_programs, owner.graphics_growth_mib << 20)
        self._circuits = [_Circuit(entry, owner.return_s) for entry in terms.circuits]
        self._rests: dict[tuple[str, str], _Rest] = {}
        self.suspicious = False
        """True if something was seen once: look again at once."""

    def decide(self, sight: Sight) -> dict[str, Verdict]:
        """Take one sample into account. Returns what is held, by scope."""
        signals = {(signal.scope, signal.rule): signal for signal in self._signals(sight)}
        verdicts: dict[str, Verdict] = {}
        self.suspicious = False
        for key in signals.keys() | self._rests.keys():
            held = self._rest(key, signals.get(key), sight.now)
            if held is None or held.action is Action.IGNORE:
                continue
            grace_s = self._terms.owner.grace_s if held.grace_s is None else held.grace_s
            verdict = Verdict(held.action, held.reason, 0.0 if held.action is Action.EVICT else grace_s, held.fault)
            known = verdicts.get(held.scope)
            if known is None or _weight(verdict) > _weight(known):
                verdicts[held.scope] = verdict
        return verdicts

    def usd_per_kwh(self, local: datetime) -> Decimal | None:
        """What power costs now; None where the owner did not say."""
        for window, price in self._tariff:
            if window.holds(local):
                return price
        return usd(self._terms.power.usd_per_kwh)

    def stays_s(self, local: datetime) -> float | None:
        """For how long the owner's hours still leave the machine, to HOURS_STEP; None: not less than HOURS_AHEAD."""
        ahead = timedelta()
        while ahead < HOURS_AHEAD:
            then = local + ahead
            if (self._hours and not inside(self._hours, then)) or inside(self._quiet, then):
                return ahead.total_seconds()
            ahead += HOURS_STEP
        return None

    # --- rules ------------------------------------------------------------------------------------------------------

    def _signals(self, sight: Sight) -> Iterator[_Signal]:
        does = self._terms.owner.does
        yield from self._said(sight)
        yield from self._whole_machine(sight)
        for report in sight.devices:
            yield from self._device(report, sight)
        seen = {report.device_id for report in sight.devices}
        for device_id in {sold.device_id for sold in sight.sold if sold.device_id.startswith("GPU-")} - seen:
            yield _Signal(device_id, "state", Action.PAUSE, "the device is not there", seen=False, fault=True)
        for index, circuit in enumerate(self._circuits):
            for device_id in circuit.shed(sight.devices, sight.now):
                yield _Signal(device_id, f"circuit{index}", does.circuit, "its circuit draws too much", seen=False)
        yield from self._prices(sight)

    def _said(self, sight: Sight) -> Iterator[_Signal]:
        owner = self._terms.owner
        match sight.asked:
            case "pause":
                yield _Signal(MACHINE, "asked", Action.DRAIN, "paused by the owner", seen=False)
            case "drain":
                yield _Signal(MACHINE, "asked", Action.DRAIN, "drained by the owner", seen=False, grace_s=DRAIN_S)
            case "evict":
                yield _Signal(MACHINE, "asked", Action.EVICT, "paused by the owner", seen=False)
        if self._hours and not inside(self._hours, sight.local):
            yield _Signal(MACHINE, "hours", owner.does.hours, "outside the owner's hours", seen=False)
        elif inside(self._quiet, sight.local):
            yield _Signal(MACHINE, "hours", owner.does.hours, "inside the owner's quiet hours", seen=False)
        limit, price = usd(owner.max_usd_per_kwh), self.usd_per_kwh(sight.local)
        if limit is not None and price is not None and price > limit:
            yield _Signal(MACHINE, "tariff", owner.does.tariff, f"power costs {price} USD/kWh now", seen=False)
        if sight.on_battery:
            yield _Signal(MACHINE, "battery", owner.does.battery, "the machine runs on its battery", seen=False)

    def _whole_machine(self, sight: Sight) -> Iterator[_Signal]:
        owner = self._terms.owner
        if sight.program:
            # Seen for certain, so one sample is enough; quiet time still keeps a short pause from bringing us back.
            yield _Signal(MACHINE, "program", owner.does.program, f"{sight.program} runs", seen=True)
        idle_s = sight.input_idle_s
        if owner.input_idle_s and idle_s is not None and idle_s < owner.input_idle_s:
            yield _Signal(MACHINE, "input", owner.does.input, "somebody uses the machine", seen=False)
        free = main_memory_free_bytes(sight.devices)
        if free is not None and free < owner.reserve_memory_mib << 20:
            yield _Signal(MACHINE, "memory", owner.does.memory, "the owner needs the memory", seen=True)
        hottest = hottest_c(report.temperature_c for report in sight.devices if report.kind == "cpu")
        if hottest is not None and hottest > owner.max_temperature_c:
            yield _Signal(MACHINE, "heat", owner.does.heat, "the machine is too hot", seen=True)

    def _device(self, report: DeviceReport, sight: Sight) -> Iterator[_Signal]:
        owner, scope = self._terms.owner, report.device_id
        if report.kind != "gpu":
            return
        if report.state != "ok":
            # A lost card took its work along. One that only cannot be read now keeps what runs, and gets nothing new.
            gone = report.state == "lost" or (report.state == "unavailable" and report.xid in FATAL_XIDS)
            action = Action.EVICT if gone else Action.PAUSE
            yield _Signal(scope, "state", action, report.reason or report.state, seen=False, fault=True)
            return
        total, used = report.memory_total_bytes, report.memory_used_bytes
        if total and used is not None and total - used < owner.reserve_gpu_share * total:
            yield _Signal(scope, "memory", owner.does.memory, f"the owner needs the memory of {report.name}", seen=True)
        if report.temperature_c is not None and report.temperature_c > owner.max_temperature_c:
            yield _Signal(scope, "heat", owner.does.heat, f"{report.name} is too hot", seen=True)
        here = [sold for sold in sight.sold if sold.device_id == scope]
        foreign = self._foreign.look(
            report,
            sight.processes.get(scope),
            sight.known,
            stamp=tuple(sold.stamp for sold in here),
            attached=any(sold.attached for sold in here),
            now=sight.now,
        )
        if foreign:
            yield _Signal(scope, "foreign", owner.does.foreign_process, foreign, seen=True)

    def _prices(self, sight: Sight) -> Iterator[_Signal]:
        floor_usd = usd(self._terms.owner.price_floor_usd_per_mtok) or Decimal(0)
        price = self.usd_per_kwh(sight.local)
        for sold in sight.sold:
            energy = energy_nano_per_mtok(self._terms, price, sold)
            floor = max(int(floor_usd * 10**9), energy)
            if sold.ask_output_nano < floor:
                what = "what its power costs now" if floor == energy else "the owner's floor"
                reason = f"the ask is under {what} ({Decimal(floor) / 10**9:.4f} USD a million tokens)"
                yield _Signal(sold.variant, "price", self._terms.owner.does.price, reason, seen=False)

    # --- memory -----------------------------------------------------------------------------------------------------

    def _rest(self, key: tuple[str, str], signal: _Signal | None, now: float) -> _Signal | None:
        """What this rule holds now, with two samples and quiet time where it is only seen."""
        rest = self._rests.get(key)
        if signal is not None and not signal.seen:
            return signal
        if rest is None:
            if signal is None:
                return None
            rest = self._rests[key] = _Rest(signal, self._terms.owner.return_s)
        if signal is not None:
            rest.signal, rest.quiet_since = signal, now
            rest.samples += 1
            if not rest.holding and (rest.samples >= SAMPLES_TO_YIELD or signal.rule == "program"):
                rest.holding = True
                self._lengthen_quiet(rest, now)
            self.suspicious = self.suspicious or not rest.holding
        else:
            rest.samples = 0
            if rest.holding and now - rest.quiet_since >= rest.return_s:
                rest.holding = False
                rest.returned_at = now
        return rest.signal if rest.holding else None

    def _lengthen_quiet(self, rest: _Rest, now: float) -> None:
        first_s = self._terms.owner.return_s
        soon = rest.returned_at is not None and now - rest.returned_at < 10 * rest.return_s
        rest.return_s = min(rest.return_s * 2, MAX_RETURN_S) if soon else first_s


class _Circuit:
    """Which cards of one circuit rest, so that it draws no more than it may."""

    def __init__(self, table: CircuitTable, return_s: float) -> None:
        self._table = table
        self._return_s = return_s
        self._shed: list[str] = []
        self._over = 0
        self._changed_at = float("-inf")
        self._calm_since: float | None = None

    def shed(self, devices: list[DeviceReport], now: float) -> list[str]:
        """The devices that rest now. A card whose power is unknown counts for nothing, and is the first to rest."""
        cards = [
            report
            for report in devices
            if report.kind == "gpu" and (not self._table.devices or report.device_id in self._table.devices)
        ]
        drawn_w = self._table.base_watts + sum((report.power_mw or 0) for report in cards) / 1000
        if drawn_w > self._table.watts:
            self._calm_since = None
            self._over += 1
            left = [report for report in cards if report.device_id not in self._shed and report.state == "ok"]
            left.sort(key=lambda report: report.power_mw is None)
            if self._over >= SAMPLES_TO_YIELD and left and now - self._changed_at >= SHED_EVERY_S:
                self._shed.append(left[-1].device_id)
                self._changed_at = now
        else:
            self._over = 0
            self._calm_since = now if self._calm_since is None else self._calm_since
            if self._shed and min(now - self._calm_since, now - self._changed_at) >= self._return_s:
                self._shed.pop()
                self._changed_at = now
        return self._shed


def energy_nano_per_mtok(terms: Terms, usd_per_kwh: Decimal | None, sold: Sold) -> int:
    """What the power of a million output tokens costs beyond that of an idle machine, in nano-USD, rounded up; 0 where
    watts, price or speed are not known. Every slot is taken to work: the least that it can cost."""
    idle, load, speed = terms.power.idle_watts, terms.power.load_watts, sold.decode_tokens_per_s
    if usd_per_kwh is None or idle is None or load is None or not speed:
        return 0
    hours = Decimal(1_000_000) / (Decimal(str(speed)) * sold.slots * 3600)
    cost = hours * (Decimal(str(load)) - Decimal(str(idle))) / 1000 * usd_per_kwh
    return int((cost * 10**9).to_integral_value(ROUND_CEILING))


def _weight(verdict: Verdict) -> tuple[int, bool, float]:
    return verdict.action.strength, verdict.fault, -verdict.grace_s


def main_memory_free_bytes(devices: Iterable[DeviceReport]) -> int | None:
    """Free main memory, from the processor's report."""
    for device in devices:
        if device.kind == "cpu" and device.memory_total_bytes is not None and device.memory_used_bytes is not None:
            return device.memory_total_bytes - device.memory_used_bytes
    return None


def hottest_c(temperatures: Iterable[float | None]) -> float | None:
    """The highest known temperature."""
    known = [value for value in temperatures if value is not None]
    return max(known) if known else None
