"""The OpenAPI document tells of every body that an endpoint reads."""

from __future__ import annotations

import asyncio
import json
from functools import cache
from typing import Any

from marketplace.app import create_app
from marketplace.core.settings import Settings

WITHOUT_BODY = {
    "accept",
    "approve",
    "cancel",
    "enable",
    "processor",
    "reconcile",
    "redeliver",
    "replay",
    "rotate",
    "verify",
}
"""Last words of the paths that are called with nothing."""


@cache
def paths() -> dict[str, dict[str, Any]]:
    sent: list[Any] = []
    scope = {"type": "http", "method": "GET", "path": "/openapi.json", "raw_path": b"/openapi.json", "headers": []}
    whole = {**scope, "query_string": b"", "root_path": "", "scheme": "http", "server": ("test", 80), "client": None}

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    async def send(message: Any) -> None:
        sent.append(message)

    asyncio.run(create_app(Settings())(whole, receive, send))
    body = b"".join(message.get("body", b"") for message in sent)
    found: dict[str, dict[str, Any]] = json.loads(body)["paths"]
    return found


class TestTheDocument:
    def test_tells_the_body_of_every_call_that_has_one(self) -> None:
        silent = [
            (method, path)
            for path, operations in paths().items()
            for method, operation in operations.items()
            if method in ("post", "put", "patch") and "requestBody" not in operation
        ]
        assert [call for call in silent if call[1].rpartition("/")[2] not in WITHOUT_BODY] == []

    def test_has_what_renters_and_their_administrators_call(self) -> None:
        for path in ("/v1/embeddings", "/v1/webhooks/{webhook_id}/deliveries", "/v1/organisation/keys/{key_id}/budget"):
            assert path in paths()
