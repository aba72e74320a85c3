"""How busy an offer is, from incomplete sources."""

from __future__ import annotations

from uuid import uuid4

import pytest

from marketplace.fleet.occupancy import FRESH_S, Occupancy

OFFER = uuid4()


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def occupancy(clock: Clock) -> Occupancy:
    return Occupancy(clock)


def test_an_own_reservation_shows_at_once_and_goes_at_once(occupancy: Occupancy) -> None:
    attempt = uuid4()
    occupancy.take(OFFER, attempt, 15.0)
    occupancy.take(OFFER, attempt, 15.0)
    assert occupancy.busy(OFFER) == 1
    occupancy.drop(OFFER, attempt)
    occupancy.drop(OFFER, attempt)
    assert occupancy.busy(OFFER) == 0


def test_other_gateways_attempts_on_own_nodes_add_up(occupancy: Occupancy) -> None:
    occupancy.take(OFFER, uuid4(), 15.0)
    occupancy.foreign(OFFER, 2)
    assert occupancy.busy(OFFER) == 3


def test_a_published_count_includes_own_ones(occupancy: Occupancy) -> None:
    occupancy.take(OFFER, uuid4(), 15.0)
    occupancy.published(OFFER, 3)
    assert occupancy.busy(OFFER) == 3
    occupancy.published(OFFER, 0)
    assert occupancy.busy(OFFER) == 1


def test_a_fresh_count_counts_and_follows_own_moves_until_it_is_old(occupancy: Occupancy, clock: Clock) -> None:
    occupancy.seen(OFFER, 4)
    attempt = uuid4()
    occupancy.take(OFFER, attempt, 15.0)
    assert occupancy.busy(OFFER) == 5
    occupancy.drop(OFFER, attempt)
    assert occupancy.busy(OFFER) == 4
    clock.now += FRESH_S
    assert occupancy.busy(OFFER) == 0


def test_a_forgotten_reservation_ends_by_itself(occupancy: Occupancy, clock: Clock) -> None:
    occupancy.take(OFFER, uuid4(), 15.0)
    kept = uuid4()
    occupancy.take(OFFER, kept, 15.0)
    clock.now += 10.0
    occupancy.take(OFFER, kept, 15.0)
    clock.now += 5.0
    occupancy.sweep()
    assert occupancy.busy(OFFER) == 1
