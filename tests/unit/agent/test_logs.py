"""The agent's log lines."""

from __future__ import annotations

import logging
import sys

from agent.logs import Formatter


class TestAnException:
    def test_is_told_by_class_and_place(self) -> None:
        try:
            raise KeyError("what a renter said")
        except KeyError:
            record = logging.LogRecord("x", logging.ERROR, "f", 1, "work_broke", (), sys.exc_info())
        told = Formatter("%(message)s").format(record)
        assert told.startswith("work_broke\n")
        assert "in test_is_told_by_class_and_place" in told
        assert told.endswith("KeyError")
