"""What clients saw, and whether the rules that always hold agree with it and with the database.

`stream`, `ask` and `submit` talk through the official client and keep what came. `assert_invariants` waits until every
job has ended and every receipt is settled, and then compares.
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final, cast
from uuid import UUID

import httpx2
import msgspec
import openai

from marketplace.billing.checks import invariants
from marketplace.finance import service as finance
from tests.stack import LEASE_S, SWEEP_S, Renter, Stack, foretold, until
from tests.vocabularies import MODEL_ID

ENDS_WITHIN_S: Final = 60.0
NANO: Final = 10**9
UNPAID: Final = frozenset(
    {
        "cancelled_early",
        "expired",
        "node_failed",
        "platform_failed",
        "owner_preempted",
        "empty",
        "request_rejected",
        "no_capacity",
        "no_balance",
        "rate_limited",
    }
)
"""Outcomes that cost the renter nothing (a cancel before the first token: within the free ones of an hour)."""


@dataclass
class Seen:
    """One request as its client saw it."""

    prompt: str = ""
    max_tokens: int = 0
    model: str = MODEL_ID
    request_id: str = ""
    pieces: list[str] = field(default_factory=list)
    finish_reason: str | None = None
    usage: dict[str, Any] | None = None
    error: str = ""
    """The error object's code; `connection` where the connection broke; empty where all went well."""
    status: int = 0
    left: bool = False
    """The client hung up."""

    @property
    def text(self) -> str:
        return "".join(self.pieces)

    @property
    def complete(self) -> bool:
        return self.finish_reason is not None and not self.error

    @property
    def cost_nano(self) -> int:
        assert self.usage is not None
        return round(float(self.usage["cost"]) * NANO)


def body_of(seen: Seen, **changes: Any) -> dict[str, Any]:
    return {
        "model": seen.model,
        "messages": [{"role": "user", "content": seen.prompt}],
        "max_tokens": seen.max_tokens,
        **changes,
    }


def _note(seen: Seen, error: Exception) -> None:
    if isinstance(error, openai.APIStatusError):
        seen.status = error.status_code
        seen.request_id = seen.request_id or error.response.headers.get("x-request-id", "")
    if isinstance(error, openai.APIError) and not isinstance(error, openai.APIConnectionError):
        seen.error = str(error.code or "unknown")
    else:
        seen.error = "connection"


def stream(
    client: openai.OpenAI,
    prompt: str,
    *,
    max_tokens: int = 40,
    model: str = MODEL_ID,
    on_piece: Callable[[Seen], Any] | None = None,
) -> Seen:
    """Stream a chat. `on_piece` is called after each piece; it hangs up by returning True."""
    seen = Seen(prompt, max_tokens, model)
    try:
        raw = client.chat.completions.with_raw_response.create(
            **body_of(seen, stream=True, stream_options={"include_usage": True})
        )
        seen.status = raw.status_code
        seen.request_id = raw.headers["x-request-id"]
        with cast("openai.Stream[Any]", raw.parse()) as chunks:
            for chunk in chunks:
                if chunk.usage is not None:
                    seen.usage = chunk.usage.model_dump()
                if not chunk.choices:
                    continue
                seen.finish_reason = chunk.choices[0].finish_reason or seen.finish_reason
                if piece := chunk.choices[0].delta.content:
                    seen.pieces.append(piece)
                    if on_piece is not None and on_piece(seen) is True:
                        seen.left = True
                        break
    except (openai.OpenAIError, httpx2.HTTPError) as error:
        _note(seen, error)
    if not (seen.error or seen.left or seen.finish_reason):
        seen.error = "connection"  # a clean end without a finish reason or an error is a broken one
    return seen


def ask(client: openai.OpenAI, prompt: str, *, max_tokens: int = 20, model: str = MODEL_ID) -> Seen:
    """A chat that is not streamed."""
    seen = Seen(prompt, max_tokens, model)
    try:
        raw = client.chat.completions.with_raw_response.create(**body_of(seen))
        seen.status = raw.status_code
        seen.request_id = raw.headers["x-request-id"]
        done = raw.parse()
        seen.pieces = [done.choices[0].message.content or ""]
        seen.finish_reason = done.choices[0].finish_reason
        seen.usage = done.usage.model_dump() if done.usage is not None else None
    except (openai.OpenAIError, httpx2.HTTPError) as error:
        _note(seen, error)
    return seen


def raw_request(stack: Stack, gateway: str, renter: Renter, body: dict[str, Any]) -> socket.socket:
    """Send a chat over a bare socket that takes as little as it can."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    connection.connect(("127.0.0.1", stack.ports[gateway]))
    payload = msgspec.json.encode(body)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: fallow\r\nAuthorization: Bearer {renter.secret}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(payload)}\r\n\r\n"
    )
    connection.sendall(head.encode() + payload)
    return connection


def submit(client: openai.OpenAI, prompt: str, *, max_tokens: int = 10, model: str = MODEL_ID, **job: Any) -> str:
    """Queue a job; its id. Raises what the client raises."""
    request = body_of(Seen(prompt, max_tokens, model))
    answer = client.post("/jobs", body={"request": request, "deadline_s": 120, **job}, cast_to=object)
    return str(cast("dict[str, Any]", answer)["id"])


def job(client: openai.OpenAI, job_id: str) -> dict[str, Any]:
    """A queued job as the API shows it."""
    return cast("dict[str, Any]", client.get(f"/jobs/{job_id}", cast_to=object))


def ended(client: openai.OpenAI, job_id: str, *, within_s: float = ENDS_WITHIN_S) -> dict[str, Any]:
    """The job once it has ended, through whatever breaks meanwhile."""

    def look() -> dict[str, Any] | None:
        with contextlib.suppress(openai.APIConnectionError, openai.InternalServerError):
            shown = job(client, job_id)
            return shown if shown["outcome"] is not None else None
        return None

    return cast("dict[str, Any]", until(look, f"the end of {job_id}", within_s=within_s, every_s=0.1))


class Background:
    """Requests in threads, while the test breaks something."""

    def __init__(self, threads: int = 32) -> None:
        self._pool = concurrent.futures.ThreadPoolExecutor(threads)
        self._futures: list[concurrent.futures.Future[Seen]] = []

    def __enter__(self) -> Background:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True)

    def add(self, work: Callable[..., Seen], *arguments: Any, **options: Any) -> None:
        self._futures.append(self._pool.submit(work, *arguments, **options))

    def all(self) -> list[Seen]:
        """What they saw, once they are through."""
        return [future.result(120) for future in self._futures]


def mid_stream(pieces: int, act: Callable[[], Any]) -> Callable[[Seen], None]:
    """Do something once, when so many pieces have come."""
    done: list[bool] = []

    def look(seen: Seen) -> None:
        if len(seen.pieces) >= pieces and not done:
            done.append(True)
            act()

    return look


# --- the rules ------------------------------------------------------------------------------------------------------


def wait_all_ended(stack: Stack, *, within_s: float = ENDS_WITHIN_S) -> None:
    """I7, and settlement: no job is open, no receipt waits."""
    open_jobs = "select id, state, kind, outcome from jobs where state in ('queued', 'running', 'delivered')"
    limit = time.monotonic() + within_s
    while left := stack.rows(open_jobs):
        assert time.monotonic() < limit, f"after {within_s:.0f} s these jobs are open: {left}"
        time.sleep(0.1)


def assert_invariants(stack: Stack, seen: Iterable[Seen] = (), *, within_s: float = ENDS_WITHIN_S) -> None:
    """Every rule that the database and the observed streams can tell of."""
    wait_all_ended(stack, within_s=within_s)
    with stack.factory() as session:
        assert invariants(session, grace_s=LEASE_S + SWEEP_S) == []
        assert finance.check(session) == []
        assert finance.trial_balance(session).sum_nano == 0
    assert stack.rows("select id, state, amount_nano from ledger_holds where resolved_at is null") == []
    assert stack.rows("select account_id, held_nano from ledger_balances where held_nano <> 0") == []
    assert stack.rows("select account_id from ledger_balances where posted_nano < coalesce(floor_nano, 0)") == []
    _assert_books_agree(stack)
    _assert_final_is_final(stack)
    for each in seen:
        _assert_seen(stack, each)


def _assert_books_agree(stack: Stack) -> None:
    """What renters paid and what we paid for our failures is what owners got and what we kept, to the nano."""
    ((charge, loss, owner, fee),) = stack.rows(
        "select coalesce(sum(charge_nano), 0), coalesce(sum(loss_nano), 0), coalesce(sum(owner_nano), 0),"
        " coalesce(sum(fee_nano), 0) from receipts"
    )
    assert charge + loss == owner + fee
    leased = stack.rows("select id from attempts where state = 'leased'")
    assert leased == []
    twice = stack.rows("select job_id from receipts group by job_id having count(*) > 1")
    assert twice == []


def _assert_final_is_final(stack: Stack) -> None:
    """I11: what was final at the last look is as it was."""
    rows = stack.rows(
        "select j.id, j.state, j.outcome, j.ended_at, coalesce(r.charge_nano, 0), coalesce(r.owner_nano, 0)"
        " from jobs j left join receipts r on r.job_id = j.id where j.state in ('settled', 'voided')"
    )
    now = {row[0]: tuple(row[1:]) for row in rows}
    changed = {job_id: (before, now.get(job_id)) for job_id, before in stack.final.items() if now.get(job_id) != before}
    assert not changed, f"final states changed: {changed}"
    stack.final = now


def _assert_seen(stack: Stack, seen: Seen) -> None:
    if not seen.request_id:
        assert seen.error == "connection", f"an answer without a request id: {seen}"  # I12
        return
    outcome, charge, output, prompt, cached = _booked(stack, seen.request_id, seen)
    # I6: what was read is the beginning of one single answer.
    if seen.text and (seeds := [node.seed for node in stack.nodes.values() if node.model == seen.model and node.seed]):
        assert any("".join(foretold(seed, seen.prompt, seen.max_tokens)).startswith(seen.text) for seed in seeds), (
            f"no single answer begins with {seen.text!r}"
        )
    if seen.complete:
        # I9: charged = counted = delivered.
        assert outcome == "complete", f"{outcome} for {seen}"
        assert seen.usage is not None
        assert (seen.usage["prompt_tokens"], seen.usage["completion_tokens"]) == (prompt, output)
        assert seen.usage["prompt_tokens_details"]["cached_tokens"] == cached
        assert seen.cost_nano == charge
    elif outcome in UNPAID:
        assert charge == 0
    elif outcome in ("cancelled", "slow_reader", "deadline"):
        assert len(seen.pieces) <= output <= seen.max_tokens
        assert charge > 0


def _booked(stack: Stack, request_id: str, seen: Seen | None = None) -> tuple[str, int, int, int, int]:
    rows = stack.rows(
        "select o.outcome, coalesce(r.charge_nano, 0),"
        " coalesce(r.output_visible_tokens + r.output_reasoning_tokens, 0),"
        " coalesce(r.input_uncached_tokens + r.input_cached_tokens, 0), coalesce(r.input_cached_tokens, 0)"
        " from outcomes o left join receipts r on r.job_id = o.job_id where o.request_id = :request",
        request=request_id,
    )
    assert len(rows) == 1, f"{len(rows)} outcomes of {request_id}: {seen}"  # I12
    return cast("tuple[str, int, int, int, int]", tuple(rows[0]))


def outcome_of(stack: Stack, seen: Seen) -> str:
    """The row of the outcome table under which the request was booked."""
    return _booked(stack, seen.request_id)[0]


def charge_of(stack: Stack, seen: Seen) -> int:
    """What its renter paid, in nano-USD."""
    return _booked(stack, seen.request_id)[1]


def attempts_of(stack: Stack, seen: Seen) -> list[tuple[UUID, str, str | None]]:
    """(node, end code, fault) of each attempt, in order."""
    rows = stack.rows(
        "select a.node_id, a.end_code, a.fault from attempts a join jobs j on j.id = a.job_id"
        " where j.request_id = :request order by a.epoch",
        request=seen.request_id,
    )
    return [(row[0], row[1], row[2]) for row in rows]
