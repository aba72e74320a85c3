"""Two gateways, two workers, one node at the first gateway: what arrives at the other one is served."""

from __future__ import annotations

import socket

from tests.stack import Stack, until
from tests.witness import Seen, ask, assert_invariants, body_of, ended, outcome_of, stream, submit


def gateway_of_the_node(stack: Stack) -> str:
    """The id of the gateway that the one agent is connected to."""
    status = stack.status("llama")
    assert status is not None
    return status.gateway_id


def ran_at(stack: Stack, seen: Seen) -> str:
    """The id of the gateway that carried the attempt out."""
    ((gateway_id,),) = stack.rows(
        "select a.gateway_id from attempts a join jobs j on j.id = a.job_id where j.request_id = :request",
        request=seen.request_id,
    )
    return str(gateway_id)


class TestAtTheOtherGateway:
    def test_a_stream_is_served_token_by_token(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        seen = stream(client, "Tell me about the sea.", max_tokens=24)
        assert seen.complete, seen
        assert len(seen.pieces) >= 3
        assert_invariants(stack, [seen])
        assert ran_at(stack, seen) != gateway_of_the_node(stack)

    def test_an_answer_that_is_not_streamed_is_served(self, stack: Stack) -> None:
        seen = ask(stack.client("gw-1", stack.renter()), "Name a river.", max_tokens=8)
        assert seen.complete, seen
        assert_invariants(stack, [seen])
        assert ran_at(stack, seen) != gateway_of_the_node(stack)

    def test_a_cancel_reaches_the_engine(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())

        def leave(seen: Seen) -> bool:
            until(lambda: stack.busy("llama"), "work at the engine")
            return len(seen.pieces) >= 5

        seen = stream(client, "Tell me everything about ships.", max_tokens=600, on_piece=leave)
        until(lambda: stack.at_rest("llama"), "a free engine", within_s=4)
        assert_invariants(stack, [seen])
        assert outcome_of(stack, seen) == "cancelled"

    def test_a_call_that_is_dropped_frees_the_engine(self, stack: Stack) -> None:
        renter = stack.renter()
        payload = str(body_of(Seen("Tell me everything about trains.", 600))).replace("'", '"').encode()
        with socket.create_connection(("127.0.0.1", stack.ports["gw-1"])) as connection:
            head = (
                f"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {renter.secret}\r\n"
                f"Content-Length: {len(payload)}\r\n\r\n"
            )
            connection.sendall(head.encode() + payload)
            until(lambda: stack.busy("llama"), "work at the engine")
        until(lambda: stack.at_rest("llama"), "a free engine", within_s=4)
        assert_invariants(stack)

    def test_queued_jobs_are_accepted_there_and_run_where_the_node_is(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        ids = [submit(client, f"Name an animal, {number}.", max_tokens=6) for number in range(4)]
        shown = [ended(client, job_id) for job_id in ids]
        assert [job["status"] for job in shown] == ["completed"] * 4
        assert_invariants(stack)
        ran = stack.rows(
            "select distinct a.gateway_id from attempts a join jobs j on j.id = a.job_id"
            " where j.request_id = any (:ids)",
            ids=[job["request_id"] for job in shown],
        )
        assert [row[0] for row in ran] == [gateway_of_the_node(stack)]
