"""What an agent makes of a plan's advice: the owner's word stands above it. Pure.

The marketplace sees demand, the agent sees the machine. So advice is followed only for models that the owner lists, at
the owner's ask, where memory and disk are free for them now, where the owner's hours leave enough time, and never in
place of what serves. What was loaded stays for a while, so that forecasts which waver do not wear the disk out.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from agent.protocol import Evict, Load
from agent.sizing.fit import MIB, gpu_margin_bytes

if TYPE_CHECKING:
    from agent.protocol import DeviceReport
    from agent.records import EngineState

TRIES: Final = 3
"""Starts in a row that may fail before an engine of a plan is given up."""
CPU_MARGIN_BYTES: Final = 256 * MIB
Refusal = tuple[str, str]
"""A code of protocol.PLAN_REFUSALS and a sentence."""


@dataclass(frozen=True, slots=True)
class Room:
    """What the shell found out for one piece of advice."""

    accepts: bool
    """The owner takes plans at all."""
    loads_at_once: int = 1
    least_stay_s: float = 0.0
    free_bytes: int | None = None
    """Of the device, beyond what the owner keeps, once what is being ended is gone; None: it does not say."""
    stays_s: float | None = None
    """For how long the owner's hours leave the machine; None: they set no end."""
    disk: str = ""
    """Why its weights are not to be had; empty where they are here, or there is room for them."""


@dataclass(frozen=True, slots=True)
class Standing:
    """What the state machine knows."""

    held: str
    """Why the owner has the machine, or this part of it."""
    busy: int
    """Slots of the engine that are taken."""
    loading: int
    """Engines that read their weights now."""


def refusal(
    frame: Load | Evict, engine: EngineState | None, room: Room, standing: Standing, now: float
) -> Refusal | None:
    """Why this advice is not followed; None if it is."""
    if not room.accepts:
        return "not_allowed", "the owner takes no plans"
    if engine is None:
        return "not_allowed", "the owner does not list this model for this device"
    if isinstance(frame, Evict):
        return _against_evict(engine, room, standing, now)
    if engine.wanted:
        return None  # it is loaded, or on its way: said twice is done once
    return _against_load(frame, engine, room, standing)


def _against_evict(engine: EngineState, room: Room, standing: Standing, now: float) -> Refusal | None:
    if engine.served.load == "always":
        return "not_allowed", "the owner wants this model loaded always"
    if standing.busy:
        return "serving", f"{standing.busy} of its slots are taken"
    stayed_s = now - engine.ready_at
    if engine.facts is not None and stayed_s < room.least_stay_s:
        return "resident", f"it came {stayed_s:.0f} s ago, and stays {room.least_stay_s:.0f} s at least"
    return None


def _against_load(frame: Load, engine: EngineState, room: Room, standing: Standing) -> Refusal | None:
    if standing.held:
        return "owner_active", standing.held
    if room.stays_s is not None and room.stays_s < room.least_stay_s:
        return "owner_active", f"the owner's hours end in {room.stays_s:.0f} s"
    if standing.loading >= room.loads_at_once:
        return "busy", f"{standing.loading} other models are being loaded"
    if room.disk:
        return "disk", room.disk
    needed = engine.served.needed_bytes or frame.needed_bytes
    if needed is not None and room.free_bytes is not None and needed > room.free_bytes:
        return "memory", f"it needs {needed / MIB:.0f} MiB, and {max(0, room.free_bytes) / MIB:.0f} MiB are free for it"
    return None


def kept_bytes(report: DeviceReport, *, reserve_memory_mib: int, reserve_gpu_share: float) -> int:
    """What of a device is not for engines: the owner's share, and a margin for a neighbour's growth."""
    total = report.memory_total_bytes or 0
    if report.kind != "gpu":
        return reserve_memory_mib * MIB + CPU_MARGIN_BYTES
    return round(reserve_gpu_share * total) + gpu_margin_bytes(total) + (report.memory_reserved_bytes or 0)
