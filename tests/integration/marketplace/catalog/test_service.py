"""The catalogue in memory: names, counting, refreshing."""

from __future__ import annotations

import asyncio
import time
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy.exc import OperationalError

from marketplace.catalog import service
from marketplace.catalog.models import Model, Variant
from marketplace.catalog.service import Catalog, PromptTooLong, UnknownModel
from marketplace.catalog.template import UnsupportedTools
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.ids import new_id
from marketplace.core.settings import Settings
from tests.vocabularies import MODEL_ID


@pytest.fixture
def catalog(session_factory: SessionFactory, imported: Variant) -> Catalog:
    loaded = Catalog(session_factory)
    assert loaded.load() == 1
    return loaded


def add_variant(session_factory: SessionFactory, columns: dict[str, Any], model_id: str, **changes: Any) -> Variant:
    """Another variant in the catalogue: the bundled model's columns under another hash."""
    variant = Variant(id=new_id(), model_id=model_id, **{**columns, "sha256": "0" * 64, **changes})
    with transaction(session_factory) as session:
        session.merge(Model(id=model_id, display_name=model_id))
        session.flush()
        session.add(variant)
    return variant


class TestNames:
    def test_a_model_is_found_by_its_names(self, catalog: Catalog, imported: Variant) -> None:
        view = catalog.resolve(MODEL_ID)
        for name in (MODEL_ID.upper(), f"{MODEL_ID}:Q4_1", f"{MODEL_ID}:q4_1", view.name, f"{MODEL_ID}@{view.sha256}"):
            assert catalog.resolve(name) is view
        assert catalog.by_id(imported.id) is view
        assert catalog.by_sha256(imported.sha256.upper()) is view
        assert catalog.all() == [view]

    @pytest.mark.parametrize("name", ["smolm-135m-instruct", "smollm2", "SmolLM2-135M", f"{MODEL_ID}:q8_0"])
    def test_an_unknown_model_is_answered_with_the_nearest_names(self, catalog: Catalog, name: str) -> None:
        with pytest.raises(UnknownModel) as caught:
            catalog.resolve(name)
        assert caught.value.status == 404
        assert MODEL_ID in caught.value.details["nearest"]
        assert MODEL_ID in caught.value.message

    @pytest.mark.parametrize(
        "name", ["", "@", ":", f"{MODEL_ID}@", f"{MODEL_ID}@b179", "x" * 100_000, "\x00", f"@{'0' * 64}"]
    )
    def test_a_strange_name_is_only_unknown(self, catalog: Catalog, name: str) -> None:
        begun = time.monotonic()
        with pytest.raises(UnknownModel) as caught:
            catalog.resolve(name)
        assert time.monotonic() - begun < 0.5
        assert len(caught.value.message) < 1_000

    def test_an_empty_catalogue_says_so(self, session_factory: SessionFactory) -> None:
        catalog = Catalog(session_factory)
        assert catalog.load() == 0
        with pytest.raises(UnknownModel, match="No model is offered"):
            catalog.resolve("anything")
        assert catalog.by_id(uuid4()) is None
        assert catalog.by_sha256("0" * 64) is None

    def test_a_models_name_goes_on_meaning_its_oldest_variant(
        self, catalog: Catalog, session_factory: SessionFactory, imported: Variant, smollm2_columns: dict[str, Any]
    ) -> None:
        newer = add_variant(session_factory, smollm2_columns, MODEL_ID)
        assert catalog.refresh() == 1
        assert catalog.resolve(MODEL_ID).id == imported.id
        assert catalog.resolve(f"{MODEL_ID}@{newer.sha256[:12]}").id == newer.id


class TestCounting:
    def test_both_ways_of_counting_agree(self, catalog: Catalog) -> None:
        view = catalog.resolve(MODEL_ID)
        for content in ("hi", "a longer text " * 500):
            chat = [{"role": "user", "content": content}]
            counted = view.count_prompt(chat)
            assert counted.tokens == len(counted.ids)
            assert asyncio.run(view.count_prompt_async(chat)) == counted
            assert asyncio.run(view.count_text_async(content)) == view.count_text(content)

    def test_a_long_prompt_is_counted_off_the_event_loop(self, catalog: Catalog) -> None:
        view = catalog.resolve(MODEL_ID)
        chat = [{"role": "user", "content": "12345 " * 60_000}]

        async def count() -> int:
            counting = asyncio.create_task(view.count_prompt_async(chat))
            turns = 0
            while not counting.done():
                await asyncio.sleep(0.001)
                turns += 1
            assert (await counting).tokens > 300_000
            return turns

        assert asyncio.run(count()) > 5

    def test_a_prompt_that_cannot_fit_is_refused_without_counting(self, catalog: Catalog) -> None:
        view = catalog.resolve(MODEL_ID)
        begun = time.monotonic()
        with pytest.raises(PromptTooLong) as caught:
            view.count_prompt([{"role": "user", "content": "1" * 2_000_000}])
        assert time.monotonic() - begun < 0.5
        assert (caught.value.status, caught.value.code) == (400, "context_length_exceeded")

    def test_tools_are_refused_where_the_model_takes_none(self, catalog: Catalog) -> None:
        view = catalog.resolve(MODEL_ID)
        assert not view.supports_tools
        with pytest.raises(UnsupportedTools):
            view.count_prompt([{"role": "user", "content": "x"}], [{"type": "function", "function": {"name": "f"}}])


class TestRefreshing:
    def test_a_new_variant_appears_by_itself(
        self,
        session_factory: SessionFactory,
        smollm2_columns: dict[str, Any],
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(service, "REFRESH_S", 0.05)

        async def play() -> None:
            catalog = Catalog(session_factory)
            await catalog.start()
            assert catalog.all() == []
            await asyncio.to_thread(add_variant, session_factory, smollm2_columns, MODEL_ID)
            async with asyncio.timeout(5):
                while not catalog.all():  # noqa: ASYNC110  # the catalogue announces nothing
                    await asyncio.sleep(0.02)
            await catalog.stop()

        asyncio.run(play())

    def test_known_variants_are_kept_as_they_are(self, catalog: Catalog) -> None:
        before = catalog.resolve(MODEL_ID)
        assert catalog.refresh() == 0
        assert catalog.resolve(MODEL_ID) is before

    def test_a_damaged_variant_is_left_out_and_the_others_are_served(
        self, session_factory: SessionFactory, imported: Variant, smollm2_columns: dict[str, Any]
    ) -> None:
        add_variant(session_factory, smollm2_columns, "second", tokenizer=b"rubbish")
        catalog = Catalog(session_factory)
        assert catalog.load() == 1
        assert catalog.refresh() == 0
        assert catalog.resolve(MODEL_ID).id == imported.id
        with pytest.raises(UnknownModel):
            catalog.resolve("second")

    def test_a_database_that_is_away_is_an_error_of_the_first_load(self, settings: Settings) -> None:
        away = settings.model_copy(update={"database_url": "postgresql://nobody@127.0.0.1:1/none"})
        catalog = Catalog(make_session_factory(make_engine(away, application_name="tests")))
        with pytest.raises(OperationalError):
            catalog.load()
