"""`fallow catalog`: the catalogue from the command line."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.markup import escape
from rich.progress import Progress
from rich.table import Table
from sqlalchemy import select

from agent.sizing.variants import CHAT, Pooling, Task
from marketplace.catalog import importer
from marketplace.catalog.models import Variant
from marketplace.core import tables
from marketplace.core.process import command_session

app = typer.Typer(help="Models and their variants.", no_args_is_help=True, add_completion=False)


@app.command("import")
def import_gguf(
    path: Annotated[Path, typer.Argument(help="The GGUF file.", exists=True, dir_okay=False, readable=True)],
    *,
    model_id: Annotated[str, typer.Option(help="What renters call it, such as smollm2-135m-instruct.")],
    name: Annotated[str | None, typer.Option(help="Its name for people; by default the id.")] = None,
    default_max_output: Annotated[
        int, typer.Option(min=1, help="Output tokens of a request that names no bound.")
    ] = importer.DEFAULT_MAX_OUTPUT,
    task: Annotated[Task, typer.Option(help="embed sells vectors, under a model id of its own.")] = CHAT,
    pooling: Annotated[
        Pooling | None, typer.Option(help="How embeddings are made; by default what the file says, else mean.")
    ] = None,
) -> None:
    """Import a model file: hash it, read its shape, tokenizer and template. Importing again changes nothing."""
    with Progress(transient=True) as progress, command_session() as session:
        bar = progress.add_task("hashing", total=path.stat().st_size)
        variant = importer.import_gguf(
            session,
            path,
            model_id,
            name or model_id,
            default_max_output=default_max_output,
            task=task,
            pooling=pooling,
            on_bytes=lambda count: progress.advance(bar, count),
        )
        facts = (variant.model_id, variant.quantisation, variant.sha256, variant.tokenizer_kind)
    typer.echo("{} {} sha256:{} tokenizer:{}".format(*facts))


@app.command("list")
def list_variants() -> None:
    """Show every variant."""
    columns = (
        Variant.model_id,
        Variant.task,
        Variant.quantisation,
        Variant.size_bytes,
        Variant.training_context,
        Variant.tokenizer_kind,
        Variant.sha256,
    )
    with command_session() as session:
        found = session.execute(select(*columns).order_by(Variant.model_id, Variant.created_at).limit(1_000)).all()
    table = Table("model", "task", "quantisation", "MB", "context", "tokenizer", "sha256")
    for model_id, task, quantisation, size_bytes, context, kind, sha256 in found:
        size = f"{size_bytes / 1e6:,.0f}"
        table.add_row(escape(model_id), task, quantisation, size, f"{context:,}", kind, sha256)
    tables.show(table)
