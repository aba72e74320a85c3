"""Finance over HTTP. The role `finance` reads everything and closes periods; owners and renters read what is theirs.

Large exports are streamed. Work that takes long answers with a line of JSON now and then, and its result as the last.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Generator, Iterator
from contextlib import suppress
from datetime import date, datetime
from pathlib import Path
from threading import BoundedSemaphore
from typing import Annotated, Any, Final, Literal, TypeVar
from uuid import UUID

from fastapi import APIRouter, Depends, Query, Response
from fastapi import Path as PathPart
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel, ConfigDict, Field
from sqlalchemy.orm import Session
from starlette.types import Receive, Scope, Send

import ledger
from marketplace.accounts.auth import Principal
from marketplace.accounts.service import find_organisation
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError, Forbidden, Unavailable
from marketplace.core.logs import get_logger
from marketplace.finance import closing, costs, export, idle, idle_rows, invoicing, reports, service, trace
from marketplace.finance import period as periods
from marketplace.finance.document import Document, as_json
from marketplace.finance.documents import invoice_document, platform_document, statement_document
from marketplace.finance.period import InvalidPeriod, Period
from marketplace.gateway.deps import Caller, GatewayServices
from marketplace.metering.models import Receipt

log = get_logger(__name__)
router = APIRouter(prefix="/v1/finance", tags=["finance"])
MAX_EXPORTS: Final = 2
"""At once in one gateway: each holds a connection for as long as its reader takes."""
MAX_JOURNAL: Final = 2**63 - 1
PROGRESS_S: Final = 2.0
TYPES: Final = {
    "csv": "text/csv; charset=utf-8",
    "xlsx": "application/vnd.openxmlformats-officedocument.spreadsheetml.sheet",
    "pdf": "application/pdf",
}
_exports = BoundedSemaphore(MAX_EXPORTS)
T = TypeVar("T")

JournalId = Annotated[int, PathPart(ge=1, le=MAX_JOURNAL)]
FormatName = Literal["json", "csv", "xlsx", "pdf"]
OrganisationName = Annotated[str | None, Query(max_length=200, description="Default: the key's own organisation.")]
PeriodName = Annotated[str | None, Query(alias="period", max_length=40, description="2026, 2026-03 or 2026-03-14.")]
ZoneName = Annotated[str, Query(alias="zone", max_length=80, description="IANA time zone.")]


async def finance(principal: Caller) -> Principal:
    """A caller that may read everybody's books. Raises Forbidden."""
    principal.require("finance")
    return principal


Finance = Annotated[Principal, Depends(finance)]


def bounds(name: PeriodName = None, zone: ZoneName = "UTC") -> Period:
    """The period that was asked for; this month by default. Raises InvalidPeriod."""
    return Period.named(name or f"{utcnow().astimezone(periods.zone(zone)):%Y-%m}", zone)


Bounds = Annotated[Period, Depends(bounds)]


# --- statements -----------------------------------------------------------------------------------------------------


@router.get("/statement")
async def statement(
    *,
    services: GatewayServices,
    principal: Caller,
    period: Bounds,
    owner: OrganisationName = None,
    shape: Annotated[FormatName, Query(alias="format")] = "json",
    held_back: bool = False,
) -> Response:
    """An owner's statement of yield."""

    def make(session: Session) -> Response:
        owner_id = _party(session, principal, owner, "owner")
        found = service.yield_statement(session, owner_id, period.start, period.end, period.zone_name)
        held = reports.held_back_of(session, found) if held_back else None
        if shape == "json":
            return JSONResponse(as_json(statement_document(found, held)))
        return _file(f"statement.{shape}", lambda path: service.write_statement(found, path, held))

    return await asyncio.to_thread(_read, services.session_factory, make)


@router.get("/invoice")
async def invoice(
    services: GatewayServices,
    principal: Caller,
    period: Bounds,
    renter: OrganisationName = None,
    shape: Annotated[FormatName, Query(alias="format")] = "json",
) -> Response:
    """A renter's invoice, with why it changed and what would make it smaller."""

    def make(session: Session) -> Response:
        renter_id = _party(session, principal, renter, "renter")
        return _shaped(invoice_document(invoicing.make_invoice(session, renter_id, period)), shape, "invoice", 1)

    return await asyncio.to_thread(_read, services.session_factory, make)


@router.get("/report")
async def report(
    services: GatewayServices,
    _: Finance,
    period: Bounds,
    shape: Annotated[FormatName, Query(alias="format")] = "json",
) -> Response:
    """The platform's own period."""

    def make(session: Session) -> Response:
        return _shaped(platform_document(reports.platform_report(session, period)), shape, "report", 2)

    return await asyncio.to_thread(_read, services.session_factory, make)


@router.get("/trial-balance")
async def trial_balance(services: GatewayServices, _: Finance, as_of: datetime | None = None) -> dict[str, Any]:
    """Every account's debits and credits, of what counts before `as_of`."""
    if as_of is not None and as_of.tzinfo is None:
        raise InvalidPeriod("A time carries its offset, such as 2026-03-01T00:00:00+01:00.", param="as_of")
    trial = await asyncio.to_thread(
        _read, services.session_factory, lambda session: service.trial_balance(session, as_of)
    )
    return {
        "object": "trial_balance",
        "as_of": None if as_of is None else as_of.isoformat(),
        "balanced": trial.balanced,
        "accounts": [
            {
                "code": row.code,
                "kind": row.kind.value,
                "currency": row.currency,
                "debits": _usd(row.debit_nano),
                "credits": _usd(row.credit_nano),
                "balance": _usd(row.balance_nano),
            }
            for row in trial.rows
        ],
    }


# --- traces and streams ---------------------------------------------------------------------------------------------


@router.get("/receipts")
async def receipts(
    *,
    services: GatewayServices,
    principal: Caller,
    period: Bounds,
    owner: OrganisationName = None,
    renter: OrganisationName = None,
    node: UUID | None = None,
    device: Annotated[str | None, Query(max_length=200)] = None,
    model: Annotated[str | None, Query(max_length=256)] = None,
    key: UUID | None = None,
    journal: Annotated[int | None, Query(ge=1, le=MAX_JOURNAL)] = None,
) -> StreamingResponse:
    """The receipts behind a line of a statement or an invoice, as CSV. Each names the journal that settled it."""

    def line(session: Session) -> trace.Line:
        owner_id = renter_id = None
        if owner is not None or (renter is None and "finance" not in principal.roles and "owner" in principal.roles):
            owner_id = _party(session, principal, owner, "owner")
        elif renter is not None or "finance" not in principal.roles:
            renter_id = _party(session, principal, renter, "renter")
        return trace.Line(owner_id, renter_id, None if journal else period, node, device, model, key, journal)

    wanted = await asyncio.to_thread(_read, services.session_factory, line)
    return _stream(
        services.session_factory,
        lambda session: export.receipt_lines(trace.receipts(session, wanted)),
        "receipts.csv",
        TYPES["csv"],
    )


@router.get("/receipts/{receipt_id}")
async def show_receipt(services: GatewayServices, principal: Caller, receipt_id: UUID) -> dict[str, Any]:
    """A receipt, and the journal that settled it. Owners and renters see their own, without others' lines."""

    def find(session: Session) -> dict[str, Any]:
        found = trace.receipt(session, receipt_id)
        everything = "finance" in principal.roles
        own = (found.receipt.owner_organisation_id, found.receipt.renter_organisation_id)
        if not everything and principal.organisation_id not in own:
            raise trace.UnknownReceipt(f"There is no receipt {receipt_id}.", param="receipt")
        mine = None if everything else principal.organisation_id.hex
        return {
            **_receipt(found.receipt, found.model_id),
            "journal": None if found.journal is None else _journal(found.journal, mine),
        }

    return await asyncio.to_thread(_read, services.session_factory, find)


@router.get("/journals/{journal_id}")
async def show_journal(services: GatewayServices, _: Finance, journal_id: JournalId) -> dict[str, Any]:
    """A journal, and what its receipts come to. `GET /v1/finance/receipts?journal=` lists them."""

    def find(session: Session) -> dict[str, Any]:
        found = trace.journal(session, journal_id)
        return {
            **_journal(found.journal, None),
            "receipts": {
                "count": found.receipts,
                "charge": _usd(found.charge_nano),
                "fee": _usd(found.fee_nano),
                "owner": _usd(found.owner_nano),
                "platform_paid": _usd(found.loss_nano),
            },
        }

    return await asyncio.to_thread(_read, services.session_factory, find)


@router.get("/books")
async def books(services: GatewayServices, _: Finance, period: Bounds) -> StreamingResponse:
    """The whole ledger's period as Beancount text."""

    def text(session: Session) -> Iterator[str]:
        return (f"{line}\n" for line in reports.books(session, period))

    return _stream(services.session_factory, text, "books.beancount", "text/plain; charset=utf-8")


# --- work on the books ----------------------------------------------------------------------------------------------


class ClosingOrder(BaseModel):
    """Which period to close."""

    model_config = ConfigDict(extra="forbid")

    period: str = Field(max_length=40)
    zone: str = Field(default="UTC", max_length=80)


@router.post("/close")
async def close(services: GatewayServices, _: Finance, order: ClosingOrder) -> StreamingResponse:
    """Close a period of the books. Repeating it is safe."""
    period = Period.named(order.period, order.zone)

    def work(say: Callable[[str], None]) -> dict[str, Any]:
        view = closing.close_period(services.session_factory, period, say)
        return {"period": str(period), **_closed(view)}

    return _progress(work)


@router.post("/verify")
async def verify(services: GatewayServices, _: Finance) -> StreamingResponse:
    """Read the whole ledger and find whatever was tampered with."""

    def work(say: Callable[[str], None]) -> dict[str, Any]:
        say("reading every journal, line, hold and balance")
        found = _read(services.session_factory, closing.prove)
        return {
            "in_order": not found.problems,
            "journals_sealed": found.links,
            "heads": [
                {"book": head.book_id, "sequence": head.sequence, "sha256": head.sha256.hex()} for head in found.heads
            ],
            "problems": [{"rule": problem.rule, "story": problem.story} for problem in found.problems],
        }

    return _progress(work)


@router.post("/reconcile")
async def reconcile(services: GatewayServices, _: Finance, period: Bounds) -> StreamingResponse:
    """Compare a period's settlements with their receipts."""

    def work(say: Callable[[str], None]) -> dict[str, Any]:
        def compare(session: Session) -> closing.Reconciled:
            return closing.reconcile(session, period, lambda count: say(f"{count} journals compared"))

        found = _read(services.session_factory, compare)
        return {
            "agrees": not found.findings,
            "journals": found.journals,
            "receipts": found.receipts,
            "findings": list(found.findings),
        }

    return _progress(work)


class CostDeclaration(BaseModel):
    """What a node costs. Amounts are decimal strings of USD; what is left out is not declared."""

    model_config = ConfigDict(extra="forbid")

    capital_usd: str | None = Field(default=None, max_length=40)
    residual_usd: str | None = Field(default=None, max_length=40)
    life_months: int | None = None
    method: Literal["straight_line", "declining"] = "straight_line"
    in_service_on: date | None = None
    energy_usd_per_kwh: str | None = Field(default=None, max_length=40)
    pue: str | None = Field(default=None, max_length=40)
    other_usd_per_hour: str | None = Field(default=None, max_length=40)
    valid_from: datetime | None = None


@router.put("/nodes/{node_id}/cost")
async def declare_cost(
    services: GatewayServices, principal: Caller, node_id: UUID, declaration: CostDeclaration
) -> dict[str, Any]:
    """Declare what a node costs: the owner, or finance."""
    principal.require("owner", "finance")
    owner_id = None if "finance" in principal.roles else principal.organisation_id

    def write() -> dict[str, Any]:
        with transaction(services.session_factory) as session:
            cost = costs.declare(session, node_id, costs.Declaration(**declaration.model_dump()), owner_id)
            return {
                "object": "node_cost",
                "id": cost.id,
                "node": str(node_id),
                "valid_from": cost.valid_from.isoformat(),
            }

    return await asyncio.to_thread(write)


@router.get("/nodes/{node_id}/idle")
async def explain_idle(
    services: GatewayServices,
    principal: Caller,
    node_id: UUID,
    hour: Annotated[str, Query(max_length=40, description="As 2026-11-30T13. By default the last whole one.")] = "",
    zone: ZoneName = "UTC",
) -> dict[str, Any]:
    """Why a node did not earn within an hour, cause by cause; the minutes add up to sixty. Owners ask for their own."""
    principal.require("owner", "finance")
    moment = periods.within_hour(hour, zone, now=utcnow())
    owner_id = None if "finance" in principal.roles else principal.organisation_id

    def find(session: Session) -> dict[str, Any]:
        found = idle.explain(idle_rows.read(session, node_id, moment, owner_id))
        worst = found.bottleneck
        return {
            "node": {"id": str(node_id), "name": found.node_name},
            "hour": found.start.isoformat(),
            "bottleneck": None if worst is None else worst.cause.value,
            "parts": [
                {
                    "cause": part.cause.value,
                    "minutes": round(part.us / idle.MINUTE_US, 3),
                    "requests": part.requests,
                    "sentence": part.sentence,
                }
                for part in found.parts
            ],
            "notes": list(found.notes),
        }

    return await asyncio.to_thread(_read, services.session_factory, find)


# --- shared ---------------------------------------------------------------------------------------------------------


def _read(factory: SessionFactory, work: Callable[[Session], T]) -> T:
    with service.snapshot(factory) as session:
        return work(session)


def _party(session: Session, principal: Principal, name: str | None, role: str) -> UUID:
    """Whose statement: finance may name anybody, others are themselves. Raises Forbidden, UnknownOrganisation."""
    if name is None or name == principal.organisation_name:
        principal.require(role, "finance")
        return principal.organisation_id
    if "finance" not in principal.roles:
        # Not said: whether that organisation exists.
        raise Forbidden("This key reads its own organisation's figures alone; others take the role finance.")
    return find_organisation(session, name).id


def _shaped(document: Document, shape: str, name: str, csv_sheet: int) -> Response:
    """A document in the format asked for; as CSV the one sheet that machines want."""
    if shape == "json":
        return JSONResponse(as_json(document))
    if shape == "csv":
        return _file(f"{name}.csv", lambda path: export.write_sheet(document.sheets[csv_sheet], path))
    return _file(f"{name}.{shape}", lambda path: service.write_document(document, path))


def _file(name: str, write: Callable[[Path], Path]) -> Response:
    with tempfile.TemporaryDirectory(prefix="fallow-export-") as folder:
        content = write(Path(folder) / name).read_bytes()
    return Response(content, media_type=TYPES[name.rpartition(".")[2]], headers=_attachment(name))


def _stream(
    factory: SessionFactory, rows: Callable[[Session], Iterator[str]], name: str, media_type: str
) -> StreamingResponse:
    if not _exports.acquire(blocking=False):
        raise Unavailable("Too many exports run at once; try again.", headers={"retry-after": "5"})

    def text() -> Generator[str, None, None]:
        with service.snapshot(factory) as session:
            yield from rows(session)

    return _Export(text(), media_type=media_type, headers=_attachment(name))


class _Export(StreamingResponse):
    """A stream that gives its place and its connection back however it ends, also if it never begins."""

    def __init__(self, rows: Generator[str, None, None], **options: Any) -> None:
        super().__init__(rows, **options)
        self._rows = rows

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            _exports.release()
            # A thread that is still making rows for a reader who left closes them when it is done.
            with suppress(ValueError):
                await asyncio.to_thread(self._rows.close)


def _attachment(name: str) -> dict[str, str]:
    return {"content-disposition": f'attachment; filename="{name}"', "cache-control": "no-store"}


def _progress(work: Callable[[Callable[[str], None]], dict[str, Any]]) -> StreamingResponse:
    """JSON lines: `running` every two seconds with what is being done, then `done` or `failed`, once."""
    said = ["starting"]

    async def lines() -> AsyncIterator[str]:
        began = time.monotonic()
        task = asyncio.create_task(asyncio.to_thread(work, said.append))
        while not task.done():
            yield _line(event="running", doing=said[-1], elapsed_s=round(time.monotonic() - began, 1))
            await asyncio.wait({task}, timeout=PROGRESS_S)
        try:
            yield _line(event="done", result=task.result())
        except FallowError as error:
            yield _line(event="failed", **error.body())
        except Exception:
            # The edge: the status is sent already, so the line says it.
            log.exception("finance_work_failed", doing=said[-1])
            yield _line(event="failed", **FallowError("Something broke on our side.").body())

    return StreamingResponse(lines(), media_type="application/x-ndjson", headers={"cache-control": "no-store"})


def _line(**facts: Any) -> str:
    return json.dumps(facts, separators=(",", ":")) + "\n"


def _usd(nano: int) -> str:
    return ledger.format_nano(nano, min_places=9)


def _closed(view: ledger.PeriodView) -> dict[str, Any]:
    snapshot = view.snapshot
    assert snapshot is not None
    return {
        "state": view.state,
        "starts_at": view.starts_at.isoformat(),
        "ends_at": view.ends_at.isoformat(),
        "closed_at": snapshot.closed_at.isoformat(),
        "journals": snapshot.journals,
        "postings": snapshot.postings,
        "chain_sequence": snapshot.head.sequence,
        "chain_sha256": snapshot.head.sha256.hex(),
        "snapshot_sha256": snapshot.digest.hex(),
    }


def _receipt(receipt: Receipt, model_id: str) -> dict[str, Any]:
    return {
        "object": "receipt",
        "id": str(receipt.id),
        "job": str(receipt.job_id),
        "model": model_id,
        "node": str(receipt.node_id),
        "device": receipt.device_id,
        "delivered_at": receipt.at.isoformat(),
        "outcome": receipt.outcome,
        "simulated": receipt.simulated,
        "price_version": receipt.price_id,
        "tokens": {
            "input_uncached": receipt.input_uncached_tokens,
            "input_cached": receipt.input_cached_tokens,
            "output_visible": receipt.output_visible_tokens,
            "output_reasoning": receipt.output_reasoning_tokens,
        },
        "charge": _usd(receipt.charge_nano),
        "fee": _usd(receipt.fee_nano),
        "owner": _usd(receipt.owner_nano),
        "platform_paid": _usd(receipt.loss_nano),
    }


def _journal(journal: ledger.JournalView, mine: str | None) -> dict[str, Any]:
    """A journal; of its lines only those on accounts of `mine`, if given."""
    return {
        "object": "journal",
        "id": journal.journal_id,
        "kind": journal.kind,
        "outside": f"{journal.source} {journal.outside_id}",
        "effective_at": journal.effective_at.isoformat(),
        "recorded_at": journal.recorded_at.isoformat(),
        "reverses": journal.reverses_id,
        "lines": [
            {"account": line.code, "currency": line.currency, "amount": _usd(line.nano)}
            for line in journal.lines
            if mine is None or mine in line.code.split(":")
        ],
    }
