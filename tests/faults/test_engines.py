"""An engine that fails in every way it can: nobody pays, nothing stays held, the next request passes."""

from __future__ import annotations

import pytest

from tests.stack import Stack, until
from tests.witness import Background, Seen, ask, assert_invariants, charge_of, mid_stream, outcome_of, stream

MANY = 100
ERRORS = {
    "reject": ({"request_rejected"}, 400),
    "error": ({"node_failed"}, 502),
    "error_event": ({"node_failed"}, 502),
    "drop": ({"node_failed"}, 502),
    "blank": ({"empty_answer", "node_failed"}, 502),
}
"""Fault -> what the client reads, and its status."""


class TestAHundredThatFailBeforeTheFirstToken:
    @pytest.mark.parametrize("kind", list(ERRORS))
    def test_hold_nothing_and_the_next_one_passes(self, stack: Stack, kind: str) -> None:
        renter = stack.renter()
        client = stack.client("gw-0", renter)
        stack.arm("brittle-engine", kind, MANY)
        with Background(8) as background:
            for number in range(MANY):
                background.add(ask if number % 2 else stream, client, f"{kind} {number}", model="brittle")
            seen = background.all()
        codes, status = ERRORS[kind]
        assert {each.error for each in seen} <= codes, {each.error for each in seen}
        assert {each.status for each in seen} == {status}
        after = stream(client, "And now?", model="brittle", max_tokens=5)
        assert after.complete, after
        assert_invariants(stack, [*seen, after])
        held, outcomes = stack.rows(
            "select (select count(*) from receipts where renter_organisation_id = :renter),"
            " (select count(*) from outcomes where organisation_id = :renter)",
            renter=renter.organisation_id,
        )[0]
        assert (held, outcomes) == (1, MANY + 1)


class TestAnEngine:
    def test_that_ends_at_once_with_an_empty_answer_is_complete(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        stack.arm("brittle-engine", "empty", 1)
        seen = stream(client, "Say nothing.", model="brittle")
        assert (seen.finish_reason, seen.text) == ("stop", "")
        assert_invariants(stack, [seen])

    @pytest.mark.parametrize("kind", ["error_event", "drop", "blank"])
    def test_that_breaks_mid_stream_costs_nothing(self, stack: Stack, kind: str) -> None:
        client = stack.client("gw-0", stack.renter())
        stack.arm("brittle-engine", kind, 1, after_tokens=7)
        seen = stream(client, f"Break after seven, {kind}.", model="brittle")
        assert (seen.error, len(seen.pieces)) == ("node_failed", 7)
        assert_invariants(stack, [seen])
        assert charge_of(stack, seen) == 0

    def test_that_claims_ten_times_its_tokens_is_paid_for_those_that_it_gave(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        stack.arm("brittle-engine", "overclaim", 1)
        seen = stream(client, "Exaggerate.", model="brittle", max_tokens=12)
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
        client = stack.client("gw-0", stack.renter(), timeout=2.0)
        stack.arm("brittle-engine", "stall", 1, after_tokens=3)
        seen = stream(client, "Stop in the middle.", model="brittle")
        assert (seen.error, len(seen.pieces)) == ("connection", 3)
        until(lambda: stack.at_rest("brittle"), "a free slot", within_s=5)
        assert_invariants(stack, [seen])
        assert outcome_of(stack, seen) == "cancelled"

    def test_that_dies_withdraws_its_offer_and_comes_back_when_it_is_started_again(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        kill = mid_stream(3, lambda: stack.kill("brittle-engine"))
        seen = stream(client, "Die outside the agent.", model="brittle", on_piece=kill, max_tokens=200)
        assert seen.error == "node_failed"

        def refused() -> bool:
            every.append(stream(client, "Anybody?", model="brittle", max_tokens=3))
            return every[-1].status == 503

        every: list[Seen] = []
        until(refused, "a refusal", within_s=10, every_s=0.5)
        stack.start("brittle-engine")
        stack.wait_offered()
        every.append(stream(client, "Back again?", model="brittle", max_tokens=3))
        assert every[-1].complete
        assert_invariants(stack, [seen, *every])
