"""What commands take as an argument: ids as we show them, inside and outside."""

from __future__ import annotations

from uuid import UUID

import typer


def node_id(text: str) -> UUID:
    """A node's id, as `fallow node list` or the API shows it. Raises BadParameter."""
    return _id("node", text, "`fallow node list` shows them.")


def key_id(text: str) -> UUID:
    """A key's id, as `fallow key list` or the API shows it. Raises BadParameter."""
    return _id("key", text, "`fallow key list ORGANISATION` shows them.")


def _id(prefix: str, text: str, where: str) -> UUID:
    try:
        return UUID(text.removeprefix(f"{prefix}_"))
    except ValueError:
        raise typer.BadParameter(f"{text[:80]!r} is no {prefix}'s id. {where}") from None
