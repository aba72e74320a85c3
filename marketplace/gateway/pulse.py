"""The gateway's pulse: one task for all running attempts checks their clocks, another keeps their leases.

Each checkpoint writes how many tokens were accepted and renews the lease in the database; only then is the node told
that it may go on. An attempt whose lease could not be renewed in time is stopped here, before anybody else takes it up.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import Final, Protocol
from uuid import UUID

from agent.protocol import Renew, RunningAttempt
from marketplace.core.errors import FallowError
from marketplace.core.logs import get_logger
from marketplace.core.settings import Settings
from marketplace.fleet.links import NodeFrame, NodeUnreachable
from marketplace.gateway.attempt import AttemptRun
from marketplace.gateway.outcomes import Ending
from marketplace.jobs.hot import Checkpoint, Checkpointed
from marketplace.matching.types import OfferView

log = get_logger(__name__)
TICK_S: Final = 0.25
"""How finely deadlines, keep-alives and slow readers are watched."""
RESERVATION_LEASES: Final = 2.0
"""A slot's reservation lasts this many leases, and is renewed three times in one lease."""


class Checkpointer(Protocol):
    """The writer, as far as the pulse needs it."""

    async def submit(self, record: Checkpoint) -> Checkpointed: ...


class Nodes(Protocol):
    """The links, as far as the pulse needs them."""

    def send(self, node_id: UUID, frame: NodeFrame) -> None: ...


class Slots(Protocol):
    """The reservations, as far as the pulse needs them."""

    async def renew(self, offer: OfferView, attempt_id: UUID, ttl_s: float) -> None: ...


class Beating(Protocol):
    """What the pulse watches: an execution with the attempt that it runs now."""

    run: AttemptRun | None

    def stop(self, ending: Ending) -> None:
        """End it."""
        ...

    def tick(self, now: float) -> None:
        """Look at the clock. Called every TICK_S; must not block."""
        ...


class Pulse:
    """See the module. One event loop."""

    def __init__(self, settings: Settings, writer: Checkpointer, nodes: Nodes, slots: Slots) -> None:
        self._lease_s = settings.lease_s
        self._checkpoint_s = settings.checkpoint_s
        self._writer = writer
        self._nodes = nodes
        self._slots = slots
        self._beating: set[Beating] = set()
        self._tasks: list[asyncio.Task[None]] = []
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def reservation_s(self) -> float:
        """For how long a slot is reserved at a time."""
        return self._lease_s * RESERVATION_LEASES

    @property
    def active(self) -> int:
        """How many executions run now."""
        return len(self._beating)

    async def wait_idle(self, timeout_s: float) -> bool:
        """Wait until nothing runs, at most so long; False if something still does."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._idle.wait()
        return not self._beating

    def stop_all(self, ending: Ending) -> None:
        """End everything that runs."""
        for execution in list(self._beating):
            execution.stop(ending)

    def start(self) -> None:
        """Begin to beat."""
        for period_s, beat in (
            (TICK_S, self._tick),
            (self._checkpoint_s, self.checkpoint),
            (self._lease_s / 3, self._renew_slots),
        ):
            self._tasks.append(asyncio.create_task(self._every(period_s, beat)))

    async def stop(self) -> None:
        """Stop beating. Leases end by themselves."""
        for task in self._tasks:
            task.cancel()
        for task in self._tasks:
            with contextlib.suppress(asyncio.CancelledError):
                await task
        self._tasks.clear()

    def join(self, execution: Beating) -> None:
        """Watch an execution from now on."""
        self._beating.add(execution)
        self._idle.clear()

    def leave(self, execution: Beating) -> None:
        """It ended."""
        self._beating.discard(execution)
        if not self._beating:
            self._idle.set()

    async def _every(self, period_s: float, beat: Callable[[], Awaitable[None]]) -> None:
        loop = asyncio.get_running_loop()
        due = loop.time() + period_s
        while True:
            await asyncio.sleep(max(0.0, due - loop.time()))
            due = max(due + period_s, loop.time())
            try:
                await beat()
            except Exception:
                # An edge: one bad beat must not end the leases of all.
                log.exception("pulse_failed")

    async def _tick(self) -> None:
        now = asyncio.get_running_loop().time()
        for execution in list(self._beating):
            execution.tick(now)

    async def checkpoint(self) -> None:
        """Write one checkpoint for each running attempt, and renew those that are alive at their nodes."""
        runs = [execution.run for execution in self._beating if execution.run is not None]
        live = [run for run in runs if run.ending is None]
        if not live:
            return
        started = asyncio.get_running_loop().time()
        answers = await asyncio.gather(*(self._checkpoint(run) for run in live))
        renewed: dict[UUID, list[RunningAttempt]] = {}
        for run, answer in zip(live, answers, strict=True):
            if run.ending is None and self._judge(run, answer, started):
                renewed.setdefault(run.offer.node_id, []).append(RunningAttempt(run.attempt_id, run.epoch))
        for node_id, attempts in renewed.items():
            with contextlib.suppress(NodeUnreachable):
                self._nodes.send(node_id, Renew(attempts, int(self._lease_s * 1000)))

    async def _checkpoint(self, run: AttemptRun) -> Checkpointed | None:
        record = Checkpoint(UUID(bytes=run.attempt_id), run.epoch, run.token_count, self._lease_s)
        try:
            return await self._writer.submit(record)
        except FallowError as error:
            log.warning("checkpoint_failed", attempt=run.attempt_id.hex(), error=error.code)
            return None

    def _judge(self, run: AttemptRun, answer: Checkpointed | None, started: float) -> bool:
        """True if the node may go on."""
        if answer is None:
            if asyncio.get_running_loop().time() > run.lease_until:
                run.stop(Ending.LEASE_LOST, message="The lease could not be renewed.")
            return False
        if not answer.alive:
            run.stop(Ending.LEASE_LOST, message="The lease of this request ended.")
            return False
        run.lease_until = started + self._lease_s
        if answer.cancel_requested:
            run.stop(Ending.CANCELLED)
            return False
        return True

    async def _renew_slots(self) -> None:
        runs = [execution.run for execution in self._beating if execution.run is not None]
        await asyncio.gather(
            *(
                self._slots.renew(run.offer, UUID(bytes=run.attempt_id), self.reservation_s)
                for run in runs
                if not run.reported
            )
        )
