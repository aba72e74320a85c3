"""The line of demand that waits: whose turn it is, who may pass the head, and who gives way. Pure; times are given.

Turns are fair by tokens. Each renter's jobs carry tags of virtual time: a job's tag is where its renter stands, and its
renter moves on by the job's tokens, divided by the renter's weight. The smallest tag goes first, so whoever was served
least is next, and who was idle starts level with the others, not with a claim on the past. A job that is due (its
deadline is near, or it waited for PATIENCE_S) goes before all tags: nobody starves.

A job that does not fit now is passed by those behind it, freely by whoever ends before it could start, and by others
until they would lengthen its wait by a tenth of its own time; then the room that it waits for is kept for it. Long
prompts then neither block the line nor wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Final, Generic, TypeVar
from uuid import UUID

PATIENCE_S: Final = 600.0
"""A job that waited for so long is due, whatever its deadline."""
DUE_MARGIN_S: Final = 5.0
"""A job is due this long before it would have to start."""
BYPASS_PART: Final = 0.1
"""Those who pass a job may lengthen its wait by this part of its own time..."""
BYPASS_LEAST_S: Final = 1.0
"""...or by this, whichever is more."""
OUTPUT_WEIGHT: Final = 4.0
"""A token written takes about as much of a device as so many that are read together."""
MAX_WAITING: Final = 1_000_000

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Waiting:
    """A job in the line."""

    job_id: UUID
    renter_id: UUID
    variant_id: UUID
    prompt_tokens: int
    max_output_tokens: int
    arrived_s: float
    deadline_s: float
    """When it must have ended."""
    runs_s: float
    """How long it runs, by prediction."""

    @property
    def tokens(self) -> float:
        """What it takes of a device, in tokens read."""
        return self.prompt_tokens + OUTPUT_WEIGHT * self.max_output_tokens

    @property
    def due_s(self) -> float:
        """From when on it goes before everybody's turn."""
        return min(self.arrived_s + PATIENCE_S, self.deadline_s - self.runs_s - DUE_MARGIN_S)


@dataclass(slots=True)
class _Place:
    job: Waiting
    tag: float
    passed_s: float = 0.0
    """How much longer it may wait because of those who passed it."""


@dataclass(frozen=True, slots=True)
class Turn(Generic[T]):
    """A job and what it was given."""

    job: Waiting
    given: T


@dataclass(slots=True)
class Line:
    """One variant's line. Weights are by renter, 1 unless said."""

    weights: Mapping[UUID, float] = field(default_factory=dict)
    _places: dict[UUID, _Place] = field(default_factory=dict)
    _virtual: float = 0.0
    _last: dict[UUID, float] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self._places)

    def join(self, job: Waiting) -> bool:
        """A job comes. False: the line is full, or the job stands in it already."""
        if job.job_id in self._places or len(self._places) >= MAX_WAITING:
            return False
        tag = max(self._virtual, self._last.get(job.renter_id, 0.0))
        self._last[job.renter_id] = tag + job.tokens / max(1e-6, self.weights.get(job.renter_id, 1.0))
        self._places[job.job_id] = _Place(job, tag)
        return True

    def running(self, tokens: Mapping[UUID, float]) -> None:
        """What each renter has running now, whoever gave it room: its next job's turn comes after as much."""
        for renter_id, taken in tokens.items():
            least = self._virtual + taken / max(1e-6, self.weights.get(renter_id, 1.0))
            self._last[renter_id] = max(self._last.get(renter_id, 0.0), least)

    def retain(self, job_ids: Set[UUID]) -> None:
        """Everybody else went away."""
        for job_id in [job_id for job_id in self._places if job_id not in job_ids]:
            del self._places[job_id]

    def leave(self, job_id: UUID) -> bool:
        """A job goes away unserved. False: it was not there."""
        return self._places.pop(job_id, None) is not None

    def refund(self, renter_id: UUID, tokens: float) -> None:
        """A job used less than it was charged with: its renter's next turn comes earlier by that."""
        last = self._last.get(renter_id)
        if last is not None and tokens > 0:
            self._last[renter_id] = max(self._virtual, last - tokens / max(1e-6, self.weights.get(renter_id, 1.0)))

    def order(self, now_s: float) -> list[Waiting]:
        """Everybody in the order of their turn."""
        return [place.job for place in self._ordered(now_s)]

    def serve(
        self,
        give: Callable[[Waiting, Sequence[Waiting]], T | None],
        now_s: float,
        *,
        most: int,
        starts_s: Callable[[Waiting], float] | None = None,
    ) -> list[Turn[T]]:
        """One round: offer room to each in turn, at most `most` turns.

        `give(job, kept)` takes room for a job and answers what it gave, or None where there is none now. `kept` are
        jobs before it that bear no further delay by it: only room that none of them could use may be given.
        `starts_s(job)` is when a job that does not fit now could start if nobody passed it, by prediction; who ends by
        then passes freely. Without it, a job is taken to be able to start any moment.
        """
        turns: list[Turn[T]] = []
        passed: list[tuple[_Place, float]] = []
        for place in self._ordered(now_s):
            if len(turns) >= most:
                break
            end_s = now_s + place.job.runs_s
            kept = [one.job for one, start_s in passed if one.passed_s + max(0.0, end_s - start_s) > _bears_s(one.job)]
            given = give(place.job, kept)
            if given is None:
                start_s = starts_s(place.job) if starts_s is not None else now_s
                passed.append((place, max(now_s, start_s)))
                continue
            turns.append(Turn(place.job, given))
            self._served(place)
            spared = {job.job_id for job in kept}
            for one, start_s in passed:
                if one.job.job_id not in spared:
                    one.passed_s += max(0.0, end_s - start_s)
        return turns

    def expired(self, now_s: float) -> list[Waiting]:
        """Jobs whose deadline passed while they waited; they are no longer in the line."""
        late = [place.job for place in self._places.values() if place.job.deadline_s <= now_s]
        for job in late:
            del self._places[job.job_id]
        return late

    def hopeless(self, fits: Callable[[Waiting], bool]) -> list[Waiting]:
        """Jobs that nothing could run even if it were free; they are no longer in the line."""
        misfits = [place.job for place in self._places.values() if not fits(place.job)]
        for job in misfits:
            del self._places[job.job_id]
        return misfits

    def _ordered(self, now_s: float) -> list[_Place]:
        return sorted(self._places.values(), key=lambda place: _turn(place, now_s))

    def _served(self, place: _Place) -> None:
        self._virtual = max(self._virtual, place.tag)
        del self._places[place.job.job_id]
        if not self._places:
            # Nobody is behind anybody: the next ones start level.
            self._last.clear()


def _bears_s(job: Waiting) -> float:
    """How much longer a job may wait for those who pass it."""
    return max(BYPASS_PART * job.runs_s, BYPASS_LEAST_S)


def _turn(place: _Place, now_s: float) -> tuple[bool, float, float, int]:
    job = place.job
    due = job.due_s <= now_s
    return (not due, job.due_s if due else place.tag, job.arrived_s, job.job_id.int)


# --- who gives way ----------------------------------------------------------------------------------------------------

MAX_PREEMPTIONS: Final = 2
"""Of one flex job; after that it runs to its end."""
MAX_LOSS_S: Final = 20.0
"""Work of a device that one pre-emption may throw away..."""
MAX_LOSS_PART: Final = 0.5
"""...and the part of the job that may be done by then: what is nearly finished is left alone."""


@dataclass(frozen=True, slots=True)
class Running:
    """A flex job that runs."""

    attempt_id: UUID
    offer_id: UUID
    started_s: float
    runs_s: float
    """How long it runs in all, by prediction."""
    preempted: int = 0
    """How often it gave way before."""

    def loss_s(self, now_s: float) -> float:
        """Work that would be lost."""
        return max(0.0, now_s - self.started_s)


def gives_way(running: Iterable[Running], offers: Sequence[UUID], now_s: float) -> Running | None:
    """The flex job that an interactive one may push aside on one of these offers: the one that loses least, if any
    loses little enough."""
    allowed = set(offers)
    fit = [
        run
        for run in running
        if run.offer_id in allowed
        and run.preempted < MAX_PREEMPTIONS
        and run.loss_s(now_s) <= min(MAX_LOSS_S, MAX_LOSS_PART * run.runs_s)
    ]
    return min(fit, key=lambda run: (run.loss_s(now_s), run.attempt_id.int), default=None)


def shares(served: Mapping[UUID, float], weights: Mapping[UUID, float] | None = None) -> float:
    """Jain's index of what renters were served by their weight: 1 if all alike, 1/n if one got everything."""
    values = [tokens / (weights or {}).get(renter, 1.0) for renter, tokens in served.items()]
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else 1.0
