"""Log lines of the agent: a fixed event name, then facts as key=value. Prompts and answers are never logged."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any


class Formatter(logging.Formatter):
    """Tells of an exception its class and its place in the code: its words may be a stranger's prompt."""

    def formatException(self, ei: Any) -> str:  # noqa: N802 - the library's name
        """Called by logging."""
        _, error, trace = ei
        places = "".join(
            f"  {place.filename}:{place.lineno} in {place.name}\n" for place in traceback.extract_tb(trace)
        )
        return f"{places}{type(error).__name__}{f': {error}' if isinstance(error, OSError) else ''}"


def configure(level: str = "INFO") -> None:
    """Log to standard error. Unknown levels mean INFO."""
    threshold = logging.getLevelNamesMapping().get(level.upper(), logging.INFO)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(Formatter("%(asctime)s %(levelname)-7s %(message)s"))
    logging.basicConfig(level=threshold, handlers=[handler])
    # Connection-level chatter of the HTTP library says nothing that our own events do not.
    logging.getLogger("aiohttp").setLevel(logging.WARNING)
    logging.getLogger("asyncio").setLevel(logging.WARNING)
