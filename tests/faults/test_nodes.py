"""Nodes that die, engines that die, wires that break, owners who take their machine back."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable

import pytest

from agent import home
from tests.stack import Node, Stack, until
from tests.witness import (
    Background,
    Seen,
    assert_invariants,
    attempts_of,
    charge_of,
    mid_stream,
    outcome_of,
    stream,
)

LONG = "Read all of this before you answer. " * 120
"""Two seconds of reading at a simulated engine's pace."""


def running_at(stack: Stack) -> Node:
    """The node that has the one attempt that runs now."""
    query = "select node_id from attempts where state = 'leased'"
    ((node_id,),) = until(lambda: stack.rows(query), "a leased attempt")
    return next(node for node in stack.nodes.values() if node.node_id == node_id)


def begun(stack: Stack, node: Node) -> None:
    """Until the node's engine has the request."""
    until(lambda: stack.busy(node.name), f"work at {node.name}")


def while_it_reads(
    stack: Stack, prompt: str, act: Callable[[Node], None], *, gateway: str = "gw-0"
) -> tuple[Node, Seen]:
    """Do something to the node that reads a long prompt, before its first token."""
    with Background() as background:
        background.add(stream, stack.client(gateway, stack.renter()), prompt + LONG, max_tokens=20)
        node = running_at(stack)
        begun(stack, node)
        act(node)
        (seen,) = background.all()
    return node, seen


def moved_on(stack: Stack, first: Node, seen: Seen, *, fault: str) -> None:
    """Another node gave the whole answer; the first one got nothing."""
    assert seen.complete, seen
    assert len(seen.pieces) == 20
    assert_invariants(stack, [seen])
    (failed, delivered) = attempts_of(stack, seen)
    assert (failed[0], failed[2]) == (first.node_id, fault)
    assert delivered[0] != first.node_id
    assert delivered[1:] == ("delivered", None)


def fallow_agent(command: str, node: Node) -> None:
    """`fallow agent <command>` as its owner types it."""
    subprocess.run(
        [sys.executable, "-m", "marketplace.cli", "agent", command, "--dir", str(node.folder)], check=True, timeout=30
    )


class TestAnAgentKilled:
    @pytest.mark.parametrize("gateway", ["gw-0", "gw-1"], ids=["at its own gateway", "at the other gateway"])
    def test_mid_stream_ends_it_with_an_error_and_costs_nothing(self, stack: Stack, gateway: str) -> None:
        client = stack.client(gateway, stack.renter())
        seen = stream(
            client, "Kill my agent.", model="solo", on_piece=mid_stream(5, lambda: stack.kill("solo")), max_tokens=100
        )
        assert seen.error == "node_failed"
        assert len(seen.pieces) >= 5
        assert_invariants(stack, [seen])
        assert (outcome_of(stack, seen), charge_of(stack, seen)) == ("node_failed", 0)

    def test_before_the_first_token_moves_the_request_to_another_node(self, stack: Stack) -> None:
        node, seen = while_it_reads(stack, "Kill it while it reads.", lambda node: stack.kill(node.name))
        moved_on(stack, node, seen, fault="node")

    def test_and_started_again_serves_at_once(self, stack: Stack) -> None:
        stack.restart("solo")
        stack.wait_offered()
        seen = stream(stack.client("gw-1", stack.renter()), "Are you back?", model="solo", max_tokens=5)
        assert seen.complete
        assert_invariants(stack, [seen])


class TestAnEngineKilled:
    @pytest.mark.parametrize("number", [signal.SIGABRT, signal.SIGKILL], ids=["SIGABRT", "SIGKILL"])
    def test_mid_stream_ends_it_with_an_error_and_is_started_again(self, stack: Stack, number: signal.Signals) -> None:
        client = stack.client("gw-1", stack.renter())
        kill = mid_stream(5, lambda: os.kill(stack.engine_pid("solo"), number))
        seen = stream(client, f"Die by {number.name}.", model="solo", on_piece=kill, max_tokens=100)
        assert seen.error == "node_failed"
        assert_invariants(stack, [seen])
        assert attempts_of(stack, seen) == [(stack.nodes["solo"].node_id, "engine_died", "node")]
        stack.wait_offered()
        after = stream(client, "Once more.", model="solo", max_tokens=5)
        assert after.complete, after
        assert_invariants(stack, [after])

    def test_before_the_first_token_moves_the_request_to_another_node(self, stack: Stack) -> None:
        node, seen = while_it_reads(
            stack, "Its engine dies.", lambda node: os.kill(stack.engine_pid(node.name), signal.SIGKILL), gateway="gw-1"
        )
        moved_on(stack, node, seen, fault="node")
        assert attempts_of(stack, seen)[0][1] == "engine_died"


class TestAWireThatBreaks:
    def test_mid_stream_ends_the_stream_and_stops_the_engine(self, stack: Stack) -> None:
        solo = stack.nodes["solo"]
        client = stack.client("gw-0", stack.renter())

        def cut() -> None:
            begun(stack, solo)
            assert solo.wire is not None
            solo.wire.cut()

        seen = stream(client, "Cut the wire.", model="solo", on_piece=mid_stream(5, cut), max_tokens=900)
        assert seen.error == "node_failed"
        until(lambda: stack.at_rest(solo.name), "an idle engine", within_s=5)
        assert_invariants(stack, [seen])

    def test_by_silence_stops_the_engine_when_its_lease_ends(self, stack: Stack) -> None:
        solo = stack.nodes["solo"]
        client = stack.client("gw-0", stack.renter())

        def leave(seen: Seen) -> bool:
            if len(seen.pieces) < 5:
                return False
            begun(stack, solo)
            assert solo.wire is not None
            solo.wire.silence()
            return True

        seen = stream(client, "Not a word more.", model="solo", on_piece=leave, max_tokens=900)
        until(lambda: stack.at_rest(solo.name), "an idle engine", within_s=12)
        assert_invariants(stack, [seen])
        assert outcome_of(stack, seen) == "cancelled"


class TestAnOwnerWhoTakesTheMachineBack:
    def test_lets_a_short_answer_end(self, stack: Stack) -> None:
        solo = stack.nodes["solo"]
        client = stack.client("gw-0", stack.renter())
        pause = mid_stream(1, lambda: fallow_agent("pause", solo))
        seen = stream(client, "Be brief.", model="solo", max_tokens=60, on_piece=pause)
        assert seen.complete, seen
        assert_invariants(stack, [seen])

    def test_mid_stream_costs_nobody_anything(self, stack: Stack) -> None:
        solo = stack.nodes["solo"]
        faults = stack.rows("select faults from nodes where id = :node", node=solo.node_id)
        client = stack.client("gw-1", stack.renter())
        pause = mid_stream(5, lambda: fallow_agent("pause", solo))
        seen = stream(client, "Talk on and on.", model="solo", max_tokens=900, on_piece=pause)
        assert seen.error == "owner_preempted"
        assert_invariants(stack, [seen])
        assert attempts_of(stack, seen) == [(solo.node_id, "owner_preempted", "owner")]
        assert charge_of(stack, seen) == 0
        assert stack.rows("select faults from nodes where id = :node", node=solo.node_id) == faults
        until(lambda: stack.offers_of(solo) == 0, "the offer is withdrawn")
        fallow_agent("resume", solo)
        stack.wait_offered()

    def test_before_the_first_token_moves_the_request_to_another_node(self, stack: Stack) -> None:
        node, seen = while_it_reads(
            stack, "My owner comes home." + LONG, lambda node: home.set_paused(node.folder, True), gateway="gw-1"
        )
        moved_on(stack, node, seen, fault="owner")

    def test_by_stopping_the_agent_is_no_fault_either(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        seen = stream(
            client,
            "Stop in order.",
            model="solo",
            max_tokens=900,
            on_piece=mid_stream(5, lambda: os.kill(stack.parts["solo"].pid, signal.SIGTERM)),
        )
        assert seen.error == "owner_preempted"
        assert_invariants(stack, [seen])
        assert attempts_of(stack, seen)[0][2] == "owner"
