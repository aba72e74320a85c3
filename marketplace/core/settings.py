"""Everything that an operator can set, in one place, read from the environment (and `.env`)."""

from __future__ import annotations

import ipaddress
import secrets
from functools import lru_cache
from typing import Annotated, Literal
from urllib.parse import urlsplit

from pydantic import AliasChoices, Field, SecretStr, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict


def _random_gateway_id() -> str:
    return f"gw-{secrets.token_hex(4)}"


def _checked_url(url: str, schemes: tuple[str, ...], example: str) -> str:
    """The URL as it is, if one of these schemes stands before it and its port is a number. Raises ValueError, without
    the URL, which may hold a password."""
    try:
        parts = urlsplit(url)
        fits = parts.scheme in schemes and url.startswith(f"{parts.scheme}://") and (parts.port or 1) > 0
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"it must be of the form {example}")
    return url


class Settings(BaseSettings):
    """Settings of every server process. Names in the environment carry the prefix `FALLOW_`, save the two stores."""

    model_config = SettingsConfigDict(
        env_prefix="FALLOW_", env_file=".env", extra="ignore", frozen=True, use_attribute_docstrings=True
    )

    database_url: Annotated[
        str, Field(validation_alias=AliasChoices("DATABASE_URL", "FALLOW_DATABASE_URL", "database_url"))
    ] = "postgresql://postgres@127.0.0.1:5432/fallow"
    """libpq URL of PostgreSQL 15 or newer."""
    valkey_url: Annotated[
        str, Field(validation_alias=AliasChoices("VALKEY_URL", "FALLOW_VALKEY_URL", "valkey_url"))
    ] = "redis://127.0.0.1:6379/0"
    """redis:// or unix:// URL of Valkey 7.2+ or Redis."""

    host: str = "127.0.0.1"
    """Address that a gateway listens on."""
    port: int = 8080
    """Port that a gateway listens on."""
    gateway_id: str = Field(default_factory=_random_gateway_id)
    """Unique per running gateway process."""
    gateway_url: str = ""
    """How other gateways reach this one (`http://host:port`); by default built from host and port."""
    cluster_secret: SecretStr = SecretStr("")
    """Shared by all gateways. Empty: this gateway neither opens nor accepts links to others."""
    log_format: str = "console"
    """`console` or `json`."""
    log_level: str = "INFO"
    """`DEBUG`, `INFO`, `WARNING` or `ERROR`."""
    otlp_endpoint: Annotated[
        str,
        Field(validation_alias=AliasChoices("FALLOW_OTLP_ENDPOINT", "OTEL_EXPORTER_OTLP_ENDPOINT", "otlp_endpoint")),
    ] = ""
    """Base URL of an OTLP/HTTP collector, such as `http://127.0.0.1:4318`. Empty: no traces are made."""
    trace_ratio: float = Field(default=1.0, ge=0, le=1)
    """The share of requests that are traced where the client has not decided that itself."""

    fee_basis_points: int = Field(default=2_000, ge=0, le=10_000)
    """The platform's share of what a renter pays, in 1/100 of a percent."""
    allow_simulated: bool = False
    """True serves from simulated engines: benches and tests only."""

    trusted_proxies: str = ""
    """CIDR blocks, comma-separated: what these say in X-Forwarded-For about a client's address is believed."""

    body_limit_bytes: int = Field(default=2 * 1024 * 1024, ge=1024)
    """Of one request; files have a limit of their own."""
    header_wait_s: float = 10.0
    """Response headers wait this long for the first token, so that a refusal keeps its status."""
    keepalive_s: float = 10.0
    """Comment pings until the first token."""
    request_timeout_s: float = 600.0
    """Deadline of an interactive request."""
    first_token_s: float = Field(default=1.0, gt=0)
    """A first token is useful to a client that waits within so much, and within more if its prompt is long."""
    first_token_tokens_per_s: float = Field(default=4_000.0, gt=0)
    """A first token is useful a second later for each so many tokens of prompt. What waiting would make later
    everywhere is refused at once."""
    refuse_late: bool = True
    """False sends every request somewhere as long as a slot is free, however late its first token would be."""
    slow_reader_s: float = 30.0
    """A client that takes nothing for this long is cut (billed as a cancel)."""
    lease_s: float = 15.0
    """An attempt's lease; renewed with each checkpoint."""
    checkpoint_s: float = 1.0
    """How often the leases of running attempts are renewed in the database."""
    hold_margin_s: float = 900.0
    """A hold expires this long after its job's deadline, should everything else fail."""
    free_prefill_cancels_per_hour: int = 20
    """Cancels before the first token that cost nothing, per key and hour; beyond them the prefill is charged."""
    settlement_batch: int = Field(default=5_000, ge=1, le=50_000)
    """Receipts that one journal of a settlement books at most."""
    database_pool_size: int = 8
    """Connections that a process keeps to PostgreSQL; as many more may be opened for a while."""

    text_life_s: int = Field(default=7 * 86_400, ge=3_600)
    """What a queued job asked and was answered is erased this long after its end; counts and prices stay."""
    batch_price_basis_points: int = Field(default=5_000, ge=1, le=10_000)
    """What a line of a batch costs, as a share of the node's ask: half by default. Pinned when the batch begins."""
    requests_at_once: int = Field(default=10_000, ge=1)
    """Requests in hand at one gateway, streams among them; one more is refused, and work that can wait above half."""
    queued_jobs: int = Field(default=100_000, ge=1)
    """Jobs, lines of batches and flex requests that wait, of all renters; one more is refused."""
    queued_jobs_per_organisation: int = Field(default=10_000, ge=1)
    """Jobs, lines of batches and flex requests of one organisation that wait; one more is refused."""
    flex_price_basis_points: int = Field(default=5_000, ge=1, le=10_000)
    """What a request with `service_tier: "flex"` costs, as a share of the node's ask. Pinned when it is admitted."""
    flex_wait_s: float = Field(default=600.0, ge=1, le=3_600)
    """A flex request waits so long for idle capacity, unless its header `x-fallow-max-wait-s` says otherwise."""
    flex_waiting: int = Field(default=2_000, ge=1)
    """Flex requests that wait at one gateway at a time, and run there; one more is refused."""
    flex_waiting_per_organisation: int = Field(default=200, ge=1)
    """Flex requests of one organisation that wait or run at one gateway at a time; one more is refused."""
    file_limit_bytes: int = Field(default=32 * 1024 * 1024, ge=1024)
    """Of one uploaded file."""
    files_limit_bytes: int = Field(default=1024 * 1024 * 1024, ge=1024)
    """Of all files of one organisation."""
    file_life_s: int = Field(default=30 * 86_400, ge=3_600)
    """Files, inputs and outputs of batches alike, are erased after this."""

    webhook_allow_private: bool = False
    """True lets webhooks call http and addresses that are not public: tests and local work only. The log says so."""
    webhook_ca_file: str = ""
    """PEM file of certificate authorities that webhooks trust beside the system's."""

    public_url: str = ""
    """How browsers reach this platform: people come back here from the payment processor. By default the own URL."""
    payment_provider: Literal["sandbox", "stripe"] = "sandbox"
    """`sandbox` moves no money and says so everywhere; `stripe` moves it."""
    payment_mode: Literal["test", "live"] = "test"
    """What the keys must be for: a live key with `test`, or the reverse, stops the process."""
    stripe_secret_key: SecretStr = SecretStr("")
    """Of the processor's account."""
    stripe_webhook_secret: SecretStr = SecretStr("")
    """Signs what the processor sends to the platform's endpoint. Empty: the endpoint refuses everything."""
    stripe_connect_webhook_secret: SecretStr = SecretStr("")
    """The secret of the endpoint for connected accounts. Empty: that endpoint refuses everything."""
    stripe_api_url: str = ""
    """Another address of the processor's API, for a stand-in."""
    payment_timeout_s: float = Field(default=20.0, gt=0, le=80)
    """One call to the payment processor takes no longer."""
    webhook_age_s: int = Field(default=300, ge=1, le=3_600)
    """What the payment processor sends with a signature older than this is refused."""
    top_up_minimum_cents: int = Field(default=500, ge=50)
    """Of one top-up."""
    top_up_maximum_cents: int = Field(default=1_000_000, ge=50, le=99_999_999)
    """Of one top-up."""
    payout_weekday: int = Field(default=0, ge=0, le=6)
    """Day (UTC) of the weekly run; 0 is Monday."""
    payout_minimum_cents: int = Field(default=1_000, ge=1)
    """Less than this is carried over to the next run."""
    payout_hold_days: int = Field(default=7, ge=0, le=365)
    """Earnings are payable this long after they settled."""
    payout_hold_days_new: int = Field(default=14, ge=0, le=365)
    """Earnings of an owner who is new are payable this long after they settled."""
    payout_new_days: int = Field(default=60, ge=0, le=3_650)
    """An owner is new for this long after the first earnings."""
    payout_reserve_basis_points: int = Field(default=1_000, ge=0, le=10_000)
    """Kept back of what a new owner's earnings release, against disputes."""
    payout_reserve_days: int = Field(default=30, ge=0, le=365)
    """What is kept back of a new owner's earnings is kept this long."""
    payout_approval_cents: int = Field(default=1_000_000, ge=1)
    """Two people must approve a payout above this."""

    @field_validator("database_url")
    @classmethod
    def _plain_libpq_url(cls, value: str) -> str:
        # People paste SQLAlchemy's form; both mean the same server.
        url = value.replace("postgresql+psycopg://", "postgresql://", 1).replace("postgres://", "postgresql://", 1)
        return _checked_url(url, ("postgresql",), "postgresql://user@host:5432/name")

    @field_validator("valkey_url")
    @classmethod
    def _redis_url(cls, value: str) -> str:
        # The client knows the protocol by its older name.
        url = value.replace("valkey://", "redis://", 1).replace("valkeys://", "rediss://", 1)
        return _checked_url(url, ("redis", "rediss", "unix"), "redis://host:6379/0 or unix:///path/to/socket")

    @field_validator("trusted_proxies")
    @classmethod
    def _networks(cls, value: str) -> str:
        for network in filter(None, value.replace(" ", "").split(",")):
            ipaddress.ip_network(network)
        return value.replace(" ", "")

    @property
    def sqlalchemy_url(self) -> str:
        return self.database_url.replace("postgresql://", "postgresql+psycopg://", 1)

    @property
    def browser_url(self) -> str:
        """Where people are sent back to."""
        return (self.public_url or self.own_url).rstrip("/")

    @property
    def own_url(self) -> str:
        return self.gateway_url or f"http://{self.host}:{self.port}"


@lru_cache
def get_settings() -> Settings:
    """The process's settings, read once. Composition roots call this; everything else is handed what it needs."""
    return Settings()
