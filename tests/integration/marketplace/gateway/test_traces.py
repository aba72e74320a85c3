"""Traces: the tree of a streamed chat, of one that moved on, of a queued job; sampling; a collector that is away."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import openai
import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from agent.protocol import Run
from marketplace.billing import service as billing
from marketplace.billing.traces import show_settled
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.otel import collecting
from marketplace.core.settings import Settings
from marketplace.core.tracing import Tracing
from marketplace.core.valkey import connect
from marketplace.gateway.traces import Traces
from marketplace.jobs.tasks import assign_once, make_matcher
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    Renter,
    ScriptedAgent,
    World,
    add_renter,
    answers,
    fails,
    until,
    world,
)

TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
CLIENT = "00f067aa0ba902b7"
SAMPLED = f"00-{TRACE}-{CLIENT}-01"


class Collector:
    """What arrived at the operator's collector."""

    def __init__(self, ratio: float = 1.0) -> None:
        self.exporter = InMemorySpanExporter()
        self.tracing: Tracing = collecting(self.exporter, ratio=ratio, batched=False)

    def watch(self, market: World) -> None:
        market.gateway.services.traces = Traces(self.tracing, market.settings, market.factory)

    @property
    def spans(self) -> Sequence[ReadableSpan]:
        return self.exporter.get_finished_spans()

    def named(self, name: str) -> list[ReadableSpan]:
        return [span for span in self.spans if span.name == name]

    def one(self, name: str) -> ReadableSpan:
        (found,) = self.named(name)
        return found

    def tree(self) -> dict[str, list[str]]:
        """Names of the children of each, sorted, by name; the client's own span is called `client`."""
        names = {span.context.span_id: span.name for span in self.spans} | {int(CLIENT, 16): "client"}
        tree: dict[str, list[str]] = {}
        for span in self.spans:
            parent = names[span.parent.span_id] if span.parent is not None else ""
            tree.setdefault(parent, []).append(span.name)
        return {parent: sorted(children) for parent, children in tree.items()}


async def chat(market: World, renter: Renter, traceparent: str = SAMPLED, **changes: Any) -> Any:
    create = market.client(renter).chat.completions.create
    headers = {"traceparent": traceparent}
    stream = await create(model=MODEL_ID, messages=CHAT, stream=True, extra_headers=headers, **changes)
    return [chunk async for chunk in stream]


async def fails_first(agent: ScriptedAgent, run: Run) -> None:
    """Whichever node is asked first fails."""
    await (fails("engine_died") if run.epoch == 1 else answers)(agent, run)


async def settle(market: World, collector: Collector) -> None:
    """What the worker does a moment later."""
    traces = market.gateway.services.traces
    assert traces is not None
    await traces.flush()

    def work() -> None:
        with transaction(market.factory) as session:
            batch = billing.settle(session, 100)
        assert batch.journal_id is not None
        show_settled(market.factory, collector.tracing, batch.journal_id, batch.count)

    await asyncio.to_thread(work)


class TestAStreamedChat:
    def test_is_one_tree_from_the_client_to_the_books(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter, collector = add_renter(session_factory), Collector()

        async def story() -> None:
            async with world(settings, session_factory) as market:
                collector.watch(market)
                agent = await market.connect(answers)
                await chat(market, renter, n=2)
                await market.settled()
                await settle(market, collector)
                request = "POST /v1/chat/completions"
                assert collector.tree() == {
                    "client": [request],
                    request: ["admit", "attempt", "match", "measure", "receipt", "reserve", "settlement"],
                    "attempt": ["agent"],
                    "agent": ["decode", "prefill"],
                    "": ["settle"],
                }
                whole = collector.one("settle")
                assert {f"{span.context.trace_id:032x}" for span in collector.spans if span is not whole} == {TRACE}
                assert [f"{link.context.trace_id:032x}" for link in whole.links] == [TRACE]
                assert collector.one("settlement").links[0].context.span_id == whole.context.span_id
                said = dict(collector.one(request).attributes or {})
                assert said["gen_ai.operation.name"] == "chat"
                assert said["gen_ai.provider.name"] == "fallow"
                assert said["gen_ai.request.model"] == said["gen_ai.response.model"] == MODEL_ID
                assert said["gen_ai.request.choice.count"] == 2
                assert said["gen_ai.request.stream"] is True
                assert said["gen_ai.response.finish_reasons"] == ("stop", "stop")
                assert said["gen_ai.usage.input_tokens"] == agent.runs[0].prompt_tokens
                assert said["gen_ai.usage.output_tokens"] == 2 * len(WORDS)
                assert 0 < said["gen_ai.response.time_to_first_chunk"] < 60
                assert said["server.address"] == "127.0.0.1"
                assert (said["fallow.outcome"], "error.type" in said) == ("complete", False)
                attempt = collector.one("attempt")
                told = f"00-{TRACE}-{attempt.context.span_id:016x}-01"
                assert agent.runs[0].traceparent == told
                for span in (*collector.named("agent"), *collector.named("prefill"), *collector.named("decode")):
                    assert attempt.start_time <= span.start_time <= span.end_time <= attempt.end_time

        asyncio.run(story())

    def test_that_moves_on_shows_both_tries(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter, collector = add_renter(session_factory), Collector()

        async def story() -> None:
            async with world(settings, session_factory) as market:
                collector.watch(market)
                for _ in range(2):
                    await market.connect(fails_first)
                chunks = await chat(market, renter)
                assert chunks[-1].choices[0].finish_reason == "stop"
                await market.settled()
                first, second = sorted(collector.named("attempt"), key=lambda span: span.start_time)
                assert first.attributes is not None
                assert (first.attributes["error.type"], first.attributes["fallow.attempt.epoch"]) == ("node_failed", 1)
                assert second.attributes is not None
                assert ("error.type" in second.attributes, second.attributes["fallow.attempt.epoch"]) == (False, 2)
                assert first.attributes["fallow.node.id"] != second.attributes["fallow.node.id"]
                assert first.parent == second.parent

        asyncio.run(story())

    def test_that_is_refused_says_by_what(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter, collector = add_renter(session_factory), Collector()

        async def story() -> None:
            async with world(settings, session_factory) as market:
                collector.watch(market)
                with pytest.raises(openai.APIStatusError):
                    await chat(market, renter)
                said = dict(collector.one("POST /v1/chat/completions").attributes or {})
                assert (said["error.type"], said["http.response.status_code"]) == ("no_capacity", 503)

        asyncio.run(story())


class TestAQueuedJob:
    def test_joins_the_trace_of_its_request_in_every_process(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter, collector = add_renter(session_factory), Collector()
        wish = {"request": {"model": MODEL_ID, "messages": CHAT, "max_tokens": 32}}

        async def story() -> None:
            async with world(settings, session_factory) as market:
                collector.watch(market)
                await market.connect(answers)
                taken = await market.call("POST", "/v1/jobs", renter, json=wish, headers={"traceparent": SAMPLED})
                assert taken.status == 202

                def place() -> int:
                    client = connect(settings.valkey_url)
                    matcher = make_matcher(client, market.settings, collector.tracing)
                    return len(assign_once(market.factory, client, matcher).placed)

                placed = 0
                async with asyncio.timeout(10):
                    while not placed:
                        placed = await asyncio.to_thread(place)
                await until(lambda: market.books.outcomes() == ["complete"])
                await market.settled()
                await settle(market, collector)
                await until(lambda: bool(collector.named(f"job {MODEL_ID}")))
                assert collector.tree() == {
                    "client": ["POST /v1/jobs"],
                    "POST /v1/jobs": ["admit", "assign", f"job {MODEL_ID}", "measure", "settlement"],
                    f"job {MODEL_ID}": ["attempt", "receipt"],
                    "attempt": ["agent"],
                    "agent": ["decode", "prefill"],
                    "": ["settle"],
                }
                said = dict(collector.one(f"job {MODEL_ID}").attributes or {})
                assert (said["fallow.outcome"], said["gen_ai.usage.output_tokens"]) == ("complete", len(WORDS))

        asyncio.run(story())


class TestSampling:
    def test_is_the_clients_decision_where_there_is_one_and_is_handed_on(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter, all_, none = add_renter(session_factory), Collector(), Collector(ratio=0.0)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(answers)
                all_.watch(market)
                await chat(market, renter, SAMPLED[:-1] + "0")
                assert all_.spans == ()
                assert agent.runs[-1].traceparent.startswith(f"00-{TRACE}-")
                assert agent.runs[-1].traceparent.endswith("-00")
                none.watch(market)
                await chat(market, renter, "no traceparent at all")
                assert none.spans == ()
                await chat(market, renter)
                assert none.named("attempt")
                market.gateway.services.traces = None
                await chat(market, renter)
                assert agent.runs[-1].traceparent == ""
                await market.settled()
                assert market.books.outcomes() == ["complete"] * 4

        asyncio.run(story())


class TestACollectorThatIsAway:
    def test_costs_spans_and_no_request(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, otlp_endpoint="http://127.0.0.1:9") as market:
                await market.connect(answers)
                assert market.gateway.services.traces is not None
                for _ in range(3):
                    assert (await chat(market, renter))[-1].choices[0].finish_reason == "stop"
                await market.settled()
                assert market.books.broken_rules() == []

        asyncio.run(story())
