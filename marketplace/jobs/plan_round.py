"""One round of planning: read, plan, write advice. One transaction; one round at a time in the whole deployment."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

import redis
from sqlalchemy import select, text
from sqlalchemy.orm import Session

from marketplace.catalog.models import Variant
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import new_id
from marketplace.core.logs import get_logger
from marketplace.core.valkey import ValkeyDownError
from marketplace.fleet import plans
from marketplace.fleet.models import Device
from marketplace.fleet.snapshot import read_fleet
from marketplace.jobs import forecast, planning
from marketplace.matching.fit import shape_from
from marketplace.matching.planner import plan
from marketplace.matching.types import OfferView

log = get_logger(__name__)
PLAN_LOCK: Final = 0x46504C4E
"""Of PostgreSQL's advisory locks."""


@dataclass(frozen=True, slots=True)
class Planned:
    """What a round came to."""

    plan_id: UUID
    steps: int
    gain_nano: int
    devices: int


def plan_once(factory: SessionFactory, client: redis.Redis) -> Planned | None:
    """Advise nodes once. None: nobody takes advice, another round runs, or the fleet cannot be seen."""
    try:
        offers = read_fleet(client)
    except ValkeyDownError as error:
        log.warning("no_plan_without_fleet", error=str(error))
        return None
    with transaction(factory) as session:
        if not session.execute(text("select pg_try_advisory_xact_lock(:key)"), {"key": PLAN_LOCK}).scalar_one():
            return None
        plans.expire(session)
        abilities = plans.abilities(session)
        if not any(ability.accepts for ability in abilities.values()):
            return None
        return _advise(session, _facts(session, abilities, offers))


def _facts(session: Session, abilities: dict[UUID, plans.Ability], offers: list[OfferView]) -> planning.Facts:
    variants = session.execute(select(Variant.id, Variant.shape, Variant.size_bytes)).all()
    names = session.execute(select(Device.node_id, Device.device_id, Device.name).where(Device.node_id.in_(abilities)))
    return planning.Facts(
        abilities=abilities,
        offers=offers,
        asked=forecast.asked(session),
        shapes={variant_id: shape_from(shape) for variant_id, shape, _ in variants},
        sizes={variant_id: size for variant_id, _, size in variants},
        device_names={(node_id, device_id): name for node_id, device_id, name in names},
        recent=plans.recent_steps(session, planning.LEAST_STAY_S),
    )


def _advise(session: Session, facts: planning.Facts) -> Planned:
    asked = planning.question(facts)
    made = plan(asked.devices, asked.demands, horizon_s=planning.HORIZON_S, circuits_w=asked.circuits_w)
    told = planning.steps(made, asked, facts)
    planned = Planned(new_id(), len(told), round(made.gain_nano), len(asked.devices))
    plans.write_steps(session, planned.plan_id, told)
    log.info("planned", steps=planned.steps, devices=planned.devices, gain_nano=planned.gain_nano)
    return planned
