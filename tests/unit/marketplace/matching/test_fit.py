"""Fit: on one card, over several, with a paged cache, and what is known of an offer."""

from __future__ import annotations

from dataclasses import asdict

import pytest

from agent.sizing.shape import ModelShape
from marketplace.matching.fit import Card, figures, fit, shape_from

GB = 1_000_000_000
SHAPE = ModelShape(
    weight_bytes=8_500_000_000,
    parameters=8_030_000_000,
    active_parameters=8_030_000_000,
    layers=32,
    hidden=4_096,
    feed_forward=14_336,
    vocabulary=128_256,
    kv_elements_per_token=65_536,
    context_train=131_072,
)
LARGE = ModelShape(**{**asdict(SHAPE), "weight_bytes": 70 * GB, "layers": 80, "kv_elements_per_token": 163_840})


class TestFit:
    def test_is_what_is_free_now_with_a_margin(self) -> None:
        assert fit(SHAPE, [Card(24 * GB, 24 * GB)], slots=4, context_per_slot=8_192).fits
        busy = fit(SHAPE, [Card(24 * GB, 10 * GB)], slots=4, context_per_slot=8_192)
        assert not busy.fits
        assert busy.slots == 0
        assert "not even one fits" in busy.reason

    def test_says_how_many_slots_would(self) -> None:
        answer = fit(SHAPE, [Card(24 * GB, 24 * GB)], slots=64, context_per_slot=8_192)
        assert not answer.fits
        assert 8 <= answer.slots <= 14
        assert fit(SHAPE, [Card(24 * GB, 24 * GB)], slots=answer.slots, context_per_slot=8_192).fits
        assert not fit(SHAPE, [Card(24 * GB, 24 * GB)], slots=answer.slots + 1, context_per_slot=8_192).fits

    def test_over_several_cards_is_decided_by_the_tightest(self) -> None:
        one, two = [Card(80 * GB, 80 * GB)], [Card(80 * GB, 80 * GB)] * 2
        assert not fit(LARGE, one, slots=8, context_per_slot=8_192).fits
        assert fit(LARGE, two, slots=8, context_per_slot=8_192).fits
        assert not fit(LARGE, [*two[:1], Card(80 * GB, 30 * GB)], slots=8, context_per_slot=8_192).fits

    def test_of_a_paged_engine_refuses_what_fails_only_under_full_load(self) -> None:
        cards = [Card(80 * GB, 80 * GB)] * 2
        assert fit(LARGE, cards, slots=16, context_per_slot=1_280, paged=True).fits
        false_fit = fit(LARGE, cards, slots=64, context_per_slot=8_192, paged=True)
        assert not false_fit.fits
        assert 16 <= false_fit.slots < 64

    def test_of_nothing_is_an_error(self) -> None:
        for cards, slots in (([], 1), ([Card(1, 1)], 0)):
            with pytest.raises(ValueError, match=r"1|one"):
                fit(SHAPE, cards, slots=slots, context_per_slot=1)


class TestFigures:
    def known(self, **changes: object) -> object:
        facts: dict[str, object] = {
            "slots": 4,
            "context_per_slot": 8_192,
            "engine": "llama.cpp",
            "device_name": "NVIDIA GeForce RTX 4090",
            "gpu": True,
            "total_bytes": 24 * GB,
        }
        return figures(changes.pop("shape", SHAPE), **{**facts, **changes})  # type: ignore[arg-type]

    def test_come_from_the_shape_and_the_data_sheet(self) -> None:
        found = self.known(power_limit_mw=270_000)
        assert found.power_fraction == pytest.approx(0.6)  # type: ignore[attr-defined]
        assert 1.2 < found.headroom < 2.0  # type: ignore[attr-defined]
        assert found.kv_step_s_per_token == pytest.approx(131_072 / (1.008e12 * 0.75))  # type: ignore[attr-defined]

    def test_are_unknown_for_an_unknown_device_or_model(self) -> None:
        assert self.known(device_name="Abacus 9000").kv_step_s_per_token == 0.0  # type: ignore[attr-defined]
        unknown = self.known(shape=None)
        assert unknown.memory_needed_bytes is None  # type: ignore[attr-defined]
        assert unknown.headroom == 1.0  # type: ignore[attr-defined]

    def test_take_the_shape_as_the_catalogue_keeps_it(self) -> None:
        assert shape_from({"architecture": "llama", **asdict(SHAPE)}) == SHAPE
        assert shape_from({"architecture": "llama"}) is None
        assert shape_from(None) is None
