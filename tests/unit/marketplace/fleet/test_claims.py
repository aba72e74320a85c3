"""What nodes claim, made safe."""

from __future__ import annotations

from types import SimpleNamespace
from uuid import UUID

import pytest

from agent.protocol import DataPolicy, Inventory
from marketplace.fleet import claims
from marketplace.fleet.claims import (
    KnownVariant,
    check_data,
    check_devices,
    check_inventory,
    declared_mw,
    free_memory_bytes,
)
from marketplace.matching.types import UNDECLARED
from tests.fleet_world import SHA256, device, offer_report


def find(sha256: str) -> KnownVariant | None:
    return SimpleNamespace(id=UUID(int=7)) if sha256 == SHA256 else None


def check(*offers: object, allow_simulated: bool = False) -> tuple[list[claims.Claim], list[str]]:
    passed, refused = check_inventory(Inventory(list(offers)), find, allow_simulated=allow_simulated)  # type: ignore[arg-type]
    return passed, [refusal.reason for refusal in refused]


class TestAnInventory:
    def test_that_is_honest_passes_whole(self) -> None:
        (claim,), refused = check(offer_report())
        assert refused == []
        assert claim.key == (UUID(int=7), "cpu")
        assert (claim.rates.input, claim.rates.cached_input, claim.rates.output) == (10**8, 5 * 10**7, 4 * 10**8)

    @pytest.mark.parametrize(
        ("change", "reason"),
        [
            ({"slots": 0}, "slots out of range"),
            ({"slots": -1}, "slots out of range"),
            ({"slots": 2**63}, "slots out of range"),
            ({"context_per_slot": 0}, "context out of range"),
            ({"input_nano_usd_per_mtok": -1}, "price out of range"),
            ({"output_nano_usd_per_mtok": 10**15 + 1}, "price out of range"),
            ({"cached_input_nano_usd_per_mtok": 10**8 + 1}, "cached input dearer than input"),
            ({"device_id": ""}, "no device"),
            ({"device_id": "x" * 201}, "a name is too long or has control characters"),
            ({"engine": "a\0b"}, "a name is too long or has control characters"),
            ({"simulated": True}, "a simulated engine is not for sale"),
            ({"variant_sha256": "d" * 64}, "the catalogue does not know these weights"),
        ],
    )
    def test_that_is_not_is_refused_with_the_reason(self, change: dict[str, object], reason: str) -> None:
        assert check(offer_report(**change)) == ([], [reason])

    def test_may_be_simulated_where_that_is_allowed(self) -> None:
        (claim,), _ = check(offer_report(simulated=True), allow_simulated=True)
        assert claim.simulated

    @pytest.mark.parametrize("speed", [0.0, 5e-324, 1e-300, 0.0009])
    def test_has_speeds_without_a_finite_inverse_made_unknown(self, speed: float) -> None:
        (claim,), _ = check(offer_report(prefill_tokens_per_s=speed, decode_tokens_per_s=speed))
        assert (claim.prefill_tokens_per_s, claim.decode_tokens_per_s) == (None, None)

    @pytest.mark.parametrize("figure", [float("nan"), float("inf"), -1.0, 1e30])
    def test_has_impossible_speeds_made_unknown(self, figure: float) -> None:
        (claim,), _ = check(
            offer_report(prefill_tokens_per_s=figure, decode_tokens_per_s=figure, prefix_cache_s=figure)
        )
        assert (claim.prefill_tokens_per_s, claim.decode_tokens_per_s, claim.prefix_cache_s) == (None, None, 0.0)

    def test_lists_one_device_and_variant_once(self) -> None:
        passed, refused = check(offer_report(slots=1), offer_report(slots=9))
        assert [claim.slots for claim in passed] == [1]
        assert refused == ["offered twice on one device"]

    def test_is_bounded(self) -> None:
        many = [offer_report(device_id=f"gpu{index}") for index in range(claims.MAX_OFFERS + 5)]
        passed, refused = check(*many)
        assert len(passed) == claims.MAX_OFFERS
        assert refused == ["too many offers"] * 5


class TestTelemetry:
    def test_that_is_honest_passes_whole(self) -> None:
        assert check_devices([device()]) == [device()]

    def test_unknown_stays_apart_from_zero(self) -> None:
        (zero,) = check_devices([device(power_mw=0, memory_used_bytes=0)])
        assert (zero.power_mw, zero.memory_used_bytes) == (0, 0)
        (unknown,) = check_devices([device(power_mw=None, memory_used_bytes=None)])
        assert (unknown.power_mw, unknown.power_source, unknown.memory_used_bytes) == (None, "unknown", None)

    @pytest.mark.parametrize(
        "change",
        [
            {"power_mw": -1},
            {"power_mw": 2**40},
            {"power_source": "guessed"},
            {"memory_used_bytes": 9 << 30},
            {"utilisation_pct": 101.0},
            {"temperature_c": float("nan")},
        ],
    )
    def test_impossible_figures_become_unknown(self, change: dict[str, object]) -> None:
        (cleaned,) = check_devices([device(**change)])
        field = "power_mw" if "power_source" in change else next(iter(change))
        assert getattr(cleaned, field) is None

    def test_a_counter_is_believed_of_nvml_only(self) -> None:
        (declared,) = check_devices([device(energy_mj=5)])
        (measured,) = check_devices([device(energy_mj=5, power_source="nvml")])
        assert (declared.energy_mj, measured.energy_mj) == (None, 5)

    def test_nameless_strange_and_surplus_devices_are_dropped(self) -> None:
        reports = [device(device_id=""), device(kind="toaster"), device(device_id="a\nb")]
        assert check_devices(reports) == []
        assert len(check_devices([device(device_id=str(index)) for index in range(500)])) == claims.MAX_DEVICES

    def test_free_memory_is_what_nobody_uses(self) -> None:
        reports = [device(), device(device_id="gpu0", memory_used_bytes=None)]
        assert free_memory_bytes(reports) == {"cpu": 6 << 30, "gpu0": None}

    @pytest.mark.parametrize(
        ("watts", "expected"),
        [(None, None), (float("nan"), None), (-1.0, None), (0.0, 0), (12.3456, 12_346), (1e9, None)],
    )
    def test_declared_watts_are_whole_milliwatts_or_unknown(self, watts: float | None, expected: int | None) -> None:
        assert declared_mw(watts) == expected


class TestADataPolicy:
    def test_that_makes_no_sense_is_not_declared(self) -> None:
        odd = DataPolicy("x" * 65, "de", -1, None, "alien")
        assert check_data(odd) == ("", UNDECLARED)
        assert check_data(None) == ("", UNDECLARED)

    def test_is_private_only_if_both_are_declared(self) -> None:
        assert check_data(DataPolicy(retention_days=0, trains=False))[1].private
        assert not check_data(DataPolicy(retention_days=0))[1].private
        assert not check_data(DataPolicy(trains=False))[1].private
