"""The published outcome table, row by row."""

from __future__ import annotations

import itertools

import pytest

from agent import protocol
from marketplace.gateway.outcomes import (
    FAULTS,
    RETRYABLE,
    Ending,
    Payer,
    Verdict,
    moves_on,
    of_failure,
    of_refusal,
    verdict,
)
from marketplace.jobs.states import JobState, Outcome

ENDINGS = [ending for ending in Ending if ending is not Ending.LEASE_LOST]
DELIVERED, VOIDED = JobState.DELIVERED, JobState.VOIDED
RENTER, NOBODY, PLATFORM = Payer.RENTER, Payer.NOBODY, Payer.PLATFORM


class TestTheTable:
    @pytest.mark.parametrize(
        ("ending", "started", "ruling"),
        [
            (Ending.FINISHED, True, Verdict(DELIVERED, Outcome.COMPLETE, RENTER, None)),
            (Ending.FINISHED, False, Verdict(DELIVERED, Outcome.COMPLETE, RENTER, None)),
            (Ending.CANCELLED, True, Verdict(DELIVERED, Outcome.CANCELLED, RENTER, None)),
            (Ending.CANCELLED, False, Verdict(VOIDED, Outcome.CANCELLED_EARLY, NOBODY, None)),
            (Ending.SLOW_READER, True, Verdict(DELIVERED, Outcome.SLOW_READER, RENTER, None)),
            (Ending.SLOW_READER, False, Verdict(VOIDED, Outcome.CANCELLED_EARLY, NOBODY, None)),
            (Ending.DEADLINE, True, Verdict(DELIVERED, Outcome.DEADLINE, RENTER, None)),
            (Ending.DEADLINE, False, Verdict(VOIDED, Outcome.EXPIRED, NOBODY, None)),
            (Ending.NODE, True, Verdict(VOIDED, Outcome.NODE_FAILED, NOBODY, "node")),
            (Ending.NODE, False, Verdict(VOIDED, Outcome.NODE_FAILED, NOBODY, "node")),
            (Ending.BLANK, True, Verdict(VOIDED, Outcome.NODE_FAILED, NOBODY, "node")),
            (Ending.BLANK, False, Verdict(VOIDED, Outcome.EMPTY, NOBODY, "node")),
            (Ending.OWNER, True, Verdict(VOIDED, Outcome.OWNER_PREEMPTED, NOBODY, "owner")),
            (Ending.OWNER, False, Verdict(VOIDED, Outcome.OWNER_PREEMPTED, NOBODY, "owner")),
            (Ending.REQUEST, False, Verdict(VOIDED, Outcome.REQUEST_REJECTED, NOBODY, "request")),
            (Ending.PLATFORM, True, Verdict(DELIVERED, Outcome.PLATFORM_FAILED, PLATFORM, "platform")),
            (Ending.PLATFORM, False, Verdict(VOIDED, Outcome.PLATFORM_FAILED, NOBODY, "platform")),
            (Ending.RACE, False, Verdict(VOIDED, Outcome.NO_CAPACITY, NOBODY, None)),
        ],
    )
    def test_says_who_pays(self, ending: Ending, started: bool, ruling: Verdict) -> None:
        assert verdict(ending, started=started, accepted=started) == ruling

    def test_charges_the_prefill_of_an_early_cancel_beyond_the_free_ones(self) -> None:
        ruling = verdict(Ending.CANCELLED, started=False, accepted=False, prefill_due=True)
        assert ruling == Verdict(DELIVERED, Outcome.CANCELLED_EARLY, RENTER, None)
        late = verdict(Ending.DEADLINE, started=False, accepted=False, prefill_due=True)
        assert late.payer is NOBODY

    def test_pays_the_owner_for_what_was_accepted_although_nothing_was_sent(self) -> None:
        assert verdict(Ending.PLATFORM, started=False, accepted=True).payer is PLATFORM

    def test_has_a_row_for_everything_that_can_happen(self) -> None:
        for ending, started, due in itertools.product(ENDINGS, (True, False), (True, False)):
            ruling = verdict(ending, started=started, accepted=started, prefill_due=due)
            assert (ruling.job_state is DELIVERED) == (ruling.payer is not NOBODY)
            assert ruling.fault == FAULTS.get(ending)

    def test_knows_nothing_of_an_attempt_that_somebody_else_ended(self) -> None:
        with pytest.raises(ValueError, match="no verdict"):
            verdict(Ending.LEASE_LOST, started=True, accepted=True)


class TestMovingOn:
    def test_happens_only_while_nobody_has_read_anything(self) -> None:
        for ending, accepted in itertools.product(Ending, (True, False)):
            assert not moves_on(ending, exposed=True, accepted=accepted)

    def test_happens_for_failures_that_another_node_may_not_have(self) -> None:
        assert {ending for ending in Ending if moves_on(ending, exposed=False, accepted=False)} == RETRYABLE

    def test_does_not_happen_where_our_failure_is_paid_instead(self) -> None:
        assert not moves_on(Ending.PLATFORM, exposed=False, accepted=True)
        assert moves_on(Ending.NODE, exposed=False, accepted=True)


class TestCodes:
    def test_of_failures_cost_reputation_only_where_the_protocol_says_so(self) -> None:
        for code, fault in protocol.FAILURES.items():
            assert FAULTS[of_failure(code)] == fault

    def test_that_nobody_knows_are_the_nodes_fault(self) -> None:
        assert of_failure("made_up") is Ending.NODE

    def test_of_refusals_never_cost_reputation(self) -> None:
        for code in (*protocol.REFUSALS, "made_up"):
            assert FAULTS.get(of_refusal(code)) != "node"
        assert of_refusal("context_overflow") is Ending.REQUEST
        assert of_refusal("owner_active") is Ending.OWNER
        assert of_refusal("slot_taken") is Ending.RACE
