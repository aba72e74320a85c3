"""Clients that leave, read slowly, come all at once, or wait too long."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator

import pytest

from marketplace.billing.service import balance
from tests.stack import Renter, Stack, until
from tests.witness import (
    Background,
    Seen,
    ask,
    assert_invariants,
    body_of,
    charge_of,
    ended,
    outcome_of,
    raw_request,
    stream,
    submit,
)

LONG = "Read all of this before you answer. " * 120


def outcomes_of(stack: Stack, renter: Renter) -> list[str]:
    query = "select outcome from outcomes where organisation_id = :renter order by at"
    return [row[0] for row in stack.rows(query, renter=renter.organisation_id)]


class TestAClientThatLeaves:
    @pytest.mark.parametrize("gateway", ["gw-0", "gw-1"])
    def test_a_stream_pays_for_what_was_delivered_and_frees_the_engine(self, stack: Stack, gateway: str) -> None:
        client = stack.client(gateway, stack.renter())

        def leave(seen: Seen) -> bool:
            return len(seen.pieces) >= 70 and until(lambda: stack.busy("solo") == 1, "work at solo") is True

        seen = stream(client, "Tell me more than I read.", model="solo", on_piece=leave, max_tokens=900)
        until(lambda: stack.busy("solo") == 0, "an idle engine", within_s=3.5)
        assert_invariants(stack, [seen])
        assert outcome_of(stack, seen) == "cancelled"
        assert charge_of(stack, seen) >= 70 * 1_000_000  # 1000 USD a million tokens

    @pytest.mark.parametrize("gateway", ["gw-0", "gw-1"])
    def test_an_answer_that_is_not_streamed_frees_the_engine_too(self, stack: Stack, gateway: str) -> None:
        renter = stack.renter()
        connection = raw_request(stack, gateway, renter, body_of(Seen("Not streamed.", 900, "solo")))
        until(lambda: stack.busy("solo") == 1, "work at solo")
        connection.close()
        until(lambda: stack.busy("solo") == 0, "an idle engine", within_s=3.5)
        assert_invariants(stack)
        assert outcomes_of(stack, renter) == ["cancelled"]

    def test_before_the_first_token_pays_nothing(self, stack: Stack) -> None:
        renter = stack.renter()
        connection = raw_request(stack, "gw-0", renter, body_of(Seen(LONG, 50, "solo"), stream=True))
        until(lambda: stack.busy("solo") == 1, "work at solo")
        connection.close()
        assert_invariants(stack)
        assert outcomes_of(stack, renter) == ["cancelled_early"]
        assert stack.rows("select 1 from receipts where renter_organisation_id = :id", id=renter.organisation_id) == []

    def test_before_its_body_is_whole_leaves_nothing(self, stack: Stack) -> None:
        renter = stack.renter()
        with socket.create_connection(("127.0.0.1", stack.ports["gw-0"])) as connection:
            head = f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {renter.secret}\r\n"
            connection.sendall(head.encode() + b'Content-Length: 500\r\n\r\n{"model": ')
        time.sleep(0.3)
        assert outcomes_of(stack, renter) == []
        assert_invariants(stack)


class TestAQueuedJobThatIsCancelled:
    def test_while_it_runs_pays_for_what_was_accepted(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        job_id = submit(client, "A long job.", model="solo", max_tokens=900)
        until(lambda: stack.busy("solo") == 1, "work at solo")
        client.post(f"/jobs/{job_id}/cancel", cast_to=object)
        shown = ended(client, job_id, within_s=10)
        assert shown["status"] == "cancelled"
        until(lambda: stack.busy("solo") == 0, "an idle engine", within_s=3.5)
        assert_invariants(stack)

    def test_while_it_waits_is_free(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        price = {"input": "1", "output": "1000"}
        job_id = submit(client, "Nobody serves this.", model="scripted", max_price=price)
        client.delete(f"/jobs/{job_id}", cast_to=object)
        shown = ended(client, job_id, within_s=5)
        assert (shown["status"], shown["cost"]) == ("cancelled", "0")
        assert_invariants(stack)


class TestADeadlineThatPasses:
    @pytest.fixture
    def hurried(self, stack: Stack) -> Iterator[str]:
        """A gateway with a request's deadline of two seconds."""
        stack.add_gateways("gw-hurried", FALLOW_REQUEST_TIMEOUT_S="2")
        stack.wait_offered()
        yield "gw-hurried"
        stack.remove_gateway("gw-hurried")

    def test_mid_stream_pays_for_what_was_delivered(self, stack: Stack, hurried: str) -> None:
        renter = stack.renter(credit_nano=10_000_000_000)
        streamed = stream(stack.client(hurried, renter), "Too long a story.", model="solo", max_tokens=900)
        assert streamed.error == "deadline_exceeded"
        assert streamed.pieces
        whole = ask(stack.client(hurried, renter), "Too long an answer.", model="solo", max_tokens=900)
        assert (whole.status, whole.finish_reason) == (200, "length")
        assert_invariants(stack, [streamed])
        assert outcomes_of(stack, renter) == ["deadline", "deadline"]
        assert 0 < charge_of(stack, streamed) < 900 * 1_000_000
        # Before the first token it costs nothing.
        early = stream(stack.client(hurried, renter), LONG + LONG, model="solo", max_tokens=5)
        assert (early.status, early.error) == (504, "deadline_exceeded")
        assert_invariants(stack, [early])
        assert outcomes_of(stack, renter)[-1] == "expired"


class TestBalances:
    def test_twenty_at_once_through_two_gateways_never_spend_more_than_there_is(self, stack: Stack) -> None:
        renter = stack.renter(credit_nano=1_000_000_000)
        start = threading.Barrier(20)

        def request(number: int) -> Seen:
            client = stack.client(f"gw-{number % 2}", renter)
            start.wait(20)
            # 299 tokens at 1000 USD a million and a few for the prompt: at worst just under 0.30 USD.
            return stream(client, f"Spend, {number}.", model="solo", max_tokens=299)

        with Background() as background:
            for number in range(20):
                background.add(request, number)
            seen = background.all()
        served = [each for each in seen if each.complete]
        refused = [each for each in seen if each.status == 402]
        assert len(served) == 3
        assert len(refused) == 17
        assert {each.error for each in refused} == {"insufficient_balance"}
        assert_invariants(stack, seen)
        with stack.factory() as session:
            credit = balance(session, renter.organisation_id)
        assert 0 <= credit.posted_nano <= 110_000_000
        assert credit.held_nano == 0
