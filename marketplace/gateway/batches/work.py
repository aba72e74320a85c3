"""What moves a batch on, step by step: check its file, admit its lines, gather their answers, write its files.

A step is one transaction. It looks at the rows and does what is due, so that it may be repeated, lost, or run by two
workers at once: the batch's row is locked while one of them works on it. Lines become queued jobs in the transaction
that notes them, so that none runs twice. Functions flush; the task commits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Final
from uuid import UUID

import msgspec
from sqlalchemy import and_, func, insert, null, or_, select, update
from sqlalchemy.orm import Session

from marketplace.accounts.models import ApiKey, Organisation
from marketplace.catalog.service import Catalog
from marketplace.core.errors import FallowError, Forbidden
from marketplace.core.ids import new_id
from marketplace.core.logs import get_logger
from marketplace.gateway.batches import files
from marketplace.gateway.batches.lines import check, result_line
from marketplace.gateway.batches.models import Batch, BatchLine
from marketplace.gateway.batches.ready import Ready, Terms, prepare
from marketplace.gateway.choice import candidates, choice_of
from marketplace.gateway.http import new_request_id
from marketplace.gateway.parse import Inference
from marketplace.gateway.surface import SURFACES
from marketplace.gateway.tasks import require_task
from marketplace.jobs import endings, repository
from marketplace.jobs.hot import Admit, Admitted, Refused
from marketplace.jobs.models import Job
from marketplace.jobs.states import Outcome
from marketplace.jobs.sweeping import BATCHES_ENDPOINT, close_waiting
from marketplace.jobs.writer import run_in_session
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import affordable_output, worst_case

log = get_logger(__name__)
MAX_OPEN: Final = 256
"""Lines of one batch that are jobs at a time: so much of the balance is held, and so many wait in the queue."""
ADMIT_AT_ONCE: Final = 64
LOOK_AT_ONCE: Final = 1_000
"""Waiting lines among which those are looked for that somebody offers to run."""
GATHER_AT_ONCE: Final = 500
SETTLE_AT_ONCE: Final = 1_000
INSERT_AT_ONCE: Final = 1_000
_STATUS_CODES: Final = {
    Outcome.COMPLETE.value: 200,
    Outcome.REQUEST_REJECTED.value: 400,
    Outcome.CANCELLED.value: 499,
    Outcome.CANCELLED_EARLY.value: 499,
    Outcome.EXPIRED.value: 504,
    Outcome.NO_CAPACITY.value: 503,
}
"""What a line would have been answered with over HTTP; 502 for every other outcome."""


@dataclass(frozen=True, slots=True)
class Means:
    """What a step needs beside the database."""

    catalog: Catalog
    offers: Callable[[], Sequence[OfferView]]
    """What is offered now, on all gateways."""
    hold_margin_s: float
    keep_files_s: float
    most_queued: int = 100_000
    """Jobs that wait, of all renters: lines wait in their batch while there are more..."""
    most_queued_own: int = 10_000
    """...or so many of the batch's own organisation."""


def active(session: Session, *, limit: int) -> list[UUID]:
    """Batches in which something is to be done, oldest first."""
    statement = select(Batch.id).where(Batch.status.in_(("validating", "in_progress", "finalizing", "cancelling")))
    return list(session.scalars(statement.order_by(Batch.created_at).limit(limit)))


def advance(session: Session, batch_id: UUID, means: Means) -> bool:
    """Do what is due for a batch. True if more may be done at once; False if it waits, has ended, or is worked on by
    somebody else."""
    batch = session.scalars(select(Batch).where(Batch.id == batch_id).with_for_update(skip_locked=True)).one_or_none()
    if batch is None:
        return False
    match batch.status:
        case "validating":
            return _validate(session, batch, means)
        case "in_progress" | "cancelling":
            return _progress(session, batch, means)
        case "finalizing":
            return _finalise(session, batch, means)
        case _:
            return False


# --- the file -----------------------------------------------------------------------------------------------------


def _validate(session: Session, batch: Batch, means: Means) -> bool:
    if batch.expires_at <= _now(session):
        message = "The batch's time was up before its file was checked."
        batch.errors = [{"code": "batch_expired", "message": message, "param": None, "line": None}]
        batch.status, batch.failed_at = "failed", _now(session)
        return False
    means.catalog.refresh()
    key = session.get_one(ApiKey, batch.key_id)

    def resolve(request: Inference) -> None:
        variant = means.catalog.resolve(request.model)
        if key.models is not None and variant.model_id not in key.models:
            raise Forbidden(f"The key of this batch may not use {variant.model_id}.", param="model")
        require_task(means.catalog, variant, SURFACES[batch.endpoint].task, _usable(key))
        candidates(means.catalog, request, choice_of(request.provider, batch.routing), _usable(key))

    checked = check(files.content(session, batch.input_file_id), batch.endpoint, resolve)
    if checked.errors:
        batch.status, batch.errors, batch.failed_at = "failed", checked.errors, _now(session)
        return False
    rows = [
        {
            "batch_id": batch.id,
            "number": line.number,
            "custom_id": line.custom_id,
            "state": "waiting",
            "body": line.body,
        }
        for line in checked.lines
    ]
    for start in range(0, len(rows), INSERT_AT_ONCE):
        session.execute(insert(BatchLine), rows[start : start + INSERT_AT_ONCE])
    batch.total_lines = len(rows)
    batch.status, batch.in_progress_at = "in_progress", _now(session)
    return True


def _usable(key: ApiKey) -> Callable[[str], bool]:
    return lambda model_id: key.models is None or model_id in key.models


# --- the lines ----------------------------------------------------------------------------------------------------


def _progress(session: Session, batch: Batch, means: Means) -> bool:
    gathered = _gather(session, batch)
    open_lines = _count(session, batch, "open")
    stopped = batch.status == "cancelling" or batch.expires_at <= _now(session) or _key_ended(session, batch)
    if stopped:
        if batch.status == "cancelling":
            _stop_jobs(session, batch)
        settled = _settle_waiting(session, batch)
    else:
        settled = _admit(session, batch, means, open_lines)
    session.flush()
    if _count(session, batch, "waiting") or _count(session, batch, "open"):
        return bool(gathered == GATHER_AT_ONCE or settled)
    batch.finalizing_at = _now(session)
    if batch.status != "cancelling":
        batch.status = "finalizing"
        return True
    return _finalise(session, batch, means)


def _gather(session: Session, batch: Batch) -> int:
    """Take up answers of jobs that ended, and erase them there. Returns how many."""
    rows = session.execute(
        select(BatchLine, Job)
        .join(Job, Job.id == BatchLine.job_id)
        .where(BatchLine.batch_id == batch.id, BatchLine.state == "open", Job.outcome.is_not(None))
        .order_by(BatchLine.number)
        .limit(GATHER_AT_ONCE)
    ).all()
    for line, job in rows:
        complete = job.outcome == Outcome.COMPLETE.value
        line.state = "completed" if complete else "failed"
        line.status_code = _STATUS_CODES.get(job.outcome or "", 502)
        line.result = msgspec.json.encode(job.result).decode() if job.result is not None else None
        if not complete:
            line.error_code, line.error_message = _error_of(job)
        batch.completed_lines += complete
        batch.failed_lines += not complete
    session.flush()
    session.execute(
        update(Job).where(Job.id.in_([job.id for _, job in rows])).values(body=null(), result=null()),
        execution_options={"synchronize_session": False},
    )
    return len(rows)


def _error_of(job: Job) -> tuple[str, str]:
    if job.outcome == Outcome.EXPIRED.value:
        return "batch_expired", "The batch's time was up before this request was answered. Nothing was charged."
    return job.error_code or job.outcome or "unknown", job.error_message or f"The request ended as {job.outcome}."


def _admit(session: Session, batch: Batch, means: Means, open_lines: int) -> int:
    """Make jobs of waiting lines, as far as there is room. Returns how many lines moved."""
    own = repository.depth(session, most=means.most_queued_own, organisation_id=batch.organisation_id)
    all_ = repository.depth(session, most=means.most_queued)
    queue_room = min(means.most_queued_own - own, means.most_queued - all_)
    room = min(MAX_OPEN - open_lines, ADMIT_AT_ONCE, queue_room)
    lines = _waiting(session, batch, LOOK_AT_ONCE) if room > 0 else []
    if not lines:
        return 0
    ready, failed = _prepare(session, batch, lines, room, means)
    refusals = [_fail(batch, line, error) for line, error in failed]
    purse = _purse(session, batch)
    admits = [_admission(batch, item, item.max_output_tokens, purse, means) for item in ready]
    answers = run_in_session(session, [*refusals, *admits])[len(refusals) :] if refusals or admits else []
    moved = len(refusals)
    for item, admit, answer in zip(ready, admits, answers, strict=True):
        assert isinstance(answer, Admitted)
        if answer.ok:
            _opened(item.line, admit)
            moved += 1
        elif not open_lines and not moved:
            # Nothing of it runs that could free a part of the balance: this line is capped, or fails.
            moved += _admit_capped(session, batch, item, answer.available_nano, purse, means)
    session.flush()
    return moved


def _prepare(
    session: Session, batch: Batch, lines: Sequence[BatchLine], room: int, means: Means
) -> tuple[list[Ready], list[tuple[BatchLine, FallowError]]]:
    usable = _usable(session.get_one(ApiKey, batch.key_id))
    terms = Terms(batch.endpoint, batch.routing, batch.price_basis_points, usable)
    return prepare(lines, means.offers(), means.catalog, terms, room=room)


@dataclass(frozen=True, slots=True)
class _Purse:
    """What every line of a batch is admitted with."""

    account_id: int
    """The ledger account that it spends from; 0: no credit was ever added."""
    left_s: float
    """Until the batch's time is up."""


def _purse(session: Session, batch: Batch) -> _Purse:
    account = select(Organisation.credit_account_id).where(Organisation.id == batch.organisation_id)
    return _Purse(session.scalar(account) or 0, (batch.expires_at - _now(session)).total_seconds())


def _admission(batch: Batch, item: Ready, bound: int, purse: _Purse, means: Means) -> Admit:
    return Admit(
        job_id=new_id(),
        organisation_id=batch.organisation_id,
        key_id=batch.key_id,
        credit_account_id=purse.account_id,
        request_id=new_request_id(),
        kind="queued",
        variant_id=item.variant.id,
        body=item.body(bound),
        prompt_tokens=item.prompt_tokens,
        max_output_tokens=bound,
        ceiling=item.ceiling,
        hold_nano=worst_case(item.ceiling, item.prompt_tokens, bound * item.request.choices),
        hold_margin_s=means.hold_margin_s,
        gateway_id=None,
        deadline_s=max(purse.left_s, 1.0),
        attempt=None,
        endpoint=BATCHES_ENDPOINT,
        price_basis_points=batch.price_basis_points,
        choice=item.choice.to_row(),
    )


def _admit_capped(  # noqa: PLR0917 - as its caller knows them
    session: Session, batch: Batch, item: Ready, available_nano: int, purse: _Purse, means: Means
) -> int:
    """Admit a line with a shorter answer that the balance affords, if its renter set no bound; else fail it."""
    affordable = affordable_output(item.ceiling, item.prompt_tokens, available_nano) // item.request.choices
    bound = min(item.max_output_tokens, affordable)
    if item.request.max_tokens is None and bound >= 1:
        admit = _admission(batch, item, bound, purse, means)
        (answer,) = run_in_session(session, [admit])
        assert isinstance(answer, Admitted)
        if answer.ok:
            _opened(item.line, admit)
        return int(answer.ok)
    error = InsufficientForLine("The balance does not cover this request. Nothing was charged.")
    run_in_session(session, [_fail(batch, item.line, error, Outcome.NO_BALANCE)])
    return 1


class InsufficientForLine(FallowError):
    """The balance does not cover a line, and nothing else of its batch is running."""

    status = 402
    code = "insufficient_balance"
    type = "insufficient_quota"


def _opened(line: BatchLine, admit: Admit) -> None:
    line.state, line.job_id, line.request_id, line.body = "open", admit.job_id, admit.request_id, None


def _fail(batch: Batch, line: BatchLine, error: FallowError, outcome: Outcome = Outcome.REQUEST_REJECTED) -> Refused:
    """End a line without a job. The record is its outcome row, which the caller writes."""
    line.state, line.body, line.request_id = "failed", None, new_request_id()
    line.status_code, line.error_code, line.error_message = error.status, error.code, error.message
    batch.failed_lines += 1
    return Refused(
        request_id=line.request_id,
        organisation_id=batch.organisation_id,
        endpoint=BATCHES_ENDPOINT,
        outcome=outcome.value,
        code=error.code,
    )


class BatchExpired(FallowError):
    """The batch's time was up before this line's turn."""

    status = 504
    code = "batch_expired"
    type = "timeout_error"


class KeyEnded(FallowError):
    """The key that began the batch was revoked, or is over, before this line's turn."""

    status = 401
    code = "invalid_api_key"
    type = "authentication_error"


class BatchCancelled(FallowError):
    """The batch was cancelled before this line's turn."""

    status = 499
    code = "batch_cancelled"


def _settle_waiting(session: Session, batch: Batch) -> int:
    """End lines that will not have their turn. Returns how many."""
    lines = _waiting(session, batch, SETTLE_AT_ONCE)
    if batch.status == "cancelling":
        error: FallowError = BatchCancelled("The batch was cancelled before this request ran. Nothing was charged.")
        outcome = Outcome.CANCELLED_EARLY
    elif _key_ended(session, batch):
        error = KeyEnded("The key of this batch is no longer valid, so this request did not run. Nothing was charged.")
        outcome = Outcome.REQUEST_REJECTED
    else:
        error = BatchExpired("The batch's time was up before this request ran. Nothing was charged.")
        outcome = Outcome.EXPIRED
    records = [_fail(batch, line, error, outcome) for line in lines]
    if records:
        run_in_session(session, records)
    return len(lines)


def _key_ended(session: Session, batch: Batch) -> bool:
    over = or_(ApiKey.revoked_at <= func.clock_timestamp(), ApiKey.expires_at <= func.clock_timestamp())
    return session.scalar(select(ApiKey.id).where(ApiKey.id == batch.key_id, over)) is not None


def _stop_jobs(session: Session, batch: Batch) -> None:
    """End jobs of a cancelled batch: those that wait now, those that run at their next checkpoint."""
    rows = session.execute(
        select(Job.id, Job.state)
        .join(BatchLine, BatchLine.job_id == Job.id)
        .where(BatchLine.batch_id == batch.id, BatchLine.state == "open", Job.outcome.is_(None))
    ).all()
    waiting = [row.id for row in rows if row.state == "queued"]
    if waiting:
        run_in_session(session, [close_waiting(job_id, endings.unwanted()) for job_id in waiting])
    for row in rows:
        if row.state == "running":
            repository.request_cancel(session, row.id)


def _waiting(session: Session, batch: Batch, limit: int) -> list[BatchLine]:
    statement = select(BatchLine).where(BatchLine.batch_id == batch.id, BatchLine.state == "waiting")
    return list(session.scalars(statement.order_by(BatchLine.number).limit(limit)))


def _count(session: Session, batch: Batch, state: str) -> int:
    statement = select(func.count()).select_from(BatchLine)
    return session.scalar(statement.where(BatchLine.batch_id == batch.id, BatchLine.state == state)) or 0


# --- the answers --------------------------------------------------------------------------------------------------


def _finalise(session: Session, batch: Batch, means: Means) -> bool:
    """Write the files, and forget what is in them now."""
    batch.output_file_id = _write(session, batch, means, "output", BatchLine.state == "completed")
    batch.error_file_id = _write(session, batch, means, "error", BatchLine.state == "failed")
    session.execute(
        update(BatchLine)
        .where(BatchLine.batch_id == batch.id, or_(BatchLine.result.is_not(None), BatchLine.body.is_not(None)))
        .values(result=None, body=None)
    )
    now = _now(session)
    if batch.status == "cancelling":
        batch.status, batch.cancelled_at = "cancelled", now
    elif _was_cut(session, batch):
        batch.status, batch.expired_at = "expired", now
    else:
        batch.status, batch.completed_at = "completed", now
    log.info("batch_ended", batch=batch.id.hex, status=batch.status, completed=batch.completed_lines)
    return False


def _was_cut(session: Session, batch: Batch) -> bool:
    cut = and_(BatchLine.batch_id == batch.id, BatchLine.error_code == "batch_expired")
    return session.scalar(select(BatchLine.number).where(cut).limit(1)) is not None


def _write(session: Session, batch: Batch, means: Means, kind: str, which: Any) -> UUID | None:
    """A file of the lines that are meant; None where there are none."""
    of_kind = and_(BatchLine.batch_id == batch.id, which)
    if session.scalar(select(BatchLine.number).where(of_kind).limit(1)) is None:
        return None
    name = f"batch_{batch.id.hex}_{kind}.jsonl"
    pieces = _result_lines(session, batch, of_kind)
    return files.store(session, batch.organisation_id, "batch_output", name, pieces, keep_s=means.keep_files_s).id


def _result_lines(session: Session, batch: Batch, which: Any) -> Iterator[bytes]:
    rows = session.execute(
        select(
            BatchLine.number,
            BatchLine.custom_id,
            BatchLine.request_id,
            BatchLine.status_code,
            BatchLine.result,
            BatchLine.error_code,
            BatchLine.error_message,
        )
        .where(which)
        .order_by(BatchLine.number)
        .execution_options(yield_per=500)
    )
    for row in rows:
        yield result_line(
            f"batch_req_{batch.id.hex}_{row.number}",
            row.custom_id,
            answer=row.result,
            status_code=row.status_code,
            request_id=row.request_id,
            error=(row.error_code, row.error_message or "") if row.error_code is not None else None,
        )


def _now(session: Session) -> Any:
    return session.scalar(select(func.clock_timestamp()))
