"""The payment port: what the platform asks of a processor, and what it is told. Adapters implement `Payments`.

Amounts are whole minor units. A wish carries a `reference`, the id of our row: it stands in the object's metadata, so
that an object can be found although the answer to its creation was lost.
"""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime
from typing import Final, Literal, Protocol

import msgspec

from marketplace.core.errors import FallowError

REFERENCE: Final = "fallow_reference"
"""Key of the reference in an object's metadata."""
CURRENCY: Final = "usd"
"""What renters pay and owners are paid in."""


# --- errors -----------------------------------------------------------------------------------------------------------


class PaymentError(FallowError):
    """The processor did not do what it was asked."""

    status = 502
    code = "payment_error"


class NotDone(PaymentError):
    """Nothing happened, and nothing stands in the way of asking again with the same key: busy, or not reached."""

    code = "payment_not_done"
    retryable = True


class Declined(PaymentError):
    """A final no: nothing happened, and the same wish will never be granted. `reason` is the processor's code."""

    status = 402
    code = "payment_declined"

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message, reason=reason)
        self.reason = reason


class Unknown(PaymentError):
    """It may have happened or not: only a look-up can tell."""

    code = "payment_unknown"


class UnknownObject(PaymentError):
    """The processor has no such object."""

    code = "payment_object_unknown"


class BadSignature(FallowError):
    """A webhook that is not the processor's, or too old."""

    status = 400
    code = "bad_signature"
    type = "invalid_request_error"


class ModeMismatch(FallowError):
    """Test and live must not meet."""

    status = 400
    code = "payment_mode_mismatch"


# --- wishes -----------------------------------------------------------------------------------------------------------


class Wish(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Something that the processor shall do once."""

    reference: str


class CheckoutWish(Wish, frozen=True, kw_only=True):
    """A page on which a renter pays, and may save the card."""

    amount: int
    currency: str
    customer: str | None
    save_card: bool
    success_url: str
    cancel_url: str
    description: str


class ChargeWish(Wish, frozen=True, kw_only=True):
    """A payment with a saved card, while its holder is away."""

    amount: int
    currency: str
    customer: str
    payment_method: str
    description: str


class RefundWish(Wish, frozen=True, kw_only=True):
    """Give back a part of a payment."""

    payment: str
    amount: int


class AccountWish(Wish, frozen=True, kw_only=True):
    """An owner's account at the processor."""

    country: str
    email: str | None


class TransferWish(Wish, frozen=True, kw_only=True):
    """Move money of the platform to an owner's account."""

    amount: int
    currency: str
    account: str
    group: str


class ReversalWish(Wish, frozen=True, kw_only=True):
    """Take a transfer back."""

    transfer: str
    amount: int


class PayoutWish(Wish, frozen=True, kw_only=True):
    """Send money from an owner's account to the owner's bank."""

    amount: int
    currency: str
    account: str


AnyWish = CheckoutWish | ChargeWish | RefundWish | AccountWish | TransferWish | ReversalWish | PayoutWish


# --- what comes back --------------------------------------------------------------------------------------------------

PaymentStatus = Literal["open", "processing", "succeeded", "failed", "canceled"]
DisputeStatus = Literal["inquiry", "open", "won", "lost", "withdrawn"]
OwnerState = Literal["onboarding", "verifying", "active", "restricted", "rejected"]
PayoutStatus = Literal["pending", "paid", "failed", "canceled"]


class CheckoutView(msgspec.Struct, frozen=True, kw_only=True):
    session_id: str
    reference: str | None
    status: Literal["open", "complete", "expired"]
    url: str | None
    payment_id: str | None


class PaymentView(msgspec.Struct, frozen=True, kw_only=True):
    payment_id: str
    reference: str | None
    status: PaymentStatus
    amount: int
    currency: str
    charge_id: str | None = None
    customer: str | None = None
    payment_method: str | None = None
    receipt_url: str | None = None
    failure: str | None = None


class RefundView(msgspec.Struct, frozen=True, kw_only=True):
    refund_id: str
    reference: str | None
    payment_id: str
    status: Literal["pending", "succeeded", "failed"]
    amount: int


class DisputeView(msgspec.Struct, frozen=True, kw_only=True):
    dispute_id: str
    payment_id: str
    status: DisputeStatus
    amount: int
    reason: str


class AccountView(msgspec.Struct, frozen=True, kw_only=True):
    account_id: str
    reference: str | None
    state: OwnerState
    payouts_enabled: bool
    due: tuple[str, ...] = ()
    disabled_reason: str | None = None


class TransferView(msgspec.Struct, frozen=True, kw_only=True):
    transfer_id: str
    reference: str | None
    account: str
    amount: int
    reversed_amount: int = 0


class ReversalView(msgspec.Struct, frozen=True, kw_only=True):
    reversal_id: str
    reference: str | None
    transfer: str
    amount: int


class PayoutView(msgspec.Struct, frozen=True, kw_only=True):
    payout_id: str
    reference: str | None
    account: str
    status: PayoutStatus
    amount: int
    failure: str | None = None


View = CheckoutView | PaymentView | RefundView | DisputeView | AccountView | TransferView | ReversalView | PayoutView
ObjectKind = Literal["checkout", "payment", "refund", "dispute", "account", "transfer", "payout"]


class ProcessorLine(msgspec.Struct, frozen=True, kw_only=True):
    """One line of the processor's own books: net = amount - fee, positive when money came in."""

    line_id: str
    account: str
    """Empty: the platform's."""
    type: str
    category: str
    amount: int
    fee: int
    net: int
    currency: str
    source: str | None
    at: datetime


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What a webhook says, as far as we believe it: which object is worth a look."""

    event_id: str
    type: str
    account: str
    """Empty: the platform's."""
    kind: ObjectKind | None
    """None: nothing that we act on."""
    object_id: str


class Funds(msgspec.Struct, frozen=True, kw_only=True):
    """A balance at the processor, in minor units of CURRENCY."""

    available: int
    pending: int
    reserved: int = 0
    """Held back from the platform for accounts below zero."""

    @property
    def total(self) -> int:
        return self.available + self.pending + self.reserved


class Payments(Protocol):
    """A processor. Every method may raise PaymentError; all are blocking calls, and none belongs in a transaction."""

    name: Literal["sandbox", "stripe"]
    live: bool

    def send(self, wish: AnyWish, key: str) -> View:
        """Do it once for this key. Raises NotDone, Declined, Unknown."""
        ...

    def find(self, wish: AnyWish, since: datetime) -> View | None:
        """What was made for this wish, looked up by its reference among objects made since then; None: nothing."""
        ...

    def fetch(self, kind: ObjectKind, object_id: str, account: str = "") -> View:
        """An object as it is now. Raises UnknownObject."""
        ...

    def onboarding_link(self, account_id: str, refresh_url: str, return_url: str) -> str:
        """A page on which the owner identifies themselves; it works once, for minutes."""
        ...

    def funds(self, account: str = "") -> Funds: ...

    def lines(self, since: datetime, account: str = "") -> Iterable[ProcessorLine]:
        """The processor's books from then on, newest first."""
        ...

    def read_event(self, body: bytes, signature: str, *, connect: bool) -> Event:
        """Check a webhook's signature and age. Raises BadSignature, ModeMismatch."""
        ...

    def webhooks_enabled(self, *, connect: bool) -> bool:
        """Whether there is a secret to check signatures with."""
        ...
