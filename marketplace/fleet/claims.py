"""What a node claims, made safe. Pure: a frame in, facts within bounds out.

An agent runs on somebody else's machine, so nothing it says is believed further than it can do harm: an impossible
figure is unknown, an impossible offer is refused.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Protocol
from uuid import UUID

from agent.protocol import DataPolicy, DeviceReport, Inventory, OfferReport
from marketplace.matching.types import UNDECLARED, DataTerms, Rates

MAX_DEVICES: Final = 64
MAX_THROTTLES: Final = 16
MAX_RETENTION_DAYS: Final = 3_650
MAX_REGION_CHARACTERS: Final = 64
OPERATORS: Final = ("person", "datacentre")
MAX_OFFERS: Final = 128
MAX_CHARS: Final = 200
MAX_SLOTS: Final = 4_096
MAX_CONTEXT: Final = 16_777_216
MAX_RATE_NANO: Final = 10**15
"""A million dollars per million tokens: above it is a slip of the keyboard, and sums could leave 64 bits."""
MAX_TOKENS_PER_S: Final = 1e7
MIN_TOKENS_PER_S: Final = 1e-3
"""Slower is a slip or a lie, and its inverse, seconds a token, need not be finite."""
MAX_PREFIX_CACHE_S: Final = 3_600.0
MAX_BYTES: Final = 2**50
MAX_POWER_MW: Final = 5_000_000
"""5 kW for one device."""
MAX_NODE_W: Final = 50_000.0
INT64_MAX: Final = 2**63 - 1


class KnownVariant(Protocol):
    """What the catalogue knows of a variant, as far as offers need it."""

    @property
    def id(self) -> UUID: ...


@dataclass(frozen=True, slots=True)
class Claim:
    """An offer that passed: what will be upserted."""

    variant_id: UUID
    device_id: str
    slots: int
    context_per_slot: int
    rates: Rates
    engine: str
    engine_version: str
    simulated: bool
    warm: bool
    prefix_cache_s: float
    prefill_tokens_per_s: float | None
    decode_tokens_per_s: float | None

    @property
    def key(self) -> tuple[UUID, str]:
        """What makes it one offer of its node."""
        return self.variant_id, self.device_id


@dataclass(frozen=True, slots=True)
class RefusedClaim:
    """An offer that did not pass, and why, for the log and the owner."""

    variant_sha256: str
    reason: str


def check_inventory(
    inventory: Inventory, find_variant: Callable[[str], KnownVariant | None], *, allow_simulated: bool
) -> tuple[list[Claim], list[RefusedClaim]]:
    """Split an inventory into offers to list and to refuse. Of two for one (variant, device) the first counts."""
    claims: dict[tuple[UUID, str], Claim] = {}
    refused: list[RefusedClaim] = []
    for report in inventory.offers[:MAX_OFFERS]:
        reason = fault(report, allow_simulated=allow_simulated)
        variant = find_variant(report.variant_sha256) if reason is None else None
        if reason is None and variant is None:
            reason = "the catalogue does not know these weights"
        if reason is None and variant is not None and (variant.id, report.device_id) in claims:
            reason = "offered twice on one device"
        if reason is not None or variant is None:
            refused.append(RefusedClaim(report.variant_sha256[:64], reason or ""))
            continue
        claim = _claim(report, variant.id)
        claims[claim.key] = claim
    refused.extend(RefusedClaim(r.variant_sha256[:64], "too many offers") for r in inventory.offers[MAX_OFFERS:])
    return list(claims.values()), refused


def _claim(report: OfferReport, variant_id: UUID) -> Claim:
    return Claim(
        variant_id=variant_id,
        device_id=report.device_id,
        slots=report.slots,
        context_per_slot=report.context_per_slot,
        rates=Rates(
            report.input_nano_usd_per_mtok, report.cached_input_nano_usd_per_mtok, report.output_nano_usd_per_mtok
        ),
        engine=report.engine,
        engine_version=report.engine_version,
        simulated=report.simulated,
        warm=report.warm,
        prefix_cache_s=within(report.prefix_cache_s, MAX_PREFIX_CACHE_S) or 0.0,
        prefill_tokens_per_s=speed(report.prefill_tokens_per_s),
        decode_tokens_per_s=speed(report.decode_tokens_per_s),
    )


def fault(report: OfferReport, *, allow_simulated: bool) -> str | None:
    """Why this may not be offered; None if it may."""
    texts = (report.variant_sha256, report.device_id, report.engine, report.engine_version)
    rates = (report.input_nano_usd_per_mtok, report.cached_input_nano_usd_per_mtok, report.output_nano_usd_per_mtok)
    checks = (
        (any(not plain(text) for text in texts), "a name is too long or has control characters"),
        (not report.device_id, "no device"),
        (not 1 <= report.slots <= MAX_SLOTS, "slots out of range"),
        (not 1 <= report.context_per_slot <= MAX_CONTEXT, "context out of range"),
        (any(not 0 <= rate <= MAX_RATE_NANO for rate in rates), "price out of range"),
        (report.cached_input_nano_usd_per_mtok > report.input_nano_usd_per_mtok, "cached input dearer than input"),
        (report.simulated and not allow_simulated, "a simulated engine is not for sale"),
    )
    return next((reason for hit, reason in checks if hit), None)


def check_devices(reports: list[DeviceReport]) -> list[DeviceReport]:
    """Telemetry with impossible figures made unknown, nameless and surplus devices dropped."""
    out: dict[str, DeviceReport] = {}
    for report in reports[:MAX_DEVICES]:
        if report.device_id and plain(report.device_id) and report.kind in ("gpu", "cpu"):
            out.setdefault(report.device_id, _clean(report))
    return list(out.values())


def _clean(report: DeviceReport) -> DeviceReport:
    total = int_within(report.memory_total_bytes, MAX_BYTES)
    used = int_within(report.memory_used_bytes, MAX_BYTES)
    power = int_within(report.power_mw, MAX_POWER_MW)
    known_source = report.power_source in ("nvml", "declared") and power is not None
    return DeviceReport(
        device_id=report.device_id,
        name=words(report.name),
        kind=report.kind,
        memory_total_bytes=total,
        memory_used_bytes=used if total is None or used is None or used <= total else None,
        memory_reserved_bytes=int_within(report.memory_reserved_bytes, MAX_BYTES),
        utilisation_pct=within(report.utilisation_pct, 100.0),
        power_mw=power if known_source else None,
        power_source=report.power_source if known_source else "unknown",
        power_limit_mw=int_within(report.power_limit_mw, MAX_POWER_MW),
        energy_mj=int_within(report.energy_mj, INT64_MAX) if report.power_source == "nvml" else None,
        temperature_c=report.temperature_c if _sane_temperature(report.temperature_c) else None,
        state=report.state if report.state in ("ok", "lost", "refused", "unavailable") else "unavailable",
        reason=words(report.reason),
        throttle=None if report.throttle is None else [name for name in report.throttle[:MAX_THROTTLES] if plain(name)],
    )


def check_data(policy: DataPolicy | None) -> tuple[str, DataTerms]:
    """(region, terms) as an owner declares them; what makes no sense is not declared."""
    if policy is None:
        return "", UNDECLARED
    country = policy.country if len(policy.country) == 2 and policy.country.isascii() else ""
    terms = DataTerms(
        country=country if country.isalpha() and country.isupper() else "",
        retention_days=int_within(policy.retention_days, MAX_RETENTION_DAYS),
        trains=policy.trains,
        operator=policy.operator if policy.operator in OPERATORS else "",
    )
    return policy.region if plain(policy.region) and len(policy.region) <= MAX_REGION_CHARACTERS else "", terms


def free_memory_bytes(reports: list[DeviceReport]) -> dict[str, int | None]:
    """Free memory by device; None where the device does not say."""
    return {
        report.device_id: (
            None
            if report.memory_total_bytes is None or report.memory_used_bytes is None
            else report.memory_total_bytes - report.memory_used_bytes
        )
        for report in reports
    }


def declared_mw(watts: float | None) -> int | None:
    """Declared watts as whole milliwatts; None where nothing sensible was declared."""
    bounded = within(watts, MAX_NODE_W)
    return None if bounded is None else round(bounded * 1000)


def plain(text: str) -> bool:
    """True for a short text without control characters."""
    return len(text) <= MAX_CHARS and text.isprintable()


def words(text: str) -> str:
    """What a node says for people, as far as it is short; nothing where it has control characters, some of which no
    database stores."""
    head = text[:MAX_CHARS]
    return head if plain(head) else ""


def within(value: float | None, limit: float) -> float | None:
    """The figure if it is finite, and in 0 to `limit`; else it is not known."""
    return value if value is not None and math.isfinite(value) and 0 <= value <= limit else None


def speed(tokens_per_s: float | None) -> float | None:
    """The speed if an engine could have it; else it is not known."""
    bounded = within(tokens_per_s, MAX_TOKENS_PER_S)
    return bounded if bounded is not None and bounded >= MIN_TOKENS_PER_S else None


def int_within(value: int | None, limit: int) -> int | None:
    """The same for a whole number."""
    return value if value is not None and 0 <= value <= limit else None


def _sane_temperature(value: float | None) -> bool:
    return value is not None and math.isfinite(value) and -50 <= value <= 200
