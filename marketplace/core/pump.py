"""Empties the outbox into the broker: at once where a process just committed, and on a timer for what was lost."""

from __future__ import annotations

import threading
from typing import Any, Final

from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.celery import BROKER_ERRORS
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.core.outbox import TaskSender, drain

log = get_logger(__name__)

BATCH: Final = 500
MAX_BATCHES: Final = 20
"""Batches in one go; the timer takes the rest."""
PAUSE_S: Final = 0.1
"""Between two goes of a pump: nudges that come meanwhile go as one."""
STOP_WAIT_S: Final = 5.0


class _Once:
    """Sends equal nudges of one batch once: the second would find the work done."""

    def __init__(self, send: TaskSender) -> None:
        self._send = send
        self._sent: list[tuple[str, list[Any]]] = []

    def __call__(self, task: str, args: list[Any]) -> None:
        if (task, args) not in self._sent:
            self._send(task, args)
            self._sent.append((task, args))


def empty_outbox(factory: SessionFactory, send: TaskSender) -> int:
    """Send what waits, equal nudges once. Returns how many rows went. Raises what the broker or the database raises;
    the rows of the failed batch stay, and those before are sent."""
    sent = 0
    for _ in range(MAX_BATCHES):
        with transaction(factory) as session:
            count = drain(session, _Once(send), limit=BATCH)
        sent += count
        if count < BATCH:
            break
    return sent


class OutboxPump:
    """A thread that empties the outbox when woken. A failure is logged and left to the timers of the worker."""

    def __init__(self, factory: SessionFactory, send: TaskSender) -> None:
        self._factory = factory
        self._send = send
        self._wanted = threading.Event()
        self._nudges: set[str] = set()
        self._stopping = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread; touches neither store until woken."""
        self._thread = threading.Thread(target=self._run, name="outbox-pump", daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """A row was committed. Returns at once; any thread."""
        self._wanted.set()

    def nudge(self, task: str) -> None:
        """Send a task that needs no row, since its timer does the same a little later: a slot came free. Returns at
        once; any thread."""
        self._nudges.add(task)
        self._wanted.set()

    def stop(self) -> None:
        """End the thread, within STOP_WAIT_S."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(STOP_WAIT_S)

    def _run(self) -> None:
        while not self._stopping.is_set():
            self._wanted.wait()
            self._wanted.clear()
            if self._stopping.is_set():
                return
            try:
                self._send_nudges()
                empty_outbox(self._factory, self._send)
            except (SQLAlchemyError, *BROKER_ERRORS) as error:
                log.warning("outbox_waits", error=str(error))
            self._stopping.wait(PAUSE_S)

    def _send_nudges(self) -> None:
        while self._nudges:
            self._send(self._nudges.pop(), [])
