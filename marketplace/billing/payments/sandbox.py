"""The sandbox: a processor that moves no money and answers at once. Every id begins with `sandbox_`.

It keeps its objects in a table of its own, in transactions of its own, as a processor outside would: the same key gives
the same object. Payments succeed, accounts are active, payouts arrive, and there are no fees and no webhooks.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, Final, Literal

import msgspec
from sqlalchemy import BigInteger, cast, func, select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from marketplace.billing.models import SandboxObject
from marketplace.billing.payments import port
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import Forbidden
from marketplace.core.ids import new_id

LINE: Final = "line"
_VIEWS: Final[dict[str, Any]] = {
    "checkout": port.CheckoutView,
    "payment": port.PaymentView,
    "refund": port.RefundView,
    "dispute": port.DisputeView,
    "account": port.AccountView,
    "transfer": port.TransferView,
    "reversal": port.ReversalView,
    "payout": port.PayoutView,
}


class Sandbox:
    """Implements port.Payments."""

    name: Literal["sandbox", "stripe"] = "sandbox"
    live = False

    def __init__(self, factory: SessionFactory) -> None:
        self._factory = factory

    def send(self, wish: port.AnyWish, key: str) -> port.View:
        with transaction(self._factory) as session:
            # One wish at a time and key: a repetition waits, and then finds what the first one made.
            session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(key, 0))))
            known = session.scalar(select(SandboxObject).where(SandboxObject.idempotency_key == key))
            if known is not None:
                return _view(known)
            kind, view, account = self._make(session, wish)
            _store(session, kind, view, account=account, key=key)
            return view

    def _make(self, session: Session, wish: port.AnyWish) -> tuple[str, port.View, str]:  # noqa: PLR0911  # one a wish
        match wish:
            case port.CheckoutWish():
                payment = _paid(session, wish.reference, wish.amount, wish.currency, saved=wish.save_card)
                view: port.View = port.CheckoutView(
                    session_id=_id("checkout"),
                    reference=wish.reference,
                    status="complete",
                    url=wish.success_url,
                    payment_id=payment.payment_id,
                )
                return "checkout", view, ""
            case port.ChargeWish():
                # Stored under the wish's key by the caller.
                view = _payment(wish.reference, wish.amount, wish.currency, saved=True)
                assert isinstance(view, port.PaymentView)
                _line(session, "charge", wish.amount, view.charge_id)
                return "payment", view, ""
            case port.RefundWish():
                view = port.RefundView(
                    refund_id=_id("refund"),
                    reference=wish.reference,
                    payment_id=wish.payment,
                    status="succeeded",
                    amount=wish.amount,
                )
                _line(session, "refund", -wish.amount, view.refund_id)
                return "refund", view, ""
            case port.AccountWish():
                account_id = _id("account")
                view = port.AccountView(
                    account_id=account_id, reference=wish.reference, state="active", payouts_enabled=True
                )
                return "account", view, account_id
            case port.TransferWish():
                return "transfer", _transfer(session, wish), ""
            case port.ReversalWish():
                return "reversal", _reversal(session, wish), ""
            case port.PayoutWish():
                if _total(session, wish.account) < wish.amount:
                    raise port.Declined("balance_insufficient", "The account does not hold that much.")
                view = port.PayoutView(
                    payout_id=_id("payout"),
                    reference=wish.reference,
                    account=wish.account,
                    status="paid",
                    amount=wish.amount,
                )
                _line(session, "payout", -wish.amount, view.payout_id, wish.account)
                return "payout", view, wish.account

    def find(self, wish: port.AnyWish, since: datetime) -> port.View | None:
        kind = _KINDS[type(wish)]
        query = select(SandboxObject).where(SandboxObject.reference == wish.reference, SandboxObject.kind == kind)
        with self._factory() as session:
            found = session.scalars(query.order_by(SandboxObject.sequence.desc()).limit(1)).first()
            return None if found is None else _view(found)

    def fetch(self, kind: port.ObjectKind, object_id: str, account: str = "") -> port.View:
        with self._factory() as session:
            found = session.get(SandboxObject, object_id)
            if found is None or found.kind != kind:
                raise port.UnknownObject(f"The sandbox has no {kind} {object_id!r}.")
            return _view(found)

    def onboarding_link(self, account_id: str, refresh_url: str, return_url: str) -> str:
        return return_url

    def funds(self, account: str = "") -> port.Funds:
        with self._factory() as session:
            return port.Funds(available=_total(session, account), pending=0)

    def lines(self, since: datetime, account: str = "") -> Iterable[port.ProcessorLine]:
        query = select(SandboxObject).where(
            SandboxObject.kind == LINE, SandboxObject.account == account, SandboxObject.created_at >= since
        )
        with self._factory() as session:
            found = session.scalars(query.order_by(SandboxObject.sequence.desc())).all()
        return [
            port.ProcessorLine(line_id=each.id, account=account, at=each.created_at.astimezone(UTC), **each.data)
            for each in found
        ]

    def read_event(self, body: bytes, signature: str, *, connect: bool) -> port.Event:
        raise Forbidden("The sandbox sends no webhooks: what claims to be one is not.")

    def webhooks_enabled(self, *, connect: bool) -> bool:
        return False


_KINDS: Final[dict[type, str]] = {
    port.CheckoutWish: "checkout",
    port.ChargeWish: "payment",
    port.RefundWish: "refund",
    port.AccountWish: "account",
    port.TransferWish: "transfer",
    port.ReversalWish: "reversal",
    port.PayoutWish: "payout",
}


def _id(kind: str) -> str:
    return f"sandbox_{kind}_{new_id().hex}"


def _object_id(view: port.View) -> str:
    """An object's id is the first field of its view."""
    return str(getattr(view, view.__struct_fields__[0]))


def _store(session: Session, kind: str, view: port.View, *, account: str = "", key: str | None = None) -> None:
    values = {
        "id": _object_id(view),
        "kind": kind,
        "account": account,
        "idempotency_key": key,
        "reference": getattr(view, "reference", None),
        "data": msgspec.to_builtins(view),
    }
    session.execute(insert(SandboxObject).values(values))


def _view(stored: SandboxObject) -> port.View:
    found: port.View = msgspec.convert(stored.data, _VIEWS[stored.kind])
    return found


def _payment(reference: str, amount: int, currency: str, *, saved: bool) -> port.PaymentView:
    return port.PaymentView(
        payment_id=_id("payment"),
        reference=reference,
        status="succeeded",
        amount=amount,
        currency=currency,
        charge_id=_id("charge"),
        customer=_id("customer") if saved else None,
        payment_method=_id("card") if saved else None,
    )


def _paid(session: Session, reference: str, amount: int, currency: str, *, saved: bool) -> port.PaymentView:
    payment = _payment(reference, amount, currency, saved=saved)
    _store(session, "payment", payment)
    _line(session, "charge", amount, payment.charge_id)
    return payment


def _transfer(session: Session, wish: port.TransferWish) -> port.TransferView:
    if _total(session, "") < wish.amount:
        raise port.Declined("balance_insufficient", "The platform does not hold that much at the sandbox.")
    view = port.TransferView(
        transfer_id=_id("transfer"), reference=wish.reference, account=wish.account, amount=wish.amount
    )
    _line(session, "transfer", -wish.amount, view.transfer_id)
    _line(session, "payment", wish.amount, view.transfer_id, wish.account)
    return view


def _reversal(session: Session, wish: port.ReversalWish) -> port.ReversalView:
    transfer = session.get(SandboxObject, wish.transfer)
    if transfer is None:
        raise port.Declined("resource_missing", f"There is no transfer {wish.transfer}.")
    account = str(transfer.data["account"])
    if _total(session, account) < wish.amount:
        raise port.Declined("balance_insufficient", "The account does not hold that much.")
    view = port.ReversalView(
        reversal_id=_id("reversal"), reference=wish.reference, transfer=wish.transfer, amount=wish.amount
    )
    _line(session, "transfer_refund", wish.amount, view.reversal_id)
    _line(session, "payment_refund", -wish.amount, view.reversal_id, account)
    return view


def _line(session: Session, kind: str, amount: int, source: str | None, account: str = "") -> None:
    # One account's lines are written one after the other, so that its balance is never judged on an old sum.
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"sandbox balance {account}", 0))))
    data = {
        "type": kind,
        "category": kind,
        "amount": amount,
        "fee": 0,
        "net": amount,
        "currency": port.CURRENCY,
        "source": source,
    }
    session.execute(insert(SandboxObject).values(id=_id(LINE), kind=LINE, account=account, data=data))


def _total(session: Session, account: str) -> int:
    session.execute(select(func.pg_advisory_xact_lock(func.hashtextextended(f"sandbox balance {account}", 0))))
    amount = func.sum(cast(SandboxObject.data["net"].astext, BigInteger))
    query = select(func.coalesce(amount, 0)).where(SandboxObject.kind == LINE, SandboxObject.account == account)
    return int(session.scalar(query) or 0)
