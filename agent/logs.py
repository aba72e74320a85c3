"""Log lines of the agent: a fixed event name, then facts as key=value. Prompts and answers are never logged."""

from __future__ import annotations

import logging
import sys


def configure(level: str = "INFO") -> None:
    """Log to standard error. Unknown levels mean INFO."""
    threshold = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    logging.basicConfig(level=threshold, stream=sys.stderr, format="%(asctime)s %(levelname)-7s %(message)s")
    # Connection-level chatter of the HTTP library says nothing that our own events do not.
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
