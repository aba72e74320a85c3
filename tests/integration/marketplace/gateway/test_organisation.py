"""An organisation's members and keys over REST: who may, what comes of it, and what nobody can give away."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import pytest

from marketplace.accounts import service
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from tests.gateway_world import Renter, World, add_renter, world

MEMBERS = "/v1/organisation/members"
KEYS = "/v1/organisation/keys"
EMAIL = "ann@example.org"
ANN = f"{MEMBERS}/{EMAIL}"
Story = Callable[[World, Renter], Awaitable[None]]


def tell(settings: Settings, factory: SessionFactory, story: Story, *roles: str) -> None:
    admin = add_renter(factory, roles=roles or ("admin", "renter"))

    async def told() -> None:
        async with world(settings, factory) as market:
            await story(market, admin)

    asyncio.run(told())


async def make(market: World, admin: Renter, **body: Any) -> Any:
    answer = await market.call("POST", KEYS, admin, json={"name": "new", **body})
    assert answer.status == 201, answer.body
    return answer.json


async def status_of(market: World, secret: str) -> int:
    return (await market.call("GET", "/v1/key", None, headers={"authorization": f"Bearer {secret}"})).status


class TestMembers:
    def test_come_change_and_go_with_their_keys(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, admin: Renter) -> None:
            made = await market.call("PUT", ANN, admin, json={"roles": ["renter", "admin"]})
            assert (made.status, made.json["roles"]) == (200, ["admin", "renter"])
            plain = await make(market, admin, member="Ann@example.org")
            managing = await make(market, admin, member="ann@example.org", roles=["admin"])
            assert (plain["member"], plain["roles"]) == ("ann@example.org", ["renter"])
            assert [await status_of(market, key["secret"]) for key in (plain, managing)] == [200, 200]
            await market.call("PUT", ANN, admin, json={"roles": ["renter"]})
            states = {
                key["id"]: key["revoked_at"] is not None for key in (await market.call("GET", KEYS, admin)).json["data"]
            }
            assert (states[plain["id"]], states[managing["id"]]) == (False, True)
            listed = (await market.call("GET", MEMBERS, admin)).json["data"]
            assert [(one["email"], one["roles"]) for one in listed] == [("ann@example.org", ["renter"])]
            gone = await market.call("DELETE", ANN, admin)
            assert gone.json["revoked_keys"] == 1
            assert (await market.call("DELETE", ANN, admin)).status == 404
            seen = [200]
            for _ in range(100):
                seen.append(await status_of(market, plain["secret"]))
                if seen[-1] == 401:
                    break
                await asyncio.sleep(0.1)
            assert seen[-1] == 401

        tell(settings, session_factory, story)

    def test_of_another_organisation_are_out_of_reach(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        other = add_renter(session_factory, roles=("admin", "renter"))

        async def story(market: World, admin: Renter) -> None:
            await market.call("PUT", ANN, other, json={"roles": ["renter"]})
            theirs = await make(market, other)
            assert (await market.call("GET", MEMBERS, admin)).json["data"] == []
            assert (await market.call("DELETE", ANN, admin)).status == 404
            for method, path in (("DELETE", f"{KEYS}/{theirs['id']}"), ("PUT", f"{KEYS}/{theirs['id']}/budget")):
                answer = await market.call(method, path, admin, data=b"null")
                assert (answer.status, answer.json["error"]["code"]) == (404, "unknown_key")
            assert await status_of(market, theirs["secret"]) == 200

        tell(settings, session_factory, story)


class TestAKey:
    def test_has_every_bound_that_it_was_made_with(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, admin: Renter) -> None:
            made = await make(
                market,
                admin,
                requests_per_minute=7,
                parallel_requests=2,
                tokens_per_minute=1_000,
                expires_in_days=3,
                models=["m"],
                networks=["192.0.2.0/24"],
                budget={"limit": "2.50", "period": "week"},
                provider={"sort": "price"},
            )
            assert made["limits"] == {"requests_per_minute": 7, "tokens_per_minute": 1_000, "parallel_requests": 2}
            assert (made["models"], made["networks"]) == (["m"], ["192.0.2.0/24"])
            assert (made["provider"], made["budget"]["limit"]) == ({"sort": "price"}, "2.5")
            assert made["expires_at"] is not None
            assert made["secret"].startswith(made["shown_prefix"])
            changed = await market.call("PUT", f"{KEYS}/{made['id']}/budget", admin, json={"limit": "9"})
            assert changed.json["budget"] == {"limit": "9", "period": "month", "spent": "0", "held": "0", "left": "9"}
            freed = await market.call("PUT", f"{KEYS}/{made['id']}/budget", admin, data=b"null")
            assert freed.json["budget"] is None
            revoked = await market.call("DELETE", f"{KEYS}/{made['id']}", admin)
            assert revoked.json["revoked_at"] is not None
            assert "secret" not in revoked.json

        tell(settings, session_factory, story)

    def test_does_not_revoke_itself(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, admin: Renter) -> None:
            own = (await market.call("GET", "/v1/key", admin)).json["id"]
            answer = await market.call("DELETE", f"{KEYS}/{own}", admin)
            assert (answer.status, answer.json["error"]["code"]) == (409, "own_key")

        tell(settings, session_factory, story)

    def test_that_was_made_for_a_member_does_not_end_itself_by_way_of_them(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, admin: Renter) -> None:
            await market.call("PUT", ANN, admin, json={"roles": ["renter", "admin"]})
            ann = replace(admin, secret=(await make(market, admin, member=EMAIL, roles=["renter", "admin"]))["secret"])
            for method, body in (("DELETE", None), ("PUT", {"roles": ["renter"]})):
                answer = await market.call(method, ANN, ann, json=body)
                assert (answer.status, answer.json["error"]["code"]) == (409, "own_key")
            (member,) = (await market.call("GET", MEMBERS, ann)).json["data"]
            assert member["roles"] == ["admin", "renter"]
            assert (await market.call("DELETE", ANN, admin)).json["revoked_keys"] == 1

        tell(settings, session_factory, story)

    @pytest.mark.parametrize(
        "body",
        [
            {"name": ""},
            {"name": "x", "roles": ["king"]},
            {"name": "x", "networks": ["here"]},
            {"name": "x", "budget": {"limit": "much"}},
            {"name": "x", "budget": {"limit": "1", "period": "hour"}},
            {"name": "x", "expires_in_days": 0},
            {"name": "x", "colour": "blue"},
        ],
    )
    def test_that_cannot_be_is_refused(
        self, settings: Settings, session_factory: SessionFactory, body: dict[str, Any]
    ) -> None:
        async def story(market: World, admin: Renter) -> None:
            assert (await market.call("POST", KEYS, admin, json=body)).status in (400, 403)
            assert len((await market.call("GET", KEYS, admin)).json["data"]) == 1

        tell(settings, session_factory, story)


class TestRoles:
    def test_that_a_key_lacks_it_can_neither_give_nor_take(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        async def story(market: World, admin: Renter) -> None:
            for role in ("finance", "operator", "owner"):
                refusals = [
                    await market.call("POST", KEYS, admin, json={"name": "x", "roles": [role]}),
                    await market.call("PUT", ANN, admin, json={"roles": [role]}),
                ]
                assert [answer.status for answer in refusals] == [403, 403]

        tell(settings, session_factory, story)

    def test_that_a_key_lacks_it_cannot_take_from_the_last_of_many_members_either(
        self, settings: Settings, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(service, "MAX_LISTED", 0)
        admin = add_renter(session_factory, roles=("admin", "renter"))
        with transaction(session_factory) as session:
            service.add_member(session, admin.organisation_id, "ann@example.org", ["finance"])

        async def story() -> None:
            async with world(settings, session_factory) as market:
                lowered = await market.call("PUT", ANN, admin, json={"roles": ["renter"]})
                removed = await market.call("DELETE", ANN, admin)
                assert [lowered.status, removed.status] == [403, 403]

        asyncio.run(story())

    def test_other_than_admin_manage_nothing(self, settings: Settings, session_factory: SessionFactory) -> None:
        async def story(market: World, plain: Renter) -> None:
            calls = [("GET", MEMBERS), ("PUT", ANN), ("DELETE", ANN), ("GET", KEYS), ("POST", KEYS)]
            for method, path in calls:
                assert (await market.call(method, path, plain, json={})).status == 403

        tell(settings, session_factory, story, "renter", "owner", "finance", "operator")
