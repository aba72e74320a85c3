"""What a model is for: a request for another task is refused, and told where to go."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

from agent.sizing.variants import CHAT
from marketplace.catalog.service import Catalog, VariantView
from marketplace.core.errors import BadRequest

MAX_NAMES: Final = 5
_WHAT: Final = {True: "answers chats and text completions", False: "makes embeddings"}


class WrongTask(BadRequest):
    """The model is for something else."""

    code = "wrong_task"


def require_task(catalog: Catalog, variant: VariantView, task: str, may_use: Callable[[str], bool]) -> None:
    """Raise WrongTask, naming models that would do, unless the variant serves the task."""
    if variant.task == task:
        return
    fitting = {view.model_id for view in catalog.all() if view.task == task and may_use(view.model_id)}
    others = f"Models for this: {', '.join(sorted(fitting)[:MAX_NAMES])}." if fitting else "No model here does this."
    raise WrongTask(f"{variant.model_id} {_WHAT[variant.task == CHAT]}, and nothing else. {others}", param="model")
