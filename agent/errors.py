"""What the owner is told when something that he set cannot be used."""

from __future__ import annotations


class ConfigError(Exception):
    """The configuration cannot be used; the message is a sentence for the owner."""
