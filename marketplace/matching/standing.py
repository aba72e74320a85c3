"""A node's standing: how new ones earn trust, how it is lost, and what never counts against anybody. Pure.

A node begins on probation: few requests at a time, none from renters who want proven nodes. Enough delivered work with
few faults of its own promotes it. Faults in a recent window take a proven node back to probation, many bar it until it
appeals or the bar ends. Each change says why, in figures that its owner can check.

What does not count: faults of the request, of the platform, of the owner's own will; faults of a job that broke several
nodes, since then the job is to blame; and everything inside an amnesty, which is a time in which we were broken, noted
by hand or found by many nodes failing at once.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

WINDOW_S: Final = 7 * 86_400.0
"""Only what ended within it counts."""
PROMOTE_COMPLETED: Final = 20
"""Attempts that a node on probation must complete..."""
PROMOTE_AFTER_S: Final = 3_600.0
"""...in at least this time since it joined or was demoted..."""
PROMOTE_MOST_FAULTS: Final = 0.1
"""...with at most this part of them failed by its own fault."""
DEMOTE_FAULTS: Final = 3
DEMOTE_PART: Final = 0.2
"""A proven node with so many faults that are so large a part goes back to probation."""
BAR_FAULTS: Final = 10
BAR_PART: Final = 0.5
"""With so many, and as large a part, it gets nothing for a while."""
BAR_S: Final = 86_400.0
OUTAGE_NODES: Final = 5
OUTAGE_PART: Final = 0.5
"""So many nodes, and such a part of those that worked, failing within one minute: that is not the nodes."""


class Standing(StrEnum):
    """What a node may get."""

    PROBATION = "probation"
    """A few requests at a time."""
    PROVEN = "proven"
    """Everything."""
    BARRED = "barred"
    """Nothing, until the bar ends or an appeal is granted."""


@dataclass(frozen=True, slots=True)
class Record:
    """What a node did in the window, after everything that does not count was left out."""

    completed: int
    faults: int
    """Attempts that failed by its own fault."""
    forgiven: int = 0
    """Faults that do not count: of requests that broke several nodes, or inside an amnesty."""

    @property
    def fault_part(self) -> float:
        """Of everything that counts."""
        counted = self.completed + self.faults
        return self.faults / counted if counted else 0.0

    def sentence(self) -> str:
        """For the owner."""
        forgiven = f" ({self.forgiven} more do not count)" if self.forgiven else ""
        return f"{self.completed} completed and {self.faults} failed by the node's own fault in 7 days{forgiven}"


@dataclass(frozen=True, slots=True)
class Judgement:
    """A change of standing, and why."""

    standing: Standing
    reason: str


def judge(standing: Standing, record: Record, *, since_s: float) -> Judgement | None:
    """The change that a record brings to a node that has had its standing for `since_s` seconds; None: it stays."""
    if standing is Standing.BARRED:
        over = f"the bar of {BAR_S / 3600:.0f} hours is over: {record.sentence()}"
        return Judgement(Standing.PROBATION, over) if since_s >= BAR_S else None
    failing = f"{record.fault_part:.0%} of its work failed: {record.sentence()}"
    if record.faults >= BAR_FAULTS and record.fault_part >= BAR_PART:
        return Judgement(Standing.BARRED, failing)
    if standing is Standing.PROVEN:
        lost = record.faults >= DEMOTE_FAULTS and record.fault_part > DEMOTE_PART
        return Judgement(Standing.PROBATION, failing) if lost else None
    earned = record.completed >= PROMOTE_COMPLETED and record.fault_part <= PROMOTE_MOST_FAULTS
    if earned and since_s >= PROMOTE_AFTER_S:
        return Judgement(Standing.PROVEN, f"it has proven itself: {record.sentence()}")
    return None


def missing(standing: Standing, record: Record, *, since_s: float) -> str:
    """What a node still lacks to be proven, in words; empty for one that is."""
    if standing is Standing.PROVEN:
        return ""
    if standing is Standing.BARRED:
        return f"barred for {max(0.0, BAR_S - since_s) / 3600:.1f} more hours, unless an appeal is granted"
    lacks: list[str] = []
    if record.completed < PROMOTE_COMPLETED:
        lacks.append(f"{PROMOTE_COMPLETED - record.completed} more completed attempts")
    if record.fault_part > PROMOTE_MOST_FAULTS:
        lacks.append(f"a share of faults of at most {PROMOTE_MOST_FAULTS:.0%} (now {record.fault_part:.0%})")
    if since_s < PROMOTE_AFTER_S:
        lacks.append(f"{(PROMOTE_AFTER_S - since_s) / 60:.0f} more minutes")
    return ", ".join(lacks)


def outages(minutes: Mapping[int, tuple[int, int]]) -> list[tuple[int, int]]:
    """Stretches [first, last] of minutes that look like our own outage, given (nodes that failed, nodes that worked or
    failed) by minute. Neighbouring minutes are one stretch."""
    broken = sorted(
        minute for minute, (failed, all_) in minutes.items() if failed >= OUTAGE_NODES and failed >= OUTAGE_PART * all_
    )
    stretches: list[tuple[int, int]] = []
    for minute in broken:
        if stretches and minute <= stretches[-1][1] + 1:
            stretches[-1] = (stretches[-1][0], minute)
        else:
            stretches.append((minute, minute))
    return stretches
