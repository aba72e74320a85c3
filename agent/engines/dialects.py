"""How the servers that speak OpenAI's chat differ, and how to tell which one answers. Facts only; no I/O of its own."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from typing import Any, Final

import msgspec

from agent.engines.chat_wire import Dialect

MAX_DEPTH: Final = 6

DIALECTS: Final = {
    "vllm": Dialect(
        name="vllm",
        busy_gauges=("vllm:num_requests_running", "vllm:num_requests_waiting"),
        extra_body={"return_token_ids": True},
        scope_field="cache_salt",
        sleep=("/sleep?level=1", ""),
        wake=("/wake_up", ""),
    ),
    "sglang": Dialect(
        name="sglang",
        # /health_generate makes a token, /health does not.
        load_path="/get_load",
        load_keys=("num_reqs", "num_waiting_reqs"),
        context_path="/get_server_info",
        context_key="context_length",
        tokenise_path="",
        abort_path="/abort_request",
        abort_field="rid",
        sleep=("/release_memory_occupation", "{}"),
        wake=("/resume_memory_occupation", "{}"),
    ),
    "ollama": Dialect(
        name="ollama",
        health_path="/api/version",
        context_path="/api/ps",
        context_key="context_length",
        truncates=True,
        tokenise_path="",
        # Without a prompt the model is loaded, or let go.
        sleep=("/api/generate", '{"model":"MODEL","keep_alive":0}'),
        wake=("/api/generate", '{"model":"MODEL","keep_alive":-1}'),
    ),
    "llama-server": Dialect(
        name="llama-server",
        busy_gauges=("llamacpp:requests_processing", "llamacpp:requests_deferred"),
        extra_body={"return_progress": True, "cache_prompt": False},
        ids_in_logprobs=True,
        context_path="/props",
        context_key="n_ctx",
    ),
    "generic": Dialect(name="openai", health_path="/v1/models", tokenise_path=""),
}
"""A dialect without `scope_field` cannot keep tenants apart in a shared prefix cache: run that engine without one."""


async def recognise(probe: Callable[[str], Awaitable[str | None]]) -> Dialect:
    """Which of them answers. `probe` gets a path and returns the body of a 200, or None."""
    metrics = await probe("/metrics") or ""
    for name, mark in (("vllm", "vllm:"), ("sglang", "sglang:"), ("llama-server", "llamacpp:")):
        if mark in metrics:
            return DIALECTS[name]
    if '"version"' in (await probe("/api/version") or ""):
        return DIALECTS["ollama"]
    if find_number(await probe("/get_server_info") or "", "tp_size") is not None:
        return DIALECTS["sglang"]
    if '"total_slots"' in (await probe("/props") or ""):
        return DIALECTS["llama-server"]
    return DIALECTS["generic"]


def find_number(text: str, key: str) -> float | None:
    """The sum of the numbers that JSON has under a name, at the least depth where there are any."""
    try:
        level: list[Any] = [msgspec.json.decode(text)]
    except msgspec.DecodeError:
        return None
    for _ in range(MAX_DEPTH):
        found = [item[key] for item in level if isinstance(item, dict) and _is_number(item.get(key))]
        if found:
            return float(sum(found))
        level = [child for item in level for child in _children(item)]
    return None


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _children(item: object) -> list[Any]:
    if isinstance(item, dict):
        return list(item.values())
    return item if isinstance(item, list) else []
