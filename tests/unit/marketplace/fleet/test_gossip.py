"""Gateways that tell each other of failures and retries, and one that is alone."""

from __future__ import annotations

import asyncio
from typing import Any, cast
from uuid import UUID

import pytest

from marketplace.core.valkey import ValkeyDownError, ValkeyPipe
from marketplace.fleet.gossip import Gossip
from marketplace.matching.retries import FLOOR_PER_S

NODE, OTHER, VARIANT = UUID(int=1), UUID(int=2), UUID(int=3)
NODES = frozenset({NODE, OTHER})
NOW = 1_000.0


class Stream:
    """Valkey's stream as the script keeps it, with a switch."""

    def __init__(self) -> None:
        self.entries: list[bytes] = []
        self.down = False

    async def run(self, _script: Any, _keys: Any, args: list[Any]) -> list[Any]:
        if self.down:
            raise ValkeyDownError("down")
        last, told = args[0], args[1]
        if told:
            self.entries.append(told)
        found = [(b"%d-0" % place, entry) for place, entry in enumerate(self.entries, 1)]
        after = int(last.partition("-")[0]) if last else 0
        return [b"1", *(part for pair in found[after:] for part in pair)]


def pair() -> tuple[Gossip, Gossip, Stream]:
    return Gossip("gw-a", lambda: NOW), Gossip("gw-b", lambda: NOW), Stream()


def exchange(stream: Stream, *gossips: Gossip) -> None:
    for gossip in gossips:
        asyncio.run(gossip.exchange(cast("ValkeyPipe", stream)))


class TestBreakers:
    def test_trip_at_all_gateways_and_close_at_all(self) -> None:
        here, there, stream = pair()
        here.breakers.failed(NODE, VARIANT, NOW)
        exchange(stream, here, there)
        assert there.breakers.resting(NODES, VARIANT, NOW + 1) == {NODE}
        there.breakers.succeeded(NODE, VARIANT)
        exchange(stream, there, here)
        assert here.breakers.resting(NODES, VARIANT, NOW + 1) == frozenset()

    def test_hear_nothing_twice_and_nothing_of_themselves(self) -> None:
        here, there, stream = pair()
        here.breakers.failed(NODE, VARIANT, NOW)
        exchange(stream, here, there, here, there, there)
        for gossip in (here, there):
            assert gossip.breakers.resting(NODES, VARIANT, NOW + 4.9) == {NODE}
            assert gossip.breakers.resting(NODES, VARIANT, NOW + 5.1) == frozenset()

    def test_send_one_canary_between_them(self) -> None:
        here, there, stream = pair()
        here.breakers.failed(NODE, VARIANT, NOW)
        exchange(stream, here, there)
        here.breakers.chosen(NODE, VARIANT, NOW + 6)
        exchange(stream, here, there)
        assert there.breakers.resting(NODES, VARIANT, NOW + 7) == {NODE}

    def test_say_nothing_of_nodes_that_never_failed(self) -> None:
        here, _, stream = pair()
        here.breakers.succeeded(NODE, VARIANT)
        here.breakers.chosen(NODE, VARIANT, NOW)
        exchange(stream, here)
        assert stream.entries == []


class TestTheRetryBudget:
    def test_is_one_for_all_gateways(self) -> None:
        here, there, stream = pair()
        granted = sum(here.retries.try_retry(VARIANT, NOW) for _ in range(20))
        assert granted == FLOOR_PER_S
        exchange(stream, here, there)
        assert not there.retries.try_retry(VARIANT, NOW)

    def test_grows_with_the_requests_of_all(self) -> None:
        here, there, stream = pair()
        for _ in range(100):
            here.retries.request(VARIANT, NOW)
        exchange(stream, here, there)
        assert sum(there.retries.try_retry(VARIANT, NOW) for _ in range(50)) == 10 + FLOOR_PER_S


class TestWithoutValkey:
    def test_each_goes_on_alone_and_tells_of_failures_later(self) -> None:
        here, there, stream = pair()
        stream.down = True
        here.breakers.failed(NODE, VARIANT, NOW)
        with pytest.raises(ValkeyDownError):
            exchange(stream, here)
        assert here.breakers.resting(NODES, VARIANT, NOW + 1) == {NODE}
        assert here.retries.try_retry(VARIANT, NOW)
        stream.down = False
        exchange(stream, here, there)
        assert there.breakers.resting(NODES, VARIANT, NOW + 1) == {NODE}
