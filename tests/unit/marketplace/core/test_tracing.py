"""Spans: what they say to whoever goes on, what an error is called, and what waits for a collector that hangs."""

from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExporter, SpanExportResult
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from marketplace.core.errors import NotFound
from marketplace.core.otel import MAX_QUEUED, collecting
from marketplace.core.settings import Settings
from marketplace.core.tracing import ending, make_tracing, step

PARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class Hanging(SpanExporter):
    """A collector that takes a call and does not answer."""

    def __init__(self) -> None:
        self.let_go = threading.Event()
        self.exported = 0

    def export(self, spans: Sequence[ReadableSpan]) -> SpanExportResult:
        self.let_go.wait(30)
        self.exported += len(spans)
        return SpanExportResult.SUCCESS

    def shutdown(self) -> None:
        """Nothing is kept."""

    def force_flush(self, timeout_millis: int = 30_000) -> bool:
        return True


class TestWithoutACollector:
    def test_there_are_no_traces_and_a_step_is_nothing(self) -> None:
        assert make_tracing(Settings(_env_file=None), "gateway") is None
        with step(None, "match") as inside, ending(None):
            assert inside is None


class TestASpan:
    def test_goes_on_from_a_traceparent_and_says_its_own(self) -> None:
        tracing = collecting(InMemorySpanExporter(), batched=False)
        span = tracing.start("request", parent=PARENT)
        _, trace, own, flags = span.traceparent.split("-")
        assert (trace, flags) == (PARENT.split("-")[1], "01")
        assert own != PARENT.split("-")[2]
        assert span.child("part").traceparent.split("-")[1] == trace

    @pytest.mark.parametrize("parent", ["", "00-0-0-01", "nonsense", f"{PARENT}-more", "00-" + "0" * 32 + PARENT[35:]])
    def test_of_no_traceparent_begins_a_trace(self, parent: str) -> None:
        span = collecting(InMemorySpanExporter(), batched=False).start("request", parent=parent)
        assert span.sampled
        assert span.traceparent.split("-")[1] != PARENT.split("-")[1]

    def test_around_a_block_ends_with_the_error_that_it_raised(self) -> None:
        exporter = InMemorySpanExporter()
        span = collecting(exporter, batched=False).start("request")
        for error in (NotFound("the prompt"), KeyError("the answer")):
            with pytest.raises(type(error)), step(span, "part"):
                raise error
        found = [dict(part.attributes or {}) for part in exporter.get_finished_spans()]
        assert found == [{"error.type": "not_found"}, {"error.type": "KeyError"}]
        assert not any(part.events for part in exporter.get_finished_spans())


class TestACollectorThatHangs:
    def test_is_waited_for_by_nobody_and_what_waits_for_it_is_bounded(self) -> None:
        exporter = Hanging()
        tracing = collecting(exporter)
        for _ in range(3 * MAX_QUEUED):
            tracing.start("request").end()
        assert exporter.exported == 0
        exporter.let_go.set()
        tracing.close()
        assert 0 < exporter.exported < 2 * MAX_QUEUED
