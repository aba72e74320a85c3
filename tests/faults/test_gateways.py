"""Gateways that die, and links between them that break."""

from __future__ import annotations

import os
import signal
import time

from tests.stack import Renter, Stack, answers, foretold, until
from tests.witness import (
    Background,
    Seen,
    ask,
    assert_invariants,
    mid_stream,
    stream,
    wait_all_ended,
)


def assert_paid_by_us(stack: Stack, seen: Seen) -> None:
    """The renter paid nothing; the owner has what was accepted at the last checkpoint, from our loss account."""
    ((outcome, charge, loss, owner, output),) = stack.rows(
        "select j.outcome, r.charge_nano, r.loss_nano, r.owner_nano, r.output_visible_tokens from receipts r"
        " join jobs j on j.id = r.job_id where j.request_id = :request",
        request=seen.request_id,
    )
    assert (outcome, charge) == ("platform_failed", 0)
    assert 20 <= output <= len(foretold(stack.nodes["solo"].seed, seen.prompt, seen.max_tokens))
    assert 0 < owner < loss


def completed(stack: Stack, renter: Renter) -> int:
    """Whole answers that are written down."""
    query = "select count(*) from jobs where organisation_id = :renter and outcome = 'complete'"
    return int(stack.rows(query, renter=renter.organisation_id)[0][0])


class TestAGatewayKilledMidStream:
    def test_that_has_the_node_ends_its_streams_and_those_over_the_link(self, stack: Stack) -> None:
        with Background() as background:
            own = stack.client("gw-0", stack.renter())
            background.add(stream, own, "I reach the node here.", model="solo", max_tokens=900)
            linked = stack.client("gw-1", stack.renter())
            # Beyond a checkpoint: what it counted is what the owner is paid for.
            kill = mid_stream(75, lambda: stack.kill("gw-0"))
            background.add(stream, linked, "I reach it over the link.", model="solo", max_tokens=900, on_piece=kill)
            seen = background.all()
        assert [each.error for each in seen] == ["connection", "platform_failed"]
        until(lambda: stack.at_rest("solo"), "an idle engine", within_s=12)
        assert_invariants(stack, seen)
        for each in seen:
            assert_paid_by_us(stack, each)

    def test_that_reaches_the_node_over_the_link_costs_the_renter_nothing_and_frees_the_engine(
        self, stack: Stack
    ) -> None:
        client = stack.client("gw-1", stack.renter())
        answered = stream(client, "One answer, then the end.", max_tokens=15)
        kill = mid_stream(75, lambda: stack.kill("gw-1"))
        seen = stream(client, "And one that breaks.", model="solo", on_piece=kill, max_tokens=900)
        assert answered.complete
        assert seen.error == "connection"
        until(lambda: stack.at_rest("solo"), "an idle engine", within_s=12)
        assert_invariants(stack, [answered, seen])
        assert_paid_by_us(stack, seen)

    def test_among_many_answers_has_charged_each_that_was_whole(self, stack: Stack) -> None:
        renter = stack.renter()
        with Background() as background:
            for number in range(12):
                client = stack.client("gw-0", renter)
                background.add(stream, client, f"Answer {number}.", model="solo", max_tokens=20 + 10 * number)
            until(lambda: completed(stack, renter) >= 3, "three whole answers", every_s=0.01)
            stack.kill("gw-0")
            seen = background.all()
        assert_invariants(stack, seen)
        whole = [each for each in seen if each.complete]
        assert 2 <= len(whole) < 12
        # A finish that was written and not sent is possible; one that was read and not written is not.
        assert len(whole) <= completed(stack, renter)


class TestAGatewayThatIsStopped:
    def test_lets_its_streams_end_and_takes_no_more(self, stack: Stack) -> None:
        renter = stack.renter()
        refused: list[Seen] = []

        def stop() -> None:
            os.kill(stack.parts["gw-1"].pid, signal.SIGTERM)
            until(lambda: not answers(f"{stack.url('gw-1')}/readyz"), "draining")
            refused.append(ask(stack.client("gw-1", renter), "Too late."))

        seen = stream(stack.client("gw-1", renter), "Let me finish.", on_piece=mid_stream(5, stop), max_tokens=80)
        assert seen.complete, seen
        assert refused[0].error in ("gateway_draining", "connection")
        process = stack.parts["gw-1"].child.process
        assert process is not None
        assert process.wait(20) == 0
        assert_invariants(stack, [seen])


class TestALinkBetweenGatewaysThatBreaks:
    def test_mid_stream_is_our_failure(self, stack: Stack) -> None:
        client = stack.client("gw-1", stack.renter())
        wires = stack.wires[:2]

        def cut() -> None:
            for wire in wires:
                wire.cut()

        seen = stream(client, "Cut the link.", model="solo", on_piece=mid_stream(30, cut), max_tokens=900)
        assert seen.error == "platform_failed"
        assert_invariants(stack, [seen])
        assert_paid_by_us(stack, seen)

    def test_is_mended_by_itself(self, stack: Stack) -> None:
        for wire in stack.wires[:2]:
            wire.cut()
        time.sleep(0.5)
        for wire in stack.wires[:2]:
            wire.mend()

        def serves() -> bool:
            seen = stream(stack.client("gw-1", renter), "Is the link back?", model="solo", max_tokens=3)
            every.append(seen)
            return seen.complete

        renter, every = stack.renter(), list[Seen]()
        until(serves, "an answer over the link", within_s=15, every_s=0.3)
        assert_invariants(stack, every)


class TestBothGatewaysKilledAtOnce:
    def test_and_started_again_serve_and_the_books_agree(self, stack: Stack) -> None:
        renter = stack.renter()
        with Background() as background:
            for number in range(6):
                client = stack.client(f"gw-{number % 2}", renter)
                background.add(stream, client, f"Both die, {number}.", max_tokens=100)
            until(lambda: stack.rows("select 1 from attempts where state = 'leased'"), "streams")
            time.sleep(0.6)
            stack.kill("gw-0", "gw-1")
            seen = background.all()
        stack.start("gw-0", "gw-1")
        stack.wait_offered()
        seen.append(stream(stack.client("gw-0", renter), "And now?", max_tokens=5))
        assert seen[-1].complete
        wait_all_ended(stack)
        assert_invariants(stack, seen)
