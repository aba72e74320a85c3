"""Checkout sessions: a hosted page where a customer pays, or saves a card."""

from __future__ import annotations

from tests.fakes.stripe.cards import CARDS, Card
from tests.fakes.stripe.clock import DAY_S
from tests.fakes.stripe.currencies import check_charge, check_currency
from tests.fakes.stripe.errors import Json, invalid, refused
from tests.fakes.stripe.forms import Params
from tests.fakes.stripe.render import includable, listing, page, whole_list
from tests.fakes.stripe.resources import customers, payment_intents, payment_methods, setup_intents
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

SHORTEST_S = 30 * 60
LONGEST_S = DAY_S
CREATE = (
    "mode line_items success_url cancel_url customer customer_email customer_creation client_reference_id metadata "
    "payment_intent_data setup_intent_data expires_at currency saved_payment_method_options submit_type locale "
    "ui_mode allowed_payment_method_types customer_update"
)
INTENT_DATA = frozenset({"metadata", "description", "setup_future_usage", "receipt_email", "transfer_group"})


@route("POST", "/v1/checkout/sessions", "SessionCreateParams", CREATE)
def create(world: World, call: Call) -> Json:
    params = call.params
    mode = params.choice("mode", ["payment", "setup"])
    if mode is None:
        raise params.absent("mode")
    params.choice("ui_mode", ["hosted_page"])
    success_url = params.required_text("success_url")
    customer = params.text("customer")
    if customer is not None:
        world.store.get(call.owner, "customer", customer, param="customer")
    expires_at = _expiry(world, params)
    lines, currency = _lines(params) if mode == "payment" else ([], _setup_currency(params))
    total = sum(line["amount_total"] for line in lines)
    if mode == "payment":
        check_charge(total, currency)
    intent_data = _intent_data(params.inner("payment_intent_data"))
    session = _new_session(world, call, mode=mode, currency=currency, total=total, expires_at=expires_at)
    session["success_url"] = success_url
    session["customer"] = customer
    for number, line in enumerate(lines):
        line["id"] = f"li_{session['id'][-20:]}{number}"
    world.store.add(call.owner, {"id": _details(session), "object": "stand_in.details", "lines": lines, **intent_data})
    if mode == "setup":
        metadata = params.inner("setup_intent_data").metadata()
        intent = setup_intents.new_setup_intent(world, call.owner, customer=customer, metadata=metadata)
        session["setup_intent"] = intent["id"]
    world.schedule(expires_at, lambda: _expire(world, call.owner, session))
    return session


def _details(session: Json) -> str:
    return f"details_{session['id']}"


def _details_of(world: World, session: Json) -> Json:
    record = world.store.find(_details(session))
    assert record is not None
    return record.data


def _expiry(world: World, params: Params) -> int:
    now = world.clock.now()
    expires_at = params.integer("expires_at") or now + DAY_S
    if not now + SHORTEST_S <= expires_at <= now + LONGEST_S:
        raise invalid(
            "The `expires_at` timestamp must be between 30 minutes and 24 hours from Checkout Session creation.",
            param="expires_at",
        )
    return expires_at


def _setup_currency(params: Params) -> str:
    if "line_items" in params:
        raise invalid("You can not pass `line_items` in `setup` mode.", param="line_items")
    return check_currency(params.required_text("currency"))


def _lines(params: Params) -> tuple[list[Json], str]:
    lines = [_line(item) for item in params.items("line_items")]
    if not lines:
        raise params.absent("line_items")
    currencies = {line["currency"] for line in lines}
    if len(currencies) > 1:
        raise invalid("All line items must have the same currency.", param="line_items")
    return lines, currencies.pop()


def _line(item: Params) -> Json:
    item.check(
        frozenset({"adjustable_quantity", "dynamic_tax_rates", "price", "tax_rates"}), ["price_data", "quantity"]
    )
    price = item.inner("price_data")
    if not price:
        raise item.absent("price_data")
    currency = check_currency(price.required_text("currency"))
    unit = price.required_integer("unit_amount", minimum=0)
    quantity = item.required_integer("quantity")
    name = price.inner("product_data").required_text("name")
    return {
        "object": "item",
        "amount_discount": 0,
        "amount_subtotal": unit * quantity,
        "amount_tax": 0,
        "amount_total": unit * quantity,
        "currency": currency,
        "description": name,
        "price": {"object": "price", "currency": currency, "unit_amount": unit, "type": "one_time"},
        "quantity": quantity,
    }


def _intent_data(given: Params) -> Json:
    given.check(frozenset({"application_fee_amount", "capture_method", "on_behalf_of", "transfer_data"}), INTENT_DATA)
    fields = {name: given.text(name) for name in INTENT_DATA - {"metadata"} if name in given}
    return {"intent": {**fields, "metadata": given.metadata()}}


def _new_session(world: World, call: Call, *, mode: str, currency: str, total: int, expires_at: int) -> Json:
    params = call.params
    creation = params.choice("customer_creation", ["always", "if_required"], "if_required")
    payment = mode == "payment"
    session = world.new(
        "cs",
        "checkout.session",
        call.owner,
        adaptive_pricing={"enabled": False},
        after_expiration=None,
        allow_promotion_codes=None,
        amount_subtotal=total if payment else None,
        amount_total=total if payment else None,
        automatic_tax={"enabled": False, "liability": None, "provider": None, "status": None},
        billing_address_collection=None,
        cancel_url=params.text("cancel_url"),
        client_reference_id=params.text("client_reference_id"),
        client_secret=None,
        collected_information=None,
        consent=None,
        consent_collection=None,
        currency=currency,
        custom_fields=[],
        customer_creation=creation if payment else None,
        customer_details=None,
        customer_email=params.text("customer_email"),
        expires_at=expires_at,
        invoice=None,
        locale=params.text("locale"),
        metadata=params.metadata(),
        mode=mode,
        payment_intent=None,
        payment_link=None,
        payment_method_collection="if_required",
        payment_method_options={},
        payment_method_types=["card"],
        payment_status="unpaid" if payment else "no_payment_required",
        recovered_from=None,
        saved_payment_method_options=params.plain("saved_payment_method_options"),
        setup_intent=None,
        shipping_options=[],
        status="open",
        submit_type=params.text("submit_type"),
        subscription=None,
        total_details={"amount_discount": 0, "amount_shipping": 0, "amount_tax": 0} if payment else None,
        ui_mode="hosted_page",
    )
    session["url"] = f"{world.pages_url}/c/pay/{session['id']}"
    return session


@route("GET", "/v1/checkout/sessions/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "checkout.session", call.path_ids[0])


@list_route("/v1/checkout/sessions", "SessionListParams", "customer payment_intent status")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "checkout.session", "customer", "payment_intent", "status")


@route("POST", "/v1/checkout/sessions/{id}", "SessionUpdateParams", "metadata")
def update(world: World, call: Call) -> Json:
    session = world.store.get(call.owner, "checkout.session", call.path_ids[0])
    session["metadata"] = call.params.metadata(session["metadata"])
    return session


@route("GET", "/v1/checkout/sessions/{id}/line_items", "SessionListLineItemsParams", "limit starting_after")
def line_items(world: World, call: Call) -> Json:
    session = world.store.get(call.owner, "checkout.session", call.path_ids[0])
    lines = [{**line, "created": session["created"]} for line in _details_of(world, session)["lines"]]
    return page(call, lines[::-1])


@includable("checkout.session", "line_items")
def lines_of(world: World, session: Json) -> Json:
    return whole_list(_details_of(world, session)["lines"], f"/v1/checkout/sessions/{session['id']}/line_items")


@route("POST", "/v1/checkout/sessions/{id}/expire")
def expire(world: World, call: Call) -> Json:
    session = world.store.get(call.owner, "checkout.session", call.path_ids[0])
    if session["status"] != "open":
        raise refused(
            f'Only Checkout Sessions with a status in ["open"] can be expired. This Checkout Session has a status of '
            f"`{session['status']}`."
        )
    _expire(world, call.owner, session)
    return session


def _expire(world: World, owner: str, session: Json) -> None:
    if session["status"] != "open":
        return
    world.change(session, status="expired", url=None)
    world.emit("checkout.session.expired", session, owner)


def complete(
    world: World,
    session: Json,
    *,
    card: str | Card,
    email: str | None = None,
    authenticates: bool = True,
) -> Json:
    """What the page does when its customer pays or saves a card; raises a 402 and stays open when the card declines."""
    record = world.store.find(session["id"])
    assert record is not None
    if session["status"] != "open":
        raise refused(f"This Checkout Session has a status of `{session['status']}`.")
    method = _method(world, record.owner, session, card)
    if session["mode"] == "setup":
        setup = world.store.get(record.owner, "setup_intent", session["setup_intent"])
        setup_intents.succeed(world, record.owner, setup, method)
    else:
        _pay(world, record.owner, session, method, email=email, authenticates=authenticates)
    world.change(session, status="complete", url=None, customer_details={"email": email or session["customer_email"]})
    world.emit("checkout.session.completed", session, record.owner)
    return session


def _method(world: World, owner: str, session: Json, card: str | Card) -> Json:
    if isinstance(card, Card):
        return payment_methods.from_card(world, owner, card)
    if card in CARDS:
        return payment_methods.from_card(world, owner, CARDS[card])
    return payment_intents.usable(world, owner, card, session["customer"])


def _pay(world: World, owner: str, session: Json, method: Json, *, email: str | None, authenticates: bool) -> None:
    intent = _intent(world, owner, session, email)
    intent["payment_method"] = method["id"]
    payment_intents.attempt(world, owner, intent)
    if intent["status"] == "requires_action":
        payment_intents.finish_authentication(world, owner, intent, succeeds=authenticates)
    if intent["status"] == "requires_payment_method":
        raise refused("We are unable to authenticate your payment method.", code=intent["last_payment_error"]["code"])
    world.change(session, payment_status="paid" if intent["status"] == "succeeded" else "unpaid")


def _intent(world: World, owner: str, session: Json, email: str | None) -> Json:
    """The session's payment intent, made at the first attempt."""
    if session["payment_intent"] is not None:
        return world.store.get(owner, "payment_intent", session["payment_intent"])
    if session["customer"] is None and session["customer_creation"] == "always":
        customer = customers.new_customer(world, owner, email=email or session["customer_email"])
        world.emit("customer.created", customer, owner)
        session["customer"] = customer["id"]
    intent = payment_intents.blank_intent(
        world,
        owner,
        amount=session["amount_total"],
        currency=session["currency"],
        customer=session["customer"],
        **_details_of(world, session)["intent"],
    )
    session["payment_intent"] = intent["id"]
    world.emit("payment_intent.created", intent, owner)
    return intent


def settle_delayed(world: World, owner: str, intent: Json) -> None:
    """Tell the session of a bank debit's answer."""
    for session in world.store.every(owner, "checkout.session"):
        if session["payment_intent"] == intent["id"]:
            paid = intent["status"] == "succeeded"
            world.change(session, payment_status="paid" if paid else "unpaid")
            outcome = "succeeded" if paid else "failed"
            world.emit(f"checkout.session.async_payment_{outcome}", session, owner)
