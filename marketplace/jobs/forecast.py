"""What is asked of each variant, out of rows: what was served of late, what found no room, what waits in the queue.

The coming half hour is taken to be like the last. Notes of refusals are a gateway's, one for each node that refused, so
of one minute the node that refused most says how many requests there were; a client that tries again counts again.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final
from uuid import UUID

from sqlalchemy import text
from sqlalchemy.orm import Session

from marketplace.jobs.demand import NO_NODE
from marketplace.matching.types import Filter

WINDOW_S: Final = 1_800.0
USUAL_OUTPUT_TOKENS: Final = 256
"""Of a request for a variant that was never served: most answers are far shorter than their bound."""
CAPACITY: Final = tuple(
    found.name
    for found in (
        *(Filter.VARIANT, Filter.FULL, Filter.RESERVED, Filter.UNAVAILABLE, Filter.STALE),
        *(Filter.BREAKER, Filter.MEMORY, Filter.PROBATION),
    )
)
"""Refusals that another warm engine would have cured."""


@dataclass(frozen=True, slots=True)
class Asked:
    """Of one variant, in the window."""

    variant_id: UUID
    model: str
    answers: int = 0
    served_tokens: int = 0
    """Of output."""
    charged_nano: int = 0
    refused: int = 0
    refused_bound_tokens: int = 0
    """Sum of the bounds that refused requests set for their output."""
    queued: int = 0
    queued_bound_tokens: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Output tokens a second of everything that was asked."""
        served = self.served_tokens + self._likely(self.refused, self.refused_bound_tokens)
        return (served + self._likely(self.queued, self.queued_bound_tokens)) / WINDOW_S

    @property
    def nano_per_token(self) -> float | None:
        """What an output token earned, its prompt's share included; None where none was sold."""
        return self.charged_nano / self.served_tokens if self.served_tokens and self.charged_nano else None

    def _likely(self, requests: int, bound_tokens: int) -> float:
        usual = self.served_tokens / self.answers if self.answers else USUAL_OUTPUT_TOKENS
        return min(bound_tokens, requests * usual)


_ASKED = text(
    """
    with served as (
      select variant_id, count(*) as answers, sum(output_visible_tokens + output_reasoning_tokens) as tokens,
             sum(charge_nano) as nano
      from receipts where at > now() - make_interval(secs => :window) group by variant_id
    ), minutes as (
      select variant_id, minute, max(requests) as requests, max(max_output_tokens) as tokens
      from refused_minutes
      where minute > now() - make_interval(secs => :window)
        and (filter = any(:capacity) or node_id = :nowhere)
      group by variant_id, minute
    ), refused as (
      select variant_id, sum(requests) as requests, sum(tokens) as tokens from minutes group by variant_id
    ), queued as (
      select variant_id, count(*) as requests, sum(max_output_tokens) as tokens
      from jobs where state = 'queued' group by variant_id
    )
    select v.id, v.model_id, s.answers, s.tokens, s.nano, r.requests, r.tokens, q.requests, q.tokens
    from variants v
    left join served s on s.variant_id = v.id
    left join refused r on r.variant_id = v.id
    left join queued q on q.variant_id = v.id
    order by v.id
    """
)


def asked(session: Session) -> list[Asked]:
    """Every variant of the catalogue, with what was asked of it."""
    rows = session.execute(_ASKED, {"window": WINDOW_S, "capacity": list(CAPACITY), "nowhere": NO_NODE})
    return [Asked(row[0], row[1], *(int(value or 0) for value in row[2:])) for row in rows]
