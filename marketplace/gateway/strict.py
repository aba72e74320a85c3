"""JSON decoded once and strictly. Whatever is wrong becomes a 400 that names the field.

Refused: unknown fields, duplicate keys, NaN and numbers out of range, invalid UTF-8 and lone surrogates, NUL, deep
nesting.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgspec
import msgspec.inspect

from marketplace.core.errors import BadRequest

MAX_DEPTH: Final = 64
"""Nested arrays and objects, in all."""
T = TypeVar("T")


class InvalidBody(BadRequest):
    """The body is not what this endpoint takes."""


@lru_cache(maxsize=16)
def _decoder(kind: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(kind)


def decode_strict(body: bytes, kind: type[T]) -> T:
    """Decode JSON into a msgspec type with every refusal of this module. Raises InvalidBody (400)."""
    try:
        value: T = _decoder(kind).decode(body)  # type: ignore[arg-type]  # a type is hashable
        if body.count(b"{") + body.count(b"[") > MAX_DEPTH:
            _refuse_depth(body)
        _duplicates.decode(body.decode())
    except RecursionError:
        raise InvalidBody(f"The body nests deeper than {MAX_DEPTH} levels.") from None
    except msgspec.ValidationError as error:
        raise _explain(str(error), kind) from None
    except msgspec.DecodeError as error:
        # msgspec reports a lone surrogate at the end of a string as truncation.
        raise InvalidBody(f"The body is not valid JSON in UTF-8: {error}.") from None
    except ValueError as error:
        # Python's own bound on the digits of an integer.
        raise InvalidBody(f"The body is not valid JSON: {error}.") from None
    if b"\\u0000" in body and _holds_nul(msgspec.json.decode(body)):
        raise InvalidBody("The body contains a NUL character (\\u0000), which is not text.")
    return value


def _refuse_duplicates(pairs: list[tuple[str, Any]]) -> None:
    seen = {key for key, _ in pairs}
    if len(seen) != len(pairs):
        keys = [key for key, _ in pairs]
        twice = next(key for key in keys if keys.count(key) > 1)
        raise InvalidBody(f"The key {twice[:80]!r} appears twice in one object.", param=twice[:80])


_duplicates: Final = json.JSONDecoder(object_pairs_hook=_refuse_duplicates)


def _refuse_depth(body: bytes) -> None:
    """Brackets inside strings do not count, hence the walk over the decoded value."""
    level: list[Any] = [msgspec.json.decode(body)]
    for _ in range(MAX_DEPTH):
        level = [child for value in level for child in _children(value)]
        if not level:
            return
    if any(isinstance(value, dict | list) for value in level):
        raise InvalidBody(f"The body nests deeper than {MAX_DEPTH} levels.")


def _children(value: Any) -> Iterable[Any]:
    if isinstance(value, dict):
        return value.values()
    return value if isinstance(value, list) else ()


def _holds_nul(value: Any) -> bool:
    stack = [value]
    while stack:
        item = stack.pop()
        if isinstance(item, str):
            if "\0" in item:
                return True
        elif isinstance(item, dict):
            stack.extend(item.keys())
            stack.extend(item.values())
        elif isinstance(item, list):
            stack.extend(item)
    return False


_NOT_TAKEN: Final = "`{}` is not a field that is taken here."
_UNKNOWN = re.compile(r"Object contains unknown field `(.*?)`", re.DOTALL)
_MISSING = re.compile(r"Object missing required field `(.*?)`", re.DOTALL)
_NO_CHOICE = re.compile(r"Invalid enum value (.*)$", re.DOTALL)
_STEP = re.compile(r"[^.\[\]]+")
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


def _explain(message: str, kind: type) -> InvalidBody:
    """msgspec's message, with the field as OpenAI's `param`."""
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    text = message[: found.start()] if found else message
    for pattern, sentence in ((_UNKNOWN, _NOT_TAKEN), (_MISSING, "`{}` is missing.")):
        if named := pattern.match(message):
            field = f"{path}.{named.group(1)}" if path else named.group(1)
            return InvalidBody(sentence.format(field[:160]), param=field[:160])
    if text.startswith("Expected `null`, got"):
        return InvalidBody(_NOT_TAKEN.format(path[:160]), param=path[:160])
    if (named := _NO_CHOICE.match(text)) and (choices := _choices(kind, path)):
        text = f"{named.group(1)[:80]} is none of {', '.join(choices)}"
    return InvalidBody(f"`{path[:160]}`: {text}." if path else f"{text}.", param=path[:160] or None)


@lru_cache(maxsize=16)
def _shape(kind: type) -> msgspec.inspect.Type:
    return msgspec.inspect.type_info(kind)


def _choices(kind: type, path: str) -> list[str]:
    """The values that a field takes, by its path; none where the path leads through more than objects and lists."""
    found = _alternatives(_shape(kind))
    for step in _STEP.findall(path):
        found = [each for outer in found for inner in _inside(outer, step) for each in _alternatives(inner)]
    return [str(value) for each in found if isinstance(each, msgspec.inspect.LiteralType) for value in each.values]


def _alternatives(kind: msgspec.inspect.Type) -> list[msgspec.inspect.Type]:
    return list(kind.types) if isinstance(kind, msgspec.inspect.UnionType) else [kind]


def _inside(kind: msgspec.inspect.Type, step: str) -> list[msgspec.inspect.Type]:
    if isinstance(kind, msgspec.inspect.StructType):
        return [field.type for field in kind.fields if field.encode_name == step]
    return [kind.item_type] if isinstance(kind, msgspec.inspect.ListType) else []
