"""API keys as text: how one is made, hashed and recognised. Pure."""

from __future__ import annotations

import hashlib
import re
import secrets
from typing import Final

PREFIX: Final = "sk-fallow-"
SHOWN_CHARACTERS: Final = len(PREFIX) + 6
"""How much of a key a list shows: enough to recognise it, useless to guess it."""
_SECRET_BYTES: Final = 32
_SHAPE: Final = re.compile(re.escape(PREFIX) + r"[A-Za-z0-9_-]{43}")


def new_secret() -> str:
    """A fresh key: the prefix and 256 random bits in URL-safe base64. It is shown once and never stored."""
    return PREFIX + secrets.token_urlsafe(_SECRET_BYTES)


def digest(secret: str) -> bytes:
    """What is stored and looked up instead of the key. The key is random, so a slow hash would add nothing."""
    return hashlib.sha256(secret.encode()).digest()


def well_formed(secret: str) -> bool:
    """True if this can be a key at all; anything else is refused without asking the database."""
    return _SHAPE.fullmatch(secret) is not None


def shown(secret: str) -> str:
    """The part of a key that may be displayed."""
    return secret[:SHOWN_CHARACTERS]
