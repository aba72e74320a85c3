from __future__ import annotations

from collections.abc import Iterator

import pytest

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.money_world import MoneyWorld, money_world


@pytest.fixture
def world(settings: Settings, session_factory: SessionFactory) -> Iterator[MoneyWorld]:
    """A platform on the stand-in Stripe; whatever a test does, both sets of books are in order after it."""
    with money_world(settings, session_factory) as made:
        yield made
        assert made.problems() == []
