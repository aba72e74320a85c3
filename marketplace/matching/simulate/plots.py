"""Pictures of a run and of the benchmark, as PNG. The sole importer of matplotlib."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Final

from matplotlib.figure import Figure

from marketplace.matching.simulate import engine as states
from marketplace.matching.simulate.benchmark import Cell
from marketplace.matching.simulate.report import Report, in_time, per_token_s
from marketplace.matching.simulate.world import Outcome

DPI: Final = 130
SLICES: Final = 120
"""Points of a timeline."""
INK: Final = "#22303c"
BLUE: Final = "#2f6db3"
ORANGE: Final = "#d9822b"
GREY: Final = "#b8c0c8"
GREEN: Final = "#3f8f5b"
_COLOURS: Final = (BLUE, "#7fb2e5", GREEN, GREY, "#9aa5b1", "#7b8794", ORANGE, "#c0504d")


def draw_run(outcome: Outcome, made: Report, folder: Path) -> list[Path]:
    """latency.png, use.png, timeline.png and owners.png of one run."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _save(_latency(outcome), folder / "latency.png"),
        _save(_use(made), folder / "use.png"),
        _save(_timeline(outcome), folder / "timeline.png"),
        _save(_owners(made), folder / "owners.png"),
    ]


def draw_benchmark(cells: Sequence[Cell], folder: Path) -> list[Path]:
    """goodput.png and cost.png over all traces, loads and policies."""
    folder.mkdir(parents=True, exist_ok=True)
    return [
        _save(_bars(cells, "of_bound", "goodput over the bound of hindsight", line=0.9), folder / "goodput.png"),
        _save(_bars(cells, "usd_per_mtok_in_time", "USD a million tokens in time"), folder / "cost.png"),
    ]


def _save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=DPI)
    return path


def _figure(width: float, height: float) -> Figure:
    return Figure(figsize=(width, height), layout="constrained")


def _latency(outcome: Outcome) -> Figure:
    fleet = outcome.fleet
    done = [run for run in outcome.runs if run.state == states.DONE]
    figure = _figure(9, 3.6)
    first, token = figure.subplots(1, 2)
    # Prompts differ in what is useful to them, so their own target is the measure.
    parts = sorted((run.first_s + fleet.network_s - run.at_s) / fleet.target.ttft_s(run.prompt) for run in done)
    paces = sorted(1e3 * per_token_s(run) for run in done if run.output > 1)
    for axes, values, limit, label in (
        (first, parts, 1.0, "first token, as a part of its target"),
        (token, paces, 1e3 * fleet.target.tpot_s, "mean time per token, ms"),
    ):
        shares = [(place + 1) / len(values) for place in range(len(values))]
        axes.step(values, shares, color=BLUE, where="post")
        axes.axvline(limit, color=ORANGE, linestyle="--", linewidth=1, label="target")
        axes.set_xlim(0, max(1.5 * limit, values[int(0.99 * (len(values) - 1))] if values else limit))
        axes.set_ylim(0, 1)
        axes.set_xlabel(label)
        axes.set_ylabel("part of the requests served")
        axes.grid(alpha=0.25)
        axes.legend(frameon=False, loc="lower right")
    figure.suptitle(f"{outcome.trace.name}: {outcome.policy}", color=INK)
    return figure


def _use(made: Report) -> Figure:
    figure = _figure(8, 3.8)
    axes = figure.subplots()
    width = 0.27
    for offset, (name, colour) in enumerate((("rented", GREY), ("busy", BLUE), ("token", GREEN))):
        places = [place + (offset - 1) * width for place in range(len(made.kinds))]
        axes.bar(places, [getattr(kind.use, name) for kind in made.kinds], width, label=f"{name} share", color=colour)
    axes.set_xticks(range(len(made.kinds)), [f"{kind.kind}\n{kind.nodes} nodes" for kind in made.kinds])
    axes.axhline(1, color=INK, linewidth=0.6)
    axes.set_ylabel("part of the offered time")
    axes.set_title(f"{made.trace}: three meanings of utilisation", color=INK)
    axes.legend(frameon=False, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.16))
    return figure


def _timeline(outcome: Outcome) -> Figure:
    width_s = max(outcome.duration_s, 1.0) / SLICES
    offered, good, refused = [0.0] * SLICES, [0.0] * SLICES, [0.0] * SLICES
    for run in outcome.runs:
        place = min(SLICES - 1, int(run.at_s / width_s))
        size = (run.prompt + run.output) / width_s
        offered[place] += size
        good[place] += size if run.state == states.DONE and in_time(run, outcome.fleet) else 0.0
        refused[place] += size if run.state == states.REFUSED else 0.0
    figure = _figure(9, 3.4)
    axes = figure.subplots()
    times = [place * width_s for place in range(SLICES)]
    axes.fill_between(times, offered, step="post", color=GREY, alpha=0.6, label="arrived")
    axes.step(times, good, where="post", color=BLUE, label="served in time")
    axes.step(times, refused, where="post", color=ORANGE, linewidth=1, label="refused")
    axes.set_xlim(0, outcome.duration_s or 1)
    axes.set_ylim(0)
    axes.set_xlabel("arrival, s")
    axes.set_ylabel("tokens a second")
    axes.set_title(f"{outcome.trace.name}: demand and what became of it", color=INK)
    axes.legend(frameon=False, loc="upper right")
    return figure


def _owners(made: Report) -> Figure:
    owners = sorted(made.owners, key=lambda owner: owner.net_usd_per_offered_h)[-40:]
    figure = _figure(7.5, 1.2 + 0.22 * len(owners))
    axes = figure.subplots()
    places = range(len(owners))
    axes.barh(places, [owner.net_usd_per_offered_h for owner in owners], color=GREEN)
    axes.set_yticks(places, [owner.owner for owner in owners], fontsize=7)
    axes.set_ylim(-0.6, len(owners) - 0.4)
    axes.axvline(0, color=INK, linewidth=0.6)
    axes.set_xlabel("USD an offered hour, after fee and energy")
    axes.set_title(f"{made.trace}: what owners earned", color=INK)
    axes.grid(axis="x", alpha=0.25)
    return figure


def _bars(cells: Sequence[Cell], name: str, label: str, line: float | None = None) -> Figure:
    traces = list(dict.fromkeys(cell.trace for cell in cells))
    policies = list(dict.fromkeys(cell.policy for cell in cells))
    loads = sorted({cell.load for cell in cells})
    figure = _figure(4.4 * len(traces), 4.2)
    width = 0.85 / len(policies)
    for axes, trace in zip(figure.subplots(1, len(traces), squeeze=False)[0], traces, strict=True):
        for number, policy in enumerate(policies):
            mine = {cell.load: getattr(cell, name) for cell in cells if (cell.trace, cell.policy) == (trace, policy)}
            shown = [load for load in loads if load in mine]
            axes.bar(
                [loads.index(load) + (number - (len(policies) - 1) / 2) * width for load in shown],
                [mine[load].mean for load in shown],
                width,
                yerr=[
                    [mine[load].mean - mine[load].least for load in shown],
                    [mine[load].most - mine[load].mean for load in shown],
                ],
                error_kw={"linewidth": 0.7},
                color=_COLOURS[number % len(_COLOURS)],
                label=policy,
            )
        if line is not None:
            axes.axhline(line, color=INK, linestyle="--", linewidth=0.8)
        axes.set_xticks(range(len(loads)), [f"load {load:g}" for load in loads])
        axes.set_title(trace, fontsize=10, color=INK)
        axes.set_ylabel(label if trace == traces[0] else "")
    handles, labels = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, frameon=False, fontsize=8)
    return figure
