"""Setup intents: cards saved for later, as Checkout makes them in setup mode."""

from __future__ import annotations

from tests.fakes.stripe.cards import decline
from tests.fakes.stripe.errors import Json, refused
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.resources import payment_methods
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World


def new_setup_intent(world: World, owner: str, *, customer: str | None, metadata: dict[str, str]) -> Json:
    """An intent that waits for a card."""
    intent = world.new(
        "seti",
        "setup_intent",
        owner,
        application=None,
        cancellation_reason=None,
        customer=customer,
        description=None,
        flow_directions=None,
        last_setup_error=None,
        latest_attempt=None,
        mandate=None,
        metadata=metadata,
        next_action=None,
        on_behalf_of=None,
        payment_method=None,
        payment_method_options={"card": {"request_three_d_secure": "automatic"}},
        payment_method_types=["card"],
        single_use_mandate=None,
        status="requires_payment_method",
        usage="off_session",
    )
    intent["client_secret"] = f"{intent['id']}_secret_{world.ids.letters(25)}"
    world.emit("setup_intent.created", intent, owner)
    return intent


def succeed(world: World, owner: str, intent: Json, method: Json) -> None:
    """The holder entered a card and agreed to later use; raises the 402 of a card that refuses."""
    card = world.cards[method["id"]]
    if card.refuses and card.declines:
        error = decline(card.declines)
        world.change(intent, last_setup_error={**error.body["error"], "payment_method": dict(method)})
        world.emit("setup_intent.setup_failed", intent, owner)
        raise error
    if intent["customer"] is not None:
        customer = world.store.get(owner, "customer", intent["customer"], param="customer")
        payment_methods.attach(world, owner, method, customer)
    payment_methods.authenticate_later_use(world, method)
    world.change(intent, status="succeeded", payment_method=method["id"], last_setup_error=None)
    world.emit("setup_intent.succeeded", intent, owner)


@route("POST", "/v1/setup_intents", "SetupIntentCreateParams", "customer metadata usage payment_method confirm")
def create(world: World, call: Call) -> Json:
    params = call.params
    customer = params.text("customer")
    if customer is not None:
        world.store.get(call.owner, "customer", customer, param="customer")
    confirms, given = params.boolean("confirm"), params.text("payment_method")
    if confirms and given is None:
        raise params.absent("payment_method")
    usage = params.choice("usage", ["off_session", "on_session"], "off_session")
    method = given and payment_methods.resolve(world, call.owner, given)
    intent = new_setup_intent(world, call.owner, customer=customer, metadata=params.metadata())
    intent["usage"] = usage
    if confirms:
        assert isinstance(method, dict)
        succeed(world, call.owner, intent, method)
    return intent


@route("GET", "/v1/setup_intents/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "setup_intent", call.path_ids[0])


@list_route("/v1/setup_intents", "SetupIntentListParams", "customer payment_method")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "setup_intent", "customer", "payment_method")


@route("POST", "/v1/setup_intents/{id}/cancel", "SetupIntentCancelParams", "cancellation_reason")
def cancel(world: World, call: Call) -> Json:
    intent = world.store.get(call.owner, "setup_intent", call.path_ids[0])
    if intent["status"] in {"succeeded", "canceled"}:
        raise refused(
            f"You cannot cancel this SetupIntent because it has a status of {intent['status']}.",
            code="setup_intent_unexpected_state",
            setup_intent=dict(intent),
        )
    reason = call.params.choice("cancellation_reason", ["abandoned", "requested_by_customer", "duplicate"])
    world.change(intent, status="canceled", cancellation_reason=reason)
    world.emit("setup_intent.canceled", intent, call.owner)
    return intent
