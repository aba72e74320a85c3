"""Servers with the shapes of vLLM, SGLang, Ollama and llama-server: what each says and does differently.

Each is a program too: `python standins.py FLAVOUR ARGUMENTS...` takes that engine's own command line.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from dataclasses import dataclass, field
from typing import Any

from aiohttp import web

WORDS = ["Once ", "upon ", "a ", "time ", "there ", "was ", "a ", "ship."]
CONTEXT = 4096


@dataclass
class StandIn:
    """One server. `gap_s` paces its words; without an end it goes on until it is cut."""

    flavour: str
    key: str = ""
    context: int = CONTEXT
    gap_s: float = 0.0
    running: int = 0
    bodies: list[dict[str, Any]] = field(default_factory=list)
    calls: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    cut_prompt_to: int | None = None
    ready: bool = True

    def app(self) -> web.Application:
        @web.middleware
        async def guard(request: web.Request, handler: Any) -> web.StreamResponse:
            return await self._guard(request, handler)

        app = web.Application(middlewares=[guard])
        app.router.add_get("/v1/models", self._models)
        app.router.add_post("/v1/chat/completions", self._chat)
        if self.flavour != "ollama":
            app.router.add_get("/health", self._health)
        for method, path, handler in {
            "vllm": [
                ("GET", "/metrics", self._metrics),
                ("GET", "/version", self._answer({"version": "0.99.1"})),
                ("POST", "/tokenize", self._tokenise),
                ("POST", "/sleep", self._note),
                ("POST", "/wake_up", self._note),
            ],
            "sglang": [
                ("GET", "/get_server_info", self._answer({"tp_size": 1, "context_length": self.context})),
                ("GET", "/get_load", self._load),
                ("POST", "/abort_request", self._abort),
                ("POST", "/release_memory_occupation", self._note),
                ("POST", "/resume_memory_occupation", self._note),
            ],
            "ollama": [
                ("GET", "/api/version", self._answer({"version": "0.12.3"})),
                ("GET", "/api/ps", self._answer({"models": [{"name": "m", "context_length": self.context}]})),
                ("POST", "/api/generate", self._note),
            ],
            "llama-server": [
                ("GET", "/metrics", self._metrics),
                ("GET", "/props", self._props),
                ("POST", "/tokenize", self._tokenise),
            ],
        }[self.flavour]:
            app.router.add_route(method, path, handler)
        return app

    async def _guard(self, request: web.Request, handler: Any) -> web.StreamResponse:
        self.calls.append(request.path)
        authorised = request.headers.get("Authorization") == f"Bearer {self.key}"
        if self.key and not authorised and request.path not in ("/health", "/version"):
            return web.json_response({"error": {"message": "Unauthorized", "code": 401}}, status=401)
        answer: web.StreamResponse = await handler(request)
        return answer

    def _answer(self, body: dict[str, Any]) -> Any:
        async def handler(_: web.Request) -> web.Response:
            return web.json_response(body)

        return handler

    async def _health(self, _: web.Request) -> web.Response:
        return web.Response(status=200 if self.ready else 503)

    async def _note(self, request: web.Request) -> web.Response:
        self.calls.append(f"{request.path_qs} {(await request.text())}".strip())
        return web.json_response({})

    async def _models(self, _: web.Request) -> web.Response:
        entry: dict[str, Any] = {"id": "m", "object": "model"}
        if self.flavour == "vllm":
            entry["max_model_len"] = self.context
        return web.json_response({"object": "list", "data": [entry]})

    async def _props(self, _: web.Request) -> web.Response:
        settings = {"n_ctx": self.context}
        return web.json_response(
            {"default_generation_settings": settings, "total_slots": 4, "build_info": "b9999-abcdef"}
        )

    async def _metrics(self, _: web.Request) -> web.Response:
        if self.flavour == "vllm":
            label = '{engine="0",model_name="m"}'
            return web.Response(
                text=f"vllm:num_requests_running{label} {self.running}.0\nvllm:num_requests_waiting{label} 0.0\n"
            )
        return web.Response(text=f"llamacpp:requests_processing {self.running}\nllamacpp:requests_deferred 0\n")

    async def _load(self, _: web.Request) -> web.Response:
        return web.json_response([{"dp_rank": 0, "num_reqs": self.running, "num_waiting_reqs": 0}])

    async def _tokenise(self, request: web.Request) -> web.Response:
        body = await request.json()
        tokens = list(range(len((body.get("prompt") or body.get("content")).split())))
        if self.flavour == "vllm":
            return web.json_response({"count": len(tokens), "tokens": tokens, "max_model_len": self.context})
        return web.json_response({"tokens": tokens})

    async def _abort(self, request: web.Request) -> web.Response:
        self.aborted.append((await request.json())["rid"])
        return web.Response(text="")

    def _refusal(self, wanted: int) -> dict[str, Any]:
        limit = self.context
        match self.flavour:
            case "vllm":
                message = (
                    f"This model's maximum context length is {limit} tokens. However, you requested {wanted} tokens."
                )
                return {"error": {"message": message, "type": "BadRequestError", "param": None, "code": 400}}
            case "sglang":
                message = f"The input ({wanted} tokens) is longer than the model's context length ({limit} tokens)."
                return {"object": "error", "message": message, "type": "BadRequestError", "code": 400}
            case _:
                message = f"request ({wanted} tokens) exceeds the available context size ({limit} tokens)"
                return {"error": {"code": 400, "message": message, "type": "exceed_context_size_error"}}

    async def _chat(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.bodies.append(body)
        prompt = sum(len(message["content"].split()) for message in body["messages"])
        if prompt > self.context and self.flavour != "ollama":
            return web.json_response(self._refusal(prompt), status=400)
        counted = min(prompt, self.context if self.cut_prompt_to is None else self.cut_prompt_to)
        response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await response.prepare(request)
        self.running += 1
        try:
            limit = body["max_tokens"]
            for index in range(limit):
                await response.write(self._chunk(WORDS[index % len(WORDS)], index))
                await asyncio.sleep(self.gap_s)
            await response.write(_event({"choices": [{"index": 0, "delta": {}, "finish_reason": "length"}]}))
            await response.write(_event({"choices": [], "usage": self._usage(counted, limit)}))
            await response.write(b"data: [DONE]\n\n")
        finally:
            self.running -= 1
        return response

    def _chunk(self, word: str, index: int) -> bytes:
        choice: dict[str, Any] = {"index": 0, "delta": {"content": word}, "finish_reason": None}
        if self.flavour == "vllm":
            choice["token_ids"] = [index]
        if self.flavour == "llama-server":
            choice["logprobs"] = {
                "content": [{"id": index, "token": word, "logprob": -0.1, "bytes": None, "top_logprobs": []}]
            }
        return _event({"object": "chat.completion.chunk", "choices": [choice]})

    def _usage(self, prompt: int, completion: int) -> dict[str, Any]:
        usage: dict[str, Any] = {"prompt_tokens": prompt, "completion_tokens": completion}
        if self.flavour == "vllm":
            usage["prompt_tokens_details"] = {"cached_tokens": 3}
        if self.flavour == "sglang":
            usage["prompt_tokens_details"] = None
        if self.flavour == "llama-server":
            usage["prompt_tokens_details"] = {"cached_tokens": 0}
        return usage


def _event(payload: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(payload).encode() + b"\n\n"


def _program(flavour: str, arguments: list[str]) -> None:
    parser = argparse.ArgumentParser(allow_abbrev=False)
    if flavour == "vllm":
        assert arguments.pop(0) == "serve"
        parser.add_argument("model")
        parser.add_argument("--uds", required=True)
        parser.add_argument("--max-model-len", type=int, required=True)
        for name in ("--served-model-name", "--max-num-seqs", "--gpu-memory-utilization", "--tensor-parallel-size"):
            parser.add_argument(name, required=True)
        parser.add_argument("--generation-config", required=True)
        for name in ("--enable-prompt-tokens-details", "--no-enable-log-requests", "--disable-uvicorn-access-log"):
            parser.add_argument(name, action="store_true", required=True)
    else:
        parser.add_argument("--host", dest="uds", required=True)
        parser.add_argument("--ctx-size", type=int, required=True)
        parser.add_argument("--parallel", type=int, required=True)
        for name in ("--model", "--alias", "--n-gpu-layers", "--threads", "--threads-batch", "--batch-size"):
            parser.add_argument(name, required=True)
        for name in ("--ubatch-size", "--cache-ram", "--slot-prompt-similarity", "--fit"):
            parser.add_argument(name, required=True)
        for name in ("--no-context-shift", "--no-kv-unified", "--jinja", "--no-prefill-assistant", "--no-webui"):
            parser.add_argument(name, action="store_true", required=True)
        for name in ("--no-slots", "--metrics", "--offline"):
            parser.add_argument(name, action="store_true", required=True)
    parser.add_argument("--fail", default="")
    options = parser.parse_args(arguments)
    if options.fail:
        sys.exit(f"error: {options.fail}")
    context = options.max_model_len if flavour == "vllm" else options.ctx_size // options.parallel
    key = os.environ["VLLM_API_KEY" if flavour == "vllm" else "LLAMA_API_KEY"]
    web.run_app(StandIn(flavour, key, context).app(), path=options.uds, print=None, handle_signals=True)


if __name__ == "__main__":
    _program(sys.argv[1], sys.argv[2:])
