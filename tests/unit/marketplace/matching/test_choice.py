"""A renter's choice: what it keeps out, who comes first, what it costs at most, and how a job's row keeps it."""

from __future__ import annotations

import json
from dataclasses import replace
from random import Random
from typing import Any
from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.matching.choice import ANY, NO_LIMIT, Choice, rank_within
from marketplace.matching.rank import refusals_of
from marketplace.matching.types import DataTerms, Filter, OfferView, Rates, Service, Sort
from tests.fleet_world import demand, offer_view

NAMES = [UUID(int=number) for number in range(1, 7)]
PLACES = ["eu", "DE", "us", ""]
PRIVATE = DataTerms(country="DE", retention_days=0, trains=False)

choices = st.builds(
    Choice,
    only=st.frozensets(st.sampled_from(NAMES), max_size=3),
    ignored=st.frozensets(st.sampled_from(NAMES), max_size=2),
    order=st.lists(st.sampled_from(NAMES), max_size=3, unique=True).map(tuple),
    fallbacks=st.booleans(),
    quantisations=st.sampled_from([(), ("int4",)]),
    sort=st.sampled_from(Sort),
    by_speed=st.booleans(),
    ceiling=st.sampled_from([None, Rates(100, 100, NO_LIMIT)]),
    regions=st.frozensets(st.sampled_from(PLACES), max_size=2),
    proven_only=st.booleans(),
    private_only=st.booleans(),
)
offers = st.builds(
    lambda node, owner, region, country, private, probation: offer_view(
        node_id=node,
        owner_organisation_id=owner,
        region=region,
        data=replace(PRIVATE, country=country) if private else DataTerms(country=country),
        probation=probation,
    ),
    st.sampled_from(NAMES[:3]),
    st.sampled_from(NAMES[3:]),
    st.sampled_from(PLACES),
    st.sampled_from(PLACES),
    st.booleans(),
    st.booleans(),
)


def named(number: int, **changes: Any) -> OfferView:
    return offer_view(node_id=UUID(int=number), owner_organisation_id=UUID(int=100 + number), **changes)


class TestTheRow:
    @given(choices)
    def test_gives_back_all_but_what_was_pinned_at_acceptance(self, choice: Choice) -> None:
        row = choice.to_row()
        kept = Choice.from_row(json.loads(json.dumps(row)) if row is not None else None)
        assert kept == replace(choice, ceiling=None, quantisations=())
        assert (row is None) == (kept == ANY)

    def test_of_a_choice_of_nothing_but_price_and_precision_is_none(self) -> None:
        assert Choice(ceiling=Rates(1, 1, 1), quantisations=("int4",)).to_row() is None
        assert Choice.from_row(None) is ANY


class TestWhatIsAllowed:
    @given(choices, offers)
    def test_is_what_the_lists_admit_and_the_narrowed_demand_does_not_refuse(
        self, choice: Choice, offer: OfferView
    ) -> None:
        refused = refusals_of(offer, choice.narrow(demand(service=Service.FLEX)))
        kept_out = {Filter.REGION, Filter.DATA, Filter.UNPROVEN} & set(refused)
        assert choice.allows(offer) == (choice.admits(offer) and not kept_out)

    @given(choices, st.lists(offers, max_size=5))
    def test_is_all_that_is_ranked(self, choice: Choice, known: list[OfferView]) -> None:
        wanted = choice.narrow(demand(service=Service.FLEX, ceiling=Rates(100, 50, 400)))
        ranked = rank_within(known, wanted, choice, Random(1))
        assert all(choice.allows(offer) for offer in ranked.offers)
        # One node may have several of these offers; none of those that fit is lost.
        assert len(ranked.offers) == sum(choice.allows(offer) and not refusals_of(offer, wanted) for offer in known)


class TestRanking:
    def test_follows_the_order_then_the_sort(self) -> None:
        known = [named(1, decode_tokens_per_s=10.0), named(2, decode_tokens_per_s=90.0), named(3)]
        choice = Choice(order=(UUID(int=3), UUID(int=101)), by_speed=True)
        ranked = rank_within(known, choice.narrow(demand()), choice, Random(1))
        assert [offer.node_id.int for offer in ranked.offers] == [3, 1, 2]
        assert ranked.tied == 1

    def test_counts_whom_the_lists_keep_out(self) -> None:
        choice = Choice(only=frozenset({UUID(int=1)}))
        ranked = rank_within([named(1, slots_busy=4), named(2), named(3)], demand(), choice, Random(1))
        assert ranked.offers == ()
        assert ranked.refusal.refused == {Filter.FULL: 1, Filter.CHOICE: 2}
        assert not ranked.refusal.hopeless

    def test_without_lists_counts_nobody(self) -> None:
        assert rank_within([named(1)], demand(), ANY, Random(1)).refusal.refused == {}


class TestPrices:
    KNOWN = (named(1, rates=Rates(100, 50, 900)), named(2, rates=Rates(300, 20, 400), region="eu"))

    @pytest.mark.parametrize(
        ("choice", "dearest"),
        [
            (ANY, Rates(300, 50, 900)),
            (Choice(regions=frozenset({"eu"})), Rates(300, 20, 400)),
            (Choice(ceiling=Rates(200, 200, NO_LIMIT)), Rates(200, 50, 900)),
            (Choice(regions=frozenset({"us"}), ceiling=Rates(200, 200, 500)), None),
        ],
    )
    def test_the_dearest_is_of_whom_it_allows_and_below_its_maximum(
        self, choice: Choice, dearest: Rates | None
    ) -> None:
        assert choice.dearest(self.KNOWN) == dearest

    def test_a_maximum_is_whole_if_no_class_is_open(self) -> None:
        assert Choice(ceiling=Rates(1, 1, 2)).whole_ceiling == Rates(1, 1, 2)
        assert Choice(ceiling=Rates(1, 1, NO_LIMIT)).whole_ceiling is None
        assert ANY.whole_ceiling is None


class TestTheFirstPickAlone:
    def test_stays_with_the_node_that_it_had(self) -> None:
        choice = Choice(fallbacks=False)
        assert choice.after(None) is choice
        assert [offer.node_id.int for offer in (named(1), named(2)) if choice.after(UUID(int=2)).admits(offer)] == [2]

    @pytest.mark.parametrize("choice", [ANY, Choice(order=(UUID(int=1),), fallbacks=False)])
    def test_is_nothing_that_others_ask_for(self, choice: Choice) -> None:
        assert choice.after(UUID(int=2)) is choice
