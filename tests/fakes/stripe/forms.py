"""Form parameters: nested keys decoded, each read with its type, and none swallowed in silence."""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any
from urllib.parse import parse_qsl

from stripe import params as official
from stripe.params import checkout as official_checkout
from tests.fakes.stripe.errors import Json, StripeError, invalid

MAX_FIELDS = 1_000
MAX_METADATA_KEYS = 50
MAX_METADATA_KEY = 40
MAX_METADATA_VALUE = 500
# The client's own options share a TypedDict with the parameters of the wire.
OPTIONS = frozenset(
    {
        "api_key",
        "stripe_version",
        "stripe_account",
        "stripe_context",
        "max_network_retries",
        "idempotency_key",
        "content_type",
        "headers",
    }
)


def decode(encoded: str) -> Json:
    """`a[b][0]=c` as nested dictionaries; a list stays a dictionary of indices until it is read as a list."""
    tree: Json = {}
    try:
        pairs = parse_qsl(encoded, keep_blank_values=True, max_num_fields=MAX_FIELDS, errors="strict")
    except ValueError as error:
        raise invalid("Invalid request: the body could not be read as form data.") from error
    for key, value in pairs:
        _insert(tree, _path(key), value)
    return tree


def _path(key: str) -> list[str]:
    head, *rest = key.split("[")
    return [head, *(part.removesuffix("]") for part in rest)]


def _insert(tree: Json, path: list[str], value: str) -> None:
    node = tree
    for part in path[:-1]:
        child = node.setdefault(part or str(len(node)), {})
        if not isinstance(child, dict):
            raise invalid("Invalid request: a parameter is both a value and an object.", param=path[0])
        node = child
    node[path[-1] or str(len(node))] = value


@functools.cache
def official_names(typed_dict: str) -> frozenset[str]:
    """The top-level parameters that the official client knows for a call, e.g. `TransferCreateParams`."""
    module = official_checkout if typed_dict.startswith("Session") else official
    return frozenset(getattr(module, typed_dict).__annotations__) - OPTIONS


class Params:
    """One call's parameters, or an object inside of them; `prefix` is its name in messages."""

    def __init__(self, tree: Json, prefix: str = "") -> None:
        self._tree = tree
        self._prefix = prefix

    def __contains__(self, name: str) -> bool:
        return name in self._tree

    def __bool__(self) -> bool:
        return bool(self._tree)

    def name(self, name: str) -> str:
        """The parameter as Stripe writes it in an error: `price_data[currency]`."""
        return f"{self._prefix}[{name}]" if self._prefix else name

    def check(self, official: frozenset[str], modelled: Iterable[str]) -> None:
        """Refuse what Stripe does not know, and, apart, what it knows and the stand-in does not model."""
        modelled_names = {*modelled, "expand"}
        for name in self._tree:
            if name in modelled_names:
                continue
            if name in official:
                raise invalid(f"The stand-in does not model this parameter: {name}", param=name)
            raise invalid(f"Received unknown parameter: {name}", param=name, code="parameter_unknown")

    def text(self, name: str) -> str | None:
        """A string; an empty one unsets and reads as None."""
        value = self._tree.get(name)
        if isinstance(value, dict):
            raise invalid("Invalid string: {...}", param=self.name(name))
        return value or None

    def required_text(self, name: str) -> str:
        value = self.text(name)
        if value is None:
            raise self.absent(name)
        return value

    def absent(self, name: str) -> StripeError:
        full = self.name(name)
        return invalid(f"Missing required param: {full}.", param=full, code="parameter_missing")

    def integer(self, name: str, *, minimum: int = 1) -> int | None:
        value = self.text(name)
        if value is None:
            return None
        full = self.name(name)
        if not value.removeprefix("-").isdecimal() or not value.isascii():
            raise invalid(f"Invalid integer: {value}", param=full, code="parameter_invalid_integer")
        number = int(value)
        if number < minimum:
            message = f"This value must be greater than or equal to {minimum}."
            raise invalid(message, param=full, code="parameter_invalid_integer")
        return number

    def required_integer(self, name: str, *, minimum: int = 1) -> int:
        value = self.integer(name, minimum=minimum)
        if value is None:
            raise self.absent(name)
        return value

    def boolean(self, name: str, *, default: bool = False) -> bool:
        value = self.text(name)
        if value is None:
            return default
        if value not in {"true", "false"}:
            raise invalid(f"Invalid boolean: {value}", param=self.name(name))
        return value == "true"

    def choice(self, name: str, options: Iterable[str], default: str | None = None) -> str | None:
        value = self.text(name)
        if value is None:
            return default
        allowed = tuple(options)
        if value not in allowed:
            raise invalid(f"Invalid {name}: must be one of {', '.join(allowed)}", param=self.name(name))
        return value

    def inner(self, name: str) -> Params:
        """An object inside; absent reads as empty."""
        value = self._tree.get(name, {})
        if value == "":
            value = {}
        if not isinstance(value, dict):
            raise invalid(f"Invalid object: {value}", param=self.name(name))
        return Params(value, self.name(name))

    def items(self, name: str) -> list[Params]:
        """A list of objects."""
        entries = self.inner(name)
        return [entries.inner(index) for index in entries.names()]

    def texts(self, name: str) -> list[str]:
        """A list of strings."""
        entries = self.inner(name)
        return [entries.required_text(index) for index in entries.names()]

    def flat(self) -> dict[str, str | None]:
        """All strings inside, as they came."""
        return {name: self.text(name) for name in self._tree}

    def names(self) -> list[str]:
        return list(self._tree)

    def metadata(self, current: dict[str, str] | None = None) -> dict[str, str]:
        """The metadata after this call: an empty value removes its key, an empty whole removes all."""
        merged = dict(current or {})
        if self._tree.get("metadata") == "":
            return {}
        given = self.inner("metadata")
        for key in given.names():
            value = given.text(key)
            if len(key) > MAX_METADATA_KEY or (value is not None and len(value) > MAX_METADATA_VALUE):
                raise invalid("Metadata keys hold up to 40 characters and values up to 500.", param=f"metadata[{key}]")
            if value is None:
                merged.pop(key, None)
            else:
                merged[key] = value
        if len(merged) > MAX_METADATA_KEYS:
            raise invalid("Metadata can have up to 50 keys.", param="metadata")
        return merged

    def plain(self, name: str) -> Any:
        """The value as it came, for what is only stored."""
        return self._tree.get(name)
