"""`fallow simulate`: replay demand against a fleet, with the real matcher."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.resources import files
from pathlib import Path
from typing import Annotated, Any, Final, NoReturn

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.table import Table

from agent.sizing.devices import DEVICES, find_device
from agent.sizing.speed import Load, SpeedModel
from marketplace.matching.simulate import tables, traces
from marketplace.matching.simulate.benchmark import (
    LOADS,
    SEEDS,
    Cell,
    benchmark_fleet,
    capacity_requests,
    run_benchmark,
)
from marketplace.matching.simulate.fleet import DAY_S, Fleet, FleetError, Hours, make_node, read_fleet
from marketplace.matching.simulate.generator import CONVERSATION, PATTERNS, generate
from marketplace.matching.simulate.policies import POLICIES
from marketplace.matching.simulate.report import FEE_PART, report
from marketplace.matching.simulate.traces import Trace, TraceError, read_trace, traces_folder
from marketplace.matching.simulate.whatif import what_if
from marketplace.matching.simulate.world import simulate
from marketplace.metering.pricing import Rates

app = typer.Typer(
    add_completion=False,
    help="Replay demand against a fleet, with the real matcher.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
BENCHMARK_TRACES: Final = (traces.AZURE_CODE, traces.AZURE_CONV, traces.MOONCAKE)
DEFAULT_LOAD: Final = 0.8
DEFAULT_MINUTES: Final = 20.0
WHAT_IF_LOAD: Final = 0.6
WHAT_IF_REQUESTS: Final = 20_000
WHAT_IF_SEEDS: Final = (1, 2, 3)
NANO_PER_USD: Final = 10**9

console = Console()

TraceArgument = Annotated[
    Path | None,
    typer.Argument(help="A trace: CSV as Azure's of 2023, or JSON lines as Mooncake's; .gz too. Without: made up."),
]
FleetOption = Annotated[Path | None, typer.Option("--fleet", help="A TOML file: see `fallow simulate example`.")]
PatternOption = Annotated[
    str, typer.Option("--pattern", help=f"What demand to make up: {', '.join(PATTERNS)}.", show_default=True)
]
SeedOption = Annotated[int, typer.Option("--seed", min=0, help="The same seed gives the same run.")]
OutOption = Annotated[Path | None, typer.Option("--out", help="A folder for the report as JSON and the plots.")]
PlotOption = Annotated[bool, typer.Option("--plots/--no-plots", help="Draw PNGs into --out.")]


@app.command("run")
def run_command(
    trace_path: TraceArgument = None,
    *,
    fleet_path: FleetOption = None,
    pattern: PatternOption = CONVERSATION.name,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_080, help="Of demand made up.")] = DEFAULT_MINUTES,
    load: Annotated[
        float, typer.Option(min=0.01, max=10, help="Arrivals as a part of what the fleet could serve at its target.")
    ] = DEFAULT_LOAD,
    as_it_is: Annotated[
        bool, typer.Option("--as-it-is", help="Keep the trace's own times; --load is ignored.")
    ] = False,
    policy: Annotated[str, typer.Option(help=f"Who chooses: {', '.join(POLICIES)}.")] = "fallow",
    seed: SeedOption = 1,
    out: OutOption = None,
    plots: PlotOption = True,
) -> None:
    """One run: service, use, cost, and what each owner earned."""
    if policy not in POLICIES:
        _fail(f"there is no policy {policy!r}; there are {', '.join(POLICIES)}")
    fleet = _fleet(fleet_path)
    trace = _trace(trace_path, pattern, minutes, seed)
    if not as_it_is:
        trace = trace.at_rate(capacity_requests(fleet, trace) * load)
    with _counting("simulating", len(trace.requests)) as advance:
        outcome = simulate(fleet, trace, POLICIES[policy], seed, advance)
    made = report(outcome)
    for table in tables.run_tables(made):
        console.print(table)
    if out is not None:
        tables.write_json(out / "report.json", made)
        written = [out / "report.json"]
        if plots:
            written += _library("plots").draw_run(outcome, made, out)
        _say_written(written)


@app.command("benchmark")
def benchmark_command(
    only: Annotated[
        list[Path] | None, typer.Argument(help="Traces; without, the three public ones of the traces' folder.")
    ] = None,
    *,
    loads: Annotated[list[float] | None, typer.Option("--load", min=0.01, max=10)] = None,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="How many.")] = len(SEEDS),
    strict: Annotated[
        bool, typer.Option("--strict", help="A tighter bound: half-second slices, prompts read by their target.")
    ] = False,
    half: Annotated[
        str, typer.Option(help="odd (what was tuned on) or even (held out): every other twentieth of each trace.")
    ] = "",
    out: OutOption = None,
    plots: PlotOption = True,
) -> None:
    """The fixed benchmark: real traces, three loads, five simple rules beside the matcher, the bound of hindsight."""
    bounds = _library("bound")

    def bound(fleet: Fleet, trace: Trace, seed: int) -> float:
        return bounds.hindsight(fleet, trace, seed, strict=strict).tokens_per_s  # type: ignore[no-any-return]

    if half not in ("", "odd", "even"):
        _fail("--half is odd or even")
    every: list[Cell] = []
    for path in only or _public_traces():
        trace = _read(path)
        if half:
            trace = trace.half(odd=half == "odd")
        mine: list[Cell] = []
        with _spinning() as say:
            for cell, _ in run_benchmark(
                trace, loads=loads or LOADS, seeds=range(1, seeds + 1), bound=bound, progress=say
            ):
                mine.append(cell)
        console.print(tables.benchmark_table(mine))
        for sentence in tables.verdicts(mine):
            console.print(sentence, soft_wrap=True, highlight=False)
        every += mine
    if out is not None:
        tables.write_json(out / "benchmark.json", every)
        written = [out / "benchmark.json"]
        if plots:
            written += _library("plots").draw_benchmark(every, out)
        _say_written(written)


@app.command("whatif")
def whatif_command(
    device: Annotated[str, typer.Argument(help="Your card, as its driver calls it: `RTX 4090`.")],
    *,
    ask_input: Annotated[float, typer.Option(min=0, help="USD a million tokens.")] = 0.05,
    ask_output: Annotated[float, typer.Option(min=0, help="USD a million tokens.")] = 0.10,
    hours_a_day: Annotated[float, typer.Option(min=0.1, max=24, help="That you would offer it.")] = 24.0,
    energy: Annotated[float, typer.Option(min=0, help="USD a kWh.")] = 0.16,
    power_cap: Annotated[float, typer.Option(min=0.2, max=1, help="Part of the card's own power.")] = 1.0,
    load: Annotated[float, typer.Option(min=0.01, max=10, help="Of the market without your card.")] = WHAT_IF_LOAD,
    trace_path: Annotated[Path | None, typer.Option("--trace", help="Last week's demand; without: made up.")] = None,
    fleet_path: FleetOption = None,
    pattern: PatternOption = CONVERSATION.name,
    out: OutOption = None,
) -> None:
    """What would my card have earned last week?"""
    spec = find_device(device)
    if spec is None:
        _fail(f"there is no card {device!r} in the table; `fallow simulate devices` lists them")
    fleet = _fleet(fleet_path)
    trace = _trace(trace_path, pattern, WHAT_IF_REQUESTS / PATTERNS[pattern].requests_per_s / 60, 1)
    trace = trace.first(WHAT_IF_REQUESTS).at_rate(capacity_requests(fleet, trace) * load)
    try:
        card = make_node(
            fleet.shape,
            spec,
            name=f"your {spec.name}",
            rates=Rates(
                round(ask_input * NANO_PER_USD), round(ask_input * NANO_PER_USD / 2), round(ask_output * NANO_PER_USD)
            ),
            target=fleet.target,
            power_fraction=power_cap,
            hours=Hours(windows=((0.0, hours_a_day * DAY_S / 24),)) if hours_a_day < 24 else Hours(),
            energy_usd_per_kwh=energy,
        )
    except FleetError as error:
        _fail(str(error))
    with _spinning() as say:
        earnings = what_if(fleet, card, trace, seeds=WHAT_IF_SEEDS, fee_part=FEE_PART, progress=say)
    console.print(tables.earning_table(earnings))
    console.print(next(one for one in earnings if one.ask_factor == 1).sentence(), soft_wrap=True, highlight=False)
    console.print(
        f"From {trace.duration_s / 60:.0f} simulated minutes of {trace.name} at load {load:g}, "
        f"{len(WHAT_IF_SEEDS)} seeds; a fee of {FEE_PART:.0%}. An estimate: speeds are uncalibrated.",
        style="dim",
        soft_wrap=True,
    )
    if out is not None:
        tables.write_json(out / "whatif.json", earnings)
        _say_written([out / "whatif.json"])


@app.command("generate")
def generate_command(
    path: Annotated[Path, typer.Argument(help="Where to write it: .csv, or .jsonl with prefix blocks.")],
    pattern: PatternOption = CONVERSATION.name,
    minutes: Annotated[float, typer.Option(min=0.1, max=10_080)] = 60.0,
    seed: SeedOption = 1,
) -> None:
    """Make up a trace with the statistics of a real one."""
    if path.suffix not in (".csv", ".jsonl"):
        _fail("the name must end with .csv or .jsonl")
    trace = _trace(None, pattern, minutes, seed)
    traces.write_trace(trace, path)
    console.print(f"{len(trace.requests):,} requests in {trace.duration_s:,.0f} s: {path}", highlight=False)


@app.command("example")
def example_command() -> None:
    """Print a fleet file to begin with."""
    sys.stdout.write(files("marketplace.matching.simulate").joinpath("example.toml").read_text(encoding="utf-8"))


@app.command("devices")
def devices_command() -> None:
    """The cards that are known, and what they would do with the fleet's model."""
    table = Table(header_style="bold")
    for name in ("card", "GB", "GB/s", "TFLOP/s 16 bit", "TDP W", "8B tokens/s alone", "8B prompt tokens/s", "source"):
        table.add_column(name, justify="left" if name in ("card", "source") else "right")
    shape = benchmark_fleet().shape
    for spec in DEVICES.values():
        model = SpeedModel(shape, spec)
        table.add_row(
            spec.name,
            f"{spec.memory_bytes / 1e9:.0f}",
            f"{spec.bandwidth_bytes_per_s / 1e9:,.0f}",
            f"{spec.flops / 1e12:,.1f}",
            f"{spec.tdp_w:.0f}" if spec.tdp_w else "?",
            f"{1 / model.per_output_token_s(Load(1, 1, 1024)):.0f}",
            f"{1024 / model.prefill_s(1024):,.0f}",
            spec.source,
        )
    console.print(table)


# --- inputs -----------------------------------------------------------------------------------------------------------


def _fleet(path: Path | None) -> Fleet:
    if path is None:
        return benchmark_fleet()
    try:
        return read_fleet(path)
    except (FleetError, OSError) as error:
        _fail(str(error))


def _trace(path: Path | None, pattern: str, minutes: float, seed: int) -> Trace:
    if path is not None:
        return _read(path)
    if pattern not in PATTERNS:
        _fail(f"there is no pattern {pattern!r}; there are {', '.join(PATTERNS)}")
    try:
        trace = generate(PATTERNS[pattern], minutes * 60, seed)
    except ValueError as error:
        _fail(str(error))
    if not trace.requests:
        _fail("so short a time had no request in it")
    return trace


def _read(path: Path) -> Trace:
    try:
        return read_trace(path)
    except (TraceError, OSError, EOFError) as error:
        _fail(f"{path}: {error}")


def _public_traces() -> list[Path]:
    folder = traces_folder()
    found = [folder / name for name in BENCHMARK_TRACES if (folder / name).exists()] if folder else []
    if not found:
        _fail(
            f"the public traces are not on this machine: put {', '.join(BENCHMARK_TRACES)} into a folder and name it "
            f"in {traces.FOLDER_VARIABLE}, or name trace files; `fallow simulate run` makes demand up"
        )
    return found


# --- outputs ----------------------------------------------------------------------------------------------------------


def _library(module: str) -> Any:
    """A module of ours that needs a library which is large, slow to load, and not everybody's."""
    try:
        return importlib.import_module(f"marketplace.matching.simulate.{module}")
    except ModuleNotFoundError as error:
        _fail(f"the library {error.name!r} is not installed. Mend it with: pip install 'fallow[simulate]'")


def _fail(sentence: str) -> NoReturn:
    print(f"fallow simulate: {sentence}", file=sys.stderr)
    raise typer.Exit(1)


def _say_written(paths: list[Path]) -> None:
    console.print("Written: " + ", ".join(str(path) for path in paths), soft_wrap=True, highlight=False)


@contextmanager
def _counting(label: str, total: int) -> Iterator[Callable[[int], None]]:
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task(label, total=total)
        yield lambda done: progress.update(task, completed=done)


@contextmanager
def _spinning() -> Iterator[Callable[[str], None]]:
    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        TimeElapsedColumn(),
        console=Console(stderr=True),
        transient=True,
    ) as progress:
        task = progress.add_task("", total=None)
        yield lambda text: progress.update(task, description=text)
