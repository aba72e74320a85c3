"""Constants come back from times that they made, and a band says how far to trust a prediction."""

from __future__ import annotations

import math
import random

import pytest

from agent.sizing.calibrate import (
    MAX_MEASUREMENTS,
    UNCALIBRATED,
    Measurement,
    band,
    calibrate,
    predicted_s,
)
from agent.sizing.devices import DEVICES
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Efficiency, Load, SpeedModel

LLAMA_8B = ModelShape(
    weight_bytes=16_060_000_000,
    parameters=8_030_000_000,
    active_parameters=8_030_000_000,
    layers=32,
    hidden=4096,
    feed_forward=14_336,
    vocabulary=128_256,
    kv_elements_per_token=65_536,
    context_train=131_072,
)
CARD = DEVICES["H100 SXM"]
TRUE = Efficiency(0.62, 0.48, 0.003, 45e-6)
LOADS = [
    (Load(batch, prompt, output), devices)
    for batch in (1, 8, 32, 128)
    for prompt, output in ((512, 512), (1024, 128), (8192, 1024))
    for devices in (1, 2)
]


def made_by(efficiency: Efficiency, noise: float = 0.0, seed: int = 1) -> list[Measurement]:
    """What an engine with these constants would show."""
    rng = random.Random(seed)
    rows = []
    for load, devices in LOADS:
        exact = SpeedModel(LLAMA_8B, CARD, devices, efficiency).per_output_token_s(load)
        rows.append(Measurement(load, exact * math.exp(rng.gauss(0, noise)), devices))
    return rows


class TestFit:
    def test_the_constants_that_made_the_times_are_found_again(self) -> None:
        found = calibrate(LLAMA_8B, CARD, made_by(TRUE)).efficiency
        assert found.memory == pytest.approx(TRUE.memory, rel=0.03)
        assert found.compute == pytest.approx(TRUE.compute, rel=0.03)
        assert found.step_overhead_s == pytest.approx(TRUE.step_overhead_s, rel=0.1)
        assert found.all_reduce_s == pytest.approx(TRUE.all_reduce_s, rel=0.1)

    def test_held_out_rows_are_predicted_better_than_by_the_priors(self) -> None:
        rows = made_by(TRUE, noise=0.05)
        fitted = calibrate(LLAMA_8B, CARD, rows[::2]).efficiency

        def worst(efficiency: Efficiency) -> float:
            return max(
                abs(predicted_s(SpeedModel(LLAMA_8B, CARD, row.devices, efficiency), row.load) / row.per_token_s - 1)
                for row in rows[1::2]
            )

        assert worst(fitted) < 0.25 < worst(Efficiency())

    def test_one_wild_row_does_not_spoil_the_rest(self) -> None:
        rows = made_by(TRUE)
        rows[3] = Measurement(rows[3].load, rows[3].per_token_s * 20, rows[3].devices)
        found = calibrate(LLAMA_8B, CARD, rows)
        assert found.efficiency.memory == pytest.approx(TRUE.memory, rel=0.05)
        assert found.median_error < 0.02

    def test_a_fixed_batch_tells_nothing_of_prefill_and_is_not_charged_for_it(self) -> None:
        model = SpeedModel(LLAMA_8B, CARD, 1, TRUE)
        rows = [
            Measurement(Load(batch, 1024, 256), model.decode_step_s(batch, 1024 + 128), mixed=False)
            for batch in (1, 4, 16, 64)
        ]
        found = calibrate(LLAMA_8B, CARD, rows).efficiency
        assert found.memory == pytest.approx(TRUE.memory, rel=0.05)
        assert found.compute == pytest.approx(Efficiency().compute, rel=0.2)

    def test_few_rows_move_the_constants_no_further_than_they_must(self) -> None:
        found = calibrate(LLAMA_8B, CARD, made_by(TRUE)[:1]).efficiency
        assert found.all_reduce_s == pytest.approx(Efficiency().all_reduce_s)
        assert 0.02 <= found.memory <= 1.5

    def test_without_rows_the_priors_stand(self) -> None:
        assert calibrate(LLAMA_8B, CARD, []) is UNCALIBRATED

    @pytest.mark.parametrize("wrong", [0.0, -1.0, math.nan, math.inf])
    def test_a_time_that_is_none_is_refused(self, wrong: float) -> None:
        with pytest.raises(ValueError, match="above zero"):
            calibrate(LLAMA_8B, CARD, [Measurement(Load(1, 10, 10), wrong)])

    def test_the_work_is_bounded(self) -> None:
        with pytest.raises(ValueError, match="at most"):
            calibrate(LLAMA_8B, CARD, [Measurement(Load(1, 10, 10), 0.01)] * (MAX_MEASUREMENTS + 1))


class TestBand:
    def test_an_uncalibrated_prediction_admits_that_it_may_be_far_off(self) -> None:
        shown = band(SpeedModel(LLAMA_8B, CARD), Load(8, 1024, 256))
        assert shown.low_s < 0.9 * shown.expected_s
        assert shown.high_s > 1.5 * shown.expected_s

    def test_a_calibrated_one_is_narrower_and_holds_eight_times_in_ten(self) -> None:
        rows = made_by(TRUE, noise=0.08)
        fitted = calibrate(LLAMA_8B, CARD, rows)
        inside = 0
        fresh = made_by(TRUE, noise=0.08, seed=2)
        for row in fresh:
            shown = band(SpeedModel(LLAMA_8B, CARD, row.devices, fitted.efficiency), row.load, fitted)
            assert shown.high_s / shown.low_s < UNCALIBRATED.high / UNCALIBRATED.low
            inside += shown.low_s <= row.per_token_s <= shown.high_s
        assert inside >= 0.6 * len(fresh)

    def test_three_rows_alone_do_not_make_a_narrow_band(self) -> None:
        fitted = calibrate(LLAMA_8B, CARD, made_by(TRUE)[:3])
        assert fitted.low < 0.9
        assert fitted.high > 1.2

    def test_it_reads_as_a_sentence(self) -> None:
        shown = band(SpeedModel(LLAMA_8B, CARD), Load(1, 1024, 256))
        assert shown.sentence() == "7.55 ms a token (6.04 to 15.9)"
