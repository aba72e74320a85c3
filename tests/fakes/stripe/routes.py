"""Which function answers which method and path, and with which parameters."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass

from tests.fakes.stripe.errors import Json, StripeError
from tests.fakes.stripe.forms import official_names
from tests.fakes.stripe.world import Call, World

Handler = Callable[[World, Call], Json]
LIST_PARAMS = frozenset({"limit", "starting_after", "ending_before", "created"})


@dataclass(frozen=True)
class Route:
    """One operation of the API."""

    method: str
    pattern: re.Pattern[str]
    official: str | None
    modelled: frozenset[str]
    handler: Handler

    def check(self, call: Call) -> None:
        """Refuse unknown and unmodelled parameters."""
        call.params.check(official_names(self.official) if self.official else frozenset(), self.modelled)


_routes: list[Route] = []


def route(method: str, path: str, official: str | None = None, modelled: str = "") -> Callable[[Handler], Handler]:
    """Register a handler.

    `official` names the client's TypedDict of parameters; `modelled` those that act here, or are only stored and
    shown. Others of Stripe's own are refused with a message that says so, rather than ignored.
    """
    pattern = re.compile(re.sub(r"\{\w+\}", "([^/]+)", path) + "$")

    def register(handler: Handler) -> Handler:
        _routes.append(Route(method, pattern, official, frozenset(modelled.split()), handler))
        return handler

    return register


def list_route(path: str, official: str | None = None, filters: str = "") -> Callable[[Handler], Handler]:
    """Register a list: paginated, filtered by the fields named."""
    return route("GET", path, official, " ".join([*LIST_PARAMS, filters]))


def match(method: str, path: str) -> tuple[Route, tuple[str, ...]]:
    """The route and the ids in its path; raises Stripe's 404."""
    for known in _routes:
        found = known.pattern.match(path)
        if found and known.method == method:
            return known, found.groups()
    raise StripeError(
        404,
        "invalid_request_error",
        f"Unrecognized request URL ({method}: {path}). If you are trying to list objects, remove the trailing slash. "
        f"If you are trying to retrieve an object, make sure you passed a valid (non-empty) identifier in your code.",
        saved=False,
    )
