"""Statements, bills and the state of the books. Only reads; see `snapshot` for a session whose answers agree."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from datetime import datetime, timedelta
from functools import reduce
from operator import add
from pathlib import Path
from typing import Any
from uuid import UUID

from sqlalchemy import Row
from sqlalchemy.orm import Session

import ledger
from marketplace.accounts.models import Organisation
from marketplace.accounts.service import UnknownOrganisation
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory
from marketplace.core.errors import BadRequest
from marketplace.finance import export, repository
from marketplace.finance.bill import PricedUse, RenterBill
from marketplace.finance.books import owner_books
from marketplace.finance.document import Document
from marketplace.finance.documents import statement_document
from marketplace.finance.economics import Activity, Capital, Declared, NodeEconomics, economics
from marketplace.finance.heldback import Held
from marketplace.finance.models import NodeCost
from marketplace.finance.period import Period
from marketplace.finance.statement import (
    AccountMovement,
    Amounts,
    DeviceYield,
    Earnings,
    Energy,
    Tokens,
    Usage,
    VariantYield,
    YieldStatement,
    merged,
)
from marketplace.finance.summary import summary
from marketplace.fleet.models import Node
from marketplace.matching.types import Rates
from marketplace.metering.models import Receipt

__all__ = [
    "UnknownOrganisation",
    "check",
    "last_receipt",
    "priced_uses",
    "renter_bill",
    "snapshot",
    "summary",
    "trial_balance",
    "unsettled_receipts",
    "write_csv",
    "write_document",
    "write_receipts_csv",
    "write_statement",
    "yield_statement",
]


class InvalidFormat(BadRequest):
    """There is no such format for this export."""

    code = "invalid_format"


DeviceKey = tuple[UUID, str]


@contextmanager
def snapshot(factory: SessionFactory) -> Iterator[Session]:
    """A read-only session on one moment: the sums of a statement agree even while settlement goes on."""
    with factory() as session:
        session.connection(execution_options={"isolation_level": "REPEATABLE READ", "postgresql_readonly": True})
        yield session


def yield_statement(
    session: Session, owner_id: UUID, start: datetime, end: datetime, zone_name: str = "UTC"
) -> YieldStatement:
    """What an owner earned in [start, end), device by device. Raises UnknownOrganisation, InvalidPeriod."""
    period = Period(start, end, zone_name)
    owner = _organisation(session, owner_id)
    devices = _devices(session, owner_id, period)
    return YieldStatement(
        owner_id=owner_id,
        owner_name=owner.name,
        period=period,
        devices=devices,
        account=_movement(session, owner_id, period),
        economics=_economics(session, owner_id, period, devices),
    )


def renter_bill(
    session: Session, organisation_id: UUID, start: datetime, end: datetime, zone_name: str = "UTC"
) -> RenterBill:
    """What a renter was charged in [start, end), model by model. Raises UnknownOrganisation, InvalidPeriod."""
    period = Period(start, end, zone_name)
    organisation = _organisation(session, organisation_id)
    waived_jobs, waived_nano = repository.waived(session, organisation_id, period)
    journals = ledger.journals_between(period.start, period.end)
    settled_nano = repository.charged_in(session, organisation_id, journals)
    opening_nano, closing_nano = _balances(session, organisation.credit_account_id, period)
    return RenterBill(
        organisation_id=organisation_id,
        organisation_name=organisation.name,
        period=period,
        uses=priced_uses(session, organisation_id, period),
        outcomes=repository.outcome_counts(session, organisation_id, period),
        waived_jobs=waived_jobs,
        waived_nano=waived_nano,
        opening_nano=opening_nano,
        added_nano=closing_nano - opening_nano + settled_nano,
        settled_nano=settled_nano,
        closing_nano=closing_nano,
    )


def priced_uses(session: Session, organisation_id: UUID, period: Period) -> tuple[PricedUse, ...]:
    """What a renter was charged in a period, by model and price."""
    return tuple(_priced_use(row) for row in repository.bill_sums(session, organisation_id, period))


def trial_balance(session: Session, as_of: datetime | None = None) -> ledger.TrialBalance:
    """Every account of the ledger; its debits equal its credits, or the books are broken."""
    return ledger.trial_balance(session, as_of)


def check(session: Session) -> list[str]:
    """What is wrong with the books, a sentence each; none when they are in order."""
    return [f"{problem.rule}: {problem.story}" for problem in ledger.check(session)]


def last_receipt(session: Session, organisation_id: UUID, *, outcome: str | None = None) -> Receipt | None:
    """The newest receipt of a renter, of this outcome if given."""
    return repository.last_receipt(session, organisation_id, outcome)


def unsettled_receipts(session: Session) -> int:
    """Receipts that wait for settlement."""
    return repository.unsettled_receipts(session)


def write_csv(statement: YieldStatement, path: Path | str) -> Path:
    """Write a statement as CSV; returns the absolute path. See export for the format."""
    return export.write_statement(statement, Path(path))


def write_statement(statement: YieldStatement, path: Path | str, held: Sequence[Held] | None = None) -> Path:
    """Write a statement in the format of the path's suffix (.csv, .xlsx, .pdf); returns the absolute path.

    Raises InvalidFormat, and NotWritten: nothing is left of it then.
    """
    if Path(path).suffix.lower() == ".csv":
        return write_csv(statement, path)
    return write_document(statement_document(statement, held), path)


def write_document(document: Document, path: Path | str) -> Path:
    """Write a document as .xlsx or .pdf. Raises InvalidFormat and NotWritten."""
    suffix = Path(path).suffix.lower()
    if suffix == ".xlsx":
        from marketplace.finance import xlsx  # noqa: PLC0415  # a gateway that makes none needs none

        return xlsx.write(document, path)
    if suffix == ".pdf":
        from marketplace.finance import pdf  # noqa: PLC0415  # the same

        return pdf.write(document, path)
    raise InvalidFormat(f"{Path(path).name[:80]!r} ends in no format that can be written here.")


def write_receipts_csv(session: Session, statement: YieldStatement, path: Path | str) -> Path:
    """Write each receipt behind a statement as CSV, streamed; returns the absolute path."""
    query = repository.receipts_of(statement.owner_id, statement.period).execution_options(yield_per=2_000)
    return export.write_receipts(((receipt, model) for receipt, model in session.execute(query)), Path(path))


def _organisation(session: Session, organisation_id: UUID) -> Organisation:
    found = session.get(Organisation, organisation_id)
    if found is None:
        raise UnknownOrganisation(f"There is no organisation with the id {organisation_id}.")
    return found


def _devices(session: Session, owner_id: UUID, period: Period) -> tuple[DeviceYield, ...]:
    """Devices that were offered, earned or drew energy in the period."""
    names = repository.device_names(session, owner_id)
    earned = _earned(session, owner_id, period)
    usage = {(row.node_id, row.device_id): _usage(row) for row in repository.usage_of(session, owner_id, period)}
    energy = _energy(repository.energy_of(session, owner_id, period))
    active = earned.keys() | usage.keys() | energy.keys()
    # A device that its node no longer reports keeps its line.
    order = [key for key in names if key in active] + sorted(active - names.keys())
    return tuple(
        _device(key, names.get(key), earned.get(key, ()), usage.get(key, Usage()), energy=energy.get(key, Energy()))
        for key in order
    )


def _earned(session: Session, owner_id: UUID, period: Period) -> dict[DeviceKey, tuple[VariantYield, ...]]:
    names = repository.variant_names(session)
    found: dict[DeviceKey, list[VariantYield]] = defaultdict(list)
    for row in repository.owner_sums(session, owner_id, period):
        model_id, quantisation = names[row.variant_id]
        found[row.node_id, row.device_id].append(
            VariantYield(
                variant_id=row.variant_id,
                model_id=model_id,
                quantisation=quantisation,
                simulated=row.simulated,
                tokens=_tokens(row),
                amounts=_amounts(row),
                earnings=Earnings(
                    jobs=row.jobs,
                    gross_nano=int(row.gross_nano),
                    fee_nano=int(row.fee_nano),
                    adjustments_nano=int(row.adjustments_nano),
                    net_nano=int(row.net_nano),
                ),
            )
        )
    return {key: merged(variants) for key, variants in found.items()}


def _device(
    key: DeviceKey,
    names: tuple[str, str] | None,
    variants: tuple[VariantYield, ...],
    usage: Usage,
    *,
    energy: Energy,
) -> DeviceYield:
    node_name, device_name = names or (key[0].hex, key[1])
    return DeviceYield(
        node_id=key[0],
        node_name=node_name,
        device_id=key[1],
        device_name=device_name,
        simulated=any(variant.simulated for variant in variants),
        tokens=sum((variant.tokens for variant in variants), Tokens()),
        earnings=sum((variant.earnings for variant in variants), Earnings()),
        usage=usage,
        energy=energy,
        variants=variants,
    )


def _economics(
    session: Session, owner_id: UUID, period: Period, devices: Iterable[DeviceYield]
) -> tuple[NodeEconomics, ...]:
    """Of each node that was the owner's within the period."""
    by_node: dict[UUID, list[DeviceYield]] = defaultdict(list)
    for device in devices:
        if device.node_id is not None:
            by_node[device.node_id].append(device)
    costs = repository.node_costs(session, owner_id, period.end, _closed_at(session, period))
    found = []
    for node in repository.nodes_of(session, owner_id):
        start, end = max(period.start, node.enrolled_at), min(period.end, utcnow())
        own = by_node.get(node.id, [])
        if start < end or own:
            activity = _activity(own, start, max(start, end))
            found.append(economics(node.id, node.name, activity, _declared(node, costs.get(node.id))))
    return tuple(found)


def _closed_at(session: Session, period: Period) -> datetime | None:
    """When the books of a whole period were closed: what was declared later changes no statement of it."""
    last = ledger.find_period(session, period.end - timedelta(microseconds=1))
    if last is None or last.snapshot is None:
        return None
    return last.snapshot.closed_at


def _activity(devices: Sequence[DeviceYield], start: datetime, end: datetime) -> Activity:
    usage = reduce(add, (device.usage for device in devices)) if devices else Usage()
    energy = sum((device.energy for device in devices), Energy())
    earnings = sum((device.earnings for device in devices), Earnings())
    known = energy.measured_us or energy.declared_us
    return Activity(
        start=start,
        end=end,
        offered_us=usage.offered_us,
        rented_us=usage.rented_us,
        busy_us=usage.busy_us,
        energy_mj=energy.measured_mj + energy.declared_mj if known else None,
        output_tokens=sum(device.tokens.output for device in devices),
        gross_nano=earnings.gross_nano,
        fee_nano=earnings.fee_nano,
        net_nano=earnings.net_nano,
    )


def _declared(node: Node, cost: NodeCost | None) -> Declared:
    """What the agent declares of its power, and the owner of the cost."""
    power = Declared(idle_mw=node.declared_idle_mw, load_mw=node.declared_load_mw)
    if cost is None:
        return power
    return replace(
        power,
        capital=_capital(cost),
        energy_nano_usd_per_kwh=cost.energy_nano_usd_per_kwh,
        pue_milli=cost.pue_milli,
        other_nano_usd_per_hour=cost.other_nano_usd_per_hour,
    )


def _capital(cost: NodeCost) -> Capital | None:
    if (
        cost.capital_nano is None
        or cost.residual_nano is None
        or cost.life_months is None
        or cost.depreciation is None
        or cost.in_service_on is None
    ):
        return None
    return Capital(cost.capital_nano, cost.residual_nano, cost.life_months, cost.depreciation, cost.in_service_on)


def _tokens(row: Row[Any]) -> Tokens:
    return Tokens(
        int(row.input_uncached_tokens),
        int(row.input_cached_tokens),
        int(row.output_visible_tokens),
        int(row.output_reasoning_tokens),
    )


def _amounts(row: Row[Any]) -> Amounts:
    return Amounts(
        int(row.input_uncached_nano),
        int(row.input_cached_nano),
        int(row.output_visible_nano),
        int(row.output_reasoning_nano),
    )


def _usage(row: Row[Any]) -> Usage:
    offered_us = int(row.offered_us or 0)
    speed = row.capacity_tokens_per_s
    return Usage(
        offered_us=offered_us,
        rented_us=int(row.rented_us or 0),
        busy_us=int(row.busy_us or 0),
        capacity_tokens=None if speed is None else float(speed) * offered_us / 1_000_000,
    )


def _energy(rows: Iterable[Row[Any]]) -> Mapping[DeviceKey, Energy]:
    found: dict[DeviceKey, Energy] = {}
    for row in rows:
        key = (row.node_id, row.device_id)
        energy_mj, covered_us = int(row.energy_mj), int(row.covered_us)
        part = {
            "measured": Energy(measured_mj=energy_mj, measured_us=covered_us),
            "declared": Energy(declared_mj=energy_mj, declared_us=covered_us),
            "unknown": Energy(unknown_us=covered_us),
        }[row.kind]
        found[key] = found.get(key, Energy()) + part
    return found


def _movement(session: Session, owner_id: UUID, period: Period) -> AccountMovement:
    settled_nano, carried_in_nano, carried_out_nano = repository.carried(session, owner_id, period.start, period.end)
    books = owner_books(session, owner_id, period)
    return AccountMovement(
        opening_nano=books.opening_nano,
        carried_in_nano=carried_in_nano,
        carried_out_nano=carried_out_nano,
        settled_nano=settled_nano,
        posted_nano=books.settled_nano,
        closing_nano=books.closing_nano,
        states=books.states,
        lines=books.lines,
    )


def _balances(session: Session, account_id: int | None, period: Period) -> tuple[int, int]:
    """(opening, closing) of an account in nanos; an account that was never opened has nothing."""
    if account_id is None:
        return 0, 0
    opening = ledger.balance(session, account_id, as_of=period.start)
    return opening.nano, ledger.balance(session, account_id, as_of=period.end).nano


def _priced_use(row: Row[Any]) -> PricedUse:
    return PricedUse(
        model_id=row.model_id,
        price_id=row.price_id,
        rates=Rates(
            input=row.input_rate,
            cached_input=row.cached_input_rate,
            output=row.output_rate,
        ),
        jobs=row.jobs,
        tokens=_tokens(row),
        amounts=_amounts(row),
    )
