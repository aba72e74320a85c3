"""Signatures of the Standard Webhooks scheme (standardwebhooks.com): HMAC-SHA256 over id, moment and body."""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
from collections.abc import Sequence
from typing import Final
from uuid import UUID

SECRET_BYTES: Final = 32
SECRET_PREFIX: Final = "whsec_"  # noqa: S105  # the scheme's mark, no secret


def new_secret() -> bytes:
    """Random."""
    return secrets.token_bytes(SECRET_BYTES)


def show_secret(secret: bytes) -> str:
    """As a renter keeps it, and as the scheme's libraries read it."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()


def signed_headers(delivery_id: UUID, sent_at_s: int, body: bytes, keys: Sequence[bytes]) -> dict[str, str]:
    """The scheme's three headers, with a signature by each key. `sent_at_s` is Unix time."""
    name = f"msg_{delivery_id.hex}"
    return {
        "webhook-id": name,
        "webhook-timestamp": str(sent_at_s),
        "webhook-signature": " ".join(signature(name, sent_at_s, body, key) for key in keys),
    }


def signature(name: str, sent_at_s: int, body: bytes, key: bytes) -> str:
    """One signature, with the scheme's version before it."""
    content = f"{name}.{sent_at_s}.".encode() + body
    return f"v1,{base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()}"
