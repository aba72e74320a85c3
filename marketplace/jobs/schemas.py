"""Jobs as the API shows them. Amounts are decimal strings of USD, times are Unix seconds."""

from __future__ import annotations

from datetime import datetime
from typing import Any, Final, Literal

from pydantic import BaseModel

from marketplace.core.amounts import usd
from marketplace.core.ids import show
from marketplace.jobs.models import Job
from marketplace.jobs.repository import JobView
from marketplace.jobs.states import JobState, Outcome

Status = Literal["queued", "running", "cancelling", "completed", "cancelled", "expired", "failed"]

STATES: Final[dict[str, tuple[str, ...]]] = {
    "queued": (JobState.QUEUED.value,),
    "running": (JobState.RUNNING.value,),
    "ended": (JobState.DELIVERED.value, JobState.SETTLED.value, JobState.VOIDED.value),
}
"""What a list may be narrowed to."""

_BY_OUTCOME: Final[dict[str, Status]] = {
    Outcome.COMPLETE.value: "completed",
    Outcome.CANCELLED.value: "cancelled",
    Outcome.CANCELLED_EARLY.value: "cancelled",
    Outcome.DEADLINE.value: "expired",
    Outcome.EXPIRED.value: "expired",
}


class JobError(BaseModel):
    """Why a job did not complete."""

    code: str
    message: str


class JobMaxPrice(BaseModel):
    """The most that this job may cost, class by class, in USD per million tokens."""

    input: str
    cached_input: str
    output: str


class JobObject(BaseModel):
    """One job."""

    id: str
    object: Literal["job"] = "job"
    status: Status
    outcome: str | None
    """A row of the published table; null while the job is open."""
    model: str
    created_at: int
    deadline_at: int
    ended_at: int | None
    attempts: int
    prompt_tokens: int
    max_output_tokens: int
    max_price: JobMaxPrice
    held: str
    """Set aside for this job now."""
    cost: str | None
    """What was charged; null while the job is open."""
    request_id: str
    waiting_for: str | None = None
    """Of a queued job that is shown alone: why it does not run yet."""
    error: JobError | None
    result: dict[str, Any] | None = None
    """An OpenAI chat completion. Lists leave it out."""
    erased: bool = False
    """True once its texts were erased, some days after its end."""


class JobList(BaseModel):
    """A page of jobs, newest first."""

    object: Literal["list"] = "list"
    data: list[JobObject]
    first_id: str | None
    last_id: str | None
    has_more: bool


def job_object(view: JobView, model: str, *, with_result: bool = True, waiting_for: str | None = None) -> JobObject:
    """A job for its renter. `model` is the name that it asked for."""
    job = view.job
    ended = job.outcome is not None
    return JobObject(
        id=show("job", job.id),
        status=status_of(job),
        outcome=job.outcome,
        model=model,
        created_at=_unix(job.created_at),
        deadline_at=_unix(job.deadline_at),
        ended_at=_unix(job.ended_at) if job.ended_at is not None else None,
        attempts=view.attempts,
        prompt_tokens=job.prompt_tokens,
        max_output_tokens=job.max_output_tokens,
        max_price=JobMaxPrice(
            input=usd(job.max_input_nano_usd_per_mtok),
            cached_input=usd(job.max_cached_input_nano_usd_per_mtok),
            output=usd(job.max_output_nano_usd_per_mtok),
        ),
        held=usd(_held_nano(view)),
        cost=usd(view.charge_nano or 0) if ended else None,
        request_id=job.request_id,
        waiting_for=waiting_for,
        error=_error(job) if ended and job.outcome != Outcome.COMPLETE else None,
        result=job.result if with_result else None,
        erased=ended and job.body is None,
    )


def job_list(views: list[JobView], models: list[str], *, has_more: bool) -> JobList:
    """A page, without results; `models` names each job's model."""
    data = [job_object(view, model, with_result=False) for view, model in zip(views, models, strict=True)]
    return JobList(
        data=data, first_id=data[0].id if data else None, last_id=data[-1].id if data else None, has_more=has_more
    )


def status_of(job: Job) -> Status:
    """One word for state and outcome."""
    if job.outcome is not None:
        return _BY_OUTCOME.get(job.outcome, "failed")
    if job.state == JobState.RUNNING.value:
        return "cancelling" if job.cancel_requested_at is not None else "running"
    return "queued"


def _held_nano(view: JobView) -> int:
    match JobState(view.job.state):
        case JobState.QUEUED | JobState.RUNNING:
            return view.job.hold_nano
        case JobState.DELIVERED:
            return view.charge_nano or 0
        case _:
            return 0


def _error(job: Job) -> JobError:
    return JobError(
        code=job.error_code or job.outcome or "unknown",
        message=job.error_message or f"The job ended as {job.outcome}.",
    )


def _unix(moment: datetime) -> int:
    return int(moment.timestamp())
