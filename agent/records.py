"""What the agent remembers: engines, attempts, reports; their states as tables of allowed steps."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Final

from agent.engines.port import EngineFacts
from agent.protocol import Failed, Finished, Run, Tokens, Vectors

RESEND_FIRST_S: Final = 5.0


class LoadMode(StrEnum):
    """When an engine is loaded, as the owner says."""

    ALWAYS = "always"
    """Whenever the machine is ours; no plan evicts it."""
    START = "start"
    """From the start on, until a plan evicts it."""
    PLAN = "plan"
    """Once a plan asks for it."""


@dataclass(frozen=True, slots=True)
class Served:
    """A variant that this node is set up to serve, at the owner's ask."""

    variant: str
    """The variant's hash: of the weights, or for embeddings as agent.sizing.variants makes it."""
    device_id: str
    slots: int
    context_per_slot: int
    input_nano_usd_per_mtok: int
    cached_input_nano_usd_per_mtok: int
    output_nano_usd_per_mtok: int
    model: int = 0
    """Its place among the models of the configuration."""
    attached: bool = False
    """True if the owner's own server is what is sold."""
    load: LoadMode = LoadMode.ALWAYS
    engine: str = "llama.cpp"
    needed_bytes: int | None = None
    """Of its device, while it is loaded; None: not known, as where its weights are not here yet."""
    weights_bytes: int = 0
    """Of those, what the system can take back from a processor's engine at any time: its file's pages."""
    task: str = "chat"
    """`chat` or `embed`."""
    name: str = ""
    """Of its weights file, for people. Empty: only the hash is known."""

    @property
    def key(self) -> str:
        """Names the engine."""
        return engine_key(self.variant, self.device_id)

    @property
    def scopes(self) -> tuple[str, str, str]:
        """What a hold may be about to concern this engine."""
        return "", self.device_id, self.variant


def engine_key(variant: str, device_id: str) -> str:
    """A variant has one replica a device, and on the processor there is no more to say."""
    return variant if device_id == "cpu" else f"{variant}@{device_id}"


class EnginePhase(StrEnum):
    OFF = "off"
    """Not wanted: the owner has the machine, or the agent ends."""
    STARTING = "starting"
    """Its process loads the weights."""
    READY = "ready"
    """It serves."""
    RESTING = "resting"
    """It died or did not start, and is tried again after a pause that grows."""


ENGINE_TRANSITIONS: Final = frozenset(
    {
        (EnginePhase.OFF, EnginePhase.STARTING),
        (EnginePhase.STARTING, EnginePhase.READY),
        (EnginePhase.STARTING, EnginePhase.RESTING),
        (EnginePhase.STARTING, EnginePhase.OFF),
        (EnginePhase.READY, EnginePhase.RESTING),
        (EnginePhase.READY, EnginePhase.OFF),
        (EnginePhase.RESTING, EnginePhase.STARTING),
        (EnginePhase.RESTING, EnginePhase.OFF),
    }
)


class AttemptPhase(StrEnum):
    RUNNING = "running"
    """The engine works on it."""
    STOPPING = "stopping"
    """The engine was told to drop it."""
    VERIFYING = "verifying"
    """The engine dropped it; the proof that it stopped is outstanding, and the slot is taken until then."""


ATTEMPT_TRANSITIONS: Final = frozenset(
    {(AttemptPhase.RUNNING, AttemptPhase.STOPPING), (AttemptPhase.STOPPING, AttemptPhase.VERIFYING)}
)


class StopCause(StrEnum):
    """Why an attempt is stopped. Decides what is reported."""

    CANCELLED = "cancelled"
    DEADLINE = "deadline"
    VOID = "void"
    """The gateway does not know it: nobody waits for a report."""
    LEASE_EXPIRED = "lease_expired"
    OWNER_PREEMPTED = "owner_preempted"
    AGENT_STOPPING = "agent_stopping"
    PLANNED = "planned"
    """A plan, or the owner's word against plans, frees its memory. Nothing runs in it then."""
    DEVICE_LOST = "engine_died"
    """The card under the engine failed."""


STOP_MESSAGES: Final = {
    StopCause.LEASE_EXPIRED: "the lease ran out, or the connection that carried it was lost",
    StopCause.OWNER_PREEMPTED: "the owner took the machine back",
    StopCause.AGENT_STOPPING: "the agent is stopping",
    StopCause.PLANNED: "its memory is freed for another model",
    StopCause.DEVICE_LOST: "the device failed",
}


class ImpossibleTransition(Exception):
    """A defect in this module: something was asked to do what its state does not allow."""


@dataclass(slots=True)
class Hold:
    """Why a part of the machine gets no new work now."""

    reason: str
    until: float
    """When what still runs is ended; infinite where it may end by itself."""
    at_once: bool
    cause: StopCause

    @property
    def keep_loaded(self) -> bool:
        """True if the engine stays in memory."""
        return self.until == float("inf")


@dataclass(slots=True)
class EngineState:
    """One engine."""

    served: Served
    phase: EnginePhase = EnginePhase.OFF
    generation: int = 0
    """Counts starts; answers about an older one are ignored."""
    facts: EngineFacts | None = None
    failures: int = 0
    """Starts and deaths in a row, for the pause before the next start."""
    retry_at: float = 0.0
    ready_at: float = 0.0
    doubtful: bool = False
    """A stopped attempt was not proven stopped yet."""
    verifying: bool = False
    last_error: str = ""
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    told_speeds: tuple[float | None, float | None] = (None, None)
    wanted: bool = True
    """False: it waits for a plan to ask for it."""
    why: str = ""
    """What the plan said that had it loaded or evicted."""

    def move(self, wanted: EnginePhase) -> None:
        """Raises ImpossibleTransition unless the table allows it."""
        if (self.phase, wanted) not in ENGINE_TRANSITIONS:
            raise ImpossibleTransition(f"engine {self.served.variant[:12]}: {self.phase} -> {wanted}")
        self.phase = wanted


@dataclass(slots=True)
class AttemptState:
    """One attempt that occupies a slot."""

    run: Run
    served: Served
    """What works on it, and at what ask."""
    arrived_at: float
    lease_until: float
    deadline_at: float
    phase: AttemptPhase = AttemptPhase.RUNNING
    cause: StopCause | None = None
    began_at: float | None = None
    first_piece_at: float | None = None
    last_piece_at: float | None = None
    stopped_at: float | None = None
    sequence: int = 0
    token_ids: int = 0
    digest: Any = field(default_factory=hashlib.sha256)
    pieces: list[Tokens | Vectors] = field(default_factory=list)
    """Everything that was said, until the report is acknowledged: a break may have swallowed the end of it."""
    away_until: float | None = None
    """Set while the socket that the attempt came by is broken: when it is given up."""

    @property
    def key(self) -> str:
        """The engine that works on it."""
        return self.served.key

    def move(self, wanted: AttemptPhase) -> None:
        """Raises ImpossibleTransition unless the table allows it."""
        if (self.phase, wanted) not in ATTEMPT_TRANSITIONS:
            raise ImpossibleTransition(f"attempt {self.run.attempt.hex()}: {self.phase} -> {wanted}")
        self.phase = wanted


@dataclass(slots=True)
class PendingReport:
    """A report that the gateway has not acknowledged."""

    frame: Finished | Failed
    served: Served
    """As it was when the attempt came: its asks are pinned."""
    resend_at: float
    pause_s: float = RESEND_FIRST_S
    pieces: list[Tokens | Vectors] = field(default_factory=list)
    """For a gateway that takes the answer up after a break; forgotten when none can any more."""
    pieces_until: float = 0.0


@dataclass(slots=True)
class Counters:
    """Since the start of the agent, for the owner's eyes."""

    accepted: int = 0
    refused: int = 0
    completed: int = 0
    cancelled: int = 0
    failed: int = 0
    pieces: int = 0
    engine_restarts: int = 0
    plans_followed: int = 0
    plans_refused: int = 0
    reports_dropped: int = 0
