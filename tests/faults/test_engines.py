"""An engine that fails in every way it can: nobody pays, nothing stays held, the next request passes."""

from __future__ import annotations

from typing import Any, cast

import openai
import pytest

from tests.stack import Stack, until
from tests.witness import Background, Seen, ask, assert_invariants, charge_of, mid_stream, outcome_of, stream

MANY = 100
ARMED = 8
"""Faults that really happen. After the first one the node rests, and the other requests are refused at once."""
ERRORS = {
    "reject": ("request_rejected", 400),
    "error": ("node_failed", 502),
    "error_event": ("node_failed", 502),
    "drop": ("node_failed", 502),
    "blank": ("empty_answer", 502),
}
"""Fault -> what the client reads, and its status."""


def patiently(client: openai.OpenAI, prompt: str, **options: Any) -> Seen:
    """Stream once the node has rested after its last failure."""

    def served() -> Seen | None:
        seen = stream(client, prompt, model="brittle", **options)
        return None if seen.status == 503 else seen

    return cast("Seen", until(served, "a node that has rested", within_s=15, every_s=0.2))


@pytest.fixture(autouse=True)
def well(stack: Stack) -> None:
    """The engine has no fault left, and its node has rested."""
    client = stack.client("gw-0", stack.renter())
    until(lambda: patiently(client, "Are you well?", max_tokens=2).complete, "a whole answer")
    client = stack.client("gw-1", stack.renter())
    until(lambda: patiently(client, "Are you well?", max_tokens=2).complete, "a whole answer")


class TestAHundredThatFailBeforeTheFirstToken:
    @pytest.mark.parametrize("kind", list(ERRORS))
    def test_hold_nothing_and_the_next_one_passes(self, stack: Stack, kind: str) -> None:
        renter = stack.renter()
        client = stack.client("gw-0", renter)
        code, status = ERRORS[kind]
        armed = MANY if kind == "reject" else ARMED
        stack.arm("brittle-engine", kind, armed)
        with Background(8) as background:
            for number in range(MANY):
                background.add(ask if number % 2 else stream, client, f"{kind} {number}", model="brittle")
            seen = background.all()
        refused = [each for each in seen if each.status == 503]
        failed = [each for each in seen if each.status != 503]
        assert {(each.error, each.status) for each in failed} == {(code, status)}
        assert {each.error for each in refused} <= {"no_capacity"}
        assert kind != "reject" or not refused

        def passes() -> Seen | None:
            failed.append(patiently(client, "And now?", max_tokens=5))
            return failed.pop() if failed[-1].complete else None

        after = until(passes, "a request that passes", within_s=20)
        assert len(failed) == armed
        assert_invariants(stack, [*seen, *failed, after])


class TestAnEngine:
    def test_that_ends_at_once_with_an_empty_answer_is_complete(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        stack.arm("brittle-engine", "empty", 1)
        seen = patiently(client, "Say nothing.")
        assert (seen.finish_reason, seen.text) == ("stop", "")
        assert_invariants(stack, [seen])

    @pytest.mark.parametrize("kind", ["error_event", "drop", "blank"])
    def test_that_breaks_mid_stream_costs_nothing(self, stack: Stack, kind: str) -> None:
        client = stack.client("gw-0", stack.renter())
        stack.arm("brittle-engine", kind, 1, after_tokens=60)
        seen = patiently(client, f"Break after sixty, {kind}.", max_tokens=100)
        assert seen.error == "node_failed"
        assert 1 <= len(seen.pieces) <= 60
        assert_invariants(stack, [seen])
        assert charge_of(stack, seen) == 0

    def test_that_claims_ten_times_its_tokens_is_paid_for_those_that_it_gave(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        stack.arm("brittle-engine", "overclaim", 1)
        seen = patiently(client, "Exaggerate.", max_tokens=12)
        assert seen.complete
        assert seen.usage is not None
        assert seen.usage["completion_tokens"] == 12
        assert_invariants(stack, [seen])

    def test_that_says_no_usage_is_paid_for_what_was_counted(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        stack.arm("brittle-engine", "no_usage", 1)
        seen = ask(client, "Say no figures.", model="brittle", max_tokens=9)
        assert seen.usage is not None
        assert seen.usage["completion_tokens"] == 9
        assert_invariants(stack, [seen])

    def test_that_stalls_is_left_by_its_client_and_the_slot_comes_back(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        stack.arm("brittle-engine", "stall", 1, after_tokens=3)

        def leave(seen: Seen) -> bool:
            if len(seen.pieces) < 3:
                return False
            until(lambda: stack.busy("brittle"), "a slot that is taken")
            return True

        seen = patiently(client, "Stop in the middle.", on_piece=leave)
        assert (seen.left, len(seen.pieces)) == (True, 3)
        until(lambda: stack.at_rest("brittle"), "a free slot", within_s=5)
        assert_invariants(stack, [seen])
        assert outcome_of(stack, seen) == "cancelled"

    def test_that_dies_withdraws_its_offer_and_comes_back_when_it_is_started_again(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        kill = mid_stream(3, lambda: stack.kill("brittle-engine"))
        seen = patiently(client, "Die outside the agent.", on_piece=kill, max_tokens=200)
        assert seen.error == "node_failed"

        def refused() -> bool:
            every.append(stream(client, "Anybody?", model="brittle", max_tokens=3))
            return every[-1].status == 503

        every: list[Seen] = []
        until(refused, "a refusal", within_s=10, every_s=0.5)
        stack.start("brittle-engine")
        stack.wait_offered()
        every.append(patiently(client, "Back again?", max_tokens=3))
        assert every[-1].complete
        assert_invariants(stack, [seen, *every])
