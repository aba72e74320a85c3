"""What could run where, and the advice that follows from it: rows between the planner and the gateways.

The planner writes steps; the gateway that has a node's socket passes them on and notes the answer. A step is advice and
nothing hangs on it: one that nobody passed on or answered in time is void, and the next plan looks anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Final
from uuid import UUID

import msgspec
from sqlalchemy import delete, func, select, update
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.protocol import ABILITIES_S, Abilities, DeviceTerms, Evict, Load, OfferReport, PlanAnswer, RunnableReport
from marketplace.catalog.models import Variant
from marketplace.fleet import claims
from marketplace.fleet.claims import KnownVariant
from marketplace.fleet.models import NodeAbility, PlanStep
from marketplace.matching.types import Rates

MAX_ANSWERS: Final = 64
"""Of one node, between two writes."""
MAX_ADVICE: Final = 256
"""Steps that one gateway passes on at a time."""
FRESH_S: Final = 3 * ABILITIES_S
"""What a node said longer ago than this is not planned with."""
STEP_LIFE_S: Final = 120.0
"""A step that was not passed on, or not answered, for so long is void."""
KEPT_DAYS: Final = 30
MAX_OFFERED_S: Final = 7 * 86_400.0
MAX_REFUSAL_CHARS: Final = 200
LOAD: Final = "load"
EVICT: Final = "evict"


class Runnable(msgspec.Struct, frozen=True):
    """A variant that an owner allows on a device."""

    variant_id: UUID
    device_id: str
    loaded: bool
    pinned: bool
    here: bool
    slots: int
    context_per_slot: int
    engine: str
    rates: tuple[int, int, int]
    """Input, cached input, output: nano-USD per million tokens."""
    needed_bytes: int | None
    decode_tokens_per_s: float | None

    @property
    def asks(self) -> Rates:
        return Rates(*self.rates)


class Ability(msgspec.Struct, frozen=True):
    """All of one node."""

    accepts: bool
    runnable: list[Runnable]
    devices: list[DeviceTerms]


@dataclass(frozen=True, slots=True)
class Said:
    """What a node said since the last write."""

    node_id: UUID
    ability: Ability | None
    answers: Sequence[PlanAnswer]


def check(frame: Abilities, find_variant: Callable[[str], KnownVariant | None], *, allow_simulated: bool) -> Ability:
    """What a node claims, made safe: unknown and impossible entries are left out."""
    runnable: dict[tuple[UUID, str], Runnable] = {}
    for report in frame.runnable[: claims.MAX_OFFERS]:
        if claims.fault(_as_offer(report), allow_simulated=allow_simulated) is not None:
            continue
        variant = find_variant(report.variant_sha256)
        if variant is not None:
            runnable.setdefault((variant.id, report.device_id), _runnable(variant.id, report))
    devices = {
        terms.device_id: _terms(terms) for terms in frame.devices[: claims.MAX_DEVICES] if claims.plain(terms.device_id)
    }
    return Ability(frame.accepts, list(runnable.values()), list(devices.values()))


def _as_offer(report: RunnableReport) -> OfferReport:
    """As if it were on offer: what may not be offered is not planned."""
    return OfferReport(
        variant_sha256=report.variant_sha256,
        device_id=report.device_id,
        slots=report.slots,
        context_per_slot=report.context_per_slot,
        input_nano_usd_per_mtok=report.input_nano_usd_per_mtok,
        cached_input_nano_usd_per_mtok=report.cached_input_nano_usd_per_mtok,
        output_nano_usd_per_mtok=report.output_nano_usd_per_mtok,
        engine=report.engine,
        engine_version="",
        simulated=report.simulated,
        warm=report.loaded,
        prefix_cache_s=0.0,
    )


def _runnable(variant_id: UUID, report: RunnableReport) -> Runnable:
    return Runnable(
        variant_id=variant_id,
        device_id=report.device_id,
        loaded=report.loaded,
        pinned=report.pinned,
        here=report.here,
        slots=report.slots,
        context_per_slot=report.context_per_slot,
        engine=report.engine,
        rates=(
            report.input_nano_usd_per_mtok,
            report.cached_input_nano_usd_per_mtok,
            report.output_nano_usd_per_mtok,
        ),
        needed_bytes=claims.int_within(report.needed_bytes, claims.MAX_BYTES),
        decode_tokens_per_s=claims.speed(report.decode_tokens_per_s),
    )


def _terms(terms: DeviceTerms) -> DeviceTerms:
    return DeviceTerms(
        device_id=terms.device_id,
        memory_bytes=claims.int_within(terms.memory_bytes, claims.MAX_BYTES),
        offered_s=claims.within(terms.offered_s, MAX_OFFERED_S),
        nano_usd_per_kwh=claims.int_within(terms.nano_usd_per_kwh, claims.MAX_RATE_NANO),
        circuit=terms.circuit if claims.plain(terms.circuit) else "",
        circuit_watts=claims.within(terms.circuit_watts, claims.MAX_NODE_W),
        idle_watts=claims.within(terms.idle_watts, claims.MAX_NODE_W),
        load_watts=claims.within(terms.load_watts, claims.MAX_NODE_W),
    )


# --- the gateway's side -----------------------------------------------------------------------------------------------


def exchange(session: Session, node_ids: Sequence[UUID], said: Sequence[Said]) -> list[tuple[UUID, Load | Evict]]:
    """Store what nodes said, and take the advice for those that are connected here, evictions first. A step is taken
    once: should the socket break before it leaves, it becomes void."""
    for item in sorted(said, key=lambda item: item.node_id):
        if item.ability is not None:
            _store(session, item.node_id, item.ability)
        for answer in item.answers:
            _note(session, item.node_id, answer)
    return _take(session, node_ids)


def _store(session: Session, node_id: UUID, ability: Ability) -> None:
    facts = {"heard_at": func.now(), "body": msgspec.to_builtins(ability)}
    session.execute(
        insert(NodeAbility)
        .values(node_id=node_id, **facts)
        .on_conflict_do_update(index_elements=[NodeAbility.node_id], set_=facts)
    )


def _note(session: Session, node_id: UUID, answer: PlanAnswer) -> None:
    session.execute(
        update(PlanStep)
        .where(PlanStep.id == answer.step, PlanStep.node_id == node_id, PlanStep.state == "sent")
        .values(
            state="accepted" if answer.accepted else "refused",
            code=answer.code[:40] if claims.plain(answer.code) else "",
            message=answer.message[:MAX_REFUSAL_CHARS] if answer.message[:MAX_REFUSAL_CHARS].isprintable() else "",
            answered_at=func.now(),
        )
    )


def _take(session: Session, node_ids: Sequence[UUID]) -> list[tuple[UUID, Load | Evict]]:
    ids = (
        select(PlanStep.id)
        .where(
            PlanStep.node_id.in_(node_ids),
            PlanStep.state == "planned",
            PlanStep.planned_at > func.now() - timedelta(seconds=STEP_LIFE_S),
        )
        .order_by(PlanStep.id)
        .with_for_update(skip_locked=True)
        .limit(MAX_ADVICE)
    )
    taken = session.execute(
        update(PlanStep)
        .where(PlanStep.id.in_(ids.scalar_subquery()), PlanStep.variant_id == Variant.id)
        .values(state="sent", sent_at=func.now())
        .returning(
            PlanStep.id,
            PlanStep.node_id,
            PlanStep.device_id,
            PlanStep.action,
            PlanStep.reason,
            Variant.sha256,
            Variant.size_bytes,
            PlanStep.needed_bytes,
        )
        .execution_options(synchronize_session=False)
    ).all()
    frames: list[tuple[UUID, Load | Evict]] = []
    for row in sorted(taken, key=lambda row: row.id):
        if row.action == LOAD:
            frame: Load | Evict = Load(
                *(row.id, row.sha256, row.device_id, row.reason),
                weights_bytes=row.size_bytes,
                needed_bytes=row.needed_bytes,
            )
        else:
            frame = Evict(row.id, row.sha256, row.device_id, row.reason)
        frames.append((row.node_id, frame))
    return frames


# --- the planner's side -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """One piece of advice."""

    node_id: UUID
    device_id: str
    variant_id: UUID
    action: str
    reason: str
    gain_nano: int | None = None
    needed_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class Recent:
    """A step of late, for what the next plan leaves alone."""

    node_id: UUID
    device_id: str
    variant_id: UUID
    action: str
    state: str
    code: str
    age_s: float


def abilities(session: Session) -> dict[UUID, Ability]:
    """What nodes that spoke lately could run."""
    rows = session.execute(
        select(NodeAbility.node_id, NodeAbility.body).where(
            NodeAbility.heard_at > func.now() - timedelta(seconds=FRESH_S)
        )
    )
    return {node_id: msgspec.convert(body, Ability) for node_id, body in rows}


def recent_steps(session: Session, within_s: float) -> list[Recent]:
    """Steps that are not void, by the time of their last change."""
    last = func.coalesce(PlanStep.answered_at, PlanStep.sent_at, PlanStep.planned_at)
    rows = session.execute(
        select(
            PlanStep.node_id,
            PlanStep.device_id,
            PlanStep.variant_id,
            PlanStep.action,
            PlanStep.state,
            PlanStep.code,
            func.extract("epoch", func.now() - last),
        ).where(
            PlanStep.planned_at > func.now() - timedelta(seconds=within_s + STEP_LIFE_S), PlanStep.state != "expired"
        )
    )
    return [Recent(*row[:-1], age_s=float(row[-1])) for row in rows]


def write_steps(session: Session, plan_id: UUID, steps: Sequence[Step]) -> None:
    """Put advice up for the gateways, in order."""
    for step in steps:
        session.add(
            PlanStep(
                plan_id=plan_id,
                node_id=step.node_id,
                device_id=step.device_id,
                variant_id=step.variant_id,
                action=step.action,
                reason=step.reason,
                gain_nano=step.gain_nano,
                needed_bytes=step.needed_bytes,
            )
        )
        session.flush()


def expire(session: Session) -> int:
    """Void what nobody passed on or answered, and forget what is old. Returns how many became void."""
    limit = func.now() - timedelta(seconds=STEP_LIFE_S)
    voided = session.execute(
        update(PlanStep)
        .where(
            PlanStep.state.in_(("planned", "sent")),
            func.coalesce(PlanStep.sent_at, PlanStep.planned_at) < limit,
        )
        .values(state="expired")
        .returning(PlanStep.id)
        .execution_options(synchronize_session=False)
    ).all()
    session.execute(delete(PlanStep).where(PlanStep.planned_at < func.now() - timedelta(days=KEPT_DAYS)))
    return len(voided)


def latest(session: Session, *, limit: int, node_id: UUID | None = None) -> list[tuple[PlanStep, str, datetime]]:
    """The newest steps, with the model's name and the database's time."""
    query = (
        select(PlanStep, Variant.model_id, func.now())
        .join(Variant, Variant.id == PlanStep.variant_id)
        .order_by(PlanStep.id.desc())
        .limit(limit)
    )
    if node_id is not None:
        query = query.where(PlanStep.node_id == node_id)
    return [(step, model, now) for step, model, now in session.execute(query)]
