"""The wire between an agent and the marketplace: frames and their version.

One WebSocket, opened by the agent, carries binary messages. A message is a msgpack array of frames, so that what became
ready within the same two milliseconds travels together. Every frame about work names its attempt and the attempt's
epoch: whoever receives a frame with an epoch other than the one it knows drops the frame.

This module imports the standard library and msgspec only. The marketplace may import it; it imports nothing of either.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import msgspec

VERSION: Final = 1
SOCKET_PATH: Final = "/agent/v1/socket"
ENROL_PATH: Final = "/agent/v1/enrol"
MAX_MESSAGE_BYTES: Final = 4 * 1024 * 1024
"""A larger message closes the socket: one request body is at most half of it."""
MAX_VECTORS_BYTES: Final = 256 * 1024
"""Of one Vectors frame."""
FLOAT_BYTES: Final = 4
RESUME_S: Final = 3.0
"""For so long after its socket broke an answer that has begun may be taken up again, on either side."""
COALESCE_S: Final = 0.002
"""How long a frame after the first may wait for company."""
MAX_CHOICES: Final = 8
"""Answers that one attempt may be asked for."""
HEARTBEAT_S: Final = 10.0
"""Telemetry goes on change, and at least this often; the gateway drops an agent silent for three of these."""

ABILITIES_S: Final = 60.0
"""What could run on a node is told at least this often; what is much older is not planned with."""


class Frame(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """Root of all frames. Arrays on the wire: fields are only ever appended, with a default."""


# --- greeting -----------------------------------------------------------------------------------------------------


class Challenge(Frame, frozen=True, array_like=True, tag="challenge"):
    """Gateway -> agent, first frame: sign this."""

    version: int
    nonce: bytes
    gateway_id: str


class Hello(Frame, frozen=True, array_like=True, tag="hello"):
    """Agent -> gateway, answer to the challenge. `signature` is Ed25519 over `hello_payload(...)`."""

    version: int
    node_id: str
    signature: bytes
    agent_version: str
    attempts: list[RunningAttempt] = []
    """Attempts that the agent still runs or holds an unacknowledged report for."""
    resumes: bool = False
    """The agent understands Resume."""
    choices: bool = False
    """The agent understands Run.choices."""
    plans: bool = False
    """The agent understands Load and Evict."""


class RunningAttempt(msgspec.Struct, frozen=True, array_like=True, gc=False):
    attempt: bytes
    epoch: int


class Welcome(Frame, frozen=True, array_like=True, tag="welcome"):
    """Gateway -> agent: the node is known; send inventory and telemetry."""

    node_id: str
    gateway_id: str
    server_time_ms: int
    plans: bool = False
    """The gateway understands Abilities and PlanAnswer."""


class Goodbye(Frame, frozen=True, array_like=True, tag="goodbye"):
    """Either way: the socket closes, and why. `retry_after_s` < 0 means: do not come back (revoked, wrong version)."""

    code: str
    message: str
    retry_after_s: float = 1.0


# --- what the node has --------------------------------------------------------------------------------------------


class DeviceReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One device, one sample. None means: the device does not say. It never means zero."""

    device_id: str
    """GPU UUID, or `cpu`."""
    name: str
    kind: str
    """`gpu` or `cpu`."""
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None
    """Used by anyone, not only by us."""
    memory_reserved_bytes: int | None = None
    utilisation_pct: float | None = None
    power_mw: int | None = None
    power_source: str = "unknown"
    """`nvml`, `declared` (the owner's own figure) or `unknown`."""
    power_limit_mw: int | None = None
    energy_mj: int | None = None
    """Running counter since boot, in millijoules."""
    temperature_c: float | None = None
    state: str = "ok"
    """`ok`, `lost`, `refused` (MIG, permissions), `unavailable`."""
    reason: str = ""
    sm_clock_mhz: int | None = None
    memory_clock_mhz: int | None = None
    throttle: list[str] | None = None
    """Why the clocks are held down; empty: they are not."""
    pcie_generation: int | None = None
    pcie_width: int | None = None
    ecc_uncorrected: int | None = None
    """Uncorrected memory errors over the card's life."""
    xid: int | None = None
    """Code of the last critical event since the agent's start."""


class Telemetry(Frame, frozen=True, array_like=True, tag="telemetry"):
    """Agent -> gateway. Sampled each second, sent on change or every HEARTBEAT_S."""

    sampled_at_ms: int
    devices: list[DeviceReport]
    running: int
    """Attempts in the engines now."""
    available: bool
    """False while the owner has the machine: nothing new may be sent."""
    unavailable_reason: str = ""


class OfferReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One variant that this node serves now, at the owner's ask."""

    variant_sha256: str
    device_id: str
    slots: int
    context_per_slot: int
    """Tokens, prompt and output together."""
    input_nano_usd_per_mtok: int
    cached_input_nano_usd_per_mtok: int
    output_nano_usd_per_mtok: int
    engine: str
    """`llama.cpp`, `vllm`, ...: the adapter's name."""
    engine_version: str
    simulated: bool
    """A simulated engine is never sold: such an offer serves only an environment that allows it."""
    warm: bool
    prefix_cache_s: float
    """For how long a slot's prefix is promised to stay cached after its request. 0: no promise."""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None


class DataPolicy(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the owner declares of the machine, and of texts that pass through it. None and empty: not declared."""

    region: str = ""
    country: str = ""
    """ISO 3166, two letters."""
    retention_days: int | None = None
    """For how long prompts and answers are kept there; 0: not at all."""
    trains: bool | None = None
    """They are used to train models."""
    operator: str = ""
    """`person` or `datacentre`."""


class Inventory(Frame, frozen=True, array_like=True, tag="inventory"):
    """Agent -> gateway: the complete list of offers, replacing the last one."""

    offers: list[OfferReport]
    declared_idle_watts: float | None = None
    declared_load_watts: float | None = None
    data: DataPolicy | None = None


# --- what it could have -------------------------------------------------------------------------------------------


class RunnableReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One variant that the owner allows on one device, loaded or not, at the owner's ask."""

    variant_sha256: str
    device_id: str
    loaded: bool
    """Wanted in memory now: it serves, or its weights are being read."""
    pinned: bool
    """No plan may evict it."""
    here: bool
    """Its weights lie on this machine; else they must be fetched first."""
    slots: int
    context_per_slot: int
    input_nano_usd_per_mtok: int
    cached_input_nano_usd_per_mtok: int
    output_nano_usd_per_mtok: int
    engine: str
    simulated: bool
    needed_bytes: int | None = None
    """Of its device, while it is loaded; None: not known here."""
    decode_tokens_per_s: float | None = None
    """Of one request, as it was measured here."""


class DeviceTerms(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """One device as far as a plan must know its owner's terms."""

    device_id: str
    memory_bytes: int | None
    """That engines may use in all, what the owner keeps left out; None: it does not say."""
    offered_s: float | None = None
    """For how long the owner's hours still leave it; 0: it is held now; None: they set no end."""
    nano_usd_per_kwh: int | None = None
    """What power costs now."""
    circuit: str = ""
    """Devices of one circuit share a fuse; empty: its own."""
    circuit_watts: float | None = None
    """What the circuit may carry beside what else hangs on it."""
    idle_watts: float | None = None
    load_watts: float | None = None


class Abilities(Frame, frozen=True, array_like=True, tag="abilities"):
    """Agent -> gateway, where Welcome says `plans`: what could run here. Complete; on change, and at least every
    ABILITIES_S."""

    accepts: bool
    """The owner lets plans load and evict."""
    runnable: list[RunnableReport]
    devices: list[DeviceTerms]


class Load(Frame, frozen=True, array_like=True, tag="load"):
    """Gateway -> agent, where Hello says `plans`: advice to load this variant. Answered with PlanAnswer."""

    step: int
    variant_sha256: str
    device_id: str
    reason: str
    """A sentence for the owner."""
    weights_bytes: int = 0
    """Size of the file, should it have to be fetched. 0: not known."""
    needed_bytes: int | None = None
    """What it takes of the device, by the catalogue; for an agent that cannot tell."""


class Evict(Frame, frozen=True, array_like=True, tag="evict"):
    """Gateway -> agent, where Hello says `plans`: advice to free this variant's memory. Answered with PlanAnswer."""

    step: int
    variant_sha256: str
    device_id: str
    reason: str


class PlanAnswer(Frame, frozen=True, array_like=True, tag="plan_answer"):
    """Agent -> gateway: what becomes of a Load or an Evict. The next inventory shows what was done."""

    step: int
    accepted: bool
    code: str = ""
    """One of PLAN_REFUSALS."""
    message: str = ""


# --- work ---------------------------------------------------------------------------------------------------------


class Run(Frame, frozen=True, array_like=True, tag="run"):
    """Gateway -> agent: execute this attempt. The lease ends `lease_ms` after arrival unless renewed."""

    attempt: bytes
    epoch: int
    variant_sha256: str
    body: bytes
    """JSON of an OpenAI chat request, only allow-listed fields, with `max_tokens` set."""
    prompt_tokens: int
    max_output_tokens: int
    lease_ms: int
    deadline_ms: int
    """Time left, in milliseconds from arrival; the clocks of the two machines are never compared."""
    cache_scope: str = ""
    """Opaque. Prefixes are reused only between attempts of one scope, so that tenants cannot time each other."""
    device_id: str = ""
    """Which replica of the variant is meant, where a node has one on several devices. Empty: whichever has room."""
    choices: int = 1
    """Answers that are wanted, made one after the other in one slot, each of `max_output_tokens` at most. More than one
    only for an agent whose Hello says `choices`."""
    traceparent: str = ""
    """Of W3C's trace context, for an engine that makes spans of its own. Empty: the request is not traced."""
    task: str = "chat"
    """`embed`: the body is an OpenAI embeddings request, and Vectors are the answer. Such a variant's hash is never
    that of a file, so an agent that does not know the task offers none, and is sent none."""
    inputs: int = 0
    """Of an embeddings request: how many vectors are due."""
    longest_input_tokens: int = 0
    """Of an embeddings request: what its slot must hold at once; `prompt_tokens` is the sum of all."""


class Renew(Frame, frozen=True, array_like=True, tag="renew"):
    """Gateway -> agent: the lease of these attempts now ends `lease_ms` after arrival."""

    attempts: list[RunningAttempt]
    lease_ms: int


class ResumePoint(msgspec.Struct, frozen=True, array_like=True, gc=False):
    attempt: bytes
    epoch: int
    sequence: int
    """The next piece that the gateway waits for."""


class Resume(Frame, frozen=True, array_like=True, tag="resume"):
    """Gateway -> agent, after Welcome: these attempts outlived the break; go on from there. Of others that the agent
    named nothing is wanted any more: a Void says so."""

    attempts: list[ResumePoint]


class Cancel(Frame, frozen=True, array_like=True, tag="cancel"):
    """Gateway -> agent: stop the engine's work on this attempt, then report with Finished(reason="cancelled")."""

    attempt: bytes
    epoch: int
    reason: str


class Accepted(Frame, frozen=True, array_like=True, tag="accepted"):
    """Agent -> gateway: a slot is taken and the request is on its way into the engine."""

    attempt: bytes
    epoch: int


class Refused(Frame, frozen=True, array_like=True, tag="refused"):
    """Agent -> gateway: not run, nothing spent. Codes: REFUSALS."""

    attempt: bytes
    epoch: int
    code: str
    message: str


class Tokens(Frame, frozen=True, array_like=True, tag="tokens"):
    """Agent -> gateway: the next piece of the answer. `sequence` counts from 0 without gaps, per attempt."""

    attempt: bytes
    epoch: int
    sequence: int
    text: str
    token_ids: list[int] = []
    """Empty where the engine does not say."""
    reasoning: bool = False
    extra: bytes = b""
    """JSON of a choice's other delta fields (tool_calls, logprobs), already in OpenAI's shape; rare."""
    choice: int = 0
    """Which of the answers it is a piece of. It never goes back."""


class Vectors(Frame, frozen=True, array_like=True, tag="vectors"):
    """Agent -> gateway: the next vectors of an embeddings request, in the order of its inputs. `sequence` as in Tokens.
    At most MAX_VECTORS_BYTES of data."""

    attempt: bytes
    epoch: int
    sequence: int
    first_index: int
    """Of the input that the first of them belongs to."""
    dimensions: int
    data: bytes
    """float32, little-endian, one vector after another, each of length 1."""


class UsageReport(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """What the engine says it did. None: the engine does not say. 0 is a value."""

    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    completion_tokens: int | None = None
    reasoning_tokens: int | None = None


class Finished(Frame, frozen=True, array_like=True, tag="finished"):
    """Agent -> gateway: the attempt ended in order. Also the agent's receipt: `signature` is Ed25519 over
    `receipt_payload(...)`. Repeated until a ReportAck arrives."""

    attempt: bytes
    epoch: int
    sequence: int
    """Number of Tokens or Vectors frames that went before."""
    finish_reason: str
    """`stop`, `length`, `tool_calls`, or `cancelled`; empty when the engine ended without one."""
    usage: UsageReport
    queued_ms: float
    ttft_ms: float | None
    """From Run's arrival to the first token out of the engine."""
    busy_ms: float
    """From the engine's first byte of work to its last."""
    signature: bytes = b""
    finish_reasons: list[str] = []
    """Of each answer, where several were asked for: `finish_reason` is then the last one's."""


class Failed(Frame, frozen=True, array_like=True, tag="failed"):
    """Agent -> gateway: the attempt broke. Codes: FAILURES. Repeated until a ReportAck arrives."""

    attempt: bytes
    epoch: int
    sequence: int
    code: str
    message: str
    usage: UsageReport
    busy_ms: float = 0.0


class ReportAck(Frame, frozen=True, array_like=True, tag="ack"):
    """Gateway -> agent: Finished or Failed is durable here (or void); forget the attempt."""

    attempt: bytes
    epoch: int


class Void(Frame, frozen=True, array_like=True, tag="void"):
    """Gateway -> agent: you hold no lease on this attempt; stop it and forget it."""

    attempt: bytes
    epoch: int


REFUSALS: Final = frozenset(
    {
        "slot_taken",  # a race for the last slot: nobody's fault
        "not_serving",  # this variant is not loaded here
        "owner_active",  # the owner took the machine back
        "context_overflow",  # prompt + output over the slot: the request's fault
        "draining",
    }
)

PLAN_REFUSALS: Final = frozenset(
    {
        "not_allowed",  # the owner takes no plans, does not list the variant, or pinned it
        "owner_active",  # the owner has the machine, or will soon
        "serving",  # answers are being made
        "resident",  # it came too recently
        "busy",  # enough is being loaded at once
        "memory",
        "disk",
    }
)

FAILURES: Final = {
    # code: whose fault. "node" costs reputation, the others never do.
    "engine_died": "node",
    "engine_error": "node",
    "engine_timeout": "node",
    "engine_empty": "node",
    "engine_rejected": "request",  # the engine answered 4xx: the body's fault
    "context_overflow": "request",
    "owner_preempted": "owner",
    "agent_stopping": "owner",
    "lease_expired": "platform",
}

AgentFrame = (
    Hello
    | Goodbye
    | Telemetry
    | Inventory
    | Abilities
    | PlanAnswer
    | Accepted
    | Refused
    | Tokens
    | Vectors
    | Finished
    | Failed
)
GatewayFrame = Challenge | Welcome | Goodbye | Load | Evict | Run | Renew | Resume | Cancel | ReportAck | Void

_encoder = msgspec.msgpack.Encoder()
_agent_decoder = msgspec.msgpack.Decoder(list[AgentFrame])
_gateway_decoder = msgspec.msgpack.Decoder(list[GatewayFrame])


def encode(frames: list[Any]) -> bytes:
    """Pack frames into one binary message."""
    return _encoder.encode(frames)


def decode_from_agent(message: bytes) -> list[AgentFrame]:
    """Unpack what an agent sent. Raises msgspec.DecodeError (ValidationError included) for anything else."""
    return _agent_decoder.decode(message)


def decode_from_gateway(message: bytes) -> list[GatewayFrame]:
    """Unpack what a gateway sent. Raises msgspec.DecodeError (ValidationError included) for anything else."""
    return _gateway_decoder.decode(message)


def hello_payload(nonce: bytes, node_id: str, gateway_id: str) -> bytes:
    """The bytes that an agent signs to prove its key. With the gateway's id in them no other gateway takes them."""
    return b"fallow-hello-1\0" + nonce + b"\0" + node_id.encode() + b"\0" + gateway_id.encode()


def signed_reason(finish_reason: str, finish_reasons: Sequence[str]) -> str:
    """What `receipt_payload` takes as the finish reason: all of them, where there are several."""
    return " ".join(finish_reasons) or finish_reason


def receipt_payload(  # noqa: PLR0917 - the order is the signed format
    attempt: bytes, epoch: int, sequence: int, finish_reason: str, usage: UsageReport, text_sha256: bytes
) -> bytes:
    """The bytes that an agent signs for one answer: what was delivered, by token class, and a hash of the text, or of
    the vectors' data."""
    return b"fallow-receipt-1\0" + _encoder.encode([attempt, epoch, sequence, finish_reason, usage, text_sha256])


class EnrolRequest(msgspec.Struct, frozen=True):
    """JSON body of POST ENROL_PATH."""

    token: str
    public_key: str
    """Ed25519 public key, raw 32 bytes, base64."""
    name: str
    agent_version: str


class EnrolAnswer(msgspec.Struct, frozen=True):
    """JSON answer of POST ENROL_PATH."""

    node_id: str
    organisation: str
