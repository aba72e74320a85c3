"""Receipts are signed by their node; a signature is kept only where it proves something.

It covers the counts and a hash of the whole text, so it is checked while the text is still at hand. A signature that
does not fit (an attempt that was cut, an agent that signs wrongly) is not kept; it changes nothing about the bill.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Sequence
from typing import Final
from uuid import UUID

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey
from sqlalchemy.exc import SQLAlchemyError

from agent.protocol import Finished, Tokens, receipt_payload, signed_reason
from marketplace.core.database import SessionFactory
from marketplace.fleet.repository import find_node

MAX_KEYS: Final = 10_000
SIGNATURE_BYTES: Final = 64


class ReceiptSignatures:
    """Checks signatures; remembers nodes' keys, which never change. One event loop."""

    def __init__(self, session_factory: SessionFactory) -> None:
        self._session_factory = session_factory
        self._keys: OrderedDict[UUID, Ed25519PublicKey] = OrderedDict()

    async def proven(
        self, node_id: UUID, report: Finished, pieces: Sequence[Tokens], vectors: bytes = b""
    ) -> bytes | None:
        """The report's signature if it is the node's own, over exactly these pieces, or these vectors; else None."""
        if len(report.signature) != SIGNATURE_BYTES:
            return None
        key = self._keys.get(node_id) or await self._fetch(node_id)
        if key is None:
            return None
        digest = hashlib.sha256("".join([piece.text for piece in pieces]).encode() + vectors).digest()
        signed = signed_reason(report.finish_reason, report.finish_reasons)
        payload = receipt_payload(report.attempt, report.epoch, report.sequence, signed, report.usage, digest)
        try:
            key.verify(report.signature, payload)
        except InvalidSignature:
            return None
        return report.signature

    async def _fetch(self, node_id: UUID) -> Ed25519PublicKey | None:
        try:
            key = await asyncio.to_thread(self._load, node_id)
        except SQLAlchemyError:
            return None
        if key is not None:
            self._keys[node_id] = key
            if len(self._keys) > MAX_KEYS:
                self._keys.popitem(last=False)
        return key

    def _load(self, node_id: UUID) -> Ed25519PublicKey | None:
        with self._session_factory() as session:
            node = find_node(session, node_id)
        return Ed25519PublicKey.from_public_bytes(node.public_key) if node is not None else None
