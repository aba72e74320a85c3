"""A job as its renter reads it."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from marketplace.core.ids import new_id
from marketplace.jobs.models import Job
from marketplace.jobs.repository import JobView
from marketplace.jobs.schemas import job_list, job_object, status_of
from marketplace.jobs.states import Outcome

MOMENT = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)


def job(**changes: Any) -> Job:
    facts: dict[str, Any] = {
        "id": new_id(),
        "request_id": "req_1",
        "state": "queued",
        "outcome": None,
        "prompt_tokens": 10,
        "max_output_tokens": 20,
        "max_input_nano_usd_per_mtok": 100_000_000,
        "max_cached_input_nano_usd_per_mtok": 25_000_000,
        "max_output_nano_usd_per_mtok": 2**53 + 1,
        "hold_nano": 9_000,
        "created_at": MOMENT,
        "deadline_at": MOMENT,
        "ended_at": None,
        "cancel_requested_at": None,
        "error_code": None,
        "error_message": None,
        "result": None,
    }
    return Job(**{**facts, **changes})


class TestStatus:
    @pytest.mark.parametrize(
        ("changes", "status"),
        [
            ({}, "queued"),
            ({"state": "running"}, "running"),
            ({"state": "running", "cancel_requested_at": MOMENT}, "cancelling"),
            ({"state": "delivered", "outcome": "complete"}, "completed"),
            ({"state": "settled", "outcome": "complete"}, "completed"),
            ({"state": "voided", "outcome": "cancelled_early"}, "cancelled"),
            ({"state": "settled", "outcome": "cancelled"}, "cancelled"),
            ({"state": "voided", "outcome": "expired"}, "expired"),
            ({"state": "settled", "outcome": "deadline"}, "expired"),
        ],
    )
    def test_state_and_outcome_are_one_word(self, changes: dict[str, Any], status: str) -> None:
        assert status_of(job(**changes)) == status

    def test_every_other_outcome_is_a_failure(self) -> None:
        told = {status_of(job(state="voided", outcome=outcome.value)) for outcome in Outcome}
        assert told == {"completed", "cancelled", "expired", "failed"}


class TestAmounts:
    def test_an_open_job_shows_its_hold_and_no_cost(self) -> None:
        shown = job_object(JobView(job(), 0, None), "tiny")
        assert (shown.held, shown.cost) == ("0.000009", None)

    def test_a_delivered_job_holds_its_charge(self) -> None:
        shown = job_object(JobView(job(state="delivered", outcome="complete"), 1, 4_000), "tiny")
        assert (shown.held, shown.cost, shown.error) == ("0.000004", "0.000004", None)

    def test_a_settled_job_holds_nothing(self) -> None:
        assert job_object(JobView(job(state="settled", outcome="complete"), 1, 4_000), "tiny").held == "0"

    def test_a_void_job_cost_nothing_and_says_why(self) -> None:
        shown = job_object(JobView(job(state="voided", outcome="no_capacity", error_code="no_capacity"), 0, None), "t")
        assert shown.cost == "0"
        assert shown.error is not None
        assert shown.error.code == "no_capacity"

    def test_large_amounts_survive_as_strings(self) -> None:
        assert job_object(JobView(job(), 0, None), "tiny").max_price.output == "9007199.254740993"


def test_a_list_leaves_results_out() -> None:
    view = JobView(job(state="delivered", outcome="complete", result={"choices": []}), 1, 0)
    page = job_list([view], ["tiny"], has_more=False)
    assert page.data[0].result is None
    assert page.first_id == page.last_id == page.data[0].id
