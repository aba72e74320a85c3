"""Money against the stand-in Stripe: its server, our adapter on it, our books, and a clock that tests move."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from uuid import UUID

from sqlalchemy.orm import Session

import ledger
from marketplace.billing import driving, inbox, onboarding, owners, payouts, reconciliation, service, topups
from marketplace.billing.models import OwnerAccount, Payment, Payout
from marketplace.billing.payments.port import Payments
from marketplace.billing.payments.stripe_adapter import StripePayments
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError
from marketplace.core.settings import Settings
from marketplace.jobs.writer import run_batch
from tests.fakes.stripe import StandInStripe
from tests.market import Market, Renter, make_market, make_renter

DAY_S = 86_400
START_S = int(datetime.now(UTC).timestamp())


class Receiver:
    """Our two webhook endpoints, on a small server of their own."""

    def __init__(self, world: MoneyWorld) -> None:
        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                status = world.receive(
                    body, self.headers.get("stripe-signature", ""), connect=self.path.endswith("/connect")
                )
                self.send_response(status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *_: Any) -> None:
                """Says nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}/webhooks"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(5)


@dataclass
class MoneyWorld:
    """A platform on the stand-in. `payments` may be wrapped by a test."""

    standin: StandInStripe
    settings: Settings
    factory: SessionFactory
    payments: Payments
    market: Market
    endpoints: dict[str, Any] = field(default_factory=dict)

    def now(self) -> datetime:
        return datetime.fromtimestamp(self.standin.clock.now(), UTC)

    def receive(self, body: bytes, signature: str, *, connect: bool) -> int:
        """What the webhook endpoint does; the status that it answers."""
        try:
            with transaction(self.factory) as session:
                inbox.receive(session, self.payments, body, signature, connect=connect, now=self.now())
        except FallowError as error:
            return error.status
        return 200

    # --- steps ------------------------------------------------------------------------------------------------------

    def drive(self) -> None:
        driving.drive_due(self.factory, self.payments, self.now())

    def listen(self, **how: Any) -> None:
        """Deliver what waits, and apply what came."""
        self.standin.deliver(**how)
        inbox.process_due(self.factory, self.payments, self.now(), limit=1_000)

    def settle_down(self) -> None:
        """Drive and listen until nothing moves any more."""
        for _ in range(8):
            self.drive()
            self.listen()

    def checkout(self, cents: int, renter: UUID | None = None, *, save_card: bool = False) -> Payment:
        """A session that can be paid."""
        with transaction(self.factory) as session:
            payment = topups.start_checkout(
                session,
                renter or self.market.renter.organisation_id,
                cents,
                save_card=save_card,
                now=self.now(),
                settings=self.settings,
            )
        self.drive()
        return self.payment(payment.id)

    def top_up(self, cents: int, renter: UUID | None = None, *, save_card: bool = False, card: str = "") -> Payment:
        """Paid, told by a webhook, credited."""
        payment = self.checkout(cents, renter, save_card=save_card)
        assert payment.session_id is not None
        self.standin.pay(payment.session_id, card or "pm_card_visa")
        self.listen()
        return self.payment(payment.id)

    def payment(self, payment_id: UUID) -> Payment:
        with self.factory() as session:
            return session.get_one(Payment, payment_id)

    def onboard(self, owner: UUID | None = None) -> str:
        """An owner whose account may be paid; its id."""
        owner = owner or self.market.node.owner_organisation_id
        with transaction(self.factory) as session:
            onboarding.open_account(session, owner, "US", None, self.now())
        self.drive()
        with self.factory() as session:
            account_id = session.get_one(OwnerAccount, owner).account_id
        assert account_id is not None
        self.standin.onboard(account_id)
        self.listen()
        return account_id

    def earn(self, nano: int, owner: UUID | None = None) -> None:
        """Earnings out of nowhere: what the platform's loss account pays."""
        owner = owner or self.market.node.owner_organisation_id
        with transaction(self.factory) as session:
            accounts = owners.open_owner(session, owner)
            loss = ledger.open_accounts(session, [ledger.charted(ledger.LOSS)])[ledger.LOSS]
            key = f"earned-{owner.hex}-{nano}-{ledger.balance(session, accounts.pending).nano}"
            lines = (ledger.debit(loss, nano), ledger.credit(accounts.pending, nano))
            ledger.post(session, ledger.JournalDraft(key, "settlement", "tests", key, lines))

    def spend(self, renter: Renter | None = None, *, output: int = 50, jobs: int = 1) -> int:
        """Deliver and settle jobs; what they charged, in nano-USD."""
        charged = 0
        import psycopg

        with psycopg.connect(self.settings.database_url) as connection:
            for _ in range(jobs):
                job = self.market.admit(renter=renter or self.market.renter)
                (admitted,) = run_batch(connection, [job])
                if not admitted.ok:
                    break
                close = self.market.delivered(job, output=output)
                run_batch(connection, [close])
                assert close.receipt is not None
                charged += close.receipt.charge_nano
        with transaction(self.factory) as session:
            service.settle(session, 1_000)
        return charged

    def run(self, key: str | None = None) -> list[payouts.Plan]:
        """A payout run, and everything that it leads to at once."""
        plans = payouts_run(self, key)
        self.drive()
        return plans

    def payouts(self) -> list[Payout]:
        """Oldest first."""
        with self.factory() as session:
            return list(payouts.status(session))[::-1]

    def reconcile(self) -> reconciliation.Report:
        return reconciliation.reconcile(self.factory, self.payments, self.now())

    def days(self, days: int) -> None:
        self.standin.clock.advance(days=days)

    # --- looking ----------------------------------------------------------------------------------------------------

    def credit_nano(self, renter: UUID | None = None) -> int:
        with self.factory() as session:
            return service.balance(session, renter or self.market.renter.organisation_id).posted_nano

    def owner(self, owner: UUID | None = None) -> owners.OwnerBalances:
        with self.factory() as session:
            return owners.find_balances(session, owner or self.market.node.owner_organisation_id)

    def balance(self, code: str) -> int:
        with self.factory() as session:
            account = ledger.find_account(session, code)
            return 0 if account is None else ledger.balance(session, account).nano

    def journals(self, kind: str) -> int:
        with self.factory() as session:
            return sum(1 for journal in ledger.read_journals(session) if journal.kind == kind)

    def new_renter(self) -> Renter:
        with transaction(self.factory) as session:
            return make_renter(session, credit_nano=0)

    def problems(self) -> list[str]:
        """What is wrong in either set of books."""
        with self.factory() as session:
            ours = [f"{each.rule}: {each.story}" for each in ledger.check(session)]
        return ours + self.standin.invariants()


def payouts_run(world: MoneyWorld, key: str | None = None) -> list[payouts.Plan]:
    from marketplace.billing.runs import run_payouts

    return run_payouts(
        world.factory,
        world.payments,
        world.settings,
        key=key or payouts.week_key(world.now()),
        started_by="tests",
        now=world.now(),
    )


@contextmanager
def money_world(
    settings: Settings, factory: SessionFactory, *, seed: int = 1, webhooks: bool = True, **changes: Any
) -> Iterator[MoneyWorld]:
    """A world on a fresh database. `changes`: of the settings."""
    with StandInStripe(seed=seed, start_s=START_S) as standin:
        told: dict[str, Any] = {
            "payment_provider": "stripe",
            "stripe_secret_key": standin.secret_key,
            "stripe_api_url": standin.url,
            "payment_timeout_s": 5.0,
            **changes,
        }
        settings = Settings(_env_file=None, **{**settings.model_dump(), **told})  # type: ignore[call-arg]
        with transaction(factory) as session:
            market = make_market(session, credit_nano=0)
        world = MoneyWorld(standin, settings, factory, StripePayments(settings), market)
        receiver = Receiver(world) if webhooks else None
        try:
            if receiver is not None:
                receiver.start()
                platform = standin.add_endpoint(receiver.url)
                connect = standin.add_endpoint(f"{receiver.url}/connect", connect=True)
                world.endpoints = {"platform": platform, "connect": connect}
                secrets = {
                    "stripe_webhook_secret": platform.secret,
                    "stripe_connect_webhook_secret": connect.secret,
                }
                world.settings = Settings(_env_file=None, **{**settings.model_dump(), **secrets})  # type: ignore[call-arg]
                world.payments = StripePayments(world.settings)
            yield world
        finally:
            if receiver is not None:
                receiver.stop()


def session_of(world: MoneyWorld) -> Session:
    return world.factory()
