"""What the gateway notes for statements: demand that found no room, and which conversation a job belongs to.

Noting costs a few microseconds and never waits. A task writes the sums every few seconds, in a thread; what cannot be
written is tried again, up to a bound, and then left out: no request ever depends on it.
"""

from __future__ import annotations

import asyncio
import hashlib
import secrets
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any, Final
from uuid import UUID

from sqlalchemy.exc import SQLAlchemyError

from marketplace.core.database import SessionFactory, transaction
from marketplace.core.logs import get_logger
from marketplace.jobs.demand import (
    NO_NODE,
    SEVERAL,
    RefusalKey,
    RefusalSum,
    add_conversations,
    add_refusals,
)
from marketplace.matching.rank import Rules, refusals_of
from marketplace.matching.types import Demand, OfferView

log = get_logger(__name__)
FLUSH_S: Final = 5.0
MAX_SUMS: Final = 20_000
MAX_CONVERSATIONS: Final = 50_000
MAX_OFFERS: Final = 128
"""Offers looked at for one refusal."""


class DemandNotes:
    """Notes of one gateway. One event loop."""

    def __init__(self, session_factory: SessionFactory, secret: bytes) -> None:
        self._session_factory = session_factory
        # Without a secret of its own a deployment gets keys that last as long as the process: later calls of a
        # conversation then look new, rather than anybody being able to guess at texts.
        self._key = hashlib.sha256(b"fallow-conversation\0" + (secret or secrets.token_bytes(32))).digest()
        self._refusals: dict[RefusalKey, RefusalSum] = {}
        self._conversations: dict[UUID, int] = {}
        self._dropped = 0
        self._task: asyncio.Task[None] | None = None

    def refused(
        self, demand: Demand, offers: Sequence[OfferView], *, rules: Rules, resting: frozenset[UUID] = frozenset()
    ) -> None:
        """A request found no room among these offers of its variant."""
        minute = datetime.now(UTC).replace(second=0, microsecond=0)
        bid = None if demand.ceiling is None else demand.ceiling.output
        reasons: dict[UUID, str] = {}
        for offer in offers[:MAX_OFFERS]:
            found = refusals_of(offer, demand, rules, resting)
            # An offer that nothing refused was taken by a simultaneous request.
            reason = "RESERVED" if not found else found[0].name if len(found) == 1 else SEVERAL
            if reasons.get(offer.node_id, SEVERAL) == SEVERAL:
                reasons[offer.node_id] = reason
        for node_id, reason in (reasons or {NO_NODE: "VARIANT"}).items():
            key = RefusalKey(minute, node_id, demand.variant_id, reason)
            total = self._refusals.get(key)
            if total is None:
                if len(self._refusals) >= MAX_SUMS:
                    self._dropped += 1
                    continue
                total = self._refusals[key] = RefusalSum()
            total.add(demand.prompt_tokens, demand.all_output_tokens, bid)

    def conversation(self, job_id: UUID, organisation_id: UUID, messages: Iterable[Mapping[str, Any]]) -> None:
        """An admitted job belongs to the conversation that begins with these messages."""
        if len(self._conversations) >= MAX_CONVERSATIONS:
            self._dropped += 1
            return
        self._conversations[job_id] = self._fingerprint(organisation_id, messages)

    def _fingerprint(self, organisation_id: UUID, messages: Iterable[Mapping[str, Any]]) -> int:
        """Of everything up to the first message of the user: what each later call of a conversation repeats."""
        hashed = hashlib.blake2b(organisation_id.bytes, key=self._key, digest_size=8)
        for message in messages:
            hashed.update(f"\0{message.get('role')}\0{message.get('content')}".encode("utf-8", "replace"))
            if message.get("role") == "user":
                break
        return int.from_bytes(hashed.digest(), "big", signed=True)

    # --- writing --------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """Write every few seconds from now on."""
        self._task = asyncio.create_task(self._run())

    async def stop(self) -> None:
        """Write what is left."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        await self.flush()

    async def flush(self) -> None:
        """Write what was noted. What cannot be written is kept for the next time, as far as there is room."""
        refusals, self._refusals = self._refusals, {}
        conversations, self._conversations = self._conversations, {}
        dropped, self._dropped = self._dropped, 0
        if dropped:
            log.warning("demand_notes_dropped", notes=dropped)
        if not refusals and not conversations:
            return
        try:
            await asyncio.to_thread(self._write, refusals, conversations)
        except (SQLAlchemyError, OSError) as error:
            log.warning("demand_notes_not_written", error=type(error).__name__)
            self._conversations = {**conversations, **self._conversations}
            for key, total in refusals.items():
                newer = self._refusals.setdefault(key, RefusalSum())
                newer.requests += total.requests
                newer.prompt_tokens += total.prompt_tokens
                newer.max_output_tokens += total.max_output_tokens
                if total.highest_bid is not None:
                    newer.highest_bid = max(total.highest_bid, newer.highest_bid or 0)

    def _write(self, refusals: Mapping[RefusalKey, RefusalSum], conversations: Mapping[UUID, int]) -> None:
        with transaction(self._session_factory) as session:
            add_refusals(session, refusals)
            add_conversations(session, conversations)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(FLUSH_S)
            await self.flush()
