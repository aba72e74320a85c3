"""Traces of requests, where an operator names a collector: what spans are to the rest of the program.

Off by default. Whoever is handed a `Span | None` guards with one `is None`, or with `step`, which costs as little.
Spans carry ids, counts, durations and codes. Never a prompt, an answer, or anything else that a client wrote: the names
of attributes are those of OpenTelemetry's conventions for generative AI where these have one, `fallow.*` elsewhere.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Final, Literal, Protocol

from marketplace.core.errors import FallowError
from marketplace.core.settings import Settings

Value = str | bool | int | float | Sequence[str]
Kind = Literal["internal", "server", "client", "consumer"]
OTLP_TRACES_PATH: Final = "/v1/traces"


class Span(Protocol):
    """One piece of work in a trace. One event loop or thread at a time."""

    @property
    def traceparent(self) -> str:
        """What W3C's header of that name says to whoever goes on from here."""
        ...

    @property
    def sampled(self) -> bool:
        """False: nothing of it is sent anywhere."""
        ...

    def child(
        self, name: str, attributes: Mapping[str, Value] | None = None, *, kind: Kind = "internal", start_ns: int = 0
    ) -> Span:
        """Begin a part of it. `start_ns` is Unix time in nanoseconds; 0: now."""
        ...

    def set(self, attributes: Mapping[str, Value]) -> None:
        """Say more about it."""
        ...

    def fail(self, error_type: str) -> None:
        """It did not do what it was to do; `error_type` is one of few words."""
        ...

    def end(self, at_ns: int = 0) -> None:
        """It is over: now, or at that Unix time in nanoseconds. Once."""
        ...


class Tracing(Protocol):
    """Where traces begin, and where they go on that another process began."""

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
        """Begin a span. `parent` and `links` are traceparents; what is none of these is passed over, and without a
        parent a new trace begins, by the operator's sampling."""
        ...

    def close(self) -> None:
        """Send what waits, for a few seconds at most."""
        ...


class TracingNotInstalled(Exception):
    """A collector is named, and the packages that talk to it are not there."""


def make_tracing(settings: Settings, service: str) -> Tracing | None:
    """Traces to the collector of the settings; None where there is none. Raises TracingNotInstalled."""
    if not settings.otlp_endpoint:
        return None
    try:
        from marketplace.core import otel  # noqa: PLC0415 - an extra that most do without
    except ModuleNotFoundError as error:
        raise TracingNotInstalled(
            f"OTEL_EXPORTER_OTLP_ENDPOINT is set, but {error.name} is missing: pip install 'fallow[tracing]'."
        ) from None
    return otel.exporting(
        service,
        instance=settings.gateway_id,
        endpoint=settings.otlp_endpoint.rstrip("/") + OTLP_TRACES_PATH,
        ratio=settings.trace_ratio,
    )


class _Step:
    """A child span around a block; what the block raises is its error."""

    __slots__ = ("_span",)

    def __init__(self, span: Span) -> None:
        self._span = span

    def __enter__(self) -> Span:
        return self._span

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None:
            self._span.fail(error_type_of(error))
        self._span.end()


class _NoStep:
    __slots__ = ()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *_: object) -> None:
        return None


_NO_STEP: Final = _NoStep()


def step(parent: Span | None, name: str) -> _Step | _NoStep:
    """Around a block that is a part of `parent`; nothing happens where that is None."""
    return _NO_STEP if parent is None else _Step(parent.child(name))


def ending(span: Span | None) -> _Step | _NoStep:
    """Around a block after which a span that has begun is over."""
    return _NO_STEP if span is None else _Step(span)


def error_type_of(error: BaseException) -> str:
    """What went wrong in one word: our own code for it, else the name of its class."""
    return error.code if isinstance(error, FallowError) else type(error).__name__
