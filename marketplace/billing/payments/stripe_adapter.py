"""Stripe behind the port: the only module that imports its client.

The API version is pinned. The client retries nothing by itself: whether and how a call is repeated is decided by
outgoing calls, which know its key. Webhooks are believed in one point only: which object is worth fetching.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import islice
from typing import Any, Final, Literal

import stripe
from stripe import StripeClient, StripeObject, WebhookSignature

from marketplace.billing.payments import port
from marketplace.core.logs import get_logger
from marketplace.core.settings import Settings

log = get_logger(__name__)
API_VERSION: Final = "2026-10-28.endive"
"""What the shapes below were written for. Stripe keeps old versions working; moving on is a change of this module."""
PAGE: Final = 100
MAX_FOUND: Final = 5_000
"""Objects that one look-up reads at most."""
MAX_LINES: Final = 1_000_000
MAX_EVENT_BYTES: Final = 1_000_000

_CHECKOUT: Final = {"open": "open", "complete": "complete", "expired": "expired"}
_PAYMENT: Final = {"succeeded": "succeeded", "processing": "processing", "canceled": "canceled"}
_REFUND: Final = {"succeeded": "succeeded", "failed": "failed", "canceled": "failed"}
_PAYOUT: Final = {"paid": "paid", "failed": "failed", "canceled": "canceled"}
_DISPUTE: Final = {"won": "won", "lost": "lost", "warning_closed": "withdrawn", "prevented": "withdrawn"}
_EVENTS: Final[tuple[tuple[str, port.ObjectKind], ...]] = (
    ("checkout.session.", "checkout"),
    ("payment_intent.", "payment"),
    ("charge.dispute.", "dispute"),
    ("charge.refund.", "refund"),
    ("refund.", "refund"),
    ("transfer.", "transfer"),
    ("payout.", "payout"),
    ("account.updated", "account"),
)
"""Beginning of an event's type -> the object that it is about."""
_BUSY: Final = frozenset({"idempotency_key_in_use", "lock_timeout", "rate_limit"})


class StripePayments:
    """Implements port.Payments."""

    name: Literal["sandbox", "stripe"] = "stripe"

    def __init__(self, settings: Settings) -> None:
        key = settings.stripe_secret_key.get_secret_value()
        self.live = settings.payment_mode == "live"
        check_key(key, live=self.live)
        addresses: Any = {"api": settings.stripe_api_url} if settings.stripe_api_url else None
        self._client = StripeClient(
            key,
            stripe_version=API_VERSION,
            base_addresses=addresses,
            max_network_retries=0,
            http_client=stripe.RequestsClient(timeout=settings.payment_timeout_s),
        )
        self._secrets = {
            False: settings.stripe_webhook_secret.get_secret_value().strip(),
            True: settings.stripe_connect_webhook_secret.get_secret_value().strip(),
        }
        self._age_s = settings.webhook_age_s

    # --- doing --------------------------------------------------------------------------------------------------------

    def send(self, wish: port.AnyWish, key: str) -> port.View:  # noqa: PLR0911  # one a wish
        options: Any = {"idempotency_key": key}
        metadata = {port.REFERENCE: wish.reference}
        v1 = self._client.v1
        with _sending():
            match wish:
                case port.CheckoutWish():
                    return self._checkout(v1.checkout.sessions.create(_checkout_params(wish), options))
                case port.ChargeWish():
                    return self._payment(v1.payment_intents.create(_charge_params(wish), options))
                case port.RefundWish():
                    params: Any = {"payment_intent": wish.payment, "amount": wish.amount, "metadata": metadata}
                    return self._refund(v1.refunds.create(params, options))
                case port.AccountWish():
                    return self._account(v1.accounts.create(_account_params(wish), options))
                case port.TransferWish():
                    transfer: Any = {
                        "amount": wish.amount,
                        "currency": wish.currency,
                        "destination": wish.account,
                        "transfer_group": wish.group,
                        "metadata": metadata,
                    }
                    return self._transfer(v1.transfers.create(transfer, options))
                case port.ReversalWish():
                    reversal: Any = {"amount": wish.amount, "metadata": metadata}
                    return self._reversal(v1.transfers.reversals.create(wish.transfer, reversal, options))
                case port.PayoutWish():
                    payout: Any = {"amount": wish.amount, "currency": wish.currency, "metadata": metadata}
                    options["stripe_account"] = wish.account
                    return self._payout(v1.payouts.create(payout, options), wish.account)

    # --- looking ------------------------------------------------------------------------------------------------------

    def find(self, wish: port.AnyWish, since: datetime) -> port.View | None:  # noqa: PLR0911  # the same
        v1: Any = self._client.v1
        created: Any = {"created": {"gte": int(since.timestamp())}, "limit": PAGE}
        with _reading():
            match wish:
                case port.CheckoutWish():
                    return _first(v1.checkout.sessions.list(created), wish.reference, self._checkout)
                case port.ChargeWish():
                    params = {**created, "customer": wish.customer}
                    return _first(v1.payment_intents.list(params), wish.reference, self._payment)
                case port.RefundWish():
                    params = {"payment_intent": wish.payment, "limit": PAGE}
                    return _first(v1.refunds.list(params), wish.reference, self._refund)
                case port.AccountWish():
                    return _first(v1.accounts.list(created), wish.reference, self._account)
                case port.TransferWish():
                    params = {"destination": wish.account, "transfer_group": wish.group, "limit": PAGE}
                    return _first(v1.transfers.list(params), wish.reference, self._transfer)
                case port.ReversalWish():
                    found = v1.transfers.reversals.list(wish.transfer, {"limit": PAGE})
                    return _first(found, wish.reference, self._reversal)
                case port.PayoutWish():
                    options: Any = {"stripe_account": wish.account}
                    found_payouts = v1.payouts.list(created, options)
                    return _first(found_payouts, wish.reference, lambda each: self._payout(each, wish.account))

    def fetch(self, kind: port.ObjectKind, object_id: str, account: str = "") -> port.View:  # noqa: PLR0911  # one a kind
        v1 = self._client.v1
        with _reading():
            match kind:
                case "checkout":
                    return self._checkout(v1.checkout.sessions.retrieve(object_id))
                case "payment":
                    expand: Any = {"expand": ["latest_charge"]}
                    if object_id.startswith(("ch_", "py_")):
                        # The processor's books name the charge.
                        object_id = str(_id_of(v1.charges.retrieve(object_id).payment_intent))
                    return self._payment(v1.payment_intents.retrieve(object_id, expand))
                case "refund":
                    return self._refund(v1.refunds.retrieve(object_id))
                case "dispute":
                    return self._dispute(v1.disputes.retrieve(object_id))
                case "account":
                    return self._account(v1.accounts.retrieve(object_id))
                case "transfer":
                    return self._transfer(v1.transfers.retrieve(object_id))
                case "payout":
                    return self._payout(v1.payouts.retrieve(object_id, options=_on(account)), account)

    def onboarding_link(self, account_id: str, refresh_url: str, return_url: str) -> str:
        params: Any = {
            "account": account_id,
            "type": "account_onboarding",
            "refresh_url": refresh_url,
            "return_url": return_url,
        }
        with _reading():
            return str(self._client.v1.account_links.create(params).url)

    def funds(self, account: str = "") -> port.Funds:
        with _reading():
            balance = self._client.v1.balance.retrieve(options=_on(account)).to_dict()

        def of(part: str) -> int:
            entries = balance.get(part) or []
            return sum(entry["amount"] for entry in entries if entry["currency"] == port.CURRENCY)

        return port.Funds(available=of("available"), pending=of("pending"), reserved=of("connect_reserved"))

    def lines(self, since: datetime, account: str = "") -> Iterable[port.ProcessorLine]:
        params: Any = {"created": {"gte": int(since.timestamp())}, "limit": PAGE}
        with _reading():
            page = self._client.v1.balance_transactions.list(params, options=_on(account))
            for line in islice(page.auto_paging_iter(), MAX_LINES):
                yield port.ProcessorLine(
                    line_id=line.id,
                    account=account,
                    type=line.type,
                    category=line.reporting_category,
                    amount=line.amount,
                    fee=line.fee,
                    net=line.net,
                    currency=line.currency,
                    source=_id_of(line.source),
                    at=datetime.fromtimestamp(line.created, UTC),
                )

    # --- webhooks -----------------------------------------------------------------------------------------------------

    def webhooks_enabled(self, *, connect: bool) -> bool:
        return bool(self._secrets[connect])

    def read_event(self, body: bytes, signature: str, *, connect: bool) -> port.Event:
        secret = self._secrets[connect]
        if not secret:
            raise port.BadSignature("There is no secret for this endpoint: nothing can be believed.")
        if len(body) > MAX_EVENT_BYTES:
            raise port.BadSignature("An event is not that large.")
        try:
            WebhookSignature.verify_header(body, signature, secret, self._age_s)
            event: dict[str, Any] = json.loads(body)
            found = event["data"]["object"]
            read = port.Event(
                event_id=str(event["id"]),
                type=str(event["type"]),
                account=str(event.get("account") or ""),
                kind=_kind_of(str(event["type"]), str(event.get("account") or "")),
                object_id=str(found.get("id") or ""),
            )
        except (stripe.SignatureVerificationError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise port.BadSignature("The signature does not fit the body, or is too old.") from error
        if bool(event.get("livemode")) != self.live:
            raise port.ModeMismatch("An event of the other mode: test and live do not meet.")
        if bool(read.account) != connect:
            raise port.BadSignature("An event of the other endpoint.")
        return read

    # --- shapes -------------------------------------------------------------------------------------------------------

    def _checked(self, found: StripeObject) -> dict[str, Any]:
        data = found.to_dict()
        if data.get("livemode", self.live) != self.live:
            raise port.ModeMismatch(f"{data.get('id')} is of the other mode: test and live do not meet.")
        return data

    def _checkout(self, found: StripeObject) -> port.CheckoutView:
        data = self._checked(found)
        status: Any = _CHECKOUT[data["status"]]
        return port.CheckoutView(
            session_id=data["id"],
            reference=data["metadata"].get(port.REFERENCE),
            status=status,
            url=data["url"],
            payment_id=_id_of(data["payment_intent"]),
        )

    def _payment(self, found: StripeObject) -> port.PaymentView:
        data = self._checked(found)
        failure = data.get("last_payment_error") or {}
        status: Any = _PAYMENT.get(data["status"]) or ("failed" if failure else "open")
        charge = data.get("latest_charge")
        return port.PaymentView(
            payment_id=data["id"],
            reference=data["metadata"].get(port.REFERENCE),
            status=status,
            amount=data["amount_received"] if status == "succeeded" else data["amount"],
            currency=data["currency"],
            charge_id=_id_of(charge),
            customer=_id_of(data.get("customer")),
            payment_method=_id_of(data.get("payment_method")) if data.get("setup_future_usage") else None,
            receipt_url=charge.get("receipt_url") if isinstance(charge, dict) else None,
            failure=failure.get("decline_code") or failure.get("code"),
        )

    def _refund(self, found: StripeObject) -> port.RefundView:
        data = self._checked(found)
        status: Any = _REFUND.get(data["status"], "pending")
        return port.RefundView(
            refund_id=data["id"],
            reference=(data.get("metadata") or {}).get(port.REFERENCE),
            payment_id=str(_id_of(data["payment_intent"]) or ""),
            status=status,
            amount=data["amount"],
        )

    def _dispute(self, found: StripeObject) -> port.DisputeView:
        data = self._checked(found)
        inquiry = data["status"].startswith("warning_")
        status: Any = _DISPUTE.get(data["status"]) or ("inquiry" if inquiry else "open")
        return port.DisputeView(
            dispute_id=data["id"],
            payment_id=str(_id_of(data["payment_intent"]) or ""),
            status=status,
            amount=data["amount"],
            reason=data["reason"],
        )

    def _account(self, found: StripeObject) -> port.AccountView:
        data = self._checked(found)
        needs = data.get("requirements") or {}
        enabled = bool(data["payouts_enabled"]) and (data.get("capabilities") or {}).get("transfers") == "active"
        return port.AccountView(
            account_id=data["id"],
            reference=(data.get("metadata") or {}).get(port.REFERENCE),
            state=_owner_state(data, needs, enabled=enabled),
            payouts_enabled=enabled,
            due=tuple(needs.get("currently_due") or ()),
            disabled_reason=needs.get("disabled_reason"),
        )

    def _transfer(self, found: StripeObject) -> port.TransferView:
        data = self._checked(found)
        return port.TransferView(
            transfer_id=data["id"],
            reference=data["metadata"].get(port.REFERENCE),
            account=str(_id_of(data["destination"])),
            amount=data["amount"],
            reversed_amount=data["amount_reversed"],
        )

    def _reversal(self, found: StripeObject) -> port.ReversalView:
        data = self._checked(found)
        return port.ReversalView(
            reversal_id=data["id"],
            reference=(data.get("metadata") or {}).get(port.REFERENCE),
            transfer=str(_id_of(data["transfer"])),
            amount=data["amount"],
        )

    def _payout(self, found: StripeObject, account: str) -> port.PayoutView:
        data = self._checked(found)
        status: Any = _PAYOUT.get(data["status"], "pending")
        return port.PayoutView(
            payout_id=data["id"],
            reference=(data.get("metadata") or {}).get(port.REFERENCE),
            account=account,
            status=status,
            amount=data["amount"],
            failure=data.get("failure_code"),
        )


def check_key(key: str, *, live: bool) -> None:
    """Raise ModeMismatch unless the key is a secret one of this mode."""
    mode = "live" if live else "test"
    if not key:
        raise port.ModeMismatch("Payments go through Stripe, but FALLOW_STRIPE_SECRET_KEY is empty.")
    if not key.startswith((f"sk_{mode}_", f"rk_{mode}_")):
        raise port.ModeMismatch(
            f"FALLOW_STRIPE_SECRET_KEY is no key of {mode} mode, which FALLOW_PAYMENT_MODE asks for."
        )


# --- calls ------------------------------------------------------------------------------------------------------------


@contextmanager
def _sending() -> Iterator[None]:
    """Sort what went wrong into what happened for sure and what may have."""
    try:
        yield
    except stripe.CardError as error:
        raise port.Declined(_reason(error), error.user_message or "The card was declined.") from error
    except (stripe.RateLimitError, stripe.AuthenticationError, stripe.PermissionError) as error:
        raise port.NotDone(_sentence(error)) from error
    except (stripe.IdempotencyError, stripe.InvalidRequestError) as error:
        if error.http_status == 409 or error.code in _BUSY:
            # Another request with this key runs: what becomes of it, its own answer tells.
            raise port.Unknown(_sentence(error)) from error
        if error.http_status == 429:
            raise port.NotDone(_sentence(error)) from error
        raise port.Declined(_reason(error), _sentence(error)) from error
    except (stripe.StripeError, ValueError) as error:
        # No answer, half of one, or a 5xx.
        raise port.Unknown(_sentence(error)) from error


@contextmanager
def _reading() -> Iterator[None]:
    try:
        yield
    except stripe.InvalidRequestError as error:
        if error.http_status == 404 or error.code == "resource_missing":
            raise port.UnknownObject(_sentence(error)) from error
        raise port.NotDone(_sentence(error)) from error
    except (stripe.StripeError, ValueError) as error:
        raise port.NotDone(_sentence(error)) from error


def _sentence(error: Exception) -> str:
    return str(getattr(error, "user_message", None) or error)[:300]


def _reason(error: stripe.StripeError) -> str:
    body: Any = error.json_body or {}
    detail = body.get("error", {}) if isinstance(body, dict) else {}
    return str(detail.get("decline_code") or error.code or "invalid_request")


def _on(account: str) -> Any:
    return {"stripe_account": account} if account else {}


def _first(page: Any, reference: str, shape: Any) -> port.View | None:
    for each in islice(page.auto_paging_iter(), MAX_FOUND):
        if (each.to_dict().get("metadata") or {}).get(port.REFERENCE) == reference:
            view: port.View = shape(each)
            return view
    return None


def _id_of(value: Any) -> str | None:
    """An id, whether the object was expanded or not."""
    if value is None or isinstance(value, str):
        return value
    return str(value["id"])


def _kind_of(event_type: str, account: str) -> port.ObjectKind | None:
    if event_type.startswith("payout.") and not account:
        # The platform's own payout to its bank: the daily reconciliation books it.
        return None
    return next((kind for prefix, kind in _EVENTS if event_type.startswith(prefix)), None)


def _owner_state(data: dict[str, Any], needs: dict[str, Any], *, enabled: bool) -> port.OwnerState:
    reason = str(needs.get("disabled_reason") or "")
    if reason.startswith("rejected"):
        return "rejected"
    if enabled:
        return "active"
    if not data["details_submitted"]:
        return "onboarding"
    return "verifying" if needs.get("pending_verification") and not needs.get("past_due") else "restricted"


# --- parameters -------------------------------------------------------------------------------------------------------


def _checkout_params(wish: port.CheckoutWish) -> Any:
    metadata = {port.REFERENCE: wish.reference}
    intent: dict[str, Any] = {"metadata": metadata, "description": wish.description}
    if wish.save_card:
        intent["setup_future_usage"] = "off_session"
    price = {"currency": wish.currency, "unit_amount": wish.amount, "product_data": {"name": wish.description}}
    params: dict[str, Any] = {
        "mode": "payment",
        "line_items": [{"price_data": price, "quantity": 1}],
        "success_url": wish.success_url,
        "cancel_url": wish.cancel_url,
        "client_reference_id": wish.reference,
        "metadata": metadata,
        "payment_intent_data": intent,
    }
    if wish.customer is not None:
        params["customer"] = wish.customer
    elif wish.save_card:
        params["customer_creation"] = "always"
    return params


def _charge_params(wish: port.ChargeWish) -> Any:
    return {
        "amount": wish.amount,
        "currency": wish.currency,
        "customer": wish.customer,
        "payment_method": wish.payment_method,
        "off_session": True,
        "confirm": True,
        "description": wish.description,
        "metadata": {port.REFERENCE: wish.reference},
    }


def _account_params(wish: port.AccountWish) -> Any:
    params: dict[str, Any] = {
        "type": "express",
        "country": wish.country,
        "capabilities": {"transfers": {"requested": True}},
        # Weekly payouts are ours to make: Stripe's own schedule would empty the account behind our back.
        "settings": {"payouts": {"schedule": {"interval": "manual"}}},
        "metadata": {port.REFERENCE: wish.reference},
    }
    if wish.email is not None:
        params["email"] = wish.email
    return params
