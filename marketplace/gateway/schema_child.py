"""The process that checks answers against JSON Schemas. Started by gateway.schemas, asked on stdin, a line a question.

Schemas come from renters: one may hold a pattern that backtracks for ever, or branch without end. Here that costs a
process, which whoever asked ends; in the gateway it would stop every stream.
"""

from __future__ import annotations

import json
import resource
import sys
from typing import Any, Final

from jsonschema import SchemaError, ValidationError
from jsonschema.validators import validator_for
from referencing import Registry
from referencing.exceptions import Unresolvable

MEMORY_BYTES: Final = 1024 * 1024 * 1024
MAX_MESSAGE: Final = 300


def judge(schema: Any, text: str | None) -> dict[str, Any]:
    """Check the schema alone (`text` None), or a text against it: `valid`, and what is wrong. Nothing is fetched."""
    try:
        _check(schema, text)
    except RecursionError:
        return {"valid": None, "error": "schema and answer are nested too deeply to be checked"}
    except SchemaError as error:
        return _invalid(f"the schema is invalid at {error.json_path}: {error.message}")
    except ValidationError as error:
        return _invalid(f"{error.json_path}: {error.message}")
    except Unresolvable as error:
        return _invalid(f"the schema refers to what it does not hold: {error}")
    except ValueError as error:
        return _invalid(f"the answer is not JSON: {error}")
    return {"valid": True, "error": None}


def _check(schema: Any, text: str | None) -> None:
    """Raise what is wrong with the schema, or with the text."""
    kind = validator_for(schema)
    kind.check_schema(schema)
    if text is not None:
        kind(schema, registry=Registry()).validate(json.loads(text, parse_constant=_refuse_constant))


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is no JSON value")


def _invalid(message: str) -> dict[str, Any]:
    return {"valid": False, "error": message[:MAX_MESSAGE]}


def main() -> None:
    """Answer until stdin ends."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    for line in sys.stdin.buffer:
        question = json.loads(line)
        answer = judge(question["schema"], question["text"])
        sys.stdout.buffer.write(json.dumps(answer).encode() + b"\n")
        sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
