"""What becomes of jobs that nobody speaks for."""

from __future__ import annotations

import pytest

from marketplace.jobs import endings
from marketplace.jobs.endings import MAX_ATTEMPTS, MAX_PREEMPTIONS, WAIT_AGAIN, History, after_lost_lease
from marketplace.jobs.states import JobState, Outcome

FRESH = History(attempts=1, preemptions=0, last_fault="platform")
SPENT = History(attempts=MAX_ATTEMPTS, preemptions=0, last_fault="platform")


class TestLostLease:
    @pytest.mark.parametrize(
        ("queued", "accepted", "history", "cancelled", "late", "state", "outcome"),
        [
            (True, 0, FRESH, False, False, JobState.QUEUED, None),
            (True, 9, FRESH, False, False, JobState.QUEUED, None),
            (True, 0, FRESH, True, False, JobState.VOIDED, Outcome.CANCELLED_EARLY),
            (True, 9, FRESH, True, False, JobState.DELIVERED, Outcome.PLATFORM_FAILED),
            (True, 0, FRESH, False, True, JobState.VOIDED, Outcome.EXPIRED),
            (True, 9, FRESH, False, True, JobState.DELIVERED, Outcome.PLATFORM_FAILED),
            (True, 0, SPENT, False, False, JobState.VOIDED, Outcome.PLATFORM_FAILED),
            (True, 9, SPENT, False, False, JobState.DELIVERED, Outcome.PLATFORM_FAILED),
            (False, 0, FRESH, False, False, JobState.VOIDED, Outcome.PLATFORM_FAILED),
            (False, 9, FRESH, False, False, JobState.DELIVERED, Outcome.PLATFORM_FAILED),
            (False, 0, FRESH, False, True, JobState.VOIDED, Outcome.PLATFORM_FAILED),
        ],
    )
    def test_each_case_has_its_ending(
        self,
        queued: bool,
        accepted: int,
        history: History,
        cancelled: bool,
        late: bool,
        state: JobState,
        outcome: Outcome | None,
    ) -> None:
        ending = after_lost_lease(
            queued=queued,
            accepted_tokens=accepted,
            history=history,
            cancel_requested=cancelled,
            deadline_passed=late,
        )
        assert (ending.job_state, ending.outcome) == (state, outcome)

    def test_whoever_ends_is_told_why(self) -> None:
        ending = after_lost_lease(
            queued=False, accepted_tokens=3, history=FRESH, cancel_requested=False, deadline_passed=False
        )
        assert ending.error_code == "platform_failed"
        assert "Nothing is charged" in (ending.error_message or "")
        assert (WAIT_AGAIN.error_code, WAIT_AGAIN.error_message) == (None, None)


class TestHistory:
    def test_a_lost_lease_is_one_more_attempt_and_our_fault(self) -> None:
        before = History(attempts=2, preemptions=4, last_fault="owner")
        assert before.with_lost_lease() == History(attempts=3, preemptions=4, last_fault="platform")

    @pytest.mark.parametrize(
        ("history", "exhausted"),
        [
            (History(MAX_ATTEMPTS - 1, MAX_PREEMPTIONS - 1), False),
            (History(MAX_ATTEMPTS, 0), True),
            (History(0, MAX_PREEMPTIONS), True),
        ],
    )
    def test_attempts_and_pre_emptions_have_each_their_bound(self, history: History, exhausted: bool) -> None:
        assert history.exhausted is exhausted

    @pytest.mark.parametrize(
        ("history", "outcome"),
        [
            (History(3, 0, "node"), Outcome.NODE_FAILED),
            (History(3, 0, "platform"), Outcome.PLATFORM_FAILED),
            (History(3, 0, None), Outcome.NO_CAPACITY),
            (History(1, MAX_PREEMPTIONS, "owner"), Outcome.OWNER_PREEMPTED),
        ],
    )
    def test_a_job_that_was_tried_enough_ends_by_its_last_fault(self, history: History, outcome: Outcome) -> None:
        ending = endings.used_up(history)
        assert (ending.job_state, ending.outcome) == (JobState.VOIDED, outcome)
