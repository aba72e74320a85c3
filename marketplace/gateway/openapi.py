"""The OpenAPI document: FastAPI's own, with the paths that it does not serve, the bodies that it does not parse, and
the errors that every path may answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import msgspec
from fastapi import FastAPI
from msgspec import Struct

from marketplace.gateway.batches.endpoints import FILES_PATH, BatchBody
from marketplace.gateway.bodies import ChatBody, ProviderBody
from marketplace.gateway.completions import CompletionBody
from marketplace.gateway.embeddings.request import EmbeddingBody
from marketplace.gateway.organisation_endpoints import BudgetBody, KeyBody, RolesBody
from marketplace.gateway.queue_endpoints import Submission
from marketplace.gateway.tokenize import TokenizeBody
from marketplace.gateway.webhooks.endpoints import Registration
from marketplace.jobs.sweeping import BATCHES_ENDPOINT, CHAT_ENDPOINT, EMBEDDINGS_ENDPOINT, JOBS_ENDPOINT, TEXT_ENDPOINT

ERRORS: Final = {
    400: "Something about the request is wrong; `param` names it.",
    401: "The key is missing, wrong, revoked or expired.",
    403: "The key is not for this.",
    404: "There is no such thing here.",
    405: "The path takes another method.",
    409: "The state of things does not allow it, or an Idempotency-Key was used before.",
    413: "The body is too large.",
    429: "Over a limit of the key; `Retry-After` says when.",
    503: "Not now; `Retry-After` says when.",
}
COSTLY: Final = {
    402: "Balance or budget do not cover it.",
    502: "The node broke the answer, and nobody could take over. Nothing was charged.",
    504: "The time for the request was up.",
}
"""What only requests that run a model answer besides."""
METHODS: Final = ("get", "put", "post", "delete", "patch")
BODIES: Final[Mapping[tuple[str, str], type[Struct]]] = {
    (CHAT_ENDPOINT, "post"): ChatBody,
    (TEXT_ENDPOINT, "post"): CompletionBody,
    (EMBEDDINGS_ENDPOINT, "post"): EmbeddingBody,
    ("/v1/quote", "post"): ChatBody,
    ("/v1/explain", "post"): ChatBody,
    ("/v1/tokenize", "post"): TokenizeBody,
    (JOBS_ENDPOINT, "post"): Submission,
    ("/v1/key/routing", "put"): ProviderBody,
    ("/v1/webhooks", "post"): Registration,
    (BATCHES_ENDPOINT, "post"): BatchBody,
    ("/v1/organisation/members/{email}", "put"): RolesBody,
    ("/v1/organisation/keys", "post"): KeyBody,
    ("/v1/organisation/keys/{key_id}/budget", "put"): BudgetBody,
}
"""Bodies that msgspec parses."""
UPLOAD: Final = {
    "type": "object",
    "required": ["file", "purpose"],
    "properties": {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "const": "batch"},
        "expires_after[anchor]": {"type": "string", "const": "created_at"},
        "expires_after[seconds]": {"type": "integer"},
    },
}
"""The form of POST /v1/files."""
RAW: Final = {
    CHAT_ENDPOINT: "A chat: streamed as server-sent events, or whole.",
    TEXT_ENDPOINT: "A text to go on from: streamed as server-sent events, or whole.",
    EMBEDDINGS_ENDPOINT: "Vectors of texts, as numbers or as base64 of little-endian float32.",
}
"""Paths beside FastAPI."""
_REFERENCE: Final = "#/components/schemas/{name}"
_ERROR: Final = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": "string"},
            },
        }
    },
}


def describe(api: FastAPI) -> None:
    """Make the application serve the whole document."""
    own = api.openapi
    document: dict[str, Any] | None = None

    def whole() -> dict[str, Any]:
        nonlocal document
        if document is None:
            document = _completed(own())
        return document

    api.openapi = whole  # type: ignore[method-assign]  # FastAPI's documented way to extend it


def _completed(document: dict[str, Any]) -> dict[str, Any]:
    components = document.setdefault("components", {})
    components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    schemas = components.setdefault("schemas", {})
    schemas["Error"] = _ERROR
    kinds = tuple(dict.fromkeys(BODIES.values()))
    references, own = msgspec.json.schema_components(kinds, ref_template=_REFERENCE)
    schemas.update(own)
    named = dict(zip(kinds, references, strict=True))
    for path, summary in RAW.items():
        document["paths"][path] = {"post": {"summary": summary, "tags": ["inference"], "responses": _answers()}}
    for path, operations in document["paths"].items():
        for method in METHODS:
            if method in operations:
                kind = BODIES.get((path, method))
                _complete(path, operations[method], named[kind] if kind is not None else None)
    document["paths"][FILES_PATH]["post"]["requestBody"] = {
        "required": True,
        "content": {"multipart/form-data": {"schema": UPLOAD}},
    }
    return document


def _answers() -> dict[str, Any]:
    content = {"application/json": {"schema": {"type": "object"}}, "text/event-stream": {"schema": {"type": "string"}}}
    return {"200": {"description": "The answer.", "content": content}}


def _complete(path: str, operation: dict[str, Any], body: Mapping[str, Any] | None) -> None:
    responses = operation["responses"]
    responses.pop("422", None)
    costly = path in (*RAW, JOBS_ENDPOINT)
    for status, description in (ERRORS | (COSTLY if costly else {})).items():
        content = {"application/json": {"schema": {"$ref": _REFERENCE.format(name="Error")}}}
        responses.setdefault(str(status), {"description": description, "content": content})
    operation["security"] = [{"key": []}]
    if body is not None:
        operation["requestBody"] = {"required": True, "content": {"application/json": {"schema": body}}}
