"""The four constants of the speed model, fitted to what was measured: one set per (device, variant, engine). Pure.

With the branch of each step known (memory or arithmetic binds), the time per output token is linear in 1 / e_m,
1 / e_c, t0 and t_ar, so a fit is a small non-negative least-squares problem. It is solved again and again: the branch
of every row follows from the last constants, and rows are weighted so that relative, absolute errors are minimised,
which an outlier cannot spoil. A light pull towards the priors decides what the rows leave open.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from agent.sizing.devices import DeviceSpec
from agent.sizing.shape import ModelShape
from agent.sizing.speed import Efficiency, Load, SpeedModel

ROUNDS: Final = 15
SWEEPS: Final = 60
PULL: Final = 0.02
"""Weight of the priors, as a part of a row per root of the number of rows."""
SMALLEST_RESIDUAL: Final = 0.02
"""Rows that fit better than this count as fitting this well, lest one row take all the weight."""
HIGHEST_EFFICIENCY: Final = 1.5
"""Above 1 where a figure of the data sheet or of the model is too low, never far above."""
LOWEST_EFFICIENCY: Final = 0.02
MAX_MEASUREMENTS: Final = 10_000
UNCALIBRATED_BAND: Final = (0.8, 2.1)
"""Measured time over predicted, tenth and ninetieth percentile, of 1,325 measured configurations of four vendors' cards
in three engines. An uncalibrated prediction is more often too fast than too slow."""
FEWEST_FOR_BAND: Final = 5
"""With fewer measurements their own scatter says too little, and the uncalibrated band is narrowed only by half."""

_PRIOR: Final = Efficiency()


@dataclass(frozen=True, slots=True)
class Measurement:
    """A steady load, and the mean time between two tokens of one request that was seen under it."""

    load: Load
    per_token_s: float
    devices: int = 1
    mixed: bool = True
    """False if nothing was prefilled meanwhile: a fixed batch, decoding."""


@dataclass(frozen=True, slots=True)
class Calibration:
    """Fitted constants, and how well they fit."""

    efficiency: Efficiency
    measurements: int
    median_error: float
    """Of the rows it was fitted on, as a part of the measured time."""
    low: float
    """Measured over predicted, tenth percentile..."""
    high: float
    """...and ninetieth."""


@dataclass(frozen=True, slots=True)
class Band:
    """A predicted time, and between what it is expected to lie eight times in ten. Seconds."""

    expected_s: float
    low_s: float
    high_s: float

    def sentence(self) -> str:
        """`23.1 ms a token (20.0 to 27.5)`."""
        return f"{self.expected_s * 1e3:.3g} ms a token ({self.low_s * 1e3:.3g} to {self.high_s * 1e3:.3g})"


UNCALIBRATED: Final = Calibration(_PRIOR, 0, 0.2, *UNCALIBRATED_BAND)
"""The priors: what is believed of a device that was never measured."""


def predicted_s(model: SpeedModel, load: Load, *, mixed: bool = True) -> float:
    """Mean time between two tokens of one request, in seconds. See Measurement.mixed."""
    if mixed:
        return model.per_output_token_s(load)
    return model.decode_step_s(load.batch, load.input_tokens + load.output_tokens / 2)


def band(model: SpeedModel, load: Load, calibration: Calibration = UNCALIBRATED) -> Band:
    """The time per token under a load, with its band. `model` should carry the calibration's efficiency."""
    expected = model.per_output_token_s(load)
    return Band(expected, expected * calibration.low, expected * calibration.high)


def calibrate(shape: ModelShape, device: DeviceSpec, rows: Sequence[Measurement]) -> Calibration:
    """Constants for this model on this kind of device in the engine that was measured.

    Rows may differ in batch, lengths and number of devices. Raises ValueError for a measured time that is no positive
    number, or for more than MAX_MEASUREMENTS rows.
    """
    if len(rows) > MAX_MEASUREMENTS:
        raise ValueError(f"at most {MAX_MEASUREMENTS} measurements")
    if any(not math.isfinite(row.per_token_s) or row.per_token_s <= 0 for row in rows):
        raise ValueError("a measured time must be a number above zero")
    if not rows:
        return UNCALIBRATED
    terms = [_terms(shape, device, row) for row in rows]
    x = _PRIOR_X
    for _ in range(ROUNDS):
        x = _solve(terms, rows, x)
    efficiency = _efficiency(x)
    ratios = sorted(
        row.per_token_s / predicted_s(SpeedModel(shape, device, row.devices, efficiency), row.load, mixed=row.mixed)
        for row in rows
    )
    low, high = _spread(ratios)
    return Calibration(efficiency, len(rows), _percentile(sorted(abs(1 - 1 / r) for r in ratios), 0.5), low, high)


_Vector = tuple[float, float, float, float]
"""1 / e_m, 1 / e_c, t0 and t_ar."""
_PRIOR_X: Final[_Vector] = (1 / _PRIOR.memory, 1 / _PRIOR.compute, _PRIOR.step_overhead_s, _PRIOR.all_reduce_s)


@dataclass(frozen=True, slots=True)
class _Terms:
    memory_s: float
    """At full efficiency, as the others."""
    compute_s: float
    prefill_s: float
    steps: float
    """Fixed times paid a token: its own step, and its part of others' prefills."""
    layers: float
    """All-reduces paid a token, in layers; 0 on one device."""

    def coefficients(self, x: _Vector) -> _Vector:
        if self.memory_s * x[0] >= self.compute_s * x[1]:
            return self.memory_s, self.prefill_s, self.steps, self.layers
        return 0.0, self.compute_s + self.prefill_s, self.steps, self.layers


def _terms(shape: ModelShape, device: DeviceSpec, row: Measurement) -> _Terms:
    ideal = SpeedModel(shape, device, row.devices, Efficiency(1.0, 1.0, 0.0, 0.0))
    load = row.load
    step = ideal.step_cost(load.batch)
    context = load.batch * (load.input_tokens + load.output_tokens / 2)
    share = load.batch / load.output_tokens if row.mixed else 0.0
    cached = load.input_tokens * load.cached_fraction
    return _Terms(
        memory_s=step.weights_s + step.kv_s * context,
        compute_s=step.sequence_s * load.batch + step.attention_s * context,
        prefill_s=share * ideal.prefill_s(load.input_tokens - cached, cached),
        steps=1.0 + share,
        layers=float(shape.layers) if row.devices > 1 else 0.0,
    )


def _solve(terms: Sequence[_Terms], rows: Sequence[Measurement], x: _Vector) -> _Vector:
    """One round: branches and weights by `x`, then the best non-negative constants. In units of the priors."""
    pull = PULL * PULL * len(rows)
    matrix = [[pull if i == j else 0.0 for j in range(4)] for i in range(4)]
    right = [pull] * 4
    for term, row in zip(terms, rows, strict=True):
        line = [c * p / row.per_token_s for c, p in zip(term.coefficients(x), _PRIOR_X, strict=True)]
        residual = abs(sum(c * v / p for c, v, p in zip(line, x, _PRIOR_X, strict=True)) - 1.0)
        weight = 1.0 / max(residual, SMALLEST_RESIDUAL)
        for i in range(4):
            right[i] += weight * line[i]
            for j in range(4):
                matrix[i][j] += weight * line[i] * line[j]
    solved = _descend(matrix, right, [v / p for v, p in zip(x, _PRIOR_X, strict=True)])
    return (solved[0] * _PRIOR_X[0], solved[1] * _PRIOR_X[1], solved[2] * _PRIOR_X[2], solved[3] * _PRIOR_X[3])


def _descend(matrix: list[list[float]], right: list[float], start: list[float]) -> list[float]:
    """Coordinate descent on a small positive definite system, no coordinate below zero."""
    z = list(start)
    for _ in range(SWEEPS):
        for i in range(len(z)):
            rest = right[i] - sum(matrix[i][j] * z[j] for j in range(len(z)) if j != i)
            z[i] = max(0.0, rest / matrix[i][i])
    return z


def _efficiency(x: _Vector) -> Efficiency:
    def reached(inverse: float) -> float:
        return min(HIGHEST_EFFICIENCY, max(LOWEST_EFFICIENCY, 1.0 / inverse if inverse else HIGHEST_EFFICIENCY))

    return Efficiency(reached(x[0]), reached(x[1]), x[2], x[3])


def _spread(ratios: list[float]) -> tuple[float, float]:
    if len(ratios) < FEWEST_FOR_BAND:
        return math.sqrt(UNCALIBRATED_BAND[0]), math.sqrt(UNCALIBRATED_BAND[1])
    return min(_percentile(ratios, 0.1), 1.0), max(_percentile(ratios, 0.9), 1.0)


def _percentile(ordered: Sequence[float], part: float) -> float:
    """Linear between neighbours."""
    at = part * (len(ordered) - 1)
    below = math.floor(at)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (at - below) * (ordered[above] - ordered[below])
