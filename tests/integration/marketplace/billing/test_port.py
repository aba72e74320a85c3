"""One contract, two adapters: what the platform may rely on, on the sandbox and on Stripe's stand-in."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from marketplace.billing.payments import port
from marketplace.billing.payments.sandbox import Sandbox
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from tests.money_world import MoneyWorld, money_world

LONG_AGO = datetime(2020, 1, 1, tzinfo=UTC)


class Bench:
    """An adapter, and what stands in for the people outside."""

    def __init__(self, payments: port.Payments, world: MoneyWorld | None) -> None:
        self.payments = payments
        self._world = world

    def account(self, reference: str) -> str:
        view = self.payments.send(
            port.AccountWish(reference=reference, country="US", email=None), f"account {reference}"
        )
        assert isinstance(view, port.AccountView)
        if self._world is not None:
            self._world.standin.onboard(view.account_id)
        return view.account_id

    def pay(self, reference: str, amount: int) -> port.PaymentView:
        wish = port.CheckoutWish(
            reference=reference,
            amount=amount,
            currency="usd",
            customer=None,
            save_card=True,
            success_url="http://localhost/",
            cancel_url="http://localhost/",
            description="credit",
        )
        view = self.payments.send(wish, f"checkout {reference}")
        assert isinstance(view, port.CheckoutView)
        if self._world is not None:
            self._world.standin.pay(view.session_id, "pm_card_bypassPending")
        session = self.payments.fetch("checkout", view.session_id)
        assert isinstance(session, port.CheckoutView)
        assert session.payment_id is not None
        payment = self.payments.fetch("payment", session.payment_id)
        assert isinstance(payment, port.PaymentView)
        return payment


@pytest.fixture(params=["sandbox", "stripe"])
def bench(request: pytest.FixtureRequest, settings: Settings, session_factory: SessionFactory) -> Iterator[Bench]:
    if request.param == "sandbox":
        yield Bench(Sandbox(session_factory), None)
        return
    with money_world(settings, session_factory, webhooks=False) as world:
        yield Bench(world.payments, world)


def ref(number: int) -> str:
    return f"{number:032x}"


class TestWishes:
    def test_of_one_key_are_granted_once(self, bench: Bench) -> None:
        bench.pay(ref(1), 50_000)
        account = bench.account(ref(2))
        wish = port.TransferWish(reference=ref(3), amount=10_000, currency="usd", account=account, group=ref(3))
        first = bench.payments.send(wish, "one key")
        assert bench.payments.send(wish, "one key") == first
        assert bench.payments.find(wish, LONG_AGO) == first
        assert bench.payments.funds(account).total == 10_000

    def test_that_nobody_sent_are_not_found(self, bench: Bench) -> None:
        account = bench.account(ref(2))
        for wish in (
            port.TransferWish(reference=ref(3), amount=100, currency="usd", account=account, group=ref(3)),
            port.PayoutWish(reference=ref(4), amount=100, currency="usd", account=account),
            port.AccountWish(reference=ref(5), country="US", email=None),
        ):
            assert bench.payments.find(wish, LONG_AGO) is None

    def test_beyond_the_balance_are_declined_for_good(self, bench: Bench) -> None:
        account = bench.account(ref(2))
        wish = port.TransferWish(reference=ref(3), amount=100, currency="usd", account=account, group=ref(3))
        with pytest.raises(port.Declined) as declined:
            bench.payments.send(wish, "one key")
        assert declined.value.reason == "balance_insufficient"

    def test_of_every_kind_are_found_again_by_their_reference(self, bench: Bench) -> None:
        payment = bench.pay(ref(1), 50_000)
        account = bench.account(ref(2))
        transfer = port.TransferWish(reference=ref(3), amount=10_000, currency="usd", account=account, group=ref(3))
        moved = bench.payments.send(transfer, "t")
        assert isinstance(moved, port.TransferView)
        assert payment.customer is not None
        assert payment.payment_method is not None
        wishes: list[port.AnyWish] = [
            port.RefundWish(reference=ref(4), payment=payment.payment_id, amount=500),
            port.PayoutWish(reference=ref(5), amount=4_000, currency="usd", account=account),
            port.ReversalWish(reference=ref(6), transfer=moved.transfer_id, amount=6_000),
        ]
        if bench.payments.name == "stripe":
            wishes.append(
                port.ChargeWish(
                    reference=ref(7),
                    amount=700,
                    currency="usd",
                    customer=payment.customer,
                    payment_method=payment.payment_method,
                    description="credit",
                )
            )
        for number, wish in enumerate(wishes):
            made = bench.payments.send(wish, f"key {number}")
            found = bench.payments.find(wish, LONG_AGO)
            assert type(found) is type(made)
            assert found.reference == wish.reference  # type: ignore[union-attr]
        assert bench.payments.funds(account).total == 0


class TestBooks:
    def test_sum_to_the_balance_on_both_sides(self, bench: Bench) -> None:
        bench.pay(ref(1), 50_000)
        account = bench.account(ref(2))
        wish = port.TransferWish(reference=ref(3), amount=10_000, currency="usd", account=account, group=ref(3))
        bench.payments.send(wish, "t")
        for each in ("", account):
            lines = list(bench.payments.lines(LONG_AGO, each))
            assert sum(line.net for line in lines) == bench.payments.funds(each).total
            assert all(line.net == line.amount - line.fee for line in lines)
        assert list(bench.payments.lines(datetime.now(UTC) + timedelta(days=365))) == []


class TestObjects:
    @pytest.mark.parametrize("kind", ["checkout", "payment", "refund", "dispute", "account", "transfer", "payout"])
    def test_that_do_not_exist_are_said_to_be_unknown(self, bench: Bench, kind: port.ObjectKind) -> None:
        with pytest.raises(port.PaymentError):
            bench.payments.fetch(kind, "nothing_like_this")
