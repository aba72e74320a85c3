"""Runs and benchmarks as tables for a terminal, and as JSON."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.table import Table

from marketplace.matching.simulate.benchmark import Cell, Spread
from marketplace.matching.simulate.report import Percentiles, Report, Use
from marketplace.matching.simulate.whatif import Earning


def write_json(path: Path, value: Any) -> None:
    """A record, or a list of them."""
    shown = [asdict(one) for one in value] if isinstance(value, list) else asdict(value)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(shown, indent=1) + "\n", encoding="utf-8")


def run_tables(made: Report) -> list[Table]:
    """Service, kinds of nodes, owners."""
    service = _table(f"{made.trace}, {made.policy}, seed {made.seed}", "", "")
    for name, value in (
        ("requests", f"{made.requests:,} in {made.duration_s:,.0f} s"),
        (
            "served / refused / interrupted / moved",
            f"{made.done:,} / {made.refused:,} / {made.interrupted:,} / {made.moved:,}",
        ),
        (
            "goodput",
            f"{made.goodput_tokens_per_s:,.0f} of {made.offered_tokens_per_s:,.0f} tokens/s, {made.in_time:.1%}",
        ),
        ("first token p50 / p95 / p99", _seconds(made.ttft_s)),
        ("per token p50 / p95 / p99", _milliseconds(made.tpot_s)),
        ("USD a million tokens (those in time)", f"{made.usd_per_mtok:.4f} ({made.usd_per_mtok_in_time:.4f})"),
        ("prefix hit rate", f"{made.prefix_hit_rate:.1%}"),
        ("cold loads", f"{made.cold_loads}"),
        ("use: rented / busy / token share", _use(made.use)),
        ("busiest node over the mean of its kind", f"{made.busiest_over_mean:.2f}"),
        ("fairness among owners of one kind (1 is even)", f"{made.fairness:.3f}"),
    ):
        service.add_row(name, value)
    if made.refused:
        service.add_row("refused by prompt length", _sizes(made))
    kinds = _table("by kind", "kind", "nodes", "offered h", "rented / busy / token", "busiest", "requests", "hits")
    for kind in made.kinds:
        kinds.add_row(
            kind.kind,
            str(kind.nodes),
            f"{kind.offered_h:,.1f}",
            _use(kind.use),
            f"{kind.busiest_over_mean:.2f}",
            f"{kind.requests:,}",
            f"{kind.prefix_hit_rate:.1%}",
        )
    return [service, kinds, _owner_table(made)]


def _owner_table(made: Report) -> Table:
    table = _table(
        "by owner, USD",
        "owner",
        "offered h",
        "rented / busy / token",
        "gross",
        "fee",
        "kWh",
        "power",
        "net",
        "net/h",
        "yield",
    )
    for owner in made.owners:
        table.add_row(
            owner.owner,
            f"{owner.offered_h:,.2f}",
            _use(owner.use),
            f"{owner.gross_usd:.4f}",
            f"{owner.fee_usd:.4f}",
            f"{owner.energy_kwh:.2f}",
            f"{owner.energy_usd:.4f}",
            f"{owner.net_usd:.4f}",
            f"{owner.net_usd_per_offered_h:.4f}",
            "unknown" if owner.yield_a_year is None else f"{owner.yield_a_year:.1%}",
        )
    return table


def benchmark_table(cells: Sequence[Cell]) -> Table:
    """One trace: every load and policy. Means over the seeds, the range of the main figure beside it."""
    table = _table(
        f"{cells[0].trace}: {cells[0].seeds} seeds" if cells else "",
        "load",
        "policy",
        "of bound (range)",
        "USD/M",
        "in time",
        "first token s",
        "per token ms",
        "busiest",
        "hits",
        "owners USD/h",
        "refused (long)",
        "cut off",
    )
    load = None
    for cell in cells:
        if load is not None and cell.load != load:
            table.add_section()
        load = cell.load
        table.add_row(
            f"{cell.load:g}",
            cell.policy,
            f"{cell.of_bound.mean:.3f} ({cell.of_bound.least:.3f}-{cell.of_bound.most:.3f})",
            f"{cell.usd_per_mtok.mean:.4f}",
            f"{cell.usd_per_mtok_in_time.mean:.4f}",
            _three(cell.ttft_p50_s, cell.ttft_p95_s, cell.ttft_p99_s, 1, 2),
            _three(cell.tpot_p50_s, cell.tpot_p95_s, cell.tpot_p99_s, 1e3, 0),
            f"{cell.busiest_over_mean.mean:.2f}",
            f"{cell.prefix_hit_rate.mean:.1%}",
            f"{cell.owners_net_usd_per_h.mean:.3f}",
            f"{cell.refused.mean:,.0f} ({cell.refused_long.mean:.0%})",
            f"{cell.interrupted.mean:.0f}",
        )
    return table


def verdicts(cells: Sequence[Cell]) -> list[str]:
    """Sentences on a trace: what was reached, and where the real matcher loses."""
    ours = [cell for cell in cells if cell.policy == "fallow"]
    priced = [cell for cell in cells if cell.policy.startswith("fallow") and cell.policy != "fallow, no guard"]
    bare = {cell.load: cell.of_bound.mean for cell in cells if cell.policy == "fallow, no guard"}
    found = []
    for cell in ours:
        rivals = [other for other in cells if other.load == cell.load and not other.policy.startswith("fallow")]
        if not rivals:
            continue
        best = max(rivals, key=lambda other: other.of_bound.mean)
        cheap = min(rivals, key=lambda other: other.usd_per_mtok_in_time.mean)
        own = min((c for c in priced if c.load == cell.load), key=lambda c: c.usd_per_mtok_in_time.mean)
        hits = max(rivals, key=lambda other: other.prefix_hit_rate.mean)
        found.append(
            f"load {cell.load:g}: {cell.of_bound.mean:.1%} of the bound"
            f" ({'reached' if cell.of_bound.mean >= 0.9 else 'MISSED'}: 90%), best baseline {best.of_bound.mean:.1%}"
            f" ({best.policy}), without the guard {bare.get(cell.load, cell.of_bound.mean):.1%};"
            f" a million tokens in time {own.usd_per_mtok_in_time.mean:.4f} USD ({own.policy}),"
            f" {'cheaper than' if own.usd_per_mtok_in_time.mean < cheap.usd_per_mtok_in_time.mean else 'DEARER than'}"
            f" the cheapest baseline's {cheap.usd_per_mtok_in_time.mean:.4f} ({cheap.policy});"
            f" busiest node {cell.busiest_over_mean.mean:.2f} of the mean"
            f" ({'even' if cell.busiest_over_mean.most < 1.3 else 'HERD'})"
            + (
                f"; prefix hits {cell.prefix_hit_rate.mean:.1%} against {hits.prefix_hit_rate.mean:.1%} ({hits.policy})"
                if hits.prefix_hit_rate.mean > 0
                else ""
            )
        )
    return found


def earning_table(earnings: Iterable[Earning]) -> Table:
    """What each ask would have brought."""
    table = _table("a week, USD", "ask in / out", "net (range)", "gross", "power", "rented", "busy", "tokens")
    for one in earnings:
        table.add_row(
            f"{one.usd_per_mtok_input:.3g} / {one.usd_per_mtok_output:.3g}",
            f"{one.net_usd:.2f} ({one.least_usd:.2f}-{one.most_usd:.2f})",
            f"{one.gross_usd:.2f}",
            f"{one.energy_usd:.2f}",
            f"{one.rented:.0%}",
            f"{one.busy:.0%}",
            f"{one.tokens / 1e6:,.0f} M",
        )
    return table


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="left" if number == 0 or column in ("policy", "") else "right")
    table.show_header = any(columns)
    return table


def _seconds(values: Percentiles) -> str:
    return f"{values.p50:.2f} / {values.p95:.2f} / {values.p99:.2f} s"


def _milliseconds(values: Percentiles) -> str:
    return f"{values.p50 * 1e3:.1f} / {values.p95 * 1e3:.1f} / {values.p99 * 1e3:.1f} ms"


def _use(use: Use) -> str:
    return f"{use.rented:.0%} / {use.busy:.0%} / {use.token:.0%}"


def _three(p50: Spread, p95: Spread, p99: Spread, factor: float, digits: int) -> str:
    return " / ".join(f"{value.mean * factor:.{digits}f}" for value in (p50, p95, p99))


def _sizes(made: Report) -> str:
    parts = []
    for size in made.refused_by_size:
        label = f"< {size.below_tokens:,}" if size.below_tokens else "longer"
        parts.append(f"{label}: {size.refused / size.requests:.0%}")
    return ", ".join(parts)
