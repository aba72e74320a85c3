"""`fallow plan`: what the planner advised nodes to load and evict, why, and what became of it."""

from __future__ import annotations

from typing import Annotated
from uuid import UUID

import typer
from rich.table import Table

from marketplace.core import process, tables
from marketplace.core.amounts import usd
from marketplace.core.arguments import node_id
from marketplace.core.database import transaction
from marketplace.fleet import plans
from marketplace.jobs.plan_round import plan_once
from marketplace.jobs.planning import HORIZON_S

app = typer.Typer(
    add_completion=False, no_args_is_help=True, help="What nodes were advised to load and evict, and why."
)
MAX_SHOWN = 1_000


@app.command()
def show(
    node: Annotated[UUID | None, typer.Option(parser=node_id, metavar="NODE", help="Only this node's.")] = None,
    limit: Annotated[int, typer.Option(min=1, max=MAX_SHOWN, help="How many of the newest steps.")] = 20,
) -> None:
    """Show the newest advice: its reason, what it was expected to earn, and the node's answer."""
    with transaction(process.session_factory()) as session:
        found = plans.latest(session, limit=limit, node_id=node)
        if not found:
            typer.echo("No advice was given. Nodes take it that have accept = true under [plans] in config.toml.")
            return
        table = Table("at (UTC)", "node", "device", "advice", "model", "USD/h", "state", "why, and the answer")
        for step, model, _ in found:
            hourly = "-" if step.gain_nano is None else usd(round(step.gain_nano * 3600 / HORIZON_S))
            answer = f" Refused ({step.code}): {step.message}." if step.state == "refused" else ""
            facts = (f"{step.planned_at:%Y-%m-%d %H:%M:%S}", step.node_id.hex[:8], step.device_id, step.action)
            table.add_row(*facts, model, hourly, step.state, step.reason + answer)
        tables.show(table)


@app.command()
def now() -> None:
    """Make a plan now, instead of waiting for the clock."""
    made = plan_once(process.session_factory(), process.valkey_client())
    if made is None:
        typer.echo("Nothing was planned: no node takes advice, another plan is being made, or Valkey is away.")
    else:
        typer.echo(f"Planned over {made.devices} devices: {made.steps} steps.")
