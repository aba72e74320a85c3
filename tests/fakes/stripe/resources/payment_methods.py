"""Payment methods: test cards by name, attached to customers."""

from __future__ import annotations

from tests.fakes.stripe.cards import CARDS, NUMBERS, Authentication, Card, decline
from tests.fakes.stripe.errors import Json, missing, refused
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World


@route("POST", "/v1/payment_methods", "PaymentMethodCreateParams", "type card metadata billing_details")
def create(world: World, call: Call) -> Json:
    call.params.required_text("type")
    call.params.choice("type", ["card"])
    given = call.params.inner("card")
    token = given.text("token")
    name = f"pm_card_{token.removeprefix('tok_')}" if token else NUMBERS.get(given.required_text("number"), "")
    if name not in CARDS:
        raise refused("Your card number is incorrect.", code="incorrect_number", param="card[number]")
    method = from_card(world, call.owner, CARDS[name])
    method["metadata"] = call.params.metadata()
    return method


def from_card(world: World, owner: str, card: Card) -> Json:
    """A payment method that behaves as this card."""
    kind = card.type
    details: Json = {"last4": card.last4, "fingerprint": world.ids.letters(16)}
    if kind == "card":
        details |= {
            "brand": card.brand,
            "country": "US",
            "display_brand": card.brand,
            "exp_month": 12,
            "exp_year": 2034,
            "funding": "credit",
            "networks": {"available": [card.brand], "preferred": None},
            "three_d_secure_usage": {"supported": True},
            "wallet": None,
        }
    else:
        details |= {"bank_name": "STRIPE TEST BANK", "account_type": "checking", "routing_number": "110000000"}
    method = world.new(
        "pm",
        "payment_method",
        owner,
        allow_redisplay="unspecified",
        billing_details={"address": None, "email": None, "name": None, "phone": None},
        customer=None,
        metadata={},
        type=kind,
    )
    method[kind] = details
    world.cards[method["id"]] = card
    return method


def resolve(world: World, owner: str, identifier: str, *, param: str = "payment_method") -> Json:
    """The method of that id; a name as `pm_card_visa` makes a new one, as in Stripe's test mode."""
    if identifier in CARDS:
        return from_card(world, owner, CARDS[identifier])
    return world.store.get(owner, "payment_method", identifier, param=param)


def owned(world: World, owner: str, identifier: str, customer: str, *, param: str) -> Json:
    """A method attached to this customer; raises resource_missing otherwise."""
    method = world.store.get(owner, "payment_method", identifier, param=param)
    if method["customer"] != customer:
        raise missing("PaymentMethod", identifier, param=param)
    return method


def attach(world: World, owner: str, method: Json, customer: Json) -> None:
    """Save a method for its customer; a card that refuses raises its decline."""
    card = world.cards[method["id"]]
    if card.refuses and card.declines:
        raise decline(card.declines)
    if method["customer"] not in (None, customer["id"]):
        raise refused(
            "The payment method you provided has already been attached to a customer.",
            code="payment_method_unexpected_state",
        )
    if method["customer"] is None:
        method["customer"] = customer["id"]
        world.emit("payment_method.attached", method, owner)


def detach_from(world: World, owner: str, method: Json) -> None:
    """Take a method from its customer; it can never be used again."""
    previous = world.change(method, customer=None)
    world.emit("payment_method.detached", method, owner, previous)


def authenticate_later_use(world: World, method: Json) -> None:
    """The holder agreed to payments without them."""
    if world.cards[method["id"]].authentication is Authentication.ONCE:
        world.authenticated.add(method["id"])


@route("GET", "/v1/payment_methods/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "payment_method", call.path_ids[0])


@list_route("/v1/payment_methods", "PaymentMethodListParams", "customer type")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "payment_method", "customer", "type")


@route("POST", "/v1/payment_methods/{id}", "PaymentMethodUpdateParams", "metadata")
def update(world: World, call: Call) -> Json:
    method = world.store.get(call.owner, "payment_method", call.path_ids[0])
    method["metadata"] = call.params.metadata(method["metadata"])
    world.emit("payment_method.updated", method, call.owner)
    return method


@route("POST", "/v1/payment_methods/{id}/attach", "PaymentMethodAttachParams", "customer")
def attach_to(world: World, call: Call) -> Json:
    customer = world.store.get(call.owner, "customer", call.params.required_text("customer"), param="customer")
    method = resolve(world, call.owner, call.path_ids[0], param="id")
    attach(world, call.owner, method, customer)
    return method


@route("POST", "/v1/payment_methods/{id}/detach")
def detach(world: World, call: Call) -> Json:
    method = world.store.get(call.owner, "payment_method", call.path_ids[0])
    if method["customer"] is None:
        raise refused(
            "The payment method you provided is not attached to a customer so detachment is impossible.",
            code="payment_method_unexpected_state",
        )
    detach_from(world, call.owner, method)
    return method
