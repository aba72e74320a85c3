"""Webhook endpoints, managed through the API; their secret is told once, at creation."""

from __future__ import annotations

from dataclasses import replace
from urllib.parse import urlsplit

from tests.fakes.stripe.errors import Json, invalid
from tests.fakes.stripe.render import listing
from tests.fakes.stripe.routes import list_route, route
from tests.fakes.stripe.webhooks import Endpoint
from tests.fakes.stripe.world import Call, World


@route(
    "POST",
    "/v1/webhook_endpoints",
    "WebhookEndpointCreateParams",
    "url enabled_events connect description metadata api_version",
)
def create(world: World, call: Call) -> Json:
    params = call.params
    url = params.required_text("url")
    if urlsplit(url).scheme not in {"http", "https"}:
        raise invalid("Invalid URL: An explicit scheme (such as https) must be provided.", param="url")
    events = params.texts("enabled_events")
    if not events:
        raise params.absent("enabled_events")
    metadata, description = params.metadata(), params.text("description")
    endpoint = world.webhooks.add(url, connect=params.boolean("connect"), events=events)
    shown = register(world, call.owner, endpoint, description=description, metadata=metadata)
    return {**shown, "secret": endpoint.secret}


def register(
    world: World, owner: str, endpoint: Endpoint, *, description: str | None = None, metadata: Json | None = None
) -> Json:
    """The API's object of an endpoint, without its secret."""
    return world.store.add(
        owner,
        {
            "id": endpoint.id,
            "object": "webhook_endpoint",
            "api_version": world.terms.api_version,
            "application": None,
            "created": world.clock.now(),
            "description": description,
            "enabled_events": list(endpoint.enabled_events),
            "livemode": world.terms.livemode,
            "metadata": metadata or {},
            "status": "enabled",
            "url": endpoint.url,
        },
    )


@route("GET", "/v1/webhook_endpoints/{id}")
def retrieve(world: World, call: Call) -> Json:
    return world.store.get(call.owner, "webhook_endpoint", call.path_ids[0])


@list_route("/v1/webhook_endpoints", "WebhookEndpointListParams")
def every(world: World, call: Call) -> Json:
    return listing(world, call, "webhook_endpoint")


@route(
    "POST",
    "/v1/webhook_endpoints/{id}",
    "WebhookEndpointUpdateParams",
    "url enabled_events disabled description metadata",
)
def update(world: World, call: Call) -> Json:
    shown = world.store.get(call.owner, "webhook_endpoint", call.path_ids[0])
    params = call.params
    disabled = params.boolean("disabled", default=shown["status"] == "disabled")
    changes: Json = {
        "url": params.text("url") or shown["url"],
        "enabled_events": params.texts("enabled_events") or shown["enabled_events"],
        "status": "disabled" if disabled else "enabled",
        "metadata": params.metadata(shown["metadata"]),
    }
    world.change(shown, **changes)
    known = world.webhooks.get(shown["id"])
    events = tuple(shown["enabled_events"])
    world.webhooks.replace(replace(known, url=shown["url"], enabled_events=events, enabled=not disabled))
    return shown


@route("DELETE", "/v1/webhook_endpoints/{id}")
def delete(world: World, call: Call) -> Json:
    shown = world.store.get(call.owner, "webhook_endpoint", call.path_ids[0])
    world.webhooks.remove(shown["id"])
    world.store.drop(shown["id"])
    return {"id": shown["id"], "object": "webhook_endpoint", "deleted": True}
