"""What an operator watches of a gateway, for Prometheus. Counted once a request, never once a token."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST

from marketplace.metering.tokens import TokenCounts

TTFT_BUCKETS_S = (0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)
TPOT_BUCKETS_S = (0.002, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.32, 1.0, 5.0)
ADMISSION_BUCKETS_S = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 5.0)
CONTENT_TYPE = CONTENT_TYPE_LATEST


class GatewayMetrics:
    """One set of figures for one gateway. No label has values that a stranger can choose."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.outcomes = Counter(
            "fallow_outcomes", "Requests by how they ended.", ["endpoint", "outcome"], registry=self.registry
        )
        self.http_errors = Counter(
            "fallow_http_errors", "Refusals and failures by stable code.", ["code"], registry=self.registry
        )
        self.tokens = Counter("fallow_tokens", "Tokens billed, by class.", ["token_class"], registry=self.registry)
        self.charged = Counter("fallow_charged_nano_usd", "Charged to renters, in nano-USD.", registry=self.registry)
        self.attempts = Counter("fallow_attempts", "Attempts by end code.", ["ending"], registry=self.registry)
        self.ttft = Histogram(
            "fallow_ttft_seconds",
            "From a request's arrival to its first token.",
            buckets=TTFT_BUCKETS_S,
            registry=self.registry,
        )
        self.tpot = Histogram(
            "fallow_tpot_seconds",
            "Between two tokens of an answer, after its first.",
            buckets=TPOT_BUCKETS_S,
            registry=self.registry,
        )
        self.admission = Histogram(
            "fallow_admission_seconds",
            "From a request's arrival until a slot and its hold were had.",
            buckets=ADMISSION_BUCKETS_S,
            registry=self.registry,
        )
        self.refusals = Counter(
            "fallow_refusals",
            "Requests without room, by each filter that kept nodes from them.",
            ["reason"],
            registry=self.registry,
        )
        self.fees = Counter(
            "fallow_fees_nano_usd", "Of what was charged, the platform's share.", registry=self.registry
        )
        self.losses = Counter(
            "fallow_losses_nano_usd", "Paid to owners by the platform itself.", registry=self.registry
        )
        self.waiting = Gauge(
            "fallow_waiting_records", "Records that wait to be written to the database.", registry=self.registry
        )
        self.active = Gauge("fallow_active_attempts", "Attempts that run here now.", registry=self.registry)
        self.nodes = Gauge("fallow_fleet_nodes", "Nodes with offers, over all gateways.", registry=self.registry)
        self.slots = Gauge(
            "fallow_fleet_slots",
            "Slots on offer: busy, idle, or withheld by their owners; over all gateways.",
            ["state"],
            registry=self.registry,
        )
        self.jobs = Gauge("fallow_jobs", "Queued jobs that are open, by state.", ["state"], registry=self.registry)
        self.oldest_job = Gauge(
            "fallow_oldest_queued_job_seconds", "Age of the job that waits longest.", registry=self.registry
        )
        self.unsettled = Gauge("fallow_unsettled_receipts", "Receipts without a journal.", registry=self.registry)
        self.outbox = Gauge("fallow_outbox_rows", "Tasks that the broker has not taken.", registry=self.registry)
        self.database_up = Gauge("fallow_database_up", "1 if the last scrape reached it.", registry=self.registry)

    def add_tokens(self, tokens: TokenCounts) -> None:
        """Count what was billed."""
        for token_class, count in (
            ("input_uncached", tokens.input_uncached),
            ("input_cached", tokens.input_cached),
            ("output_visible", tokens.output_visible),
            ("output_reasoning", tokens.output_reasoning),
        ):
            if count:
                self.tokens.labels(token_class).inc(count)

    def render(self) -> bytes:
        """The text format."""
        return generate_latest(self.registry)
