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
        raise _explain(str(error)) from None
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
_PATH = re.compile(r" - at `(?:key in )?\$\.?(.*)`$", re.DOTALL)


def _explain(message: str) -> InvalidBody:
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
    return InvalidBody(f"`{path[:160]}`: {text}." if path else f"{text}.", param=path[:160] or None)
