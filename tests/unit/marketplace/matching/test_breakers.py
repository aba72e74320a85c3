"""Breakers and the retry budget."""

from __future__ import annotations

from uuid import uuid4

from marketplace.matching.breakers import (
    FIRST_REST_S,
    LEAST_REST_S,
    LONGEST_REST_S,
    MAX_ENTRIES,
    PROBE_S,
    Breakers,
)
from marketplace.matching.retries import RetryBudget

VARIANT = uuid4()
A, B = uuid4(), uuid4()


class TestABreaker:
    def test_opens_at_the_first_failure_while_others_serve(self) -> None:
        breakers = Breakers()
        breakers.failed(A, VARIANT, 100.0)
        assert breakers.resting([A, B], VARIANT, 100.0) == {A}
        assert breakers.resting([A, B], VARIANT, 100.0 + FIRST_REST_S - 0.1) == {A}
        assert breakers.resting([A, B], VARIANT, 100.0 + FIRST_REST_S) == frozenset()

    def test_doubles_its_rest_up_to_a_bound(self) -> None:
        breakers = Breakers()
        now = 0.0
        for rest_s in (5.0, 10.0, 20.0, 40.0, 80.0, 160.0, LONGEST_REST_S, LONGEST_REST_S):
            breakers.failed(A, VARIANT, now)
            assert breakers.resting([A, B], VARIANT, now + rest_s - 0.01) == {A}
            assert breakers.resting([A, B], VARIANT, now + rest_s) == frozenset()
            now += rest_s

    def test_closes_with_one_success(self) -> None:
        breakers = Breakers()
        breakers.failed(A, VARIANT, 0.0)
        breakers.succeeded(A, VARIANT)
        assert breakers.resting([A, B], VARIANT, 0.1) == frozenset()

    def test_of_one_variant_leaves_the_others_alone(self) -> None:
        breakers = Breakers()
        breakers.failed(A, VARIANT, 0.0)
        assert breakers.resting([A, B], uuid4(), 0.1) == frozenset()

    def test_forgives_when_the_request_was_to_blame(self) -> None:
        breakers = Breakers()
        for node in (A, B):
            breakers.failed(node, VARIANT, 0.0)
            breakers.forgive(node, VARIANT)
        assert breakers.resting([A, B], VARIANT, 0.1) == frozenset()

    def test_never_ejects_the_whole_fleet_for_long(self) -> None:
        breakers = Breakers()
        breakers.failed(A, VARIANT, 0.0)
        breakers.failed(A, VARIANT, 0.0)
        breakers.failed(B, VARIANT, 0.5)
        assert breakers.resting([A, B], VARIANT, 0.6) == {A, B}
        assert breakers.resting([A, B], VARIANT, 0.5 + LEAST_REST_S) == {A}
        assert breakers.resting([A], VARIANT, LEAST_REST_S) == frozenset()

    def test_keeps_a_bounded_memory(self) -> None:
        breakers = Breakers()
        for _ in range(MAX_ENTRIES + 10):
            breakers.failed(uuid4(), VARIANT, 0.0)
        assert len(breakers._entries) == MAX_ENTRIES


class TestTheRetryBudget:
    def test_lets_a_quiet_model_retry_three_times_a_second(self) -> None:
        budget = RetryBudget()
        assert [budget.try_retry(VARIANT, 0.0) for _ in range(4)] == [True, True, True, False]
        assert budget.try_retry(VARIANT, 1.0)

    def test_adds_a_tenth_of_the_requests_of_ten_seconds(self) -> None:
        budget = RetryBudget()
        for second in range(10):
            for _ in range(20):
                budget.request(VARIANT, float(second))
        allowed = sum(budget.try_retry(VARIANT, 9.5) for _ in range(200))
        assert allowed == 200 // 10 + 3

    def test_never_exceeds_its_share_of_the_window(self) -> None:
        budget = RetryBudget()
        for _ in range(100):
            budget.request(VARIANT, 0.0)
        allowed = sum(budget.try_retry(VARIANT, second) for second in range(10) for _ in range(100))
        assert allowed == 100 // 10 + 3 * 10

    def test_forgets_what_left_the_window(self) -> None:
        budget = RetryBudget()
        for _ in range(1_000):
            budget.request(VARIANT, 0.0)
        allowed = sum(budget.try_retry(VARIANT, 10.0) for _ in range(100))
        assert allowed == 3

    def test_keeps_models_apart(self) -> None:
        budget = RetryBudget()
        while budget.try_retry(VARIANT, 0.0):
            pass
        assert budget.try_retry(uuid4(), 0.0)


class TestACanary:
    def test_goes_alone_after_a_rest(self) -> None:
        breakers = Breakers()
        breakers.failed(A, VARIANT, 0.0)
        breakers.chosen(A, VARIANT, FIRST_REST_S)
        assert breakers.resting([A, B], VARIANT, FIRST_REST_S + 0.1) == {A}
        breakers.succeeded(A, VARIANT)
        assert breakers.resting([A, B], VARIANT, FIRST_REST_S + 0.2) == frozenset()

    def test_that_is_never_heard_of_again_blocks_for_a_bounded_time(self) -> None:
        breakers = Breakers()
        breakers.failed(A, VARIANT, 0.0)
        breakers.chosen(A, VARIANT, FIRST_REST_S)
        assert breakers.resting([A, B], VARIANT, FIRST_REST_S + PROBE_S) == frozenset()

    def test_is_no_matter_for_a_node_that_never_failed(self) -> None:
        breakers = Breakers()
        breakers.chosen(B, VARIANT, 0.0)
        assert breakers.resting([A, B], VARIANT, 0.1) == frozenset()
