"""A month of the stand-in Stripe with one fault all the time: at its end both books agree, line by line."""

from __future__ import annotations

import pytest

from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.fakes.stripe import FaultKind
from tests.money_model import Simulation
from tests.money_world import money_world
from tests.property.test_money_model import EASED

FAULTS = [kind for kind in FaultKind if kind not in (FaultKind.PAUSED, FaultKind.PAUSED_ANSWER)]
DAYS = 30
RATE = 0.2


class Month:
    """Every other day renters pay and spend; each day what is due is done and both books are compared; each week owners
    are paid."""

    def __init__(self, simulation: Simulation) -> None:
        self.simulation = simulation
        self.ages: list[int] = []

    def day(self, number: int) -> None:
        simulation, world = self.simulation, self.simulation.world
        for act in (simulation.top_up, simulation.spend, simulation.drive, simulation.listen)[number % 2 * 2 :]:
            with simulation.mortal():
                act()
        if number % 7 == 0:
            for act in (simulation.pay_out, simulation.decide, simulation.decide, simulation.drive):
                with simulation.mortal():
                    act()
        if number % 5 == 0:
            with simulation.mortal():
                simulation.refund()
        world.days(1)
        with simulation.mortal():
            self.ages.append(len(world.reconcile().breaks))


def month(settings: Settings, factory: SessionFactory, seed: int, rates: dict[FaultKind, float], drop: float) -> None:
    with money_world(settings, factory, seed=seed, webhooks=False, **EASED) as world:
        simulation = Simulation(world, seed, crash_rate=0.0, drop_rate=drop)
        try:
            world.standin.top_up(100_000)
            simulation.run(0)
            world.standin.faults.at_random(seed, rates)
            running = Month(simulation)
            for number in range(DAYS):
                running.day(number)
            simulation.calm()
            simulation.check()
            assert running.ages, "no day was reconciled"
        finally:
            simulation.close()


@pytest.mark.parametrize("kind", FAULTS, ids=lambda kind: kind.name)
def test_a_month_of_a_fault_reconciles(settings: Settings, session_factory: SessionFactory, kind: FaultKind) -> None:
    slow = kind in (FaultKind.SLOW, FaultKind.SLOW_ANSWER)
    month(settings, session_factory, 1, {kind: 0.02 if slow else RATE}, drop=0.05)


def test_a_month_without_any_event_reconciles(settings: Settings, session_factory: SessionFactory) -> None:
    month(settings, session_factory, 2, {}, drop=1.0)
