"""Celery on Valkey: queues, bounds, and how a task is asked for by name. Holds no task and imports none.

Facts that shaped it: a message can be lost between the broker's pop and its bookkeeping whatever the acknowledgement
says, and a late one is redelivered after minutes at best. So a message is only a nudge that may be lost or doubled, it
is acknowledged early (no poison loop), it expires while nobody works, and the rows decide. There is no result backend.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any, Final, ParamSpec, TypeVar
from urllib.parse import parse_qs, quote, urlsplit

from celery import Celery, shared_task
from celery.beat import Scheduler, SchedulingError
from kombu.exceptions import KombuError, OperationalError
from redis.exceptions import RedisError

from marketplace.core.logs import get_logger
from marketplace.core.outbox import TaskSender
from marketplace.core.settings import Settings

log = get_logger(__name__)
P = ParamSpec("P")
R = TypeVar("R")

MATCH: Final = "match"
"""Assignment of queued jobs: short, frequent, must not wait behind anything."""
MONEY: Final = "money"
"""Settlement and the checks of the books."""
SWEEP: Final = "sweep"
"""Leases, deadlines, the outbox."""
BATCH: Final = "batch"
"""Batches: steps of seconds, which nothing else may wait behind."""
WEBHOOK: Final = "webhook"
"""Calls to renters' own servers, which may be slow."""
QUEUES: Final = (MATCH, MONEY, SWEEP, BATCH, WEBHOOK)
ROUTES: Final = {"jobs.assign": MATCH, "billing.*": MONEY, "jobs.*": SWEEP, "batches.*": BATCH, "webhooks.*": WEBHOOK}

NUDGE_LIFE_S: Final = 30
"""A nudge that nobody took for this long says nothing that the next tick does not."""
MAX_BACKLOG: Final = 500
"""Messages in one queue above which the clock stops adding: with no worker alive the broker must not fill up."""
BACKLOG_CHECK_S: Final = 5.0
KEY_PREFIX: Final = "fallow:celery:"
CONNECT_TIMEOUT_S: Final = 2.0
SOCKET_TIMEOUT_S: Final = 5.0
"""Above kombu's blocking pop of one second."""

BROKER_ERRORS: Final = (OperationalError, KombuError, RedisError, OSError)
"""What sending may raise when the broker is away."""


def make_celery(settings: Settings) -> Celery:
    """An application that can send. The worker's composition root adds tasks and the schedule."""
    app = Celery("fallow", broker=broker_url(settings.valkey_url), set_as_current=False)
    app.conf.update(
        broker_connection_retry_on_startup=True,
        broker_connection_max_retries=None,
        broker_connection_timeout=CONNECT_TIMEOUT_S,
        broker_transport_options={
            "global_keyprefix": KEY_PREFIX,
            "socket_connect_timeout": CONNECT_TIMEOUT_S,
            "socket_timeout": SOCKET_TIMEOUT_S,
            "health_check_interval": 10,
            "visibility_timeout": 600,
        },
        result_backend=None,
        result_expires=None,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_serializer="json",
        accept_content=["json"],
        task_acks_late=False,
        task_create_missing_queues=False,
        task_default_queue=SWEEP,
        task_queues={name: {"exchange": name, "routing_key": name} for name in QUEUES},
        task_routes={pattern: {"queue": queue} for pattern, queue in ROUTES.items()},
        task_soft_time_limit=25,
        task_time_limit=40,
        task_publish_retry=True,
        task_publish_retry_policy={"max_retries": 1, "interval_start": 0.0, "interval_step": 0.1, "interval_max": 0.1},
        worker_prefetch_multiplier=1,
        worker_concurrency=2,
        worker_max_tasks_per_child=20_000,
        worker_enable_remote_control=False,
        worker_send_task_events=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        beat_scheduler="marketplace.core.celery:BoundedScheduler",
        beat_max_loop_interval=1,
        enable_utc=True,
        timezone="UTC",
    )
    return app


def broker_url(valkey_url: str) -> str:
    """kombu's spelling of a Valkey URL: it knows a Unix socket as redis+socket, and its database as a virtual host."""
    parts = urlsplit(valkey_url)
    if parts.scheme != "unix":
        return valkey_url
    query = parse_qs(parts.query)
    password = parts.password or query.get("password", [""])[0]
    login = f"{quote(parts.username or '', safe='')}:{quote(password, safe='')}@" if password else ""
    database = query.get("db", ["0"])[0]
    return f"redis+socket://{login}{parts.path}?virtual_host={database}"


def task(name: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Make a function a task of whichever application loads its module."""
    decorate: Callable[[Callable[P, R]], Callable[P, R]] = shared_task(name=name)
    return decorate


def sender(app: Celery) -> TaskSender:
    """Sends by name within a bound of seconds. Raises one of BROKER_ERRORS."""

    def send(task: str, args: list[Any]) -> None:
        app.send_task(task, args=args, expires=NUDGE_LIFE_S)

    return send


class BoundedScheduler(Scheduler):  # type: ignore[misc]  # celery has no types
    """Celery's clock in memory, which holds its breath while a queue is long. Several may run: tasks are idempotent."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._full: frozenset[str] = frozenset()
        self._checked_at_s = float("-inf")

    def apply_entry(self, entry: Any, producer: Any = None) -> None:
        """Send an entry, unless its queue is full: then this tick is skipped, not made up for."""
        if _queue_of(entry.task) in self._full_queues():
            log.warning("tick_skipped", task=entry.task)
            return
        try:
            self.apply_async(entry, producer=producer, advance=False)
        except (SchedulingError, *BROKER_ERRORS) as error:
            log.warning("tick_not_sent", task=entry.task, error=str(error))

    def _full_queues(self) -> frozenset[str]:
        now_s = time.monotonic()
        if now_s - self._checked_at_s >= BACKLOG_CHECK_S:
            self._checked_at_s = now_s
            self._full = frozenset(name for name, length in backlog(self.app).items() if length >= MAX_BACKLOG)
        return self._full


def _queue_of(task: str) -> str:
    return next((queue for pattern, queue in ROUTES.items() if _matches(task, pattern)), SWEEP)


def _matches(task: str, pattern: str) -> bool:
    return task.startswith(pattern[:-1]) if pattern.endswith("*") else task == pattern


def backlog(app: Celery) -> dict[str, int]:
    """Messages waiting in each queue; a broker that does not answer counts as empty."""
    try:
        with app.connection_for_read() as connection, connection.channel() as channel:
            return {name: int(channel.client.llen(name)) for name in QUEUES}
    except BROKER_ERRORS as error:
        log.warning("broker_silent", error=str(error))
        return {}
