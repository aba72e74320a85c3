"""Standing of nodes: what their attempts say, judged by the pure rules, with reasons, appeals and amnesties as rows.

Lives beside the jobs, whose attempts are the evidence. Services flush; the edges commit.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any, Final
from uuid import UUID

from sqlalchemy import func, select, text, update
from sqlalchemy.orm import Session

from marketplace.core.errors import BadRequest, Conflict, NotFound
from marketplace.fleet.models import Amnesty, Appeal, Node, NodeStanding, StandingChange
from marketplace.matching.standing import WINDOW_S, Judgement, Record, Standing, judge, missing, outages

MAX_BODY_CHARACTERS: Final = 4_000
MAX_AMNESTY: Final = timedelta(days=30)
OUTAGE_LOOKBACK: Final = timedelta(minutes=30)
"""How far back an outage of ours is looked for; older ones are noted by hand."""
CHANGES_SHOWN: Final = 20

# A fault counts unless its job broke another node as well (then the request is to blame), or it ended in an amnesty.
# Work that its renter cancelled or that ended in order counts as completed; an owner's pre-emption counts as nothing.
_RECORDS: Final = text("""
    with ended as (
      select a.node_id, a.job_id, a.ended_at, a.fault, a.accepted_tokens, a.end_code
      from attempts a where a.state = 'ended' and a.leased_at > now() - make_interval(secs => :window_s)
    ), faulty as (
      select e.node_id, e.ended_at,
             exists (select from ended o
                     where o.job_id = e.job_id and o.fault = 'node' and o.node_id <> e.node_id)
             or exists (select from standing_amnesties m
                        where e.ended_at >= m.started_at and e.ended_at < m.ended_at) as forgiven
      from ended e where e.fault = 'node'
    ), good as (
      select node_id, count(*) as completed from ended
      where fault is null and (end_code = 'delivered' or accepted_tokens > 0) group by node_id
    ), bad as (
      select f.node_id,
             count(*) filter (where not f.forgiven and f.ended_at > s.since) as faults,
             count(*) filter (where f.forgiven) as forgiven
      from faulty f join node_standings s using (node_id) group by f.node_id
    )
    select s.node_id, s.standing, extract(epoch from now() - s.since) as since_s,
           coalesce(g.completed, 0) as completed, coalesce(b.faults, 0) as faults, coalesce(b.forgiven, 0) as forgiven
    from node_standings s left join good g using (node_id) left join bad b using (node_id)
""")
"""Faults before the present standing began were judged with it, and do not count twice."""

_MINUTES: Final = text("""
    select extract(epoch from date_trunc('minute', ended_at))::bigint / 60 as minute,
           count(distinct node_id) filter (where fault = 'node') as failed, count(distinct node_id) as all_nodes
    from attempts where state = 'ended' and ended_at > now() - make_interval(secs => :lookback_s) group by 1
""")


class NoSuchNode(NotFound):
    """No node has this id, or it belongs to another owner."""

    code = "node_not_found"


class NoSuchAppeal(NotFound):
    """No appeal has this number."""

    code = "appeal_not_found"


class AppealOpen(Conflict):
    """The node's last appeal is not decided yet."""

    code = "appeal_open"


@dataclass(frozen=True, slots=True)
class StandingView:
    """What an owner reads about a node."""

    node_id: UUID
    name: str
    standing: Standing
    since: datetime
    record: Record
    lacks: str
    """What is missing to be proven; empty for a proven node."""
    changes: Sequence[StandingChange]
    """The last ones, newest first."""
    appeals: Sequence[Appeal]


def review(session: Session) -> int:
    """Judge every node by its window, after noting outages of ours. Returns how many changed their standing."""
    note_outages(session)
    changed = 0
    for row in session.execute(_RECORDS, {"window_s": WINDOW_S}).all():
        record = Record(int(row.completed), int(row.faults), int(row.forgiven))
        session.execute(
            update(NodeStanding)
            .where(NodeStanding.node_id == row.node_id)
            .values(completed=record.completed, faults=record.faults, forgiven=record.forgiven, judged_at=func.now())
        )
        judgement = judge(Standing(row.standing), record, since_s=float(row.since_s))
        if judgement is not None:
            _change(session, row.node_id, judgement)
            changed += 1
    session.flush()
    return changed


def note_outages(session: Session) -> int:
    """Find minutes in which so many nodes failed at once that it was us, and give an amnesty. Returns how many."""
    rows = session.execute(_MINUTES, {"lookback_s": OUTAGE_LOOKBACK.total_seconds()}).all()
    minutes = {int(row.minute): (int(row.failed), int(row.all_nodes)) for row in rows}
    new = 0
    for first, last in outages(minutes):
        began, ended = _moment(first), _moment(last + 1)
        covered = select(Amnesty.id).where(Amnesty.started_at <= began, Amnesty.ended_at >= ended)
        if session.scalars(covered).first() is None:
            reason = "Many nodes failed in the same minute: an outage of the platform."
            session.add(Amnesty(started_at=began, ended_at=ended, reason=reason))
            new += 1
    session.flush()
    return new


def show(session: Session, node_id: UUID, *, organisation_id: UUID | None = None) -> StandingView:
    """A node's standing with its reasons. Raises NoSuchNode."""
    node = _node(session, node_id, organisation_id)
    row = session.get(NodeStanding, node_id)
    if row is None:
        raise NoSuchNode(f"Node {node_id} has no standing.")
    record = Record(row.completed, row.faults, row.forgiven)
    since_s = (datetime.now(UTC) - row.since).total_seconds()
    changes = select(StandingChange).where(StandingChange.node_id == node_id).order_by(StandingChange.id.desc())
    appeals = select(Appeal).where(Appeal.node_id == node_id).order_by(Appeal.id.desc())
    return StandingView(
        node_id=node_id,
        name=node.name,
        standing=Standing(row.standing),
        since=row.since,
        record=record,
        lacks=missing(Standing(row.standing), record, since_s=since_s),
        changes=session.scalars(changes.limit(CHANGES_SHOWN)).all(),
        appeals=session.scalars(appeals.limit(CHANGES_SHOWN)).all(),
    )


def appeal(session: Session, node_id: UUID, body: str, *, organisation_id: UUID | None = None) -> Appeal:
    """The owner objects. Raises NoSuchNode, BadRequest without words or with too many, AppealOpen."""
    _node(session, node_id, organisation_id)
    if not body.strip() or len(body) > MAX_BODY_CHARACTERS:
        raise BadRequest(f"Say in 1 to {MAX_BODY_CHARACTERS} characters what was judged wrongly.", param="body")
    waiting = select(Appeal).where(Appeal.node_id == node_id, Appeal.decided_at.is_(None))
    if session.scalars(waiting.with_for_update()).first() is not None:
        raise AppealOpen("The last appeal of this node is not decided yet.")
    made = Appeal(node_id=node_id, body=body.strip())
    session.add(made)
    session.flush()
    return made


def open_appeals(session: Session) -> Sequence[Appeal]:
    """Those that wait for a decision, the oldest first."""
    return session.scalars(select(Appeal).where(Appeal.decided_at.is_(None)).order_by(Appeal.id)).all()


def decide(session: Session, appeal_id: int, *, granted: bool, answer: str) -> Appeal:
    """The operator answers. A granted appeal makes the node proven again; its old faults count no more.

    Raises NoSuchAppeal, Conflict if it was decided already.
    """
    found = session.scalars(select(Appeal).where(Appeal.id == appeal_id).with_for_update()).one_or_none()
    if found is None:
        raise NoSuchAppeal(f"There is no appeal {appeal_id}.")
    if found.decided_at is not None:
        raise Conflict(f"Appeal {appeal_id} was decided already.")
    found.decided_at, found.granted, found.answer = datetime.now(UTC), granted, answer
    if granted:
        _change(session, found.node_id, Judgement(Standing.PROVEN, f"an appeal was granted: {answer}"))
    session.flush()
    return found


def grant_amnesty(session: Session, started_at: datetime, ended_at: datetime, reason: str) -> Amnesty:
    """Faults between the two moments count against nobody. Raises BadRequest for an order or a length that makes no
    sense."""
    if not timedelta(0) < ended_at - started_at <= MAX_AMNESTY:
        raise BadRequest(f"An amnesty ends after it starts, and within {MAX_AMNESTY.days} days.")
    made = Amnesty(started_at=started_at, ended_at=ended_at, reason=reason)
    session.add(made)
    session.flush()
    return made


def _change(session: Session, node_id: UUID, judgement: Judgement) -> None:
    session.execute(
        update(NodeStanding)
        .where(NodeStanding.node_id == node_id)
        .values(standing=judgement.standing.value, since=func.now())
    )
    session.add(StandingChange(node_id=node_id, standing=judgement.standing.value, reason=judgement.reason))


def _node(session: Session, node_id: UUID, organisation_id: UUID | None) -> Node:
    node = session.get(Node, node_id)
    if node is None or organisation_id not in (None, node.organisation_id):
        raise NoSuchNode(f"There is no node {node_id}.")
    return node


def _moment(minute: int) -> Any:
    return datetime.fromtimestamp(minute * 60, UTC)
