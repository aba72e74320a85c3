"""What renters ask and are answered, and their keys, are in no log line, metric or span: of a gateway, a worker, a
clock, an agent and its engine as real processes, with everything logged that can be."""

from __future__ import annotations

import http.server
import json
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from marketplace.accounts.service import create_key
from marketplace.core.database import transaction
from tests.stack import MODEL_ID, Renter, Stack, running_stack, until

CANARY = "xylophone-4711"
"""In every prompt, name and wrong key."""
ASK: list[Any] = [{"role": "user", "content": f"Tell me of the {CANARY}."}]


class Sink(http.server.BaseHTTPRequestHandler):
    """A collector that keeps what it gets."""

    received = b""

    def do_POST(self) -> None:
        """Called by the server."""
        type(self).received += self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_: Any) -> None:
        """Says nothing."""


@pytest.fixture
def collector() -> Iterator[str]:
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Sink)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def post(stack: Stack, path: str, body: bytes, key: str) -> int:
    headers = {"authorization": f"Bearer {key}", "content-type": "application/json"}
    request = urllib.request.Request(stack.url("gw-0") + path, data=body, headers=headers)
    try:
        with urllib.request.urlopen(request, timeout=20) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return int(error.code)


def ask_well(stack: Stack, renter: Renter) -> list[str]:
    """Chats that are answered, streamed, cut by their client, and moved on; returns the answers."""
    client = stack.client("gw-0", renter)
    chat = client.chat.completions.create
    said = [choice.message.content or "" for choice in chat(model=MODEL_ID, messages=ASK, max_tokens=24, n=2).choices]
    said.append(client.completions.create(model=MODEL_ID, prompt=f"Once a {CANARY}", max_tokens=24).choices[0].text)
    keyed = {"Idempotency-Key": f"key-{CANARY}"}
    for _ in range(2):
        chat(model=MODEL_ID, messages=ASK, max_tokens=8, user=CANARY, extra_headers=keyed)
    with chat(model=MODEL_ID, messages=ASK, max_tokens=200, stream=True) as stream:
        next(iter(stream))
    stack.arm("engine", "drop", 1, after_tokens=2)
    with pytest.raises(openai.OpenAIError):
        for _ in chat(model=MODEL_ID, messages=ASK, max_tokens=24, stream=True):
            pass
    return said


def ask_badly(stack: Stack, renter: Renter) -> None:
    """Everything that is refused, with the word wherever a client can put one."""
    chat, good = "/v1/chat/completions", {"model": MODEL_ID, "messages": ASK}
    bodies: list[Any] = [
        {**good, CANARY: 1},
        {**good, "model": CANARY},
        {**good, "max_tokens": CANARY},
        {**good, "tools": [{"type": "function", "function": {"name": CANARY, "parameters": {"$ref": CANARY}}}]},
        {
            **good,
            "response_format": {"type": "json_schema", "json_schema": {"name": CANARY, "schema": {"type": CANARY}}},
        },
        {**good, "provider": {"only": [CANARY]}},
        {**good, "messages": [{"role": CANARY, "content": CANARY}]},
        {**good, "messages": [{"role": "user", "content": f"{CANARY} " * 4_000}]},
    ]
    raw = [json.dumps(body).encode() for body in bodies]
    raw += [f'{{"{CANARY}": '.encode(), f'"{CANARY}\\ud800"'.encode(), CANARY.encode() + b"\xff"]
    for body in raw:
        for path, sent in ((chat, body), ("/v1/jobs", b'{"request": ' + body + b"}"), ("/v1/quote", body)):
            assert post(stack, path, sent, renter.secret) not in (500, 502)
    for key in (f"sk-fallow-{CANARY}", renter.secret[:-6] + CANARY):
        assert post(stack, chat, json.dumps(good).encode(), key) == 401
    assert post(stack, f"/v1/{CANARY}?{CANARY}={CANARY}", b"{}", renter.secret) == 404


def queue(stack: Stack, renter: Renter) -> None:
    """A job and a batch that are answered, and a batch that is refused."""
    client = stack.client("gw-0", renter)
    wish = {"request": {"model": MODEL_ID, "messages": ASK, "max_tokens": 8}}
    assert post(stack, "/v1/jobs", json.dumps(wish).encode(), renter.secret) == 202
    body = {"model": MODEL_ID, "messages": ASK, "max_tokens": 8}
    line = {"custom_id": CANARY, "method": "POST", "url": "/v1/chat/completions", "body": body}
    for lines, end in (([line], "completed"), ([{**line, "body": {**body, CANARY: 1}}], "failed")):
        data = "\n".join(json.dumps(one) for one in lines).encode()
        file = client.files.create(file=(f"{CANARY}.jsonl", data), purpose="batch")
        batch = client.batches.create(
            input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h", metadata={"x": CANARY}
        )
        until(lambda batch=batch, end=end: client.batches.retrieve(batch.id).status == end, f"batch {end}", within_s=40)
    until(lambda: not stack.rows("select 1 from jobs where state in ('queued', 'running')"), "the queue is empty")


def test_neither_prompts_nor_answers_nor_keys_are_told(collector: str) -> None:
    loud = {"FALLOW_LOG_LEVEL": "DEBUG", "FALLOW_OTLP_ENDPOINT": collector}
    with running_stack("fallow-silence-", **loud) as stack:
        stack.sell()
        port = stack.add_engine("engine", slots=4)
        stack.add_workers("worker")
        stack.add_beat()
        stack.add_gateways("gw-0")
        stack.add_node("node", "gw-0", engine="openai", engine_url=f"http://127.0.0.1:{port}")
        stack.wait_offered()
        renter = stack.renter(name=f"Renter {CANARY}")
        with transaction(stack.factory) as session:
            _, operator = create_key(session, renter.organisation_id, roles=["operator"])
        said = ask_well(stack, renter)
        ask_badly(stack, renter)
        queue(stack, renter)
        with urllib.request.urlopen(stack.url("gw-0") + "/metrics", timeout=5) as answer:
            told = {"metrics": answer.read().decode()}
        for name in ("gw-0", "worker", "beat", "node", "engine"):
            stack.stop(name)
        told |= {path.stem: path.read_text(errors="replace") for path in stack.logs.glob("*.log")}
        told |= {str(path): path.read_text(errors="replace") for path in (stack.folder / "node").rglob("*.log")}
        told["spans"] = Sink.received.decode(errors="replace")
        assert {"metrics", "gw-0", "worker", "node", "spans"} <= told.keys()
        assert "node_connected" in told["gw-0"]
        assert "settled" in told["worker"]
        assert "settlement" in told["spans"]
        words = [CANARY, renter.secret, operator, *(answer for answer in said if len(answer) > 20)]
        found = {(name, word) for name, text in told.items() for word in words if word in text}
        assert not found, [line for name, word in found for line in told[name].splitlines() if word in line][:20]
