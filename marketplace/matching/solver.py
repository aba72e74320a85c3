"""The planner's linear program, for HiGHS through scipy: how much of each device's time each variant should have. Pure.

    maximise    sum gain(d, v) x(d, v)
    subject to  sum over v of x(d, v) <= 1                     a device's time
                sum over d of speed(d, v) x(d, v) <= demand(v)
                sum over d, v of watts(d) x(d, v) <= fuse      by circuit
                0 <= x <= 1

Its value bounds every plan from above. A vertex of it has few fractions, so rounding it loses little; what it leaves is
filled by the planner's own greedy. Needs the `simulate` extra; only this module knows the solver.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from marketplace.matching.planner import State

TIME_LIMIT_S: Final = 10.0


def available() -> bool:
    """True if the solver is installed."""
    try:
        import scipy.optimize  # noqa: F401, PLC0415  # an extra; the planner does without it
    except ImportError:
        return False
    return True


def solve(state: State, allowed: Sequence[Sequence[str]]) -> tuple[float, list[tuple[float, int, str]]] | None:
    """The bound in nano-USD, and (share, device, variant) of everything that gets a share; None if it found nothing in
    TIME_LIMIT_S. Looks at an empty plan."""
    import numpy  # noqa: PLC0415  # an extra; the planner does without it
    from scipy.optimize import linprog  # noqa: PLC0415
    from scipy.sparse import coo_matrix  # noqa: PLC0415

    variant_row = {name: len(state.devices) + at for at, name in enumerate(state.demands)}
    circuit_row = {name: len(state.devices) + len(variant_row) + at for at, name in enumerate(state.circuits_w)}
    gains: list[float] = []
    names: list[tuple[int, str]] = []
    rows: list[int] = []
    columns: list[int] = []
    values: list[float] = []
    for at, variants in enumerate(allowed):
        device = state.devices[at]
        for variant in variants:
            speed = device.tokens_per_s[variant]
            gain, _ = state.gain(at, variant, most=speed)
            if gain <= 0.0:
                continue
            column = len(gains)
            gains.append(-gain)
            names.append((at, variant))
            cells = [(at, 1.0), (variant_row[variant], speed)]
            if device.circuit in circuit_row:
                cells.append((circuit_row[device.circuit], device.load_w))
            for row, value in cells:
                rows.append(row)
                columns.append(column)
                values.append(value)
    if not gains:
        return 0.0, []
    bounds = [1.0] * len(state.devices)
    bounds += [state.unmet[name] for name in state.demands]
    bounds += list(state.circuits_w.values())
    matrix = coo_matrix((values, (rows, columns)), shape=(len(bounds), len(gains))).tocsr()
    solved = linprog(
        numpy.array(gains),
        A_ub=matrix,
        b_ub=bounds,
        bounds=(0, 1),
        method="highs",
        options={"time_limit": TIME_LIMIT_S},
    )
    if solved.x is None:
        return None
    shares = [(float(share), at, variant) for share, (at, variant) in zip(solved.x, names, strict=True) if share > 1e-6]
    return -float(solved.fun), shares
