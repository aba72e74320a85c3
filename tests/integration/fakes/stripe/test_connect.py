"""Connected accounts, transfers, payouts and balances: with the official client."""

from __future__ import annotations

from typing import Any
from urllib.request import Request, urlopen

import pytest
import stripe

from tests.fakes.stripe import StandInStripe
from tests.integration.fakes.stripe.conftest import Charging

NEW_ACCOUNT: Any = {"type": "express", "country": "DE", "capabilities": {"transfers": {"requested": True}}}


def types(standin: StandInStripe, account: str) -> list[str]:
    return [event["type"] for event in standin.events(account=account)]


class TestOnboarding:
    def test_a_new_account_can_do_nothing_and_says_what_it_lacks(self, client: stripe.StripeClient) -> None:
        account = client.v1.accounts.create({**NEW_ACCOUNT, "metadata": {"organisation": "42"}})
        assert (account.charges_enabled, account.payouts_enabled, account.details_submitted) == (False, False, False)
        assert account.default_currency == "eur"
        assert account.requirements is not None
        assert "external_account" in (account.requirements.currently_due or [])
        assert account.requirements.disabled_reason == "requirements.past_due"
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.transfers.create({"amount": 100, "currency": "eur", "destination": account.id})
        assert caught.value.code == "insufficient_capabilities_for_transfer"

    def test_submitted_then_verified_then_restricted_then_mended(
        self, client: stripe.StripeClient, standin: StandInStripe
    ) -> None:
        account = client.v1.accounts.create(NEW_ACCOUNT)
        states = []
        for step in (
            lambda: standin.onboard(account.id, verified=False),
            lambda: standin.verify(account.id),
            lambda: standin.require(account.id, "individual.verification.document", past=False),
            lambda: standin.require(account.id, "individual.verification.document"),
            lambda: standin.verify(account.id),
            lambda: standin.reject(account.id),
        ):
            step()
            read = client.v1.accounts.retrieve(account.id)
            assert read.requirements is not None
            assert read.capabilities is not None
            states.append((read.payouts_enabled, read.capabilities.transfers, read.requirements.disabled_reason))
        assert states == [
            (False, "pending", "requirements.pending_verification"),
            (True, "active", None),
            (True, "active", None),
            (False, "inactive", "requirements.past_due"),
            (True, "active", None),
            (False, "inactive", "rejected.fraud"),
        ]
        assert types(standin, account.id).count("account.updated") == 6
        assert standin.events("account.updated", account.id)[0]["account"] == account.id

    def test_the_hosted_page_works_once_and_sends_late_comers_back(
        self, client: stripe.StripeClient, standin: StandInStripe
    ) -> None:
        account = client.v1.accounts.create(NEW_ACCOUNT)

        def link() -> str:
            return client.v1.account_links.create(
                {
                    "account": account.id,
                    "type": "account_onboarding",
                    "refresh_url": f"{standin.url}/v1/refresh",
                    "return_url": f"{standin.url}/v1/return",
                }
            ).url

        def visited(request: str | Request) -> str:
            try:
                with urlopen(request) as answer:
                    return str(answer.url)
            except OSError as error:
                return str(error.url)  # type: ignore[attr-defined]

        url = link()
        assert visited(url) == url
        assert visited(Request(url, data=b"outcome=verified", method="POST")).endswith("/return")
        assert client.v1.accounts.retrieve(account.id).payouts_enabled
        assert visited(url).endswith("/refresh")
        late = link()
        standin.clock.advance(301)
        assert visited(late).endswith("/refresh")

    def test_login_links_need_a_finished_onboarding(self, client: stripe.StripeClient, owner: str) -> None:
        assert client.v1.accounts.login_links.create(owner).url.startswith("http")
        fresh = client.v1.accounts.create(NEW_ACCOUNT)
        with pytest.raises(stripe.InvalidRequestError, match="onboarding"):
            client.v1.accounts.login_links.create(fresh.id)

    def test_accounts_are_changed_listed_and_deleted(self, client: stripe.StripeClient, owner: str) -> None:
        changed = client.v1.accounts.update(
            owner, {"metadata": {"a": "1"}, "settings": {"payouts": {"schedule": {"interval": "weekly"}}}}
        )
        assert changed.to_dict()["settings"]["payouts"]["schedule"]["weekly_anchor"] == "monday"
        assert [each.id for each in client.v1.accounts.list().data] == [owner]
        assert client.v1.accounts.delete(owner).deleted
        with pytest.raises(stripe.PermissionError):
            client.v1.balance.retrieve(options={"stripe_account": owner})

    def test_the_platforms_key_does_not_open_other_accounts(self, client: stripe.StripeClient) -> None:
        with pytest.raises(stripe.PermissionError) as caught:
            client.v1.balance.retrieve(options={"stripe_account": "acct_foreign"})
        assert caught.value.http_status == 403


class TestTransfers:
    def test_money_moves_and_both_sides_show_it(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(50_000)
        transfer = client.v1.transfers.create(
            {
                "amount": 12_345,
                "currency": "usd",
                "destination": owner,
                "transfer_group": "run 1",
                "metadata": {"payout": "3"},
                "expand": ["balance_transaction", "destination_payment"],
            }
        )
        assert isinstance(transfer.balance_transaction, stripe.BalanceTransaction)
        assert (transfer.balance_transaction.type, transfer.balance_transaction.net) == ("transfer", -12_345)
        assert isinstance(transfer.destination_payment, stripe.Charge)
        assert transfer.destination_payment.source_transfer == transfer.id
        assert (standin.balance()[0], standin.balance(account=owner)[0]) == (37_655, 12_345)
        assert [each.id for each in client.v1.transfers.list({"transfer_group": "run 1"}).data] == [transfer.id]
        assert client.v1.transfers.list({"transfer_group": "run 2"}).data == []
        seen = client.v1.balance_transactions.list(options={"stripe_account": owner}).data
        assert [(line.type, line.amount) for line in seen] == [("payment", 12_345)]

    def test_pending_money_cannot_be_transferred_unless_it_is_named(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str, charge: Charging
    ) -> None:
        intent = charge(10_000)
        params: Any = {"amount": 9_000, "currency": "usd", "destination": owner}
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.transfers.create(params)
        assert caught.value.code == "balance_insufficient"
        client.v1.transfers.create({**params, "source_transaction": str(intent.latest_charge)})
        assert standin.balance(account=owner) == (0, 9_000)
        with pytest.raises(stripe.InvalidRequestError, match="exceed the source"):
            client.v1.transfers.create({**params, "source_transaction": str(intent.latest_charge)})
        standin.clock.advance(days=2)
        assert standin.balance(account=owner) == (9_000, 0)

    def test_reversed_in_parts_and_never_too_much(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(50_000)
        transfer = client.v1.transfers.create({"amount": 10_000, "currency": "usd", "destination": owner})
        client.v1.transfers.reversals.create(transfer.id, {"amount": 4_000, "metadata": {"why": "refund"}})
        with pytest.raises(stripe.InvalidRequestError, match="greater than unreversed"):
            client.v1.transfers.reversals.create(transfer.id, {"amount": 6_001})
        rest = client.v1.transfers.reversals.create(transfer.id)
        read = client.v1.transfers.retrieve(transfer.id)
        assert (rest.amount, read.amount_reversed, read.reversed) == (6_000, 10_000, True)
        assert [each.amount for each in read.reversals.data] == [6_000, 4_000]
        assert client.v1.transfers.reversals.retrieve(transfer.id, rest.id).amount == 6_000
        assert len(client.v1.transfers.reversals.list(transfer.id).data) == 2
        assert standin.balance()[0] == 50_000
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.transfers.reversals.create(transfer.id)
        assert caught.value.code == "transfer_already_reversed"

    def test_what_the_owner_has_spent_cannot_be_reversed(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(50_000)
        transfer = client.v1.transfers.create({"amount": 10_000, "currency": "usd", "destination": owner})
        client.v1.payouts.create({"amount": 9_000, "currency": "usd"}, {"stripe_account": owner})
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.transfers.reversals.create(transfer.id)
        assert caught.value.code == "balance_insufficient"

    def test_an_owner_below_zero_binds_the_platforms_money(
        self, client: stripe.StripeClient, standin: StandInStripe, owner: str
    ) -> None:
        standin.top_up(10_000)
        standin.adjust(-4_000, account=owner, why="a debit of Stripe's own")
        balance = client.v1.balance.retrieve()
        assert balance.available[0].amount == 6_000
        assert balance.connect_reserved is not None
        assert balance.connect_reserved[0].amount == 4_000
        theirs = client.v1.balance.retrieve(options={"stripe_account": owner})
        assert theirs.available[0].amount == -4_000
        with pytest.raises(stripe.InvalidRequestError):
            client.v1.transfers.create({"amount": 6_001, "currency": "usd", "destination": owner})
        client.v1.transfers.create({"amount": 5_000, "currency": "usd", "destination": owner})
        assert standin.balance(account=owner)[0] == 1_000

    def test_an_unknown_destination_is_named(self, client: stripe.StripeClient) -> None:
        with pytest.raises(stripe.InvalidRequestError, match="No such destination") as caught:
            client.v1.transfers.create({"amount": 100, "currency": "usd", "destination": "acct_none"})
        assert caught.value.param == "destination"


class TestPayouts:
    @pytest.fixture
    def funded(self, client: stripe.StripeClient, standin: StandInStripe, owner: str) -> str:
        standin.top_up(50_000)
        client.v1.transfers.create({"amount": 10_000, "currency": "usd", "destination": owner})
        return owner

    def test_paid_on_its_day(self, client: stripe.StripeClient, standin: StandInStripe, funded: str) -> None:
        options: Any = {"stripe_account": funded}
        payout = client.v1.payouts.create({"amount": 8_000, "currency": "usd", "metadata": {"run": "1"}}, options)
        assert (payout.status, payout.automatic) == ("pending", False)
        assert standin.balance(account=funded)[0] == 2_000
        standin.clock.advance(days=1)
        assert client.v1.payouts.retrieve(payout.id, options=options).status == "in_transit"
        standin.clock.advance(days=1)
        paid = client.v1.payouts.retrieve(payout.id, options=options)
        assert paid.status == "paid"
        assert paid.arrival_date <= standin.clock.now()
        assert [kind for kind in types(standin, funded) if kind.startswith("payout")] == [
            "payout.created",
            "payout.updated",
            "payout.paid",
        ]

    def test_paid_and_then_failed(self, client: stripe.StripeClient, standin: StandInStripe, funded: str) -> None:
        options: Any = {"stripe_account": funded}
        payout = client.v1.payouts.create({"amount": 8_000, "currency": "usd"}, options)
        standin.arrive(payout.id)
        standin.fail_payout(payout.id, "no_account")
        failed = client.v1.payouts.retrieve(payout.id, {"expand": ["failure_balance_transaction"]}, options)
        assert (failed.status, failed.failure_code) == ("failed", "no_account")
        assert isinstance(failed.failure_balance_transaction, stripe.BalanceTransaction)
        assert failed.failure_balance_transaction.amount == 8_000
        assert standin.balance(account=funded)[0] == 10_000
        account = client.v1.accounts.retrieve(funded)
        assert not account.payouts_enabled
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.payouts.create({"amount": 8_000, "currency": "usd"}, options)
        assert caught.value.code == "payouts_not_allowed"
        client.v1.transfers.create({"amount": 100, "currency": "usd", "destination": funded})
        standin.add_bank(funded)
        assert client.v1.payouts.create({"amount": 8_000, "currency": "usd"}, options).status == "pending"

    def test_cancelled_while_pending_only(
        self, client: stripe.StripeClient, standin: StandInStripe, funded: str
    ) -> None:
        options: Any = {"stripe_account": funded}
        payout = client.v1.payouts.create({"amount": 8_000, "currency": "usd"}, options)
        assert client.v1.payouts.cancel(payout.id, options=options).status == "canceled"
        assert standin.balance(account=funded)[0] == 10_000
        with pytest.raises(stripe.InvalidRequestError, match="canceled"):
            client.v1.payouts.cancel(payout.id, options=options)

    def test_more_than_there_is_and_the_wrong_currency_are_refused(
        self, client: stripe.StripeClient, funded: str
    ) -> None:
        options: Any = {"stripe_account": funded}
        with pytest.raises(stripe.InvalidRequestError) as caught:
            client.v1.payouts.create({"amount": 10_001, "currency": "usd"}, options)
        assert caught.value.code == "balance_insufficient"
        with pytest.raises(stripe.InvalidRequestError, match="external accounts in that currency"):
            client.v1.payouts.create({"amount": 100, "currency": "eur"}, options)
        with pytest.raises(stripe.InvalidRequestError, match="divisible by 100"):
            client.v1.payouts.create({"amount": 1_050, "currency": "huf"}, options)

    def test_by_schedule_each_day_and_itemised(
        self, client: stripe.StripeClient, standin: StandInStripe, funded: str
    ) -> None:
        client.v1.accounts.update(funded, {"settings": {"payouts": {"schedule": {"interval": "daily"}}}})
        standin.clock.advance(days=1)
        options: Any = {"stripe_account": funded}
        [payout] = client.v1.payouts.list(options=options).data
        assert (payout.amount, payout.automatic) == (10_000, True)
        lines = client.v1.balance_transactions.list({"payout": payout.id}, options).data
        assert sorted(line.amount for line in lines) == [-10_000, 10_000]
        standin.clock.advance(days=3)
        assert client.v1.payouts.retrieve(payout.id, options=options).reconciliation_status == "completed"
        assert len(client.v1.payouts.list(options=options).data) == 1

    def test_by_schedule_each_week(self, client: stripe.StripeClient, standin: StandInStripe, funded: str) -> None:
        schedule: Any = {"settings": {"payouts": {"schedule": {"interval": "weekly", "weekly_anchor": "friday"}}}}
        client.v1.accounts.update(funded, schedule)
        options: Any = {"stripe_account": funded}
        standin.clock.advance(days=3)
        assert client.v1.payouts.list(options=options).data == []
        standin.clock.advance(days=1)
        assert len(client.v1.payouts.list({"status": "pending"}, options).data) == 1

    def test_a_connected_account_keeps_its_objects_to_itself(self, client: stripe.StripeClient, funded: str) -> None:
        payout = client.v1.payouts.create({"amount": 100, "currency": "usd"}, {"stripe_account": funded})
        with pytest.raises(stripe.InvalidRequestError, match="No such payout"):
            client.v1.payouts.retrieve(payout.id)


class TestBalance:
    def test_a_charges_money_is_pending_for_two_days(
        self, client: stripe.StripeClient, standin: StandInStripe, charge: Charging
    ) -> None:
        charge(10_000)
        client.v1.balance.retrieve()
        assert standin.balance() == (0, 9_680)
        [line] = client.v1.balance_transactions.list({"type": "charge"}).data
        assert (line.fee, line.fee_details[0].type, line.status) == (320, "stripe_fee", "pending")
        standin.clock.advance(days=2)
        assert standin.balance() == (9_680, 0)
        assert client.v1.balance_transactions.retrieve(line.id).status == "available"
        assert [event["type"] for event in standin.events()][-1] == "balance.available"
