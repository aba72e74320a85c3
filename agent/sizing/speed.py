"""How fast a device decodes and prefills a model: a roofline, predicted from their own figures. Pure.

Memory bandwidth bounds decoding, arithmetic bounds prefill:

    decode step   t_d(B, c) = max((W + B c k) / (n BW e_m), (2 P B + 4 L H c B) / (n F e_c)) + t0 + [n > 1] L t_ar
    prefill       t_p(m, h) = (2 P m + 2 L H m (m + 2 h)) / (n F e_c) + t0
    per token     TPOT(B)   = t_d(B, I + O/2) + (B / O) t_p(I (1 - hit), I hit)

with B running sequences, c their mean context, m uncached and h cached prompt tokens, I and O the tokens in and out of
a request, n devices, W, P, L, H and k as in `ModelShape`. Uncalibrated, this is some 20% off what is measured; fitted
to measurements of the same model, device and engine, under 10%.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.sizing.shape import ModelShape


@dataclass(frozen=True, slots=True)
class DeviceSpec:
    """A device's own figures, from its maker's data sheet."""

    name: str
    memory_bytes: int
    bandwidth_bytes_per_s: float
    flops: float
    """Dense, at the precision that the weights are multiplied in (16 bit unless said)."""


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of the data sheet is reached, and what every step costs besides. The defaults are priors."""

    memory: float = 0.75
    compute: float = 0.70
    step_overhead_s: float = 0.0005
    all_reduce_s: float = 10e-6
    """Two all-reduces of one layer; counted only with more than one device."""


@dataclass(frozen=True, slots=True)
class Load:
    """A steady load of like requests."""

    batch: int
    input_tokens: int
    output_tokens: int
    cached_fraction: float = 0.0
    """Part of the input that the prefix cache has, 0 to 1."""


DEVICES: Final[dict[str, DeviceSpec]] = {
    spec.name: spec
    for spec in (
        DeviceSpec("A100-80 SXM", 80_000_000_000, 2.039e12, 312e12),
        DeviceSpec("H100 SXM", 80_000_000_000, 3.35e12, 989e12),
        DeviceSpec("H100 PCIe", 80_000_000_000, 2.0e12, 756e12),
        DeviceSpec("H200", 141_000_000_000, 4.8e12, 989e12),
        DeviceSpec("L40S", 48_000_000_000, 864e9, 362e12),
        DeviceSpec("RTX 4090", 24_000_000_000, 1.008e12, 165e12),
        DeviceSpec("RTX 3090", 24_000_000_000, 936e9, 71e12),
    )
}
"""Cards that the formulas were checked on. A device that is not here is measured instead."""


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """One model on one device, or on several in tensor parallel. All times in seconds, all sizes in tokens."""

    shape: ModelShape
    device: DeviceSpec
    devices: int = 1
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError("at least one device is needed")

    def decode_step_s(self, batch: int, context: float) -> float:
        """One step of `batch` sequences whose mean context is `context`; each gains one token."""
        shape = self.shape
        moved_bytes = shape.weight_bytes + batch * context * shape.kv_bytes_per_token
        operations = 2 * shape.active_parameters * batch + 4 * shape.layers * shape.hidden * context * batch
        return max(moved_bytes / self._bandwidth, operations / self._flops) + self._step_overhead_s

    def prefill_s(self, uncached: float, cached: float = 0.0) -> float:
        """Working through `uncached` prompt tokens behind `cached` ones. 0 for nothing to do."""
        if uncached <= 0:
            return 0.0
        shape = self.shape
        attention = 2 * shape.layers * shape.hidden * uncached * (uncached + 2 * cached)
        return (2 * shape.active_parameters * uncached + attention) / self._flops + self.efficiency.step_overhead_s

    def per_output_token_s(self, load: Load) -> float:
        """Time between two tokens of one request, prefill of the others included."""
        cached = load.input_tokens * load.cached_fraction
        step = self.decode_step_s(load.batch, load.input_tokens + load.output_tokens / 2)
        return step + load.batch / load.output_tokens * self.prefill_s(load.input_tokens - cached, cached)

    def first_token_s(self, uncached: float, cached: float = 0.0, wait_s: float = 0.0) -> float:
        """Until the first token: what is waited for, and the prefill, whose last step makes that token."""
        return wait_s + self.prefill_s(uncached, cached)

    def requests_per_s(self, load: Load) -> float:
        """What the device completes when always `batch` requests run."""
        cached = load.input_tokens * load.cached_fraction
        first = self.prefill_s(load.input_tokens - cached, cached)
        return load.batch / (load.output_tokens * self.per_output_token_s(load) + first)

    def output_tokens_per_s(self, load: Load) -> float:
        """Output tokens a second over all requests."""
        return self.requests_per_s(load) * load.output_tokens

    @property
    def _bandwidth(self) -> float:
        return self.devices * self.device.bandwidth_bytes_per_s * self.efficiency.memory

    @property
    def _flops(self) -> float:
        return self.devices * self.device.flops * self.efficiency.compute

    @property
    def _step_overhead_s(self) -> float:
        all_reduce = self.shape.layers * self.efficiency.all_reduce_s if self.devices > 1 else 0.0
        return self.efficiency.step_overhead_s + all_reduce


def cold_start_s(weight_bytes: int, slowest_bytes_per_s: float, init_s: float) -> float:
    """Until a model that is not loaded serves: its bytes over the slowest of disk, network and bus, and the start."""
    if slowest_bytes_per_s <= 0:
        raise ValueError("a rate must be above zero")
    return weight_bytes / slowest_bytes_per_s + init_s
