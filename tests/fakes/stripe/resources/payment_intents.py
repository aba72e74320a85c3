"""Payment intents: created, confirmed with or without the holder, authenticated, declined, cancelled."""

from __future__ import annotations

from collections.abc import Mapping

from tests.fakes.stripe.cards import Authentication, Card, decline
from tests.fakes.stripe.currencies import check_charge, check_currency
from tests.fakes.stripe.errors import Json, StripeError, card_error, invalid, refused
from tests.fakes.stripe.forms import Params
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.resources import charges, disputes, payment_methods
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

CAPTURES = ("automatic", "automatic_async")
STORED = "description receipt_email statement_descriptor statement_descriptor_suffix transfer_group"
CONFIRM = "payment_method off_session error_on_requires_action return_url use_stripe_sdk setup_future_usage"
CREATE = (
    f"amount currency customer confirm allowed_payment_method_types automatic_payment_methods metadata capture_method "
    f"{STORED} {CONFIRM}"
)
CONFIRMABLE = frozenset({"requires_payment_method", "requires_confirmation", "requires_action"})
CANCELABLE = CONFIRMABLE | {"requires_capture", "processing"}


@route("POST", "/v1/payment_intents", "PaymentIntentCreateParams", CREATE)
def create(world: World, call: Call) -> Json:
    params = call.params
    confirms = params.boolean("confirm")
    if "off_session" in params and not confirms:
        raise invalid("The parameter `off_session` can only be used when `confirm` is true.", param="off_session")
    if confirms:
        _check_confirmation(params, _automatic(params), method=params.text("payment_method"))
    intent = new_intent(world, call.owner, params)
    world.emit("payment_intent.created", intent, call.owner)
    return _confirm(world, call, intent) if confirms else intent


def new_intent(world: World, owner: str, params: Params) -> Json:
    """An intent from create parameters, without an event."""
    currency = check_currency(params.required_text("currency"))
    amount = params.required_integer("amount", minimum=0)
    check_charge(amount, currency)
    customer = params.text("customer")
    if customer is not None:
        world.store.get(owner, "customer", customer, param="customer")
    stored = {name: params.text(name) for name in STORED.split()}
    method = params.text("payment_method")
    known = method and usable(world, owner, method, customer)["id"]
    return blank_intent(
        world,
        owner,
        amount=amount,
        currency=currency,
        customer=customer,
        payment_method=known,
        metadata=params.metadata(),
        capture_method=params.choice("capture_method", CAPTURES, "automatic_async"),
        setup_future_usage=params.choice("setup_future_usage", ["on_session", "off_session"]),
        automatic_payment_methods=_automatic(params),
        **stored,
    )


def blank_intent(world: World, owner: str, **fields: object) -> Json:
    """An intent with defaults for what is not given."""
    intent = world.new(
        "pi",
        "payment_intent",
        owner,
        amount_capturable=0,
        amount_details={"tip": {}},
        amount_received=0,
        application=None,
        application_fee_amount=None,
        canceled_at=None,
        cancellation_reason=None,
        capture_method="automatic_async",
        client_secret=None,
        confirmation_method="automatic",
        customer=None,
        last_payment_error=None,
        latest_charge=None,
        metadata={},
        next_action=None,
        on_behalf_of=None,
        payment_method=None,
        payment_method_options={},
        payment_method_types=["card"],
        processing=None,
        review=None,
        setup_future_usage=None,
        shipping=None,
        transfer_data=None,
        automatic_payment_methods=None,
    )
    intent.update(dict.fromkeys(STORED.split()))
    intent.update(fields)
    intent["status"] = "requires_confirmation" if intent["payment_method"] else "requires_payment_method"
    intent["client_secret"] = f"{intent['id']}_secret_{world.ids.letters(25)}"
    return intent


def _automatic(params: Params) -> Json | None:
    given = params.inner("automatic_payment_methods")
    if "allowed_payment_method_types" in params:
        return None
    redirects = given.choice("allow_redirects", ["always", "never"], "always")
    return {"allow_redirects": redirects, "enabled": given.boolean("enabled", default=True)}


def usable(world: World, owner: str, identifier: str, customer: str | None) -> Json:
    """A method that this customer may pay with: a new one, or one of theirs."""
    method = payment_methods.resolve(world, owner, identifier)
    if method["customer"] not in (None, customer):
        raise refused(
            f"The customer does not have a payment method with the ID {identifier}. The payment method must be "
            f"attached to the customer.",
            code="resource_missing",
            param="payment_method",
        )
    return method


def missing_method() -> StripeError:
    return invalid(
        "You cannot confirm this PaymentIntent because it's missing a payment method. You can either update the "
        "PaymentIntent with a payment method and then confirm it again, or confirm it again directly with a payment "
        "method or ConfirmationToken.",
        code="payment_intent_unexpected_state",
    )


def unexpected_state(intent: Json, verb: str) -> StripeError:
    return refused(
        f"You cannot {verb} this PaymentIntent because it has a status of {intent['status']}.",
        code="payment_intent_unexpected_state",
        payment_intent=intent,
    )


@route("GET", "/v1/payment_intents/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "payment_intent", call.path_ids[0])


@list_route("/v1/payment_intents", "PaymentIntentListParams", "customer")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "payment_intent", "customer")


@route("POST", "/v1/payment_intents/{id}", "PaymentIntentUpdateParams", "metadata description payment_method amount")
def update(world: World, call: Call) -> Json:
    intent = world.store.get(call.owner, "payment_intent", call.path_ids[0])
    changes: Json = {"metadata": call.params.metadata(intent["metadata"])}
    if "description" in call.params:
        changes["description"] = call.params.text("description")
    if "amount" in call.params or "payment_method" in call.params:
        if intent["status"] not in CONFIRMABLE:
            raise unexpected_state(intent, "update")
        changes |= _repriced(world, call, intent)
    world.change(intent, **changes)
    return intent


def _repriced(world: World, call: Call, intent: Json) -> Json:
    changes: Json = {}
    amount = call.params.integer("amount")
    if amount is not None:
        check_charge(amount, intent["currency"])
        changes["amount"] = amount
    method = call.params.text("payment_method")
    if method is not None:
        changes["payment_method"] = usable(world, call.owner, method, intent["customer"])["id"]
        changes["status"] = "requires_confirmation"
    return changes


@route("POST", "/v1/payment_intents/{id}/confirm", "PaymentIntentConfirmParams", CONFIRM)
def confirm(world: World, call: Call) -> Json:
    intent = world.store.get(call.owner, "payment_intent", call.path_ids[0])
    return _confirm(world, call, intent)


def _confirm(world: World, call: Call, intent: Json) -> Json:
    params = call.params
    if intent["status"] not in CONFIRMABLE:
        raise unexpected_state(intent, "confirm")
    given = params.text("payment_method")
    _check_confirmation(params, intent["automatic_payment_methods"], method=given or intent["payment_method"])
    if given is not None and call.path_ids:
        intent["payment_method"] = usable(world, call.owner, given, intent["customer"])["id"]
    usage = params.choice("setup_future_usage", ["on_session", "off_session"], intent["setup_future_usage"])
    intent["setup_future_usage"] = usage
    return attempt(
        world,
        call.owner,
        intent,
        off_session=_off_session(params),
        holder_can_act=not params.boolean("error_on_requires_action"),
        return_url=params.text("return_url"),
    )


def _off_session(params: Params) -> bool:
    return params.text("off_session") not in (None, "false")


def _check_confirmation(params: Params, automatic: Json | None, *, method: str | None) -> None:
    if method is None:
        raise missing_method()
    redirects = automatic is not None and automatic["enabled"] and automatic["allow_redirects"] == "always"
    waived = _off_session(params) or params.boolean("use_stripe_sdk") or params.text("return_url") is not None
    if redirects and not waived:
        raise invalid(
            "This PaymentIntent is configured to accept payment methods enabled in your Dashboard. Because some of "
            "these payment methods might redirect your customer off of your page, you must provide a `return_url`. If "
            "you don't want to accept redirect-based payment methods, set `automatic_payment_methods[enabled]` to "
            "`true` and `automatic_payment_methods[allow_redirects]` to `never` when creating Setup Intents and "
            "Payment Intents."
        )


def attempt(
    world: World,
    owner: str,
    intent: Json,
    *,
    off_session: bool = False,
    holder_can_act: bool = True,
    authenticated: bool = False,
    return_url: str | None = None,
) -> Json:
    """Try to take the money. Raises the 402 of a decline, after the failed charge and its events."""
    method = world.store.get(owner, "payment_method", intent["payment_method"])
    card = world.cards[method["id"]]
    if card.declines is not None:
        raise fail(world, owner, intent, method, card.declines)
    if not authenticated and _must_authenticate(world, card, method["id"]):
        if off_session or not holder_can_act:
            raise fail(world, owner, intent, method, "authentication_required")
        return _ask_holder(world, owner, intent, return_url)
    if card.delayed:
        return _start_debit(world, owner, intent, method)
    return _succeed(world, owner, intent, method, card)


def _must_authenticate(world: World, card: Card, method: str) -> bool:
    if card.authentication is Authentication.ONCE:
        return method not in world.authenticated
    return card.authentication is Authentication.ALWAYS


def _ask_holder(world: World, owner: str, intent: Json, return_url: str | None) -> Json:
    if return_url is None:
        action: Json = {"type": "use_stripe_sdk", "use_stripe_sdk": {"type": "three_d_secure_redirect"}}
    else:
        url = f"{world.pages_url}/3d_secure/{intent['id']}"
        action = {"type": "redirect_to_url", "redirect_to_url": {"return_url": return_url, "url": url}}
    world.change(intent, status="requires_action", next_action=action)
    world.emit("payment_intent.requires_action", intent, owner)
    return intent


def _succeed(world: World, owner: str, intent: Json, method: Json, card: Card) -> Json:
    charge = charges.new_charge(world, owner, intent, method, status="succeeded")
    _save_method(world, owner, intent, method)
    world.emit("charge.succeeded", charge, owner)
    _mark_paid(world, owner, intent, charge)
    if intent["capture_method"] == "automatic":
        charges.book(world, owner, charge, card)
    else:
        world.schedule(world.clock.now(), lambda: charges.book(world, owner, charge, card))
    if card.disputes:
        world.schedule(world.clock.now(), lambda: _dispute(world, owner, charge))
    return intent


def _dispute(world: World, owner: str, charge: Json) -> None:
    disputes.open_dispute(world, owner, charge)


def _mark_paid(world: World, owner: str, intent: Json, charge: Json) -> None:
    world.change(
        intent,
        status="succeeded",
        amount_received=intent["amount"],
        latest_charge=charge["id"],
        next_action=None,
        last_payment_error=None,
    )
    world.emit("payment_intent.succeeded", intent, owner)


def _save_method(world: World, owner: str, intent: Json, method: Json) -> None:
    if intent["setup_future_usage"] is None or intent["customer"] is None:
        return
    customer = world.store.get(owner, "customer", intent["customer"], param="customer")
    payment_methods.attach(world, owner, method, customer)
    if intent["setup_future_usage"] == "off_session":
        payment_methods.authenticate_later_use(world, method)


def _start_debit(world: World, owner: str, intent: Json, method: Json) -> Json:
    charge = charges.new_charge(world, owner, intent, method, status="pending")
    _save_method(world, owner, intent, method)
    world.emit("charge.pending", charge, owner)
    world.change(intent, status="processing", latest_charge=charge["id"], next_action=None)
    world.emit("payment_intent.processing", intent, owner)
    return intent


def fail(world: World, owner: str, intent: Json, method: Json, reason: str) -> StripeError:
    """Record a decline and return its error: the intent waits for another payment method."""
    error = decline(reason)
    charge = charges.new_charge(world, owner, intent, method, status="failed")
    _decline(world, owner, intent, method, charge, error)
    return card_error(
        str(error),
        code=error.body["error"]["code"],
        decline_code=reason,
        charge=charge["id"],
        payment_intent=dict(intent),
        payment_method=dict(method),
    )


def _decline(world: World, owner: str, intent: Json, method: Json, charge: Json, error: StripeError) -> None:
    told: Mapping[str, object] = error.body["error"]
    charge.update(status="failed", paid=False, failure_code=told["code"], failure_message=told["message"])
    world.emit("charge.failed", charge, owner)
    world.change(
        intent,
        status="requires_payment_method",
        latest_charge=charge["id"],
        payment_method=None,
        next_action=None,
        last_payment_error={**told, "charge": charge["id"], "payment_method": dict(method)},
    )
    world.emit("payment_intent.payment_failed", intent, owner)


def finish_authentication(world: World, owner: str, intent: Json, *, succeeds: bool) -> Json:
    """The holder came back from their bank."""
    if intent["status"] != "requires_action":
        raise unexpected_state(intent, "authenticate")
    if succeeds:
        return attempt(world, owner, intent, authenticated=True)
    method = world.store.get(owner, "payment_method", intent["payment_method"])
    failure = {
        "code": "payment_intent_authentication_failure",
        "message": "The provided PaymentMethod has failed authentication.",
        "type": "card_error",
        "payment_method": dict(method),
    }
    world.change(
        intent, status="requires_payment_method", payment_method=None, next_action=None, last_payment_error=failure
    )
    world.emit("payment_intent.payment_failed", intent, owner)
    return intent


def finish_debit(world: World, owner: str, intent: Json, *, succeeds: bool) -> Json:
    """The bank answered a debit that was processing."""
    if intent["status"] != "processing":
        raise unexpected_state(intent, "settle")
    charge = world.store.get(owner, "charge", intent["latest_charge"])
    method = world.store.get(owner, "payment_method", intent["payment_method"])
    if not succeeds:
        _decline(world, owner, intent, method, charge, decline("insufficient_funds"))
        return intent
    charges.settle(charge)
    world.emit("charge.succeeded", charge, owner)
    _mark_paid(world, owner, intent, charge)
    charges.book(world, owner, charge, world.cards[method["id"]])
    return intent


@route("POST", "/v1/payment_intents/{id}/cancel", "PaymentIntentCancelParams", "cancellation_reason")
def cancel(world: World, call: Call) -> Json:
    intent = world.store.get(call.owner, "payment_intent", call.path_ids[0])
    reasons = ("duplicate", "fraudulent", "requested_by_customer", "abandoned")
    reason = call.params.choice("cancellation_reason", reasons)
    if intent["status"] not in CANCELABLE:
        raise unexpected_state(intent, "cancel")
    now = world.clock.now()
    world.change(intent, status="canceled", canceled_at=now, cancellation_reason=reason, next_action=None)
    world.emit("payment_intent.canceled", intent, call.owner)
    return intent
