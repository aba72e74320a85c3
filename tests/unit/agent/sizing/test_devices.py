"""The table of cards: complete, in the right units, found by the names that drivers use."""

from __future__ import annotations

import pytest

from agent.sizing.devices import DEVICES, DeviceSpec, find_device


class TestTable:
    @pytest.mark.parametrize("spec", DEVICES.values(), ids=lambda spec: spec.name)
    def test_every_card_has_plausible_figures_and_a_source(self, spec: DeviceSpec) -> None:
        assert 8e9 <= spec.memory_bytes <= 200e9
        assert 250e9 <= spec.bandwidth_bytes_per_s <= 8e12
        # Arithmetic an owner can buy lies between 50 and 600 operations a byte moved.
        assert 50 <= spec.flops / spec.bandwidth_bytes_per_s <= 600
        assert spec.tdp_w is not None
        assert 60 <= spec.tdp_w <= 1000
        assert spec.source

    def test_narrower_types_are_never_slower(self) -> None:
        for spec in DEVICES.values():
            for faster in (spec.fp8_flops, spec.int8_ops, spec.fp4_flops):
                assert faster is None or faster >= spec.flops

    def test_the_figures_are_dense_and_accumulate_in_32_bits(self) -> None:
        assert DEVICES["RTX 4090"].flops == pytest.approx(128 * 512 * 2.52e9, rel=0.001)
        assert DEVICES["RTX 3090"].flops == pytest.approx(82 * 512 * 1.695e9, rel=0.001)
        assert DEVICES["H100 SXM"].flops == 989e12

    def test_a_card_multiplies_in_the_type_that_it_has(self) -> None:
        assert DEVICES["L40S"].at("fp8").flops == 2 * DEVICES["L40S"].flops
        assert DEVICES["A100-80 SXM"].at("fp8").flops == DEVICES["A100-80 SXM"].flops


class TestNames:
    @pytest.mark.parametrize(
        ("said", "meant"),
        [
            ("NVIDIA GeForce RTX 4090", "RTX 4090"),
            ("GeForce-RTX-4090", "RTX 4090"),
            ("NVIDIA GeForce RTX 4070 Ti SUPER", "RTX 4070 Ti SUPER"),
            ("NVIDIA GeForce RTX 4060 Ti", "RTX 4060 Ti 16GB"),
            ("NVIDIA H100 80GB HBM3", "H100 SXM"),
            ("NVIDIA A100-SXM4-80GB", "A100-80 SXM"),
            ("NVIDIA A100 80GB PCIe", "A100-80 PCIe"),
            ("NVIDIA RTX 6000 Ada Generation", "RTX 6000 Ada"),
            ("NVIDIA RTX A6000", "RTX A6000"),
            ("Tesla T4", "T4"),
            ("AMD Radeon RX 7900 XTX", "RX 7900 XTX"),
            ("L40S", "L40S"),
        ],
    )
    def test_a_drivers_name_finds_the_card(self, said: str, meant: str) -> None:
        found = find_device(said)
        assert found is not None
        assert found.name == meant

    @pytest.mark.parametrize("said", ["NVIDIA GeForce RTX 4090 Laptop GPU", "GeForce GT 710", "", "RTX 4"])
    def test_what_is_not_in_the_table_is_not_guessed(self, said: str) -> None:
        assert find_device(said) is None


class TestPowerCap:
    def test_a_server_card_loses_prefill_and_keeps_decode(self) -> None:
        whole = DEVICES["A100-80 SXM"]
        capped = whole.capped(0.7)
        assert capped.flops == pytest.approx(whole.flops / 1.3)
        assert capped.bandwidth_bytes_per_s == whole.bandwidth_bytes_per_s
        assert capped.tdp_w == pytest.approx(280)

    def test_a_3090_follows_what_was_measured_down_to_its_cliff(self) -> None:
        whole = DEVICES["RTX 3090"]
        for watts, prefill, decode in ((250, 0.85, 0.97), (200, 0.60, 0.94), (100, 0.05, 0.1)):
            capped = whole.capped(watts / 350)
            assert capped.flops == pytest.approx(whole.flops * prefill)
            assert capped.bandwidth_bytes_per_s == pytest.approx(whole.bandwidth_bytes_per_s * decode)

    def test_no_cap_changes_nothing(self) -> None:
        assert DEVICES["L4"].capped(1.0) == DEVICES["L4"]

    @pytest.mark.parametrize("fraction", [0.0, -0.5, 1.01])
    def test_a_cap_is_a_part(self, fraction: float) -> None:
        with pytest.raises(ValueError, match="power cap"):
            DEVICES["L4"].capped(fraction)
