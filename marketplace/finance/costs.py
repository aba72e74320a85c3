"""What owners declare of their nodes' cost. The edge commits."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import date, datetime
from typing import Final
from uuid import UUID

from sqlalchemy import func, select
from sqlalchemy.orm import Session

import ledger
from marketplace.core.errors import BadRequest, NotFound
from marketplace.finance.models import NodeCost
from marketplace.fleet.models import Node

METHODS: Final = ("straight_line", "declining")
MAX_USD_NANO: Final = 10**9 * 10**9
MAX_LIFE_MONTHS: Final = 12 * 30
MAX_PUE_MILLI: Final = 10_000


class UnknownNode(NotFound):
    code = "unknown_node"


class InvalidCost(BadRequest):
    """A declaration that cannot be."""

    code = "invalid_cost"


@dataclass(frozen=True, slots=True)
class Declaration:
    """As people write it: decimal strings in USD; None is not declared. Capital comes with its life, or not at all."""

    capital_usd: str | None = None
    residual_usd: str | None = None
    life_months: int | None = None
    method: str = "straight_line"
    in_service_on: date | None = None
    energy_usd_per_kwh: str | None = None
    pue: str | None = None
    other_usd_per_hour: str | None = None
    valid_from: datetime | None = None
    """None: from when the node was enrolled, if nothing was declared before; else from now."""


def declare(session: Session, node_id: UUID, declaration: Declaration, owner_id: UUID | None = None) -> NodeCost:
    """Declare a node's cost; what is not in it counts as not declared from then on.

    `owner_id`: whoever declares; a node of somebody else is unknown to them. Raises UnknownNode, InvalidCost.
    """
    node = session.get(Node, node_id)
    if node is None or (owner_id is not None and node.organisation_id != owner_id):
        raise UnknownNode(f"There is no node {node_id}.", param="node")
    cost = NodeCost(node_id=node_id, valid_from=_valid_from(session, node, declaration), **_columns(declaration))
    session.add(cost)
    session.flush()
    return cost


def _valid_from(session: Session, node: Node, declaration: Declaration) -> datetime:
    if declaration.valid_from is not None:
        if declaration.valid_from.tzinfo is None:
            raise InvalidCost("A time carries its zone.", param="valid_from")
        return declaration.valid_from
    declared = session.scalar(select(func.count()).where(NodeCost.node_id == node.id))
    return session.scalars(select(func.now())).one() if declared else node.enrolled_at


def _columns(declaration: Declaration) -> dict[str, int | str | date | None]:
    capital = _nano(declaration.capital_usd, "capital_usd")
    whole = (capital, declaration.residual_usd, declaration.life_months, declaration.in_service_on)
    if any(fact is None for fact in whole) and any(fact is not None for fact in whole):
        raise InvalidCost(
            "Capital, residual value, life and the day that it entered service are declared together.",
            param="capital_usd",
        )
    residual = _nano(declaration.residual_usd, "residual_usd")
    _check_capital(capital, residual, declaration)
    pue = _nano(declaration.pue, "pue")
    pue_milli = None if pue is None else pue // 10**6
    if pue_milli is not None and (pue is None or pue % 10**6 or not 1_000 <= pue_milli <= MAX_PUE_MILLI):
        raise InvalidCost("A PUE is 1 to 10, with at most three places.", param="pue")
    return {
        "capital_nano": capital,
        "residual_nano": residual,
        "life_months": declaration.life_months,
        "depreciation": None if capital is None else declaration.method,
        "in_service_on": declaration.in_service_on,
        "energy_nano_usd_per_kwh": _nano(declaration.energy_usd_per_kwh, "energy_usd_per_kwh"),
        "pue_milli": pue_milli,
        "other_nano_usd_per_hour": _nano(declaration.other_usd_per_hour, "other_usd_per_hour"),
    }


def _check_capital(capital: int | None, residual: int | None, declaration: Declaration) -> None:
    if declaration.method not in METHODS:
        raise InvalidCost(f"Depreciation is {' or '.join(METHODS)}.", param="method")
    if capital is None or residual is None or declaration.life_months is None:
        return
    if capital <= 0 or residual > capital:
        raise InvalidCost("Capital is more than nothing, and no less than what is left of it.", param="capital_usd")
    if not 0 < declaration.life_months <= MAX_LIFE_MONTHS:
        raise InvalidCost(f"A life is 1 to {MAX_LIFE_MONTHS} months.", param="life_months")


def _nano(text: str | None, param: str) -> int | None:
    if text is None:
        return None
    try:
        nano = ledger.parse_nano(text)
    except ledger.InvalidAmount as error:
        raise InvalidCost(str(error), param=param) from None
    if not 0 <= nano <= MAX_USD_NANO:
        raise InvalidCost(f"{text[:40]!r} is negative, or too much.", param=param)
    return nano
