"""Answers: references expanded on request, lists cut into pages."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from typing import Any

from tests.fakes.stripe.errors import Json, invalid, missing
from tests.fakes.stripe.forms import Params
from tests.fakes.stripe.world import Call, World

MAX_DEPTH = 4
DEFAULT_LIMIT = 10
MAX_LIMIT = 100
BOUNDS: dict[str, Callable[[int, int], bool]] = {
    "gt": lambda value, bound: value > bound,
    "gte": lambda value, bound: value >= bound,
    "lt": lambda value, bound: value < bound,
    "lte": lambda value, bound: value <= bound,
}
Include = Callable[[World, Json], Json]
_includable: dict[tuple[str, str], Include] = {}


def includable(kind: str, name: str) -> Callable[[Include], Include]:
    """Register a field that is shown only when asked for, as a charge's refunds."""

    def register(compute: Include) -> Include:
        _includable[kind, name] = compute
        return compute

    return register


def render(world: World, data: Json, call: Call) -> Json:
    """A copy for the answer, with `expand` obeyed."""
    shown = copy.deepcopy(data)
    for path in call.params.texts("expand"):
        parts = path.split(".")
        if len(parts) > MAX_DEPTH:
            raise invalid("You cannot expand more than 4 levels of a property.", param="expand")
        _expand(world, shown, parts, path)
    return shown


def _expand(world: World, node: Any, parts: list[str], path: str) -> None:
    if isinstance(node, list):
        for item in node:
            _expand(world, item, parts, path)
        return
    head, *rest = parts
    include = _includable.get((str(node.get("object")), head)) if isinstance(node, dict) else None
    if include is not None:
        node[head] = copy.deepcopy(include(world, node))
    if not isinstance(node, dict) or head not in node:
        raise invalid(f"This property cannot be expanded ({path}).", param="expand")
    if isinstance(node[head], str):
        record = world.store.find(node[head])
        if record is None:
            raise invalid(f"This property cannot be expanded ({path}).", param="expand")
        node[head] = copy.deepcopy(record.data)
    if rest and node[head] is not None:
        _expand(world, node[head], rest, path)


def whole_list(items: list[Json], url: str) -> Json:
    """A list inside an object, complete."""
    return {"object": "list", "data": items, "has_more": False, "total_count": len(items), "url": url}


def page(call: Call, items: Iterable[Json]) -> Json:
    """One page of a list, newest first; `items` come oldest first and already filtered."""
    params = call.params
    limit = params.integer("limit") or DEFAULT_LIMIT
    if limit > MAX_LIMIT:
        raise invalid("The limit must be at most 100.", param="limit", code="parameter_invalid_integer")
    created_fits = time_filter("created", params)
    rows = [item for item in items if created_fits(item["created"])][::-1]
    after, before = params.text("starting_after"), params.text("ending_before")
    if after is not None and before is not None:
        raise invalid("You may use only one of starting_after and ending_before.", param="starting_after")
    if after is not None:
        rows = rows[_place(rows, after, "starting_after") + 1 :]
    if before is not None:
        rows = rows[: _place(rows, before, "ending_before")]
        return _list(call, rows[-limit:], more=len(rows) > limit)
    return _list(call, rows[:limit], more=len(rows) > limit)


def _list(call: Call, rows: list[Json], *, more: bool) -> Json:
    return {"object": "list", "data": rows, "has_more": more, "url": call.url}


def _place(rows: list[Json], cursor: str, param: str) -> int:
    for index, row in enumerate(rows):
        if row["id"] == cursor:
            return index
    raise missing("object", cursor, param=param)


def time_filter(name: str, params: Params) -> Callable[[int], bool]:
    """Whether a time fits a filter that is one second or bounds: `created[gte]`."""
    if name not in params:
        return lambda _: True
    if not isinstance(params.plain(name), dict):
        wanted = params.integer(name, minimum=0)
        return lambda value: value == wanted
    given = params.inner(name)
    given.check(frozenset(), BOUNDS)
    bounds = [(BOUNDS[bound], given.required_integer(bound, minimum=0)) for bound in given.names()]
    return lambda value: all(holds(value, limit) for holds, limit in bounds)


def listing(world: World, call: Call, kind: str, *filters: str, source: list[Json] | None = None) -> Json:
    """A page of the caller's objects of one kind, filtered by equality on the fields named."""
    wanted = {name: call.params.text(name) for name in filters if name in call.params}
    items = world.store.every(call.owner, kind) if source is None else source
    return page(call, [item for item in items if all(item.get(name) == value for name, value in wanted.items())])
