"""A seeded run of money against the stand-in Stripe: everything that people, banks and networks do, in random order,
with the process dying between any two steps; and a model of a few lines that says what must be left at the end."""

from __future__ import annotations

import copy
import random
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from typing import Any, Final
from uuid import UUID

import psycopg
from sqlalchemy import event, select, text
from sqlalchemy.orm import Session

import ledger
from marketplace.billing import (
    clawback,
    disputes,
    driving,
    inbox,
    onboarding,
    owners,
    payouts,
    refunds,
    service,
    topups,
)
from marketplace.billing.checks import invariants
from marketplace.billing.models import Dispute, OutgoingCall, OwnerAccount, Payment, Payout
from marketplace.billing.payments import port
from marketplace.core.database import transaction
from marketplace.core.errors import FallowError
from marketplace.jobs.writer import run_batch
from marketplace.matching.types import Rates
from tests.fakes.stripe import FaultKind, StripeError
from tests.fakes.stripe.webhooks import encode, signature
from tests.market import Renter, make_node, make_renter
from tests.money_world import MoneyWorld

NANO_PER_CENT: Final = 10_000_000
DEAR: Final = Rates(input=10**13, cached_input=2 * 10**12, output=4 * 10**13)
"""A job costs some dollars: cents must move."""
CARDS: Final = ("pm_card_visa",) * 6 + (
    "pm_card_bypassPending",
    "pm_card_refundFail",
    "pm_card_pendingRefund",
    "pm_card_createDispute",
    "pm_card_chargeDeclined",
)
RATES: Final = {
    FaultKind.RATE_LIMITED: 0.03,
    FaultKind.UNAVAILABLE: 0.02,
    FaultKind.REFUSED: 0.02,
    FaultKind.CONFLICT: 0.02,
    FaultKind.ERROR_BEFORE: 0.03,
    FaultKind.DECLINED_BALANCE: 0.03,
    FaultKind.ERROR_AFTER: 0.03,
    FaultKind.LOST: 0.04,
    FaultKind.CUT: 0.02,
}
SECRETS: Final = {False: "whsec_platform", True: "whsec_connect"}


class Crash(BaseException):
    """The process died here."""


class Dying:
    """The port of a process that may die just before or after it was heard."""

    def __init__(self, payments: port.Payments, dies: Callable[[], bool]) -> None:
        self._payments = payments
        self._dies = dies

    def __getattr__(self, name: str) -> Any:
        return getattr(self._payments, name)

    def send(self, wish: port.AnyWish, key: str) -> port.View:
        if self._dies():
            raise Crash
        view = self._payments.send(wish, key)
        if self._dies():
            raise Crash
        return view


@dataclass
class Simulation:
    """One seed."""

    world: MoneyWorld
    seed: int
    crash_rate: float = 0.02
    drop_rate: float = 0.05

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)
        self.standin = self.world.standin
        self.armed = False
        self.crashes = 0
        self.world.payments = Dying(self.world.payments, self.dies)  # type: ignore[assignment]
        self.told: set[str] = set()
        self.late: list[dict[str, Any]] = []
        self.keys = 0
        market = self.world.market
        with transaction(self.world.factory) as session:
            second = make_node(session, market.variant_id)
            renter = make_renter(session, credit_nano=0)
        self.markets = [replace(market, rates=DEAR), replace(market, rates=DEAR, node=second)]
        self.renters: list[Renter] = [market.renter, renter]
        self.owners = [each.node.owner_organisation_id for each in self.markets]
        self.connection = psycopg.connect(self.world.settings.database_url, autocommit=True)
        event.listen(self.world.factory, "before_commit", self._at_commit)
        event.listen(self.world.factory, "after_commit", self._at_commit)

    def close(self) -> None:
        self.connection.close()
        event.remove(self.world.factory, "before_commit", self._at_commit)
        event.remove(self.world.factory, "after_commit", self._at_commit)

    def _at_commit(self, _: Session) -> None:
        if self.dies():
            raise Crash

    def dies(self) -> bool:
        if self.armed and self.random.random() < self.crash_rate:
            self.crashes += 1
            return True
        return False

    @contextmanager
    def mortal(self) -> Iterator[None]:
        """A step during which the process may die, or be refused what it asks."""
        self.armed = True
        try:
            with suppress(Crash, FallowError, StripeError, ledger.LedgerError):
                yield
        finally:
            self.armed = False

    def key(self) -> str:
        self.keys += 1
        return f"{self.seed}-{self.keys}"

    def renter(self) -> Renter:
        return self.random.choice(self.renters)

    # --- what happens -------------------------------------------------------------------------------------------------

    def run(self, steps: int) -> None:
        """Random steps."""
        for owner in self.owners:
            self._onboard(owner)
        acts = {
            self.top_up: 6,
            self.spend: 6,
            self.drive: 5,
            self.listen: 5,
            self.pass_time: 4,
            self.pay_out: 3,
            self.refund: 3,
            self.decide: 3,
            self.dispute: 2,
            self.verdict: 2,
            self.bounce: 2,
            self.promote: 1,
            self.take_back: 1,
            self.reconcile: 1,
        }
        for act in self.random.choices(list(acts), list(acts.values()), k=steps):
            with self.mortal():
                act()

    def _onboard(self, owner: UUID) -> None:
        with transaction(self.world.factory) as session:
            onboarding.open_account(session, owner, "US", None, self.world.now())
        self.world.drive()
        with self.world.factory() as session:
            account = session.get_one(OwnerAccount, owner).account_id
        if account is not None:
            self.standin.onboard(account)

    def top_up(self) -> None:
        cents = self.random.randrange(1_000, 20_000)
        with transaction(self.world.factory) as session:
            topups.start_checkout(
                session,
                self.renter().organisation_id,
                cents,
                save_card=False,
                now=self.world.now(),
                settings=self.world.settings,
            )
        self.drive()
        for session_ in self.standin.every("checkout.session"):
            if session_["status"] == "open" and self.random.random() < 0.8:
                self.standin.pay(session_["id"], self.random.choice(CARDS))

    def spend(self) -> None:
        market, renter = self.random.choice(self.markets), self.renter()
        for _ in range(self.random.randrange(1, 4)):
            job = market.admit(renter=renter)
            with self.connection.transaction():
                (admitted,) = run_batch(self.connection, [job])
                if admitted.ok:
                    run_batch(self.connection, [market.delivered(job, output=self.random.randrange(1, 200))])
        with transaction(self.world.factory) as session:
            service.settle(session, 100)

    def drive(self) -> None:
        driving.drive_due(self.world.factory, self.world.payments, self.world.now())

    def listen(self) -> None:
        """Events as the network brings them: some lost, some late, some often, in any order."""
        fresh = self.late + self._untold()
        self.late = []
        self.random.shuffle(fresh)
        for each in fresh:
            chance = self.random.random()
            if chance < self.drop_rate:
                continue
            if chance < 2 * self.drop_rate:
                self.late.append(each)
                continue
            for _ in range(self.random.choice((1, 1, 1, 2, 3))):
                self.tell(each)
        inbox.process_due(self.world.factory, self.world.payments, self.world.now())

    def tell(self, told: dict[str, Any]) -> int:
        connect = "account" in told
        body = encode(told)
        header = signature(body, SECRETS[connect], self.standin._world.webhooks.signing_time())
        return self.world.receive(body, header, connect=connect)

    def _untold(self) -> list[dict[str, Any]]:
        fresh = []
        inside = self.standin._world
        with inside.lock:
            inside.run_due()
            for account in (inside.platform, *inside.connected()):
                # Copies of what is new alone: after a month there are thousands.
                found = list(inside.store.every(account, "event"))
                new = [each for each in found if each["id"] not in self.told]
                self.told.update(each["id"] for each in new)
                fresh += copy.deepcopy(new)
        return fresh

    def _accounts(self) -> list[str]:
        return [each["id"] for each in self.standin.every("account")]

    def pass_time(self) -> None:
        self.standin.clock.advance(hours=self.random.choice((1, 3, 7, 25, 49)))

    def pay_out(self) -> None:
        self.world.run(self.key())

    def decide(self) -> None:
        """People approve and cancel."""
        with self.world.factory() as session:
            found = payouts.status(session, open_only=True)
        for payout in found:
            with suppress(payouts.PayoutConflict), transaction(self.world.factory) as session:
                if self.random.random() < 0.25:
                    payouts.cancel(session, payout.id, "carl", self.world.now())
                else:
                    payouts.approve(session, payout.id, self.random.choice(("anna", "bert")), self.world.now())

    def refund(self) -> None:
        cents = self.random.choice((None, self.random.randrange(100, 4_000)))
        with transaction(self.world.factory) as session:
            refunds.request_refund(session, self.renter().organisation_id, cents, self.key(), self.world.now())
        self.drive()

    def promote(self) -> None:
        with transaction(self.world.factory) as session:
            nano = self.random.randrange(1, 20 * 10**9)
            service.grant_promotion(session, self.renter().organisation_id, nano, self.key(), "a gift")

    def take_back(self) -> None:
        with transaction(self.world.factory) as session:
            query = text("select id from receipts where journal_id > 0 order by id desc limit 5")
            receipt = self.random.choice([*session.scalars(query), None])
            if receipt is not None:
                nano = self.random.choice((None, self.random.randrange(1, 10**9)))
                clawback.refund_usage(session, receipt, nano, "wrong", key=self.key(), by="anna")

    def dispute(self) -> None:
        paid = [each for each in self.standin.every("charge") if each["status"] == "succeeded"]
        paid = [each for each in paid if not each["disputed"] and each["amount_refunded"] < each["amount"]]
        if paid:
            self.standin.dispute(self.random.choice(paid)["id"], inquiry=self.random.random() < 0.2)

    def verdict(self) -> None:
        for each in self.standin.every("dispute"):
            if each["status"] in ("needs_response", "warning_needs_response") and self.random.random() < 0.5:
                self.standin.close_dispute(each["id"], won=self.random.random() < 0.5)

    def bounce(self) -> None:
        """Banks send payouts back, also after they had arrived."""
        for account in self._accounts():
            for each in self.standin.every("payout", account):
                if each["status"] in ("pending", "in_transit", "paid") and self.random.random() < 0.3:
                    self.standin.fail_payout(each["id"], disables_bank=False)

    def reconcile(self) -> None:
        self.world.reconcile()

    # --- the end ------------------------------------------------------------------------------------------------------

    def calm(self, rounds: int = 24) -> None:
        """No more faults; everything under way comes to its end."""
        self.standin.faults.clear()
        with transaction(self.world.factory) as session:
            service.settle(session, 1_000)
        for owner in self.owners:
            with self.world.factory() as session:
                known = session.get_one(OwnerAccount, owner).account_id
            if known is None:
                self.standin.clock.advance(hours=25)
                self._onboard(owner)
        for each in self.standin.every("dispute"):
            if each["status"] in ("needs_response", "warning_needs_response"):
                self.standin.close_dispute(each["id"], won=self.random.random() < 0.5)
        for each in self.standin.every("refund"):
            if each["status"] == "pending" and each.get("pending_reason") == "processing":
                self.standin.complete_refund(each["id"])
        for _ in range(rounds):
            self.standin.clock.advance(hours=25)
            self._cancel_what_waits()
            self.drive()
            inbox.process_due(self.world.factory, self.world.payments, self.world.now())
            if not self._restless(calls_only=True):
                self.world.reconcile()
                if not self._restless():
                    break
        assert not self._restless(), f"seed {self.seed}: {self._restless()}"

    def _cancel_what_waits(self) -> None:
        with self.world.factory() as session:
            waiting = [each.id for each in payouts.status(session) if each.state == "awaiting_approval"]
        for payout_id in waiting:
            with transaction(self.world.factory) as session:
                payouts.cancel(session, payout_id, "carl", self.world.now())

    def _restless(self, *, calls_only: bool = False) -> list[str]:
        """What is still under way."""
        open_calls = select(OutgoingCall).where(OutgoingCall.state.in_(("intended", "sent", "unknown")))
        open_payments = select(Payment).where(Payment.state == "open")
        with self.world.factory() as session:
            found = [f"{call.kind} {call.state}: {call.error}" for call in session.scalars(open_calls)]
            if not calls_only:
                found += [f"payout {each.state}" for each in payouts.status(session, open_only=True)]
                found += [f"payment {each.kind}" for each in session.scalars(open_payments)]
                found += [f"dispute {each.id}" for each in disputes.read_disputes(session, open_only=True)]
        return found

    # --- the model ----------------------------------------------------------------------------------------------------

    def check(self) -> None:
        """What the processor says happened, and what was delivered, must be exactly what the ledger is left with."""
        with self.world.factory() as session:
            found = [
                *self._renters(session),
                *self._owners(session),
                *self._payouts(session),
                *invariants(session),
                *self.world.problems(),
            ]
        report = self.world.reconcile()
        found += [f"{each.kind} {each.subject}: {each.story}" for each in report.breaks]
        assert found == [], f"seed {self.seed} after {self.crashes} crashes: {found}"

    def _renters(self, session: Session) -> list[str]:
        by_intent = {each.payment_id: each.organisation_id for each in session.scalars(select(Payment))}
        cash: dict[UUID, int] = defaultdict(int)
        for charge in self.standin.every("charge"):
            if charge["status"] == "succeeded":
                back = charge["amount_refunded"]
                cash[by_intent[charge["payment_intent"]]] += (charge["amount"] - back) * NANO_PER_CENT
        for dispute in self.standin.every("dispute"):
            if dispute["status"] == "lost":
                cash[by_intent[dispute["payment_intent"]]] -= dispute["amount"] * NANO_PER_CENT
        known = {each.id for each in session.scalars(select(Dispute))}
        withdrawn = {each["id"] for each in self.standin.every("dispute") if not each["status"].startswith("warning")}
        found = [f"dispute {each} is unknown" for each in withdrawn - known]
        covered = sum(cash.values())
        left = 0
        for renter in self.renters:
            ref = renter.organisation_id
            used = _sums(session, "select sum(charge_nano) from receipts where renter_organisation_id = :ref", ref)
            given = _sums(session, _PROMOTIONAL_USE, ref)
            back, back_given = _pair(session, _TAKEN_BACK, ref)
            credit = service.balance(session, ref)
            promoted = _sums(session, _PROMOTED, ledger.renter_promotional(ref.hex))
            # What was paid for usage and given back is credit again; what a bank took of it was never ours.
            left += credit.posted_nano + (used - given) - (back - back_given)
            if credit.promotional_nano != promoted - given + back_given:
                found.append(f"{ref.hex} has {credit.promotional_nano} promotional of {promoted}")
            if credit.posted_nano < 0:
                found.append(f"{ref.hex} has {credit.posted_nano} paid credit")
        lost = _balance(session, ledger.BAD_DEBT)
        if covered != left - lost:
            found.append(f"cards paid {covered}, the ledger is left with {left} and lost {lost}")
        return found

    def _owners(self, session: Session) -> list[str]:
        found = []
        for owner in self.owners:
            earned = _sums(session, "select sum(owner_nano) from receipts where owner_organisation_id = :ref", owner)
            taken = _sums(session, _TAKEN_FROM, owner)
            account = session.get_one(OwnerAccount, owner).account_id
            assert account is not None
            arrived = [each for each in self.standin.every("payout", account) if each["status"] == "paid"]
            paid = sum(each["amount"] for each in arrived) * NANO_PER_CENT
            held = owners.find_balances(session, owner)
            kept = held.pending_nano + held.available_nano + held.reserve_nano + held.transit_nano
            if earned - taken - paid != kept - held.receivable_nano:
                found.append(f"{owner.hex} earned {earned}, gave {taken}, was paid {paid}, is left with {held}")
            if self.standin.balance(account=account) != (0, 0):
                found.append(f"{account} still holds {self.standin.balance(account=account)}")
        return found

    def _payouts(self, session: Session) -> list[str]:
        found = []
        sent: dict[str, int] = defaultdict(int)
        for transfer in self.standin.every("transfer"):
            sent[transfer["metadata"][port.REFERENCE]] += transfer["amount"] - transfer["amount_reversed"]
        for payout in session.scalars(select(Payout)):
            wanted = payout.amount_minor if payout.state == "paid" else 0
            if sent.get(payout.id.hex, 0) != wanted:
                found.append(f"payout {payout.id.hex} is {payout.state}, sent {sent.get(payout.id.hex)} of {wanted}")
        return found


_PROMOTIONAL_USE: Final = """
    select sum(u.nano) from promotional_uses u join receipts r on r.id = u.receipt_id
    where r.renter_organisation_id = :ref
"""
_TAKEN_BACK: Final = """
    select sum(t.amount_nano), sum(t.promotional_nano) from take_backs t join receipts r on r.id = t.receipt_id
    where r.renter_organisation_id = :ref
"""
_TAKEN_FROM: Final = """
    select sum(t.owner_nano) from take_backs t join receipts r on r.id = t.receipt_id
    where r.owner_organisation_id = :ref
"""
_PROMOTED: Final = """
    select -sum(p.amount_nano) from ledger_postings p join ledger_journals j on j.id = p.journal_id
    join ledger_accounts a on a.id = p.account_id
    where j.kind = 'promotion' and a.code = :ref
"""


def _sums(session: Session, query: str, ref: object) -> int:
    return int(session.execute(text(query), {"ref": ref}).scalar() or 0)


def _pair(session: Session, query: str, ref: object) -> tuple[int, int]:
    row = session.execute(text(query), {"ref": ref}).one()
    return int(row[0] or 0), int(row[1] or 0)


def _balance(session: Session, code: str) -> int:
    account = ledger.find_account(session, code)
    return 0 if account is None else ledger.balance(session, account).nano
