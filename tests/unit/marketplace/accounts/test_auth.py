"""The authenticator's memory: what it asks, how often, and what it does when nobody answers."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Sequence
from uuid import uuid4

import pytest
from sqlalchemy.exc import OperationalError
from sqlalchemy.orm import sessionmaker

from marketplace.accounts import auth, keys
from marketplace.accounts.auth import Authenticator, Principal, Refused, Verdict
from marketplace.core.errors import Forbidden, Unauthenticated, Unavailable


def principal(**changes: object) -> Principal:
    facts: dict[str, object] = {
        "key_id": uuid4(),
        "organisation_id": uuid4(),
        "organisation_name": "Renter",
        "credit_account_id": 1,
        "roles": frozenset({"renter"}),
        "requests_per_minute": 60,
        "parallel_requests": 2,
    }
    return Principal(**{**facts, **changes})  # type: ignore[arg-type]


class Lookup:
    """A database that counts what it is asked."""

    def __init__(self) -> None:
        self.known: dict[bytes, Verdict] = {}
        self.batches: list[list[bytes]] = []
        self.away = False
        self.gate = threading.Event()
        self.gate.set()

    def __call__(self, sha256s: Sequence[bytes]) -> dict[bytes, Verdict]:
        self.batches.append(list(sha256s))
        assert self.gate.wait(5)
        if self.away:
            raise OperationalError("select", None, Exception("away"))
        return {sha256: self.known[sha256] for sha256 in sha256s if sha256 in self.known}

    def add(self, verdict: Verdict) -> str:
        secret = keys.new_secret()
        self.known[keys.digest(secret)] = verdict
        return f"Bearer {secret}"


class World:
    def __init__(self) -> None:
        self.now = 100.0
        self.lookup = Lookup()
        self.authenticator = Authenticator(sessionmaker(), clock=lambda: self.now)
        self.authenticator._lookup = self.lookup


@pytest.fixture
def world() -> World:
    return World()


class TestHeaders:
    def test_a_good_key_is_its_principal_however_the_scheme_is_written(self, world: World) -> None:
        wanted = principal()
        header = world.lookup.add(wanted)

        async def act() -> None:
            for form in (header, header.encode(), header.replace("Bearer", "bearer"), f"  {header}  "):
                assert await world.authenticator.authenticate(form) is wanted

        asyncio.run(act())

    @pytest.mark.parametrize(
        "header",
        [
            None,
            "",
            "   ",
            b"",
            "Bearer",
            "Bearer ",
            "Basic abc",
            "Bearer sk-other-key",
            "Bearer \xff\xfe",
            b"Bearer \xff",
            "Bearer " + "x" * 1_000_000,
            "Bearer sk-fallow-\x00" + "a" * 42,
        ],
    )
    def test_what_cannot_be_a_key_is_refused_without_asking(self, world: World, header: str | bytes | None) -> None:
        with pytest.raises(Unauthenticated) as caught:
            asyncio.run(world.authenticator.authenticate(header))
        assert (caught.value.status, caught.value.code) == (401, "invalid_api_key")
        assert len(caught.value.message) < 200
        assert world.lookup.batches == []

    def test_an_unknown_key_is_never_repeated_in_full(self, world: World) -> None:
        secret = keys.new_secret()
        with pytest.raises(Unauthenticated) as caught:
            asyncio.run(world.authenticator.authenticate(f"Bearer {secret}"))
        assert secret not in caught.value.message
        assert keys.shown(secret) in caught.value.message

    def test_a_holder_reads_why_the_key_is_refused(self, world: World) -> None:
        header = world.lookup.add(Refused("This API key was revoked."))
        with pytest.raises(Unauthenticated, match="revoked"):
            asyncio.run(world.authenticator.authenticate(header))


class TestMemory:
    def test_the_database_is_asked_once_in_two_seconds(self, world: World) -> None:
        header = world.lookup.add(principal())

        async def act() -> None:
            for _ in range(50):
                await world.authenticator.authenticate(header)
            assert len(world.lookup.batches) == 1
            world.now += auth.TTL_S + 0.001
            await world.authenticator.authenticate(header)
            assert len(world.lookup.batches) == 2

        asyncio.run(act())

    def test_refusals_are_remembered_as_well(self, world: World) -> None:
        header = f"Bearer {keys.new_secret()}"

        async def act() -> None:
            for _ in range(50):
                with pytest.raises(Unauthenticated):
                    await world.authenticator.authenticate(header)

        asyncio.run(act())
        assert len(world.lookup.batches) == 1

    def test_a_revoked_key_works_two_seconds_at_most(self, world: World) -> None:
        header = world.lookup.add(principal())

        async def act() -> None:
            await world.authenticator.authenticate(header)
            world.lookup.known = dict.fromkeys(world.lookup.known, Refused("This API key was revoked."))
            world.now += auth.TTL_S
            with pytest.raises(Unauthenticated):
                await world.authenticator.authenticate(header)

        asyncio.run(act())

    def test_a_key_that_was_refused_and_then_made_is_known_after_two_seconds(self, world: World) -> None:
        secret = keys.new_secret()

        async def act() -> None:
            with pytest.raises(Unauthenticated):
                await world.authenticator.authenticate(f"Bearer {secret}")
            wanted = world.lookup.known[keys.digest(secret)] = principal()
            world.now += auth.TTL_S
            assert await world.authenticator.authenticate(f"Bearer {secret}") is wanted

        asyncio.run(act())

    def test_garbage_cannot_push_out_customers(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth, "MAX_CACHED", 10)
        header = world.lookup.add(principal())

        async def act() -> None:
            await world.authenticator.authenticate(header)
            for _ in range(50):
                with pytest.raises(Unauthenticated):
                    await world.authenticator.authenticate(f"Bearer {keys.new_secret()}")
            asked = len(world.lookup.batches)
            await world.authenticator.authenticate(header)
            assert len(world.lookup.batches) == asked
            assert len(world.authenticator._refused) <= 10

        asyncio.run(act())


class TestManyAtOnce:
    def test_what_queued_meanwhile_is_one_question(self, world: World) -> None:
        headers = [world.lookup.add(principal()) for _ in range(100)]

        async def act() -> None:
            await asyncio.gather(*(world.authenticator.authenticate(header) for header in headers * 3))

        asyncio.run(act())
        assert len(world.lookup.batches) <= 2
        assert sum(map(len, world.lookup.batches)) == 100

    def test_the_number_that_may_wait_is_bounded(self, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(auth, "MAX_WAITING", 5)
        world.lookup.gate.clear()

        async def act() -> None:
            waiting = [
                asyncio.create_task(world.authenticator.authenticate(world.lookup.add(principal()))) for _ in range(5)
            ]
            await asyncio.sleep(0.01)
            with pytest.raises(Unavailable):
                await world.authenticator.authenticate(f"Bearer {keys.new_secret()}")
            world.lookup.gate.set()
            assert all(await asyncio.gather(*waiting))

        asyncio.run(act())

    def test_a_client_that_leaves_does_not_take_the_answer_from_the_others(self, world: World) -> None:
        wanted = principal()
        header = world.lookup.add(wanted)
        world.lookup.gate.clear()

        async def act() -> None:
            first = asyncio.create_task(world.authenticator.authenticate(header))
            second = asyncio.create_task(world.authenticator.authenticate(header))
            await asyncio.sleep(0.01)
            first.cancel()
            await asyncio.sleep(0)
            world.lookup.gate.set()
            assert await second is wanted

        asyncio.run(act())


class TestDatabaseAway:
    def test_a_key_that_cannot_be_checked_is_a_503_and_is_not_remembered(self, world: World) -> None:
        header = world.lookup.add(principal())
        world.lookup.away = True

        async def act() -> None:
            with pytest.raises(Unavailable) as caught:
                await world.authenticator.authenticate(header)
            assert caught.value.headers["retry-after"] == "1"
            world.lookup.away = False
            assert await world.authenticator.authenticate(header)

        asyncio.run(act())

    def test_known_keys_go_on_for_as_long_as_they_are_believed(self, world: World) -> None:
        header = world.lookup.add(principal())

        async def act() -> None:
            await world.authenticator.authenticate(header)
            world.lookup.away = True
            assert await world.authenticator.authenticate(header)

        asyncio.run(act())


class TestRoles:
    def test_one_of_the_roles_is_enough(self) -> None:
        principal(roles=frozenset({"owner"})).require("finance", "owner")

    def test_without_any_of_them_it_is_forbidden(self) -> None:
        with pytest.raises(Forbidden, match="operator"):
            principal().require("operator")
