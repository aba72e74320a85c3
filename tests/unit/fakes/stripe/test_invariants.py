"""The stand-in's own checks see what they are there to see."""

from __future__ import annotations

from collections.abc import Callable
from urllib.error import HTTPError
from urllib.request import urlopen

import pytest

from tests.fakes.stripe import StandInStripe, server
from tests.fakes.stripe.balances import TRANSFER
from tests.fakes.stripe.cards import CARDS
from tests.fakes.stripe.clock import Clock
from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.invariants import breaches
from tests.fakes.stripe.resources import payment_intents, payment_methods, refunds
from tests.fakes.stripe.world import Terms, World


@pytest.fixture
def world() -> World:
    """A charge of 100.00, booked, of which 30.00 were refunded."""
    world = World(seed=1, clock=Clock(), terms=Terms(settlement_days=0))
    method = payment_methods.from_card(world, world.platform, CARDS["pm_card_visa"])
    intent = payment_intents.blank_intent(
        world, world.platform, amount=10_000, currency="usd", payment_method=method["id"]
    )
    payment_intents.attempt(world, world.platform, intent)
    world.run_due()
    [charge] = world.store.every(world.platform, "charge")
    refunds.give_back(world, world.platform, charge, 3_000)
    assert breaches(world) == []
    return world


def only(world: World, kind: str) -> Json:
    return world.store.every(world.platform, kind)[0]


@pytest.mark.parametrize(
    "spoil",
    [
        lambda world: only(world, "balance_transaction").update(net=1),
        lambda world: only(world, "balance_transaction").update(status="pending"),
        lambda world: only(world, "charge").update(amount_refunded=0),
        lambda world: only(world, "refund").update(status="failed"),
        lambda world: only(world, "payment_intent").update(status="processing"),
        lambda world: only(world, "charge").update(amount=20_000),
        lambda world: world.store.drop(only(world, "balance_transaction")["id"]),
        lambda world: world.balances.post(world.platform, TRANSFER, -5, "usd", source=None),
        lambda world: world.new("po", "payout", world.platform, amount=5, currency="usd", status="paid"),
    ],
)
def test_each_breach_is_told(world: World, spoil: Callable[[World], object]) -> None:
    spoil(world)
    assert breaches(world) != []


def test_a_mistake_of_the_stand_in_is_told_apart_from_its_faults(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr(server, "answer", broken)
    with StandInStripe() as standin:
        with pytest.raises(HTTPError) as caught:
            urlopen(f"{standin.url}/v1/balance")
        assert caught.value.code == 500
        caught.value.close()
        [told] = standin.invariants()
    assert "ZeroDivisionError" in told
