"""The stand-in's time, and what falls due in it."""

from __future__ import annotations

import pytest

from tests.fakes.stripe.clock import Clock, midnight
from tests.fakes.stripe.world import Terms, World


def test_the_clock_stands_still_until_it_is_moved() -> None:
    clock = Clock(1_000)
    assert clock.now() == 1_000
    assert clock.advance(5, hours=1, days=1) == 1_000 + 5 + 3_600 + 86_400


def test_it_never_runs_back() -> None:
    with pytest.raises(ValueError, match="forward"):
        Clock().advance(-1)


def test_what_falls_due_on_the_way_happens_in_its_order_and_at_its_time() -> None:
    clock = Clock(0)
    world = World(seed=1, clock=clock, terms=Terms())
    seen: list[tuple[str, int]] = []
    world.schedule(20, lambda: seen.append(("late", clock.now())))
    world.schedule(10, lambda: seen.append(("early", clock.now())))
    world.schedule(10, lambda: world.schedule(15, lambda: seen.append(("planned on the way", clock.now()))))
    world.schedule(31, lambda: seen.append(("not yet", clock.now())))
    clock.advance(30)
    assert seen == [("early", 10), ("planned on the way", 15), ("late", 20)]
    assert clock.now() == 30


def test_money_is_available_at_midnight_some_days_on() -> None:
    clock = Clock(midnight(1_767_603_600) + 3_600)
    world = World(seed=1, clock=clock, terms=Terms())
    assert world.later(2) == midnight(clock.now()) + 2 * 86_400
    assert world.later(0) == clock.now()


def test_the_same_seed_gives_the_same_ids() -> None:
    def drawn(seed: int) -> list[str]:
        world = World(seed=seed, clock=Clock(), terms=Terms())
        return [world.secret_key, *(world.ids.new(prefix) for prefix in ("pi", "cs", "acct"))]

    assert drawn(7) == drawn(7)
    assert drawn(7) != drawn(8)
    assert drawn(7)[2].startswith("cs_test_")
