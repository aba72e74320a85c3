"""What was used: GET /v1/usage by day, key and model, and GET /v1/usage/{request_id} for one request."""

from __future__ import annotations

import asyncio
from datetime import UTC, date, datetime, time, timedelta
from typing import Annotated, Any, Final, Literal
from uuid import UUID
from zoneinfo import ZoneInfo, ZoneInfoNotFoundError

from fastapi import APIRouter, Query
from pydantic import BaseModel, ConfigDict, Field

from marketplace.core import ids
from marketplace.core.amounts import usd
from marketplace.core.database import SessionFactory
from marketplace.core.errors import BadRequest
from marketplace.gateway.answer import usage_object
from marketplace.gateway.deps import GatewayServices, Renter
from marketplace.gateway.models import model_name
from marketplace.gateway.services import Services
from marketplace.jobs.trace import Trace, trace
from marketplace.metering.models import Receipt
from marketplace.metering.pricing import Priced
from marketplace.metering.usage import MAX_ROWS, GroupBy, UsageRow, tokens_of, usage_of

MAX_DAYS: Final = 366
DEFAULT_DAYS: Final = 30
_TIERS: Final[dict[str, Literal["default", "flex"]]] = {"interactive": "default", "flex": "flex"}

router = APIRouter(prefix="/v1/usage", tags=["usage"])


class InvalidRange(BadRequest):
    """No range of days: the end is not after the start, too many days, or no such time zone."""

    code = "invalid_range"


class UsageBucket(BaseModel):
    """The sum over one day, key and model, as far as these were asked for."""

    day: date | None
    key_id: str | None
    model: str | None
    requests: int
    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    reasoning_tokens: int
    cost: str
    """Charged, in USD."""


class UsageReport(BaseModel):
    """What an organisation used in [start, end), by the clocks of `zone`."""

    object: Literal["usage"] = "usage"
    start: date
    end: date
    zone: str
    group_by: list[str]
    data: list[UsageBucket]
    has_more: bool
    """True if there were more groups than one answer shows: ask for fewer days."""


class RequestUsage(BaseModel):
    """One request: running, ended, or refused."""

    object: Literal["request.usage"] = "request.usage"
    request_id: str
    endpoint: str | None
    """Null while it runs."""
    model: str | None
    service_tier: Literal["default", "flex"] | None
    """Of a request whose client waited for its answer, else null."""
    status: Literal["queued", "running", "ended"]
    outcome: str | None
    """A row of the published table; null while it runs."""
    code: str | None
    created_at: int | None
    ended_at: int | None
    attempts: int
    prompt_tokens: int | None
    accepted_tokens: int
    """Output that was accepted from the node so far; renewed each second while it runs."""
    usage: dict[str, Any] | None
    """What was delivered and charged, as in an answer's `usage`; null while it runs, and where nothing was charged."""
    cost: str
    held: str
    """Set aside for it now."""
    settled: bool
    """Posted in the ledger: final."""


class UsageQuery(BaseModel):
    """[start, end) in days by the clocks of `zone`, by default the last 30; and what to group by."""

    model_config = ConfigDict(extra="forbid")

    start: date | None = None
    end: date | None = None
    zone: Annotated[str, Field(max_length=64)] = "UTC"
    group_by: Annotated[list[GroupBy], Field(max_length=3)] = ["day", "model"]


@router.get("")
async def report(services: GatewayServices, principal: Renter, asked: Annotated[UsageQuery, Query()]) -> UsageReport:
    """What the organisation used, summed over what `group_by` names: each request with a receipt is in one bucket."""
    days = _range(asked.start, asked.end, asked.zone)
    rows = await asyncio.to_thread(
        _rows, services.session_factory, principal.organisation_id, days, asked.zone, asked.group_by
    )
    return UsageReport(
        start=days[0],
        end=days[1],
        zone=asked.zone,
        group_by=[name for name in ("day", "key", "model") if name in asked.group_by],
        data=[_bucket(services, row) for row in rows[:MAX_ROWS]],
        has_more=len(rows) > MAX_ROWS,
    )


@router.get("/{request_id}")
async def of_request(services: GatewayServices, principal: Renter, request_id: str) -> RequestUsage:
    """What one request used and cost, by its `x-request-id`; while it runs, how far it is. Raises NotFound."""
    found = await asyncio.to_thread(trace, services.session_factory, principal.organisation_id, request_id[:80])
    return _request(services, found)


def _range(start: date | None, end: date | None, zone: str) -> tuple[date, date]:
    """[first, last) in days. Raises InvalidRange."""
    last = end or datetime.now(_zone(zone)).date() + timedelta(days=1)
    if any(day is not None and not 2000 <= day.year <= 9000 for day in (start, end)):
        raise InvalidRange("The years of a range are 2000 to 9000.", param="start")
    first = start or last - timedelta(days=DEFAULT_DAYS)
    if not first < last:
        raise InvalidRange("`end` must be after `start`: the range is half-open.", param="end")
    if (last - first).days > MAX_DAYS:
        raise InvalidRange(f"A range has at most {MAX_DAYS} days.", param="start")
    return first, last


def _zone(name: str) -> ZoneInfo:
    try:
        return ZoneInfo(name)
    except (ZoneInfoNotFoundError, ValueError, OSError):
        raise InvalidRange(
            f"There is no time zone {name[:64]!r}; an example is 'Europe/Berlin'.", param="zone"
        ) from None


def _rows(
    factory: SessionFactory, organisation_id: UUID, days: tuple[date, date], zone: str, group_by: list[GroupBy]
) -> list[UsageRow]:
    where = _zone(zone)
    start, end = (datetime.combine(day, time.min, where).astimezone(UTC) for day in days)
    with factory() as session:
        return usage_of(session, organisation_id, start, end, zone=zone, group_by=group_by, limit=MAX_ROWS + 1)


def _bucket(services: Services, row: UsageRow) -> UsageBucket:
    return UsageBucket(
        day=row.day,
        key_id=ids.show("key", row.key_id) if row.key_id is not None else None,
        model=model_name(services, row.variant_id),
        requests=row.requests,
        prompt_tokens=row.tokens.input,
        cached_tokens=row.tokens.input_cached,
        completion_tokens=row.tokens.output,
        reasoning_tokens=row.tokens.output_reasoning,
        cost=usd(row.charge_nano),
    )


def _request(services: Services, found: Trace) -> RequestUsage:
    job, outcome, receipt = found.job, found.outcome, found.receipt
    ended_at = job.ended_at if job is not None else outcome.at if outcome is not None else None
    paid = receipt if receipt is not None and receipt.loss_nano == 0 else None
    open_ = outcome is None and job is not None
    return RequestUsage(
        request_id=found.request_id,
        endpoint=outcome.endpoint if outcome is not None else None,
        model=model_name(services, found.variant_id),
        service_tier=_TIERS.get(job.kind) if job is not None else None,
        status=("queued" if job.state == "queued" else "running") if open_ and job is not None else "ended",
        outcome=outcome.outcome if outcome is not None else None,
        code=outcome.code if outcome is not None else None,
        created_at=int(found.began_at.timestamp()) if found.began_at is not None else None,
        ended_at=int(ended_at.timestamp()) if ended_at is not None else None,
        attempts=found.attempts,
        prompt_tokens=job.prompt_tokens if job is not None else None,
        accepted_tokens=found.accepted_tokens,
        usage=usage_object(tokens_of(paid), _priced(paid)) if paid is not None else None,
        cost=usd(paid.charge_nano if paid is not None else 0),
        held=usd(_held_nano(found)),
        settled=job is None or job.state in ("settled", "voided"),
    )


def _held_nano(found: Trace) -> int:
    if found.job is None:
        return 0
    match found.job.state:
        case "queued" | "running":
            return found.job.hold_nano
        case "delivered":
            return found.receipt.charge_nano if found.receipt is not None else 0
        case _:
            return 0


def _priced(receipt: Receipt) -> Priced:
    return Priced(
        input_uncached_nano=receipt.input_uncached_nano,
        input_cached_nano=receipt.input_cached_nano,
        output_visible_nano=receipt.output_visible_nano,
        output_reasoning_nano=receipt.output_reasoning_nano,
        gross_nano=receipt.charge_nano,
        fee_nano=receipt.fee_nano,
        owner_nano=receipt.owner_nano,
    )
