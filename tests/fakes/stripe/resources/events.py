"""Events: listed and fetched for 30 days."""

from __future__ import annotations

from tests.fakes.stripe.errors import Json, invalid
from tests.fakes.stripe.render import page
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.world import Call, World


@route("GET", "/v1/events/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "event", call.path_ids[0])


@list_route("/v1/events", "EventListParams", "type types delivery_success")
def every(world: World, call: Call) -> Json:
    params = call.params
    kind, kinds = params.text("type"), params.texts("types")
    if kind is not None and kinds:
        raise invalid("You may only specify one of these parameters: type, types.", param="types")
    events = world.store.every(call.owner, "event")
    if kind is not None:
        events = [event for event in events if _fits(event["type"], kind)]
    if kinds:
        events = [event for event in events if event["type"] in kinds]
    if "delivery_success" in params:
        delivered = params.boolean("delivery_success")
        events = [event for event in events if (event["pending_webhooks"] == 0) == delivered]
    return page(call, events)


def _fits(kind: str, pattern: str) -> bool:
    return kind.startswith(pattern[:-1]) if pattern.endswith("*") else kind == pattern
