"""An attempt takes frames and ends once."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from agent.protocol import Accepted, Failed, Finished, Refused, Tokens, UsageReport
from marketplace.fleet.links import GoneReason
from marketplace.gateway.attempt import CHARACTERS_PER_TOKEN, SPARE_CHARACTERS, SPARE_TOKENS, AttemptRun
from marketplace.gateway.outcomes import Ending
from tests.fleet_world import offer_view

ATTEMPT = b"a" * 16


def tell(story: Callable[[AttemptRun], Awaitable[None]], *, max_output_tokens: int = 8, choices: int = 1) -> AttemptRun:
    async def run() -> AttemptRun:
        attempt = AttemptRun(offer_view(), ATTEMPT, 1, max_output_tokens, choices)
        await story(attempt)
        return attempt

    return asyncio.run(run())


def piece(text: str = "a", *, ids: int = 0, extra: bytes = b"", choice: int = 0) -> Tokens:
    return Tokens(ATTEMPT, 1, 0, text, [7] * ids, False, extra, choice)


def finished(reason: str = "stop", each: tuple[str, ...] = ()) -> Finished:
    return Finished(ATTEMPT, 1, 1, reason, UsageReport(), 0.0, 1.0, 2.0, b"", list(each))


class TestPieces:
    def test_count_by_ids_or_else_one_each(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.on_frame(piece(ids=3))
            attempt.on_frame(piece())
            attempt.on_frame(piece(""))

        attempt = tell(story)
        assert (attempt.token_count, len(attempt.pieces)) == (4, 3)
        assert attempt.first_token_at is not None

    def test_after_the_ending_are_not_accepted(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.on_frame(piece())
            attempt.stop(Ending.CANCELLED)
            attempt.on_frame(piece())

        assert tell(story).token_count == 1

    def test_beyond_what_was_asked_for_end_it_by_the_nodes_fault(self) -> None:
        async def tokens(attempt: AttemptRun) -> None:
            for _ in range(8 + SPARE_TOKENS):
                attempt.on_frame(piece())
            assert attempt.ending is None
            attempt.on_frame(piece())

        async def text(attempt: AttemptRun) -> None:
            attempt.on_frame(piece("x" * (SPARE_CHARACTERS + 8 * CHARACTERS_PER_TOKEN)))
            assert attempt.ending is None
            attempt.on_frame(piece())

        for story in (tokens, text):
            attempt = tell(story)
            assert (attempt.ending, attempt.code) == (Ending.NODE, "engine_error")

    def test_with_extras_that_cannot_be_read_end_it_by_the_nodes_fault(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.on_frame(piece(extra=b"nonsense"))

        attempt = tell(story)
        assert (attempt.ending, attempt.pieces) == (Ending.NODE, [])


class TestSeveralAnswers:
    def test_come_one_after_the_other_and_each_has_its_reason(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            for choice in (0, 0, 2):  # the second one was empty
                attempt.on_frame(piece(choice=choice))
            attempt.on_frame(finished("length", ("stop", "stop", "length")))

        attempt = tell(story, choices=3)
        assert (attempt.ending, attempt.token_count) == (Ending.FINISHED, 3)
        assert attempt.finish_reasons == ("stop", "stop", "length")

    def test_have_a_bound_each(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            for choice in (0, 1):
                for _ in range(8 + SPARE_TOKENS):
                    attempt.on_frame(piece(choice=choice))
            assert attempt.ending is None
            attempt.on_frame(piece(choice=1))

        attempt = tell(story, choices=2)
        assert (attempt.ending, attempt.code) == (Ending.NODE, "engine_error")

    @pytest.mark.parametrize(("order", "choices"), [((0, 1, 0), 2), ((0, 2), 2), ((0, -1), 2), ((1,), 1)])
    def test_that_are_not_due_end_it_by_the_nodes_fault(self, order: tuple[int, ...], choices: int) -> None:
        async def story(attempt: AttemptRun) -> None:
            for choice in order:
                attempt.on_frame(piece(choice=choice))

        attempt = tell(story, choices=choices)
        assert (attempt.ending, len(attempt.pieces)) == (Ending.NODE, len(order) - 1)

    @pytest.mark.parametrize("each", [(), ("stop",), ("stop", "stop", "stop"), ("stop", "made_up"), ("", "stop")])
    def test_without_a_reason_for_each_are_a_nodes_failure(self, each: tuple[str, ...]) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.on_frame(piece())
            attempt.on_frame(finished("stop", each))

        attempt = tell(story, choices=2)
        assert (attempt.ending, attempt.finish_reasons) == (Ending.NODE, ())


class TestEndings:
    @pytest.mark.parametrize(
        ("frame", "ending", "code"),
        [
            (finished("stop"), Ending.FINISHED, "delivered"),
            (finished("length"), Ending.FINISHED, "delivered"),
            (finished(""), Ending.BLANK, "engine_empty"),
            (finished("made_up"), Ending.BLANK, "engine_empty"),
            (finished("cancelled"), Ending.NODE, "engine_error"),
            (Failed(ATTEMPT, 1, 0, "engine_died", "m", UsageReport()), Ending.NODE, "engine_died"),
            (Failed(ATTEMPT, 1, 0, "owner_preempted", "m", UsageReport()), Ending.OWNER, "owner_preempted"),
            (Failed(ATTEMPT, 1, 0, "x" * 500, "m" * 5_000, UsageReport()), Ending.NODE, "x" * 64),
            (Refused(ATTEMPT, 1, "slot_taken", "m"), Ending.RACE, "slot_taken"),
        ],
    )
    def test_come_from_reports(self, frame: Finished | Failed | Refused, ending: Ending, code: str) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.on_frame(Accepted(ATTEMPT, 1))
            attempt.on_frame(frame)

        attempt = tell(story)
        assert (attempt.ending, attempt.code, attempt.reported, attempt.accepted) == (ending, code, True, True)
        assert len(attempt.message) <= 300

    @pytest.mark.parametrize(
        ("reason", "ending"),
        [
            (GoneReason.NODE_GONE, Ending.NODE),
            (GoneReason.PROTOCOL, Ending.NODE),
            (GoneReason.REPLACED, Ending.NODE),
            (GoneReason.LINK_LOST, Ending.PLATFORM),
            (GoneReason.STOPPING, Ending.PLATFORM),
        ],
    )
    def test_come_from_lost_ways(self, reason: GoneReason, ending: Ending) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.on_gone(reason)

        assert tell(story).ending is ending

    def test_count_once_and_a_late_report_only_confirms(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.stop(Ending.DEADLINE)
            attempt.stop(Ending.CANCELLED)
            attempt.on_frame(finished("stop"))

        attempt = tell(story)
        assert (attempt.ending, attempt.reported) == (Ending.DEADLINE, True)
        assert attempt.report is not None


class TestWaiting:
    def test_ends_with_a_piece_or_with_an_ending(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            for event in (lambda: attempt.on_frame(piece()), lambda: attempt.stop(Ending.CANCELLED)):
                waiting = asyncio.create_task(attempt.wait())
                await asyncio.sleep(0)
                event()
                await asyncio.wait_for(waiting, 1.0)

        tell(story)

    def test_sleeps_through_pieces_where_nobody_sends_them_on(self) -> None:
        async def story(attempt: AttemptRun) -> None:
            attempt.eager = False
            waiting = asyncio.create_task(attempt.wait())
            await asyncio.sleep(0)
            attempt.on_frame(piece())
            await asyncio.sleep(0.01)
            assert not waiting.done()
            attempt.on_frame(finished())
            await asyncio.wait_for(waiting, 1.0)

        tell(story)


class TestWordsOfANode:
    def test_lose_what_no_database_takes(self) -> None:
        async def refused(attempt: AttemptRun) -> None:
            attempt.on_frame(Refused(ATTEMPT, 1, "a\0b", "\x1b[2Jgone\0" + "x" * 1_000))

        async def failed(attempt: AttemptRun) -> None:
            attempt.on_frame(Failed(ATTEMPT, 1, 0, "\0" * 1_000, "out of memory: 5 GiB, größer", UsageReport(), 0.0))

        attempt = tell(refused)
        assert (attempt.code, attempt.message[:10]) == ("a\ufffdb", "\ufffd[2Jgone\ufffdx")
        attempt = tell(failed)
        assert (attempt.code, attempt.message) == ("\ufffd" * 64, "out of memory: 5 GiB, größer")
        assert attempt.ending is Ending.NODE
