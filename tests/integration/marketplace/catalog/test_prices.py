"""Prices: a version stays, a change is a new one."""

from __future__ import annotations

import threading
from uuid import uuid4

import pytest
from sqlalchemy import func, select

from marketplace.catalog.models import Model, Price, Variant
from marketplace.catalog.prices import MAX_NANO_USD_PER_MTOK, InvalidPrice, UnknownPrice, get_price, set_price
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import new_id
from marketplace.matching.types import Rates

RATES = Rates(input=100_000_000, cached_input=25_000_000, output=400_000_000)


@pytest.fixture
def variant(session_factory: SessionFactory) -> Variant:
    with transaction(session_factory) as session:
        session.add(Model(id="m", display_name="M"))
        session.flush()
        row = Variant(
            id=new_id(),
            model_id="m",
            sha256="0" * 64,
            size_bytes=1,
            quantisation="F16",
            training_context=1,
            default_max_output=1,
            shape={},
            tokenizer_kind="fast",
            tokenizer=b"",
            chat_template="x",
            special_tokens={},
        )
        session.add(row)
        return row


class TestSetPrice:
    def test_an_unchanged_ask_keeps_its_version(self, session_factory: SessionFactory, variant: Variant) -> None:
        seller = uuid4()
        with transaction(session_factory) as session:
            first = set_price(session, variant.id, seller, RATES)
        with transaction(session_factory) as session:
            assert set_price(session, variant.id, seller, RATES) == first

    def test_a_changed_ask_is_a_new_version_and_the_old_one_stays(
        self, session_factory: SessionFactory, variant: Variant
    ) -> None:
        seller = uuid4()
        dearer = Rates(RATES.input, RATES.cached_input, RATES.output + 1)
        with transaction(session_factory) as session:
            versions = [set_price(session, variant.id, seller, rates) for rates in (RATES, dearer, RATES)]
        assert versions == sorted(set(versions))
        with session_factory() as session:
            assert get_price(session, versions[0]).output_nano_usd_per_mtok == RATES.output
            assert get_price(session, versions[1]).output_nano_usd_per_mtok == RATES.output + 1

    def test_sellers_have_their_own_versions(self, session_factory: SessionFactory, variant: Variant) -> None:
        with transaction(session_factory) as session:
            assert set_price(session, variant.id, uuid4(), RATES) != set_price(session, variant.id, uuid4(), RATES)

    def test_two_reports_at_once_make_one_version(self, session_factory: SessionFactory, variant: Variant) -> None:
        seller = uuid4()
        barrier = threading.Barrier(4)

        def report() -> None:
            barrier.wait()
            with transaction(session_factory) as session:
                set_price(session, variant.id, seller, RATES)

        threads = [threading.Thread(target=report) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        with session_factory() as session:
            assert session.scalar(select(func.count()).select_from(Price)) == 1

    @pytest.mark.parametrize(
        ("rates", "param"),
        [
            (Rates(-1, -1, 0), "input"),
            (Rates(0, 0, -1), "output"),
            (Rates(1, 2, 0), "cached_input"),
            (Rates(0, 0, MAX_NANO_USD_PER_MTOK + 1), "output"),
        ],
    )
    def test_an_absurd_ask_is_refused_by_name(
        self, session_factory: SessionFactory, variant: Variant, rates: Rates, param: str
    ) -> None:
        with pytest.raises(InvalidPrice) as caught, transaction(session_factory) as session:
            set_price(session, variant.id, uuid4(), rates)
        assert caught.value.param == param

    def test_a_free_model_has_a_price_too(self, session_factory: SessionFactory, variant: Variant) -> None:
        with transaction(session_factory) as session:
            version = set_price(session, variant.id, uuid4(), Rates(0, 0, 0))
            assert get_price(session, version).output_nano_usd_per_mtok == 0

    def test_an_unknown_version_is_not_found(self, session_factory: SessionFactory) -> None:
        with pytest.raises(UnknownPrice), session_factory() as session:
            get_price(session, 12_345)
