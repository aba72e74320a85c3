"""The live view: own nodes, other gateways' nodes, ages and claims."""

from __future__ import annotations

from dataclasses import replace
from random import Random
from uuid import UUID, uuid4

import pytest

from marketplace.fleet.occupancy import Occupancy
from marketplace.fleet.snapshot import GatewaySnapshot, PublishedOffer
from marketplace.fleet.view import REMOTE_GRACE_S, FleetView
from marketplace.matching.types import Filter, OfferView
from tests.fleet_world import VARIANT_ID, demand, offer_view

NODE = uuid4()


class World:
    def __init__(self) -> None:
        self.now = 1_000.0
        self.occupancy = Occupancy(lambda: self.now)
        self.linked = True
        self.view = FleetView("gw-a", self.occupancy, lambda _: self.linked, lambda: self.now)

    def local(self, *offers: OfferView, connected_at_us: int = 1) -> None:
        self.view.put_local(NODE, offers, connected_at_us, self.now)

    def remote(
        self, *offers: OfferView, gateway_id: str = "gw-b", connected_at_us: int = 1, age_s: float = 0.0
    ) -> None:
        published = [PublishedOffer.of(offer, connected_at_us) for offer in offers]
        self.view.put_remote(GatewaySnapshot(gateway_id, "http://b", published), "v1", age_s)


@pytest.fixture
def world() -> World:
    return World()


def own(**changes: object) -> OfferView:
    return offer_view(node_id=NODE, gateway_id="gw-a", **changes)


class TestOwnNodes:
    def test_are_listed_by_variant(self, world: World) -> None:
        offer, other = own(), own(variant_id=UUID(int=8))
        world.local(offer, other)
        assert world.view.offers(VARIANT_ID) == [offer]
        assert world.view.home_of(NODE) == "gw-a"
        assert len(world.view.all_offers()) == 2

    def test_show_a_taken_slot_at_once(self, world: World) -> None:
        offer = own()
        world.local(offer)
        attempt = uuid4()
        world.occupancy.take(offer.offer_id, attempt, 15.0)
        assert world.view.offers(VARIANT_ID)[0].slots_busy == 1
        world.occupancy.drop(offer.offer_id, attempt)
        assert world.view.offers(VARIANT_ID)[0].slots_busy == 0

    def test_age_until_their_next_telemetry(self, world: World) -> None:
        world.local(own())
        world.now += 12.0
        assert world.view.offers(VARIANT_ID)[0].sampled_age_s == 12.0
        world.view.touch_local(NODE, available=False, reason="owner", memory_free_bytes={"cpu": 5})
        offer = world.view.offers(VARIANT_ID)[0]
        assert (offer.sampled_age_s, offer.available, offer.unavailable_reason) == (0.0, False, "owner")
        assert offer.memory_free_bytes == 5

    def test_that_leave_take_their_offers_along(self, world: World) -> None:
        world.local(own())
        world.view.drop_local(NODE)
        assert world.view.all_offers() == []
        assert world.view.home_of(NODE) is None

    def test_move_the_revision_only_when_something_changed(self, world: World) -> None:
        world.local(own())
        before = world.view.revision
        world.view.touch_local(NODE, available=True, reason="", memory_free_bytes={})
        assert world.view.revision == before
        world.view.touch_local(NODE, available=False, reason="", memory_free_bytes={})
        assert world.view.revision > before


class TestOtherGateways:
    def test_are_seen_through_their_snapshots(self, world: World) -> None:
        offer = offer_view(gateway_id="gw-b", slots_busy=2, sampled_age_s=1.0)
        world.remote(offer, age_s=2.0)
        (seen,) = world.view.offers(VARIANT_ID)
        assert seen == replace(offer, sampled_age_s=3.0)
        assert world.view.home_of(offer.node_id) == "gw-b"
        assert world.view.gateways() == {"gw-b": "http://b"}
        assert world.view.known_versions() == [("gw-b", "v1")]

    def test_say_nothing_about_this_one(self, world: World) -> None:
        world.remote(offer_view(), gateway_id="gw-a")
        assert world.view.all_offers() == []

    def test_are_forgotten_after_a_grace_unless_a_link_proves_them_alive(self, world: World) -> None:
        world.remote(offer_view())
        world.now += REMOTE_GRACE_S + 0.1
        world.view.expire_remote()
        assert world.view.gateways()
        world.linked = False
        world.view.keep_remote("gw-b")
        world.view.expire_remote()
        assert world.view.gateways()
        world.now += REMOTE_GRACE_S + 0.1
        world.view.expire_remote()
        assert world.view.gateways() == {}

    def test_that_cannot_be_reached_are_not_shown(self, world: World) -> None:
        world.local(own())
        world.remote(offer_view(gateway_id="gw-b"))
        world.linked = False
        assert [offer.gateway_id for offer in world.view.offers(VARIANT_ID)] == ["gw-a"]
        world.linked = True
        assert len(world.view.offers(VARIANT_ID)) == 2

    def test_leave_no_count_behind(self, world: World) -> None:
        offer = offer_view(slots_busy=3)
        world.remote(offer)
        world.remote()
        assert world.occupancy.busy(offer.offer_id) == 0


class TestTwoClaims:
    def test_the_later_connection_is_believed(self, world: World) -> None:
        offer = own()
        world.local(offer, connected_at_us=5)
        world.remote(replace(offer, gateway_id="gw-b"), connected_at_us=4)
        assert world.view.home_of(NODE) == "gw-a"
        assert world.view.superseded() == []
        world.remote(replace(offer, gateway_id="gw-b"), connected_at_us=6)
        assert world.view.home_of(NODE) == "gw-b"
        assert world.view.superseded() == [NODE]
        assert len(world.view.all_offers()) == 1

    def test_an_earlier_one_does_not_end_a_connection_that_has_no_offers_yet(self, world: World) -> None:
        """A gateway that died is remembered for a while: its nodes, back at another one, must not be sent away."""
        world.remote(own(), connected_at_us=4)
        world.local(connected_at_us=5)
        assert world.view.superseded() == []

    def test_a_published_offer_survives_the_wire(self, world: World) -> None:
        offer = own(prefill_tokens_per_s=None, memory_free_bytes=7, unavailable_reason="why", simulated=True)
        world.local(offer)
        (published,) = world.view.published()
        assert published.view("gw-a", 0.0) == offer


class TestPicking:
    def test_sees_slots_that_are_taken_and_given_back(self, world: World) -> None:
        offer = own(slots=1)
        world.local(offer)
        attempt = uuid4()
        assert world.view.rank(demand(), Random(1)).offers[0].offer_id == offer.offer_id
        world.occupancy.take(offer.offer_id, attempt, 15.0)
        assert world.view.rank(demand(), Random(1)).refusal.refused == {Filter.FULL: 1}
        assert world.view.full(demand()) == [offer.offer_id]
        world.occupancy.drop(offer.offer_id, attempt)
        assert world.view.rank(demand(), Random(1)).offers

    def test_forgets_a_count_that_is_old(self, world: World) -> None:
        offer = own()
        world.local(offer)
        world.occupancy.seen(offer.offer_id, 4)
        assert not world.view.rank(demand(), Random(1)).offers
        world.now += 1.5
        world.occupancy.sweep()
        assert world.view.rank(demand(), Random(1)).offers

    def test_weighs_an_attempts_prompt_until_its_slot_is_free(self, world: World) -> None:
        offer = own()
        world.local(offer)
        attempt = uuid4()
        before = world.view.rank(demand(), Random(1)).ttft_s[0]
        world.occupancy.take(offer.offer_id, attempt, 15.0)
        world.view.weigh(attempt, offer.offer_id, demand(prompt_tokens=3_000))
        assert world.view.rank(demand(), Random(1)).ttft_s[0] > before + 2.9
        world.view.first_token(attempt.bytes)
        world.occupancy.drop(offer.offer_id, attempt)
        assert world.view.rank(demand(), Random(1)).ttft_s[0] == before

    def test_leaves_out_what_cannot_be_reached_until_it_can(self, world: World) -> None:
        world.remote(offer_view(gateway_id="gw-b"))
        assert world.view.rank(demand(), Random(1)).offers
        world.linked = False
        assert not world.view.rank(demand(), Random(1)).offers
        world.linked = True
        assert world.view.rank(demand(), Random(1)).offers
        world.view.drop_remote("gw-b")
        assert not world.view.rank(demand(), Random(1)).offers

    def test_follows_telemetry(self, world: World) -> None:
        world.local(own())
        world.view.touch_local(NODE, available=False, reason="owner", memory_free_bytes={})
        assert world.view.rank(demand(), Random(1)).refusal.refused == {Filter.UNAVAILABLE: 1}
        world.view.touch_local(NODE, available=True, reason="", memory_free_bytes={})
        assert world.view.rank(demand(), Random(1)).offers
        world.now += 31.0
        assert world.view.rank(demand(), Random(1)).refusal.refused == {Filter.STALE: 1}
        world.view.touch_local(NODE, available=True, reason="", memory_free_bytes={})
        assert world.view.rank(demand(), Random(1)).offers

    def test_knows_the_largest_slot(self, world: World) -> None:
        world.local(own(context_per_slot=2_048), own(context_per_slot=512))
        assert world.view.largest_context(VARIANT_ID) == 2_048
