"""How fast a device decodes and prefills a model: a roofline, predicted from their own figures. Pure.

Memory bandwidth bounds decoding, arithmetic bounds prefill:

    decode step   t_d(B, c) = max((W + B c k) / (n BW e_m), (2 P B + 4 L H c B) / (n F e_c)) + t0 + [n > 1] L t_ar
    prefill       t_p(m, h) = (2 P m + 2 L H m (m + 2 h)) / (n F e_c) + t0
    per token     TPOT(B)   = t_d(B, I + O/2) + (B / O) t_p(I (1 - hit), I hit)

with B running sequences, c their mean context, m uncached and h cached prompt tokens, I and O the tokens in and out of
a request, n devices, W, P, L, H and k as in `ModelShape`. Of a mixture of experts a step reads only the experts that
some sequence visits: W (1 - (1 - P/N)^B) of its N parameters' bytes, which for a dense model is W.

Uncalibrated, this is some 20% off what is measured; fitted to measurements of the same model, device and engine (see
`calibrate`), under 10%.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.sizing.devices import DEVICES, DeviceSpec
from agent.sizing.shape import ModelShape

__all__ = ["DEVICES", "DeviceSpec", "Efficiency", "Load", "SpeedModel", "StepCost", "cold_start_s"]


@dataclass(frozen=True, slots=True)
class Efficiency:
    """What part of the data sheet is reached, and what every step costs besides. The defaults are priors."""

    memory: float = 0.75
    compute: float = 0.70
    step_overhead_s: float = 0.001
    all_reduce_s: float = 20e-6
    """Two all-reduces of one layer; counted only with more than one device."""


@dataclass(frozen=True, slots=True)
class Load:
    """A steady load of like requests."""

    batch: float
    """Sequences that run at once; a mean need not be whole."""
    input_tokens: float
    output_tokens: float
    cached_fraction: float = 0.0
    """Part of the input that the prefix cache has, 0 to 1."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """What one decode step takes, in seconds: linear in sequences and in tokens of context on either side of a max."""

    weights_s: float
    """Reading the weights."""
    kv_s: float
    """Reading one cached token."""
    sequence_s: float
    """Multiplying for one sequence."""
    attention_s: float
    """Attending to one cached token."""
    fixed_s: float
    """Everything besides."""

    def step_s(self, sequences: float, context_tokens: float) -> float:
        """A step of so many sequences that hold so many tokens together."""
        memory = self.weights_s + self.kv_s * context_tokens
        compute = self.sequence_s * sequences + self.attention_s * context_tokens
        return max(memory, compute) + self.fixed_s


@dataclass(frozen=True, slots=True)
class SpeedModel:
    """One model on one device, or on several in tensor parallel. All times in seconds, all sizes in tokens.

    The constants of `efficiency` belong to one model on one kind of device in one engine.
    """

    shape: ModelShape
    device: DeviceSpec
    devices: int = 1
    efficiency: Efficiency = Efficiency()

    def __post_init__(self) -> None:
        if self.devices < 1:
            raise ValueError("at least one device is needed")

    def decode_step_s(self, batch: float, context: float) -> float:
        """One step of `batch` sequences whose mean context is `context`; each gains one token."""
        return self.step_cost(batch).step_s(batch, batch * context)

    def step_cost(self, batch: float) -> StepCost:
        """The parts of a decode step. They depend on `batch` only for a mixture of experts."""
        shape = self.shape
        visited = 1.0 - (1.0 - shape.active_parameters / shape.parameters) ** batch
        return StepCost(
            weights_s=shape.weight_bytes * visited / self._bandwidth,
            kv_s=shape.kv_bytes_per_token / self._bandwidth,
            sequence_s=2 * shape.active_parameters / self._flops,
            attention_s=4 * shape.layers * shape.hidden / self._flops,
            fixed_s=self._step_overhead_s,
        )

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
