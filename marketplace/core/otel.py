"""OpenTelemetry's SDK behind core.tracing: the only module that imports it."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from typing import Final

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import SpanProcessor, TracerProvider
from opentelemetry.sdk.trace.export import BatchSpanProcessor, SimpleSpanProcessor, SpanExporter
from opentelemetry.sdk.trace.sampling import ParentBased, TraceIdRatioBased
from opentelemetry.trace import (
    Link,
    SpanKind,
    Status,
    StatusCode,
    Tracer,
    format_span_id,
    format_trace_id,
    get_current_span,
    set_span_in_context,
)
from opentelemetry.trace import Span as SdkSpan
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from marketplace.core.tracing import Kind, Span, Tracing, Value

MAX_QUEUED: Final = 2_048
"""Spans that wait for the collector; what comes then is dropped."""
MAX_BATCH: Final = 512
EVERY_MS: Final = 2_000
EXPORT_S: Final = 5
"""One call to the collector, its repeats included, takes no longer."""
_KINDS: Final[dict[Kind, SpanKind]] = {
    "internal": SpanKind.INTERNAL,
    "server": SpanKind.SERVER,
    "client": SpanKind.CLIENT,
    "consumer": SpanKind.CONSUMER,
}
_NOWHERE: Final = Context()
"""Parents are handed on by hand: what a library may have made current is not ours."""
_propagator: Final = TraceContextTextMapPropagator()


def exporting(service: str, *, instance: str, endpoint: str, ratio: float) -> Tracing:
    """Spans to a collector by OTLP over HTTP, from a thread of their own: a slow or absent one costs spans, no time."""
    exporter = OTLPSpanExporter(endpoint=endpoint, timeout=EXPORT_S)
    return collecting(exporter, service=service, instance=instance, ratio=ratio)


def collecting(
    exporter: SpanExporter, *, service: str = "fallow", instance: str = "", ratio: float = 1.0, batched: bool = True
) -> Tracing:
    """Spans to any exporter; `batched` False sends each as it ends, which is for tests."""
    resource = Resource.create(
        {
            "service.name": service,
            "service.namespace": "fallow",
            "service.instance.id": instance,
            "service.version": version("fallow"),
        }
    )
    provider = TracerProvider(resource=resource, sampler=ParentBased(TraceIdRatioBased(ratio)), shutdown_on_exit=False)
    provider.add_span_processor(_processor(exporter, batched=batched))
    return _Tracing(provider)


def _processor(exporter: SpanExporter, *, batched: bool) -> SpanProcessor:
    if not batched:
        return SimpleSpanProcessor(exporter)
    return BatchSpanProcessor(
        exporter,
        max_queue_size=MAX_QUEUED,
        max_export_batch_size=MAX_BATCH,
        schedule_delay_millis=EVERY_MS,
        export_timeout_millis=EXPORT_S * 1_000,
    )


class _Tracing:
    """core.tracing.Tracing."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("fallow", version("fallow"))

    def start(
        self,
        name: str,
        attributes: Mapping[str, Value] | None = None,
        *,
        kind: Kind = "internal",
        parent: str = "",
        links: Sequence[str] = (),
        start_ns: int = 0,
    ) -> Span:
        """Begin a span."""
        found = [get_current_span(_context_of(link)).get_span_context() for link in links]
        span = self._tracer.start_span(
            name,
            context=_context_of(parent),
            kind=_KINDS[kind],
            attributes=attributes,
            links=[Link(context) for context in found if context.is_valid],
            start_time=start_ns or None,
        )
        return _Span(self._tracer, span)

    def close(self) -> None:
        """Send what waits; whatever the collector does, this returns and raises nothing."""
        with contextlib.suppress(Exception):  # a vendor's own end: nothing of ours depends on it any more
            self._provider.shutdown()


class _Span:
    """core.tracing.Span."""

    __slots__ = ("_context", "_span", "_tracer")

    def __init__(self, tracer: Tracer, span: SdkSpan) -> None:
        self._tracer = tracer
        self._span = span
        self._context = set_span_in_context(span, _NOWHERE)

    @property
    def traceparent(self) -> str:
        context = self._span.get_span_context()
        flags = int(context.trace_flags)
        return f"00-{format_trace_id(context.trace_id)}-{format_span_id(context.span_id)}-{flags:02x}"

    @property
    def sampled(self) -> bool:
        return self._span.is_recording()

    def child(
        self, name: str, attributes: Mapping[str, Value] | None = None, *, kind: Kind = "internal", start_ns: int = 0
    ) -> Span:
        """Begin a part of it."""
        span = self._tracer.start_span(
            name, context=self._context, kind=_KINDS[kind], attributes=attributes, start_time=start_ns or None
        )
        return _Span(self._tracer, span)

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Say more about it."""
        self._span.set_attributes(attributes)

    def fail(self, error_type: str) -> None:
        """Mark it as failed."""
        self._span.set_attribute("error.type", error_type)
        self._span.set_status(Status(StatusCode.ERROR))

    def end(self, at_ns: int = 0) -> None:
        """It is over."""
        self._span.end(at_ns or None)


def _context_of(traceparent: str) -> Context:
    return _propagator.extract({"traceparent": traceparent}, _NOWHERE) if traceparent else _NOWHERE
