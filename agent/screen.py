"""What `fallow agent status`, `top`, `models` and `earnings` show. Rendering only: facts in, tables out."""

from __future__ import annotations

import time
from collections.abc import Iterable

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

from agent import home as folder
from agent.earnings import Day, usd
from agent.home import Status
from agent.protocol import DeviceReport
from agent.runnable import Verdict, gib


def status_lines(found: Status) -> list[str]:
    """A running agent, in sentences."""
    minutes = int(time.time() - found.started_at_s) // 60
    link = f"connected to {found.url}" if found.connected else f"not connected: {found.last_error or 'connecting'}"
    counters = found.counters
    lines = [f"Running for {minutes} min (process {found.pid}), {link}"]
    if not folder.is_fresh(found):
        lines.append(f"It has not said anything for {time.time() - found.written_at_s:.0f} s.")
    takes_work, reason = folder.standing(found)
    lines.append("Taking work" if takes_work else f"Taking no work: {reason}")
    lines += [f"  held: {hold.scope[:40]} ({hold.action}): {hold.reason}" for hold in found.holds if hold.scope]
    lines += [f"  look at this: {problem}" for problem in found.problems]
    for offer in found.offers:
        label = f"{offer.engine or 'engine'}{' (simulated)' if offer.simulated else ''}"
        error = f", last error: {offer.last_error}" if offer.last_error else ""
        speed = f", {offer.decode_tokens_per_s:.0f} tokens/s" if offer.decode_tokens_per_s else ""
        lines.append(
            f"  {offer.title} on {offer.device_id}  {label} {offer.phase}, {offer.busy} of {offer.slots} "
            f"slots busy, {offer.context_per_slot} tokens each{speed}{error}"
        )
        if offer.why or not offer.wanted:
            lines.append(f"    plan: {offer.why or 'not asked for yet'}")
        if offer.phase == "ready" and not offer.simulated:
            lines.append(f"    enclosed: {offer.protection or 'no, it runs with the rights of the agent'}")
    lines.append(
        f"Since the start: {counters['completed']} answers, {counters['cancelled']} cancelled, "
        f"{counters['failed']} failed, {counters['refused']} refused; "
        f"{found.reports_waiting} reports wait for the marketplace"
    )
    return lines


def top(found: Status | None, running: bool) -> RenderableType:
    """The live view: cards, engines, answers that are being made, what they come to."""
    if found is None or not running:
        return Text("The agent does not run.", style="yellow")
    takes_work, reason = folder.standing(found)
    state = Text("taking work", style="green") if takes_work else Text(reason, style="yellow")
    link = Text("connected", style="green") if found.connected else Text(found.last_error or "connecting", style="red")
    head = Text.assemble(f"node {found.node_id[:8]}  ", link, "  ", state)
    head.append(f"   today {usd(found.earned_today_nano_usd)} USD by your asks, before the fee")
    parts: list[RenderableType] = [head, _devices(found), _offers(found)]
    if found.attempts:
        parts.append(_attempts(found))
    parts += [Text(f"! {problem}", style="red") for problem in found.problems]
    return Group(*parts)


def _devices(found: Status) -> Table:
    energy = {entry.device_id: entry for entry in found.energy}
    held = {hold.scope: f"{hold.action}: {hold.reason}" for hold in found.holds}
    table = _table("device", "state", ">memory", ">busy", ">power", ">temp", ">energy", "note")
    for report in found.devices:
        entry = energy.get(report.device_id)
        spent = (
            "unknown"
            if entry is None or entry.source == "unknown"
            else (f"{entry.millijoules / 3.6e9:.3f} kWh {entry.source}")
        )
        note = held.get(report.device_id) or report.reason or ", ".join(report.throttle or [])
        table.add_row(
            escape(f"{report.name[:28]} {report.device_id[-4:] if report.kind == 'gpu' else ''}".strip()),
            report.state,
            f"{gib(report.memory_used_bytes)} / {gib(report.memory_total_bytes)}",
            _or_unknown(report.utilisation_pct, "%"),
            _power(report),
            _or_unknown(report.temperature_c, " C"),
            spent,
            escape(note),
        )
    return table


def _offers(found: Status) -> Table:
    table = _table("model", "device", "engine", "phase", ">slots", ">tokens/s", "enclosed")
    for offer in found.offers:
        table.add_row(
            escape(offer.title),
            offer.device_id[-12:],
            f"{offer.engine}{' (simulated)' if offer.simulated else ''}",
            offer.phase,
            f"{offer.busy}/{offer.slots}",
            _or_unknown(offer.decode_tokens_per_s, ""),
            offer.protection or "no",
        )
    return table


def _attempts(found: Status) -> Table:
    table = _table("answer", ">age", ">pieces")
    for number, attempt in enumerate(found.attempts, 1):
        table.add_row(f"{number} on {attempt.engine_key[:12]}", f"{attempt.age_s:.0f} s", str(attempt.pieces))
    return table


def models(verdicts: Iterable[Verdict], *, slots: int, context: int) -> Table:
    """What fits, how fast, and what it would earn."""
    table = _table(
        "model", "device", f">needs ({slots} x {context})", ">free", "fits", ">most slots", ">tokens/s", ">USD/h"
    )
    for verdict in verdicts:
        speed = "unknown"
        if verdict.decode_tokens_per_s is not None:
            speed = f"{verdict.decode_tokens_per_s:.0f} {'measured' if verdict.measured else 'predicted'}"
        table.add_row(
            escape(verdict.model),
            verdict.device[-16:],
            gib(verdict.need_bytes),
            gib(verdict.free_bytes),
            "yes" if verdict.fits else "no",
            str(verdict.slots),
            speed,
            "unknown" if verdict.usd_per_hour is None else f"{verdict.usd_per_hour}",
        )
    return table


def earnings(days: dict[str, Day], last: int) -> Table:
    """The machine's own note of its last days."""
    table = _table("day", ">answers", ">input", ">cached", ">output", ">USD before the fee")
    shown = list(days.items())[-last:]
    for day, entry in shown:
        table.add_row(
            day,
            *(str(entry.answers), str(entry.input_tokens), str(entry.cached_tokens), str(entry.output_tokens)),
            usd(entry.gross_nano_usd),
        )
    total = [entry for _, entry in shown]
    table.add_section()
    table.add_row(
        "together",
        str(sum(entry.answers for entry in total)),
        str(sum(entry.input_tokens for entry in total)),
        str(sum(entry.cached_tokens for entry in total)),
        str(sum(entry.output_tokens for entry in total)),
        usd(sum(entry.gross_nano_usd for entry in total)),
    )
    return table


def _table(*columns: str) -> Table:
    """A `>` before a name sets its figures to the right."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column.lstrip(">"), justify="right" if column.startswith(">") else "left", overflow="fold")
    return table


def _or_unknown(value: float | None, unit: str) -> str:
    return "unknown" if value is None else f"{value:.0f}{unit}"


def _power(report: DeviceReport) -> str:
    if report.power_mw is None:
        return "unknown"
    limit = "" if report.power_limit_mw is None else f"/{report.power_limit_mw / 1000:.0f}"
    declared = " declared" if report.power_source == "declared" else ""
    return f"{report.power_mw / 1000:.0f}{limit} W{declared}"
