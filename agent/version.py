"""Which version of Fallow this is."""

from __future__ import annotations

import importlib.metadata


def version() -> str:
    """The installed distribution's version."""
    return importlib.metadata.version("fallow")
