"""The line: turns, due jobs, bypass, and who gives way."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from uuid import UUID

from marketplace.matching.line import (
    MAX_LOSS_S,
    MAX_PREEMPTIONS,
    PATIENCE_S,
    Line,
    Running,
    Waiting,
    gives_way,
    shares,
)

A, B, C = (UUID(int=number) for number in (1, 2, 3))
VARIANT = UUID(int=7)


def job(number: int, renter: UUID = A, **changes: float) -> Waiting:
    facts = {"prompt_tokens": 100, "max_output_tokens": 100, "arrived_s": 0.0, "deadline_s": 3_600.0, "runs_s": 2.0}
    return Waiting(UUID(int=1_000 + number), renter, VARIANT, **{**facts, **changes})  # type: ignore[arg-type]


def always(_: Waiting, __: Sequence[Waiting]) -> bool:
    return True


def take(line: Line, now_s: float = 0.0, most: int = 1) -> list[UUID]:
    return [turn.job.renter_id for turn in line.serve(always, now_s, most=most)]


class TestTurns:
    def test_alternate_between_renters_however_many_jobs_one_has(self) -> None:
        line = Line()
        for number in range(10):
            line.join(job(number, A))
        for number in range(10, 12):
            line.join(job(number, B))
        assert take(line, most=4) in ([A, B, A, B], [B, A, B, A])

    def test_are_fair_by_tokens_not_by_jobs(self) -> None:
        line = Line()
        for number in range(8):
            line.join(job(number, A, max_output_tokens=800))
            line.join(job(100 + number, B, max_output_tokens=100))
        served: dict[UUID, float] = defaultdict(float)
        for turn in line.serve(always, 0.0, most=9):
            served[turn.job.renter_id] += turn.job.tokens
        assert shares(served) > 0.75
        assert served[B] >= 7 * job(0, B).tokens

    def test_follow_weights(self) -> None:
        line = Line(weights={A: 3.0})
        for number in range(20):
            line.join(job(number, A))
            line.join(job(100 + number, B))
        turns = take(line, most=12)
        assert turns.count(A) == 9

    def test_give_who_was_idle_no_claim_on_the_past(self) -> None:
        line = Line()
        for number in range(10):
            line.join(job(number, A))
        take(line, most=5)
        for number in range(100, 110):
            line.join(job(number, B))
        assert take(line, most=4).count(A) >= 2

    def test_count_what_a_renter_has_running_already(self) -> None:
        line = Line()
        line.running({A: 10_000.0})
        line.join(job(1, A))
        line.join(job(2, B))
        assert take(line) == [B]

    def test_come_sooner_for_what_was_not_used(self) -> None:
        line = Line()
        line.join(job(1, A))
        line.join(job(3, C))
        line.join(job(4, B))
        assert take(line) == [A]
        line.refund(A, job(1).tokens)
        line.join(job(5, A))
        assert line.order(0.0)[0].renter_id in (A, B, C)
        assert {item.renter_id for item in line.order(0.0)[:3]} == {A, B, C}

    def test_of_a_job_that_is_due_come_first(self) -> None:
        line = Line()
        for number in range(5):
            line.join(job(number, B))
        line.join(job(50, A, deadline_s=8.0))
        line.join(job(51, A, deadline_s=7.5))
        assert [item.job_id.int for item in line.order(2.0)[:2]] == [1_051, 1_050]

    def test_come_for_everybody_within_patience(self) -> None:
        line = Line(weights={B: 1e6})
        line.join(job(0, A, deadline_s=1e9))
        for number in range(1, 2_000):
            line.join(job(number, B, deadline_s=1e9))
        assert take(line, PATIENCE_S, most=1) == [A]


class TestTheLine:
    def test_holds_a_job_once(self) -> None:
        line = Line()
        assert line.join(job(1))
        assert not line.join(job(1))
        assert line.leave(job(1).job_id)
        assert not line.leave(job(1).job_id)

    def test_drops_who_is_late_and_who_fits_nowhere(self) -> None:
        line = Line()
        line.join(job(1, deadline_s=5.0))
        line.join(job(2, prompt_tokens=90_000))
        line.join(job(3))
        assert [late.job_id for late in line.expired(5.0)] == [job(1).job_id]
        assert [lost.job_id for lost in line.hopeless(lambda item: item.prompt_tokens < 10_000)] == [job(2).job_id]
        assert len(line) == 1

    def test_keeps_only_who_is_still_there(self) -> None:
        line = Line()
        for number in range(4):
            line.join(job(number))
        line.retain({job(2).job_id})
        assert [item.job_id for item in line.order(0.0)] == [job(2).job_id]


def run_memory(*, bypass: bool) -> tuple[float, list[float]]:
    """One engine with room for 18,000 tokens and 50 tokens a second for each: a job of 8,192 and 512 runs, at the head
    one of 16,384 waits for memory, eight of 1,024 and 512 stand behind. When the head starts, and the others."""
    room, now = 18_000, 0.0
    running: list[tuple[float, int]] = [(512 / 50 + 8_192 / 4_000, 8_192 + 512)]
    line = Line()
    head = job(0, A, prompt_tokens=16_384, max_output_tokens=512, runs_s=16_384 / 4_000 + 512 / 50)
    line.join(head)
    for number in range(1, 9):
        line.join(job(number, B, prompt_tokens=1_024, max_output_tokens=512, runs_s=1_024 / 4_000 + 512 / 50))
    starts: dict[UUID, float] = {}

    def size(item: Waiting) -> int:
        return item.prompt_tokens + item.max_output_tokens

    def free() -> int:
        return room - sum(tokens for until, tokens in running if until > now)

    def give(item: Waiting, kept: Sequence[Waiting]) -> bool | None:
        blocked = not bypass and head.job_id not in starts and item is not head
        if blocked or size(item) > free() or kept:
            return None
        running.append((now + item.runs_s, size(item)))
        starts[item.job_id] = now
        return True

    def starts_s(item: Waiting) -> float:
        """When enough of what runs has ended."""
        left = free()
        for until, tokens in sorted(running):
            if until > now:
                left += tokens
                if left >= size(item):
                    return until
        return now

    while len(line):
        line.serve(give, now, most=10, starts_s=starts_s)
        now += 0.1
    return starts[head.job_id], [starts[UUID(int=1_000 + number)] for number in range(1, 9)]


class TestALongJobAtTheHead:
    def test_is_passed_by_short_ones_and_starts_at_most_a_tenth_later(self) -> None:
        strict_head, strict_others = run_memory(bypass=False)
        head, others = run_memory(bypass=True)
        assert min(strict_others) >= strict_head
        assert min(others) <= 0.7
        assert sorted(others)[4] <= 0.7
        runs = 16_384 / 4_000 + 512 / 50
        assert head <= strict_head + 0.1 * runs + 0.2

    def test_is_not_passed_for_ever(self) -> None:
        line = Line()
        line.join(job(0, A, prompt_tokens=10_000, runs_s=20.0))
        given: list[int] = []

        def give(item: Waiting, kept: Sequence[Waiting]) -> bool | None:
            if item.prompt_tokens > 1_000 or kept:
                return None
            given.append(item.job_id.int)
            return True

        for number in range(1, 100):
            line.join(job(number, B, runs_s=1.0))
            line.serve(give, float(number), most=1)
        # Two of a second each: a tenth of the twenty seconds that the long one runs.
        assert len(given) == 2


class TestWhoGivesWay:
    def running(self, number: int, **changes: float) -> Running:
        facts = {"started_s": 0.0, "runs_s": 30.0, "preempted": 0}
        return Running(UUID(int=number), UUID(int=50), **{**facts, **changes})  # type: ignore[arg-type]

    def test_is_the_job_that_loses_least(self) -> None:
        old, young = self.running(1, started_s=0.0), self.running(2, started_s=4.0)
        assert gives_way([old, young], [UUID(int=50)], 5.0) is young

    def test_is_nobody_elsewhere(self) -> None:
        assert gives_way([self.running(1)], [UUID(int=51)], 1.0) is None

    def test_is_nobody_who_gave_way_often_enough_or_would_lose_too_much(self) -> None:
        offers = [UUID(int=50)]
        assert gives_way([self.running(1, preempted=MAX_PREEMPTIONS)], offers, 1.0) is None
        assert gives_way([self.running(1, runs_s=10.0)], offers, 5.1) is None
        assert gives_way([self.running(1, runs_s=1e6)], offers, MAX_LOSS_S + 0.1) is None
        assert gives_way([self.running(1, runs_s=1e6)], offers, MAX_LOSS_S) is not None
