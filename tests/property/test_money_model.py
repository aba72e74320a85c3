"""Money in random order, with faults and crashes, against a model. The seed is in the name of each test."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from sqlalchemy import create_engine

from marketplace.core.database import SessionFactory, make_session_factory
from marketplace.core.settings import Settings
from tests.fakes.stripe import FaultKind
from tests.money_model import RATES, SECRETS, Simulation
from tests.money_world import money_world

STEPS = 16
LONG_STEPS = 40
EASED = {
    "payout_hold_days": 0,
    "payout_hold_days_new": 0,
    "payout_reserve_days": 2,
    "payout_minimum_cents": 100,
    "payout_approval_cents": 1_500,
    "stripe_webhook_secret": SECRETS[False],
    "stripe_connect_webhook_secret": SECRETS[True],
}


@pytest.fixture
def factory(settings: Settings) -> Iterator[SessionFactory]:
    """Sessions without a ping before each: a fifth of all statements otherwise."""
    engine = create_engine(settings.sqlalchemy_url)
    yield make_session_factory(engine)
    engine.dispose()


def play(
    settings: Settings, factory: SessionFactory, seed: int, rates: dict[FaultKind, float], steps: int = STEPS
) -> None:
    with money_world(settings, factory, seed=seed, webhooks=False, **EASED) as world:
        simulation = Simulation(world, seed)
        try:
            # Nobody is paid from an empty account: what the platform itself put there.
            world.standin.top_up(100_000)
            world.standin.faults.at_random(seed, rates)
            simulation.run(steps)
            simulation.calm()
            simulation.check()
        finally:
            simulation.close()


@pytest.mark.parametrize("seed", range(1, 101))
def test_no_cent_is_lost_or_made(settings: Settings, factory: SessionFactory, seed: int) -> None:
    play(settings, factory, seed, RATES)


@pytest.mark.soak
@pytest.mark.parametrize("seed", range(101, 2_101))
def test_no_cent_is_lost_or_made_in_the_long_run(settings: Settings, factory: SessionFactory, seed: int) -> None:
    play(settings, factory, seed, RATES, LONG_STEPS)
