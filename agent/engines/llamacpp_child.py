"""The process that llama.cpp's server lives in. Started by agent.engines.llamacpp, told what to do on stdin.

The server of xllamacpp has no close and no cancel: the process is the handle. Sole importer of xllamacpp.
"""

from __future__ import annotations

import threading
from typing import Any, Final

from agent.engines.child import give_up, prepare, say

PREFILL_BATCH_TOKENS: Final = 128
"""How much of a prompt is worked on between two looks at whether its reader is still there."""
EUCLIDEAN: Final = 2
SPARE_HTTP_THREADS: Final = 4
"""A stream holds a thread; health checks and metrics need some beside."""


def parameters(config: dict[str, Any]) -> Any:
    """llama.cpp's parameters, with the defaults that would hurt a shared machine turned off."""
    import xllamacpp  # noqa: PLC0415 - heavy, and needed in this process only

    params = xllamacpp.CommonParams()
    params.model.path = config["model_path"]
    params.n_parallel = config["slots"]
    params.n_ctx = config["context_per_slot"] * config["slots"]
    params.n_gpu_layers = config["gpu_layers"]
    params.cpuparams.n_threads = config["threads"]
    params.cpuparams_batch.n_threads = config["threads"]
    params.n_batch = PREFILL_BATCH_TOKENS
    params.n_ubatch = PREFILL_BATCH_TOKENS
    params.n_threads_http = config["slots"] + SPARE_HTTP_THREADS

    params.hostnames = [config["socket"]]
    params.api_keys = [config["api_key"]]
    params.cors_origins = "null"
    params.ui = False
    params.endpoint_slots = False
    params.endpoint_metrics = True

    # One slot, one tenant at a time: nothing is cached beside the slots, and no slot takes from another.
    params.cache_ram_mib = 0
    params.cache_idle_slots = False
    params.kv_unified = False
    params.slot_prompt_similarity = 0.0
    params.ctx_shift = False

    if config["task"] == "embed":
        _embed(params, config, xllamacpp.llama_pooling_type)

    params.fit_params = False  # What was offered is what is loaded, or it fails.
    params.use_jinja = True
    params.prefill_assistant = False  # The gateway counts a chat by its template; so must the engine read it.
    params.warmup = True
    return params


def _embed(params: Any, config: dict[str, Any], pooling_types: Any) -> None:
    """Vectors instead of text. An input must be worked on in one piece to be pooled as a whole: hence batches that hold
    a slot's context. And all slots share one cache, since with one for each llama.cpp splits inputs of different
    lengths that run at the same time, and pools the longer one over its rest only: a wrong vector, without an error."""
    params.embedding = True
    params.pooling_type = getattr(pooling_types, f"LLAMA_POOLING_TYPE_{config['pooling'].upper()}")
    params.embd_normalize = EUCLIDEAN
    params.n_batch = params.n_ubatch = config["context_per_slot"]
    params.kv_unified = True
    params.cache_prompt = False


def main() -> None:
    """Load, say so, and serve until the agent ends us."""
    config = prepare()
    config.pop("protection")
    try:
        import xllamacpp  # noqa: PLC0415

        server = xllamacpp.Server(parameters(config))
    except ImportError as error:
        give_up(f"llama.cpp is not installed here ({error}): install fallow[engine]")
    except RuntimeError as error:
        give_up(str(error))
    say(ready=True, version=xllamacpp.__version__, address=server.listening_address)
    threading.Event().wait()


if __name__ == "__main__":
    main()
