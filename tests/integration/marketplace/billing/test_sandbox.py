"""The embedded default: the sandbox answers at once, is marked everywhere, and keeps books that reconcile."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
from starlette.testclient import TestClient
from typer.testing import CliRunner

import ledger
from marketplace.accounts.service import create_key
from marketplace.app import create_app
from marketplace.billing import owners, payouts
from marketplace.billing.payments.factory import claim_books, make_payments
from marketplace.billing.payments.port import ModeMismatch
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from tests.market import Market, make_market

USD = 1_000_000_000


class Api:
    """A gateway without a port, asked with the keys of several roles."""

    def __init__(self, settings: Settings, factory: SessionFactory, market: Market) -> None:
        self.factory = factory
        self.market = market
        self.app = create_app(settings)
        with transaction(factory) as session:
            owner, renter = market.node.owner_organisation_id, market.renter.organisation_id
            self.keys = {
                who: create_key(session, organisation, name=who, roles=[role])[1]
                for who, role, organisation in (
                    ("renter", "renter", renter),
                    ("owner", "owner", owner),
                    ("anna", "finance", renter),
                    ("bert", "finance", renter),
                )
            }

    def ask(self, who: str, method: str, path: str, **options: Any) -> Any:
        headers = {"authorization": f"Bearer {self.keys[who]}"} if who else {}
        return TestClient(self.app, headers=headers).request(method, f"/v1{path}", **options)

    def done(self, who: str, method: str, path: str, **options: Any) -> Any:
        answer = self.ask(who, method, path, **options)
        assert answer.status_code == 200, answer.text
        return answer.json()

    def earn(self, nano: int) -> None:
        with transaction(self.factory) as session:
            accounts = owners.open_owner(session, self.market.node.owner_organisation_id)
            loss = ledger.open_accounts(session, [ledger.charted(ledger.LOSS)])[ledger.LOSS]
            key = f"earned {nano}"
            lines = (ledger.debit(loss, nano), ledger.credit(accounts.pending, nano))
            ledger.post(session, ledger.JournalDraft(key, "settlement", "tests", key, lines))


@pytest.fixture
def api(settings: Settings, session_factory: SessionFactory) -> Iterator[Api]:
    values = {**settings.model_dump(), "payout_hold_days": 0, "payout_hold_days_new": 0, "payout_approval_cents": 5_000}
    with transaction(session_factory) as session:
        market = make_market(session, credit_nano=0)
    made = Api(Settings(_env_file=None, **values), session_factory, market)  # type: ignore[call-arg]
    yield made
    with session_factory() as session:
        assert ledger.check(session) == []
    made.app.services.session_factory.kw["bind"].dispose()


class TestOverHttp:
    def test_a_renter_pays_saves_the_card_and_takes_back_what_is_unused(self, api: Api) -> None:
        paid = api.done("renter", "POST", "/billing/top-ups", json={"amount": "25.00", "save_card": True})
        assert (paid["state"], paid["amount"], paid["sandbox"]) == ("succeeded", "25.00", True)
        api.done("renter", "POST", "/billing/top-ups/saved-card", json={"amount": "5"})
        plan = {"enabled": True, "threshold": "10", "amount": "20", "monthly_cap": "40", "low_balance": "5"}
        assert api.done("renter", "PUT", "/billing/plan", json=plan)["card_saved"]
        refund = api.done("renter", "POST", "/billing/refunds", json={"amount": "27.50", "key": "a"})
        assert [each["state"] for each in refund["data"]] == ["succeeded", "succeeded"]
        balance = api.done("renter", "GET", "/billing/balance")
        assert (balance["paid"], balance["unused_paid"], balance["frozen"]) == ("2.50", "2.50", False)

    def test_an_owner_is_paid_after_two_people_said_yes(self, api: Api) -> None:
        api.done("renter", "POST", "/billing/top-ups", json={"amount": "500"})
        account = api.done("owner", "POST", "/billing/account", json={"country": "DE"})
        assert (account["state"], account["sandbox"]) == ("active", True)
        api.earn(100 * USD)
        (plan,) = api.done("anna", "GET", "/finance/payouts/preview")["data"]
        assert (plan["amount"], plan["needs_approval"]) == ("90.00", True)
        api.done("anna", "POST", "/finance/payouts/run", json={})
        (waiting,) = api.done("anna", "GET", "/finance/payouts", params={"open": True})["data"]
        for who in ("anna", "bert"):
            assert waiting["state"] == "awaiting_approval"
            waiting = api.done(who, "POST", f"/finance/payouts/{waiting['id']}/approve")
        api.done("anna", "POST", "/finance/payouts/run", json={"key": "sends what waits"})
        own = api.done("owner", "GET", "/billing/payouts")
        assert [each["state"] for each in own["data"]] == ["paid"]
        assert (own["reserve"], own["payable"], own["in_transit"]) == ("10.00", "0.00", "0.00")
        report = api.done("anna", "POST", "/finance/reconcile/processor")
        assert (report["breaks"], report["covered"], report["sandbox"]) == ([], True, True)

    @pytest.mark.parametrize(
        ("method", "path"),
        [
            ("GET", "/finance/payouts/preview"),
            ("POST", "/finance/payouts/run"),
            ("POST", "/finance/reconcile/processor"),
            ("GET", "/finance/webhooks"),
            ("GET", "/finance/disputes"),
        ],
    )
    def test_finance_is_for_finance(self, api: Api, method: str, path: str) -> None:
        for who in ("renter", "owner"):
            assert api.ask(who, method, path, json={}).status_code == 403
        assert api.ask("", method, path, json={}).status_code == 401

    def test_amounts_that_no_card_can_pay_are_refused(self, api: Api) -> None:
        for amount in ("0.001", "-5", "1e3", "NaN", "1", "1000000000"):
            answer = api.ask("renter", "POST", "/billing/top-ups", json={"amount": amount})
            assert answer.status_code == 400, answer.text
            assert answer.json()["error"]["param"] == "amount"

    def test_webhooks_are_refused(self, api: Api) -> None:
        for path in ("/webhooks/stripe", "/webhooks/stripe/connect"):
            answer = api.ask("", "POST", path, content=b"{}", headers={"stripe-signature": "t=1,v1=00"})
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "webhooks_disabled")


class TestModes:
    def test_books_of_one_processor_are_never_anothers(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        claim_books(session_factory, make_payments(settings, session_factory))
        stripe = {"payment_provider": "stripe", "stripe_secret_key": "sk_test_1"}
        other = Settings(_env_file=None, **{**settings.model_dump(), **stripe})  # type: ignore[call-arg]
        with pytest.raises(ModeMismatch, match="sandbox"):
            claim_books(session_factory, make_payments(other, session_factory))

    @pytest.mark.parametrize(("key", "mode"), [("sk_live_1", "test"), ("sk_test_1", "live"), ("", "test")])
    def test_a_key_of_the_other_mode_stops_the_process(
        self, settings: Settings, session_factory: SessionFactory, key: str, mode: str
    ) -> None:
        values = {"payment_provider": "stripe", "stripe_secret_key": key, "payment_mode": mode}
        made = Settings(_env_file=None, **{**settings.model_dump(), **values})  # type: ignore[call-arg]
        with pytest.raises(ModeMismatch):
            make_payments(made, session_factory)


class TestOnTheCommandLine:
    def test_payouts_are_previewed_run_and_shown(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        from marketplace.billing.desk import Desk
        from marketplace.finance import money_cli
        from marketplace.finance.cli import app

        parts = api.app.services
        desk = Desk(parts.settings, api.factory, make_payments(parts.settings, api.factory))
        monkeypatch.setattr(money_cli, "open_desk", lambda: desk)
        api.done("renter", "POST", "/billing/top-ups", json={"amount": "500"})
        api.done("owner", "POST", "/billing/account", json={"country": "DE"})
        api.earn(50 * USD)
        runner = CliRunner()
        assert "45.00" in runner.invoke(app, ["payouts", "preview"]).output
        assert runner.invoke(app, ["payouts", "run"]).exit_code == 0
        with api.factory() as session:
            owner = payouts.status(session)[0].statement["owner"]
        shown = runner.invoke(app, ["payouts", "status", "--owner", owner])
        assert "paid" in shown.output
        assert "earnings released" in shown.output
        assert runner.invoke(app, ["reconcile", "--processor"]).exit_code == 0
        assert runner.invoke(app, ["webhooks", "list"]).exit_code == 0

    def test_a_difference_ends_with_an_error(self, api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
        from marketplace.billing.desk import Desk
        from marketplace.finance import money_cli
        from marketplace.finance.cli import app

        parts = api.app.services
        desk = Desk(
            parts.settings,
            api.factory,
            make_payments(parts.settings, api.factory),
            clock=lambda: utcnow() + timedelta(days=1),
        )
        monkeypatch.setattr(money_cli, "open_desk", lambda: desk)
        with transaction(api.factory) as session:
            ids = ledger.open_accounts(session, [ledger.charted(code) for code in (ledger.CLEARING, ledger.BANK)])
            lines = (ledger.debit(ids[ledger.CLEARING], USD), ledger.credit(ids[ledger.BANK], USD))
            ledger.post(session, ledger.JournalDraft("by hand", "by_hand", "tests", "1", lines))
        result = CliRunner().invoke(app, ["reconcile", "--processor"])
        assert result.exit_code == 1
        assert "platform_total" in result.output
