"""Customers."""

from __future__ import annotations

from tests.fakes.stripe.errors import Json
from tests.fakes.stripe.forms import Params
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.resources import payment_methods
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World

TEXTS = ("email", "name", "description", "phone")
FIELDS = "email name description phone metadata invoice_settings"


@route("POST", "/v1/customers", "CustomerCreateParams", f"{FIELDS} payment_method")
def create(world: World, call: Call) -> Json:
    customer = new_customer(world, call.owner, **{name: call.params.text(name) for name in TEXTS})
    customer["metadata"] = call.params.metadata()
    _settings(world, call.owner, customer, call.params)
    method = call.params.text("payment_method")
    if method is not None:
        payment_methods.attach(world, call.owner, payment_methods.resolve(world, call.owner, method), customer)
    world.emit("customer.created", customer, call.owner)
    return customer


def new_customer(world: World, owner: str, **fields: str | None) -> Json:
    """A customer without an event."""
    blank: dict[str, str | None] = dict.fromkeys(TEXTS)
    return world.new(
        "cus",
        "customer",
        owner,
        **{**blank, **fields},
        address=None,
        balance=0,
        currency=None,
        default_source=None,
        delinquent=False,
        discount=None,
        invoice_prefix=world.ids.letters(8).upper(),
        invoice_settings={"custom_fields": None, "default_payment_method": None, "footer": None},
        metadata={},
        preferred_locales=[],
        shipping=None,
        tax_exempt="none",
        test_clock=None,
    )


def _settings(world: World, owner: str, customer: Json, params: Params) -> None:
    settings = params.inner("invoice_settings")
    if "default_payment_method" in settings:
        method = settings.text("default_payment_method")
        if method is not None:
            param = settings.name("default_payment_method")
            payment_methods.owned(world, owner, method, customer["id"], param=param)
        customer["invoice_settings"] = {**customer["invoice_settings"], "default_payment_method": method}


@route("GET", "/v1/customers/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "customer", call.path_ids[0])


@route("POST", "/v1/customers/{id}", "CustomerUpdateParams", FIELDS)
def update(world: World, call: Call) -> Json:
    customer = world.store.get(call.owner, "customer", call.path_ids[0])
    changes: Json = {name: call.params.text(name) for name in TEXTS if name in call.params}
    changes["metadata"] = call.params.metadata(customer["metadata"])
    before = customer["invoice_settings"]
    _settings(world, call.owner, customer, call.params)
    previous = world.change(customer, **changes)
    if customer["invoice_settings"] != before:
        previous["invoice_settings"] = before
    world.emit("customer.updated", customer, call.owner, previous)
    return customer


@route("DELETE", "/v1/customers/{id}")
def delete(world: World, call: Call) -> Json:
    customer = world.store.get(call.owner, "customer", call.path_ids[0])
    for method in world.store.every(call.owner, "payment_method"):
        if method["customer"] == customer["id"]:
            payment_methods.detach_from(world, call.owner, method)
    world.emit("customer.deleted", customer, call.owner)
    world.store.drop(customer["id"])
    return {"id": customer["id"], "object": "customer", "deleted": True}


@list_route("/v1/customers", "CustomerListParams", "email")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "customer", "email")


@list_route("/v1/customers/{id}/payment_methods", "CustomerPaymentMethodListParams", "type")
def saved_methods(world: World, call: Call) -> Json:
    customer = world.store.get(call.owner, "customer", call.path_ids[0])
    methods = [each for each in world.store.every(call.owner, "payment_method") if each["customer"] == customer["id"]]
    return listing(world, call, "payment_method", "type", source=methods)


@route("GET", "/v1/customers/{id}/payment_methods/{id}")
def saved_method(world: World, call: Call) -> Json:
    return payment_methods.owned(world, call.owner, call.path_ids[1], call.path_ids[0], param="id")
