"""Composition root of the Celery worker and of its clock.

`celery -A marketplace.worker worker` and `celery -A marketplace.worker beat` work as for any Celery application;
`fallow worker` and `fallow beat` are the same with fitting options.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import lru_cache
from typing import Any, Final

from celery import Celery, signals

from marketplace.core import logs, process
from marketplace.core.celery import NUDGE_LIFE_S, QUEUES, make_celery
from marketplace.core.settings import Settings, get_settings

TASK_MODULES: Final = (
    "marketplace.jobs.tasks",
    "marketplace.billing.tasks",
    "marketplace.gateway.batches.tasks",
    "marketplace.gateway.webhooks.tasks",
)
SCHEDULE_S: Final = {
    "jobs.assign": 1.0,
    "jobs.outbox": 1.0,
    "jobs.sweep": 2.0,
    "batches.advance": 1.0,
    "batches.erase": 60.0,
    "webhooks.send": 5.0,
    "webhooks.erase": 60.0,
    "jobs.forget": 60.0,
    "jobs.review_standing": 60.0,
    "jobs.erase": 60.0,
    "jobs.plan": 120.0,
    "billing.settle": 1.0,
    "billing.seal": 1.0,
    "billing.check": 300.0,
    "billing.verify": 3600.0,
    "billing.payments": 5.0,
    "billing.top_ups": 60.0,
    "billing.payouts": 1800.0,
    "billing.reconcile": 1800.0,
}
"""Task -> its period in seconds."""
MAX_TICK_LIFE_S: Final = 300.0
"""No tick is worth doing later than this: after an outage they must not all come at once."""
QUIET_LOGGERS: Final = ("celery.worker.strategy", "celery.app.trace")
"""They say of each tick that it came and went; failures are warnings and above."""


def make_worker(settings: Settings) -> Celery:
    """The application with its tasks and its schedule. Touches no store."""
    app = make_celery(settings)
    app.conf.update(
        imports=TASK_MODULES,
        beat_schedule={
            name: {
                "task": name,
                "schedule": every_s,
                # A tick that waited for longer than its period is stale: the next one is there.
                "options": {
                    "expires": max(every_s * 2, 5.0) if every_s < NUDGE_LIFE_S else min(every_s, MAX_TICK_LIFE_S)
                },
            }
            for name, every_s in SCHEDULE_S.items()
        },
    )
    return app


@lru_cache
def _process_app() -> Celery:
    settings = get_settings()
    signals.setup_logging.connect(_configure_logs, weak=False)
    signals.worker_process_shutdown.connect(_end_traces, weak=False)
    app = make_worker(settings)
    app.set_default()
    return app


def _configure_logs(**_: Any) -> None:
    settings = get_settings()
    logs.configure(settings.log_format, settings.log_level)
    logging.getLogger("celery.app.trace").addFilter(_plain)
    for name in QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING)


def _plain(record: logging.LogRecord) -> bool:
    """Celery's words about a task that failed, with the error as our logs tell it."""
    if record.exc_info and record.exc_info[1] is not None and isinstance(record.args, dict):
        record.args = {**record.args, "exc": logs.reason(record.exc_info[1]), "traceback": ""}
    return True


def _end_traces(**_: Any) -> None:
    """A child of the worker ends: what waits for the collector is sent."""
    tracing = process.tracing()
    if tracing is not None:
        tracing.close()


def __getattr__(name: str) -> Celery:
    """`app`, for Celery's own command line; built when it is asked for, so that importing this module does nothing."""
    if name == "app":
        return _process_app()
    raise AttributeError(name)


def run_worker(argv: Sequence[str]) -> None:
    """Run a worker of all queues until SIGTERM or SIGINT, which let running tasks end. `argv` as for `celery worker`.
    Raises SystemExit with Celery's exit code."""
    options = ["--queues", ",".join(QUEUES), "--without-gossip", "--without-mingle", "--without-heartbeat"]
    raise SystemExit(_process_app().start(argv=["worker", *options, *argv]) or 0)


def run_beat(argv: Sequence[str]) -> None:
    """Run the clock until SIGTERM or SIGINT. `argv` as for `celery beat`. Raises SystemExit with Celery's exit code."""
    raise SystemExit(_process_app().start(argv=["beat", *argv]) or 0)
