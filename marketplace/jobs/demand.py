"""Demand that found no room, and which conversation a request belongs to: kept for statements, never for matching.

Both are notes of a gateway, written in bulk some seconds later. A gateway that dies loses its last seconds of them, so
whoever reads them speaks of what was recorded, not of everything.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, text
from sqlalchemy.orm import Mapped, Session, mapped_column

from marketplace.core.database import Base

NO_NODE = UUID(int=0)
"""Stands for the node where nobody offered the variant at all."""
SEVERAL = "SEVERAL"
"""Stands for the filter where more than one refused: relaxing one alone would not have helped."""


class RefusedMinute(Base):
    """Requests of one minute for one variant that found no room, by what kept one node from serving them.

    `filter` names the only filter that refused this node (a member of matching.types.Filter), or SEVERAL.
    """

    __tablename__ = "refused_minutes"
    __table_args__ = (CheckConstraint("requests > 0", name="requests"),)

    minute: Mapped[datetime] = mapped_column(primary_key=True)
    node_id: Mapped[UUID] = mapped_column(primary_key=True)
    """Of the node, or NO_NODE."""
    variant_id: Mapped[UUID] = mapped_column(ForeignKey("variants.id"), primary_key=True)
    filter: Mapped[str] = mapped_column(primary_key=True)
    requests: Mapped[int]
    prompt_tokens: Mapped[int]
    max_output_tokens: Mapped[int]
    highest_bid_nano_usd_per_mtok: Mapped[int | None]
    """The highest ceiling for output among them; null: none of them had a ceiling."""


class JobConversation(Base):
    """Which conversation a job belongs to. The key is a keyed hash of its first messages: equal within one renter,
    meaningless outside, and no text can be had back from it."""

    __tablename__ = "job_conversations"

    job_id: Mapped[UUID] = mapped_column(ForeignKey("jobs.id"), primary_key=True)
    conversation: Mapped[int]


@dataclass(frozen=True, slots=True, order=True)
class RefusalKey:
    """What refusals are summed by."""

    minute: datetime
    node_id: UUID
    variant_id: UUID
    filter: str


@dataclass(slots=True)
class RefusalSum:
    """Of the requests of one key."""

    requests: int = 0
    prompt_tokens: int = 0
    max_output_tokens: int = 0
    highest_bid: int | None = None

    def add(self, prompt_tokens: int, max_output_tokens: int, bid: int | None) -> None:
        """One more request."""
        self.requests += 1
        self.prompt_tokens += prompt_tokens
        self.max_output_tokens += max_output_tokens
        if bid is not None:
            self.highest_bid = max(bid, self.highest_bid or 0)


# In order of the key: gateways that write at once wait for each other and never in a circle.
_ADD_REFUSALS = text(
    """
    insert into refused_minutes as m (minute, node_id, variant_id, filter, requests, prompt_tokens, max_output_tokens,
                                      highest_bid_nano_usd_per_mtok)
    select * from unnest(cast(:minutes as timestamptz[]), cast(:nodes as uuid[]), cast(:variants as uuid[]),
                         cast(:filters as text[]), cast(:requests as bigint[]), cast(:prompts as bigint[]),
                         cast(:outputs as bigint[]), cast(:bids as bigint[]))
    on conflict (minute, node_id, variant_id, filter) do update
      set requests = m.requests + excluded.requests, prompt_tokens = m.prompt_tokens + excluded.prompt_tokens,
          max_output_tokens = m.max_output_tokens + excluded.max_output_tokens,
          highest_bid_nano_usd_per_mtok = greatest(m.highest_bid_nano_usd_per_mtok,
                                                   excluded.highest_bid_nano_usd_per_mtok)
    """
)
_ADD_CONVERSATIONS = text(
    """
    insert into job_conversations (job_id, conversation)
    select w.job_id, w.conversation
    from unnest(cast(:jobs as uuid[]), cast(:conversations as bigint[])) as w (job_id, conversation)
    where exists (select from jobs where id = w.job_id)
    on conflict (job_id) do nothing
    """
)


def add_refusals(session: Session, sums: Mapping[RefusalKey, RefusalSum]) -> None:
    """Add these sums to what is stored."""
    if not sums:
        return
    rows = sorted(sums.items(), key=lambda item: item[0])
    session.execute(
        _ADD_REFUSALS,
        {
            "minutes": [key.minute for key, _ in rows],
            "nodes": [key.node_id for key, _ in rows],
            "variants": [key.variant_id for key, _ in rows],
            "filters": [key.filter for key, _ in rows],
            "requests": [total.requests for _, total in rows],
            "prompts": [total.prompt_tokens for _, total in rows],
            "outputs": [total.max_output_tokens for _, total in rows],
            "bids": [total.highest_bid for _, total in rows],
        },
    )


def add_conversations(session: Session, conversations: Mapping[UUID, int]) -> None:
    """Note the conversation of each job. Twice is once; a job that was never admitted is left out."""
    if conversations:
        session.execute(
            _ADD_CONVERSATIONS, {"jobs": list(conversations), "conversations": list(conversations.values())}
        )
