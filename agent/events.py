"""What happens to the agent (events), and what it is to do about it (instructions).

Times are monotonic seconds. `key` names an engine (records.Served.key); `generation` counts its starts, so that news
about an older one can be told.
"""

from __future__ import annotations

from dataclasses import dataclass

from agent.engines.port import Embedded, EngineFacts, Piece, Usage
from agent.plans import Room
from agent.protocol import (
    Accepted,
    DataPolicy,
    Evict,
    Failed,
    Finished,
    GatewayFrame,
    Inventory,
    Load,
    PlanAnswer,
    Refused,
    Tokens,
    UsageReport,
    Vectors,
)
from agent.records import Served


@dataclass(frozen=True, slots=True)
class Connected:
    """The gateway said Welcome."""

    now: float


@dataclass(frozen=True, slots=True)
class Disconnected:
    """The socket is gone, and with it whoever could take an answer."""

    now: float


@dataclass(frozen=True, slots=True)
class GatewaySaid:
    """One frame about work."""

    frame: GatewayFrame
    now: float


@dataclass(frozen=True, slots=True)
class WorkBegan:
    """The engine was handed the request."""

    attempt: bytes
    now: float


@dataclass(frozen=True, slots=True)
class PieceCame:
    attempt: bytes
    piece: Piece
    now: float
    choice: int = 0


@dataclass(frozen=True, slots=True)
class VectorsCame:
    attempt: bytes
    vectors: Embedded
    now: float


@dataclass(frozen=True, slots=True)
class WorkEnded:
    """The engine ended in order; an empty finish_reason means that it closed without one."""

    attempt: bytes
    finish_reason: str
    usage: Usage
    now: float
    finish_reasons: tuple[str, ...] = ()
    """Of each choice, where there are several."""


@dataclass(frozen=True, slots=True)
class WorkBroke:
    """The engine failed this attempt. `code` is one of protocol.FAILURES."""

    attempt: bytes
    code: str
    message: str
    now: float


@dataclass(frozen=True, slots=True)
class WorkStopped:
    """The shell closed the stream, as StopWork told it to."""

    attempt: bytes
    now: float


@dataclass(frozen=True, slots=True)
class EngineReady:
    key: str
    generation: int
    facts: EngineFacts
    now: float
    prefill_tokens_per_s: float | None = None
    """As a short run measured it, now or earlier."""
    decode_tokens_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class EngineFailed:
    """It did not start, or it is dead."""

    key: str
    generation: int
    message: str
    now: float


@dataclass(frozen=True, slots=True)
class IdleVerified:
    """Answer to VerifyIdle. idle False: the engine still worked when the time for it was up."""

    key: str
    generation: int
    idle: bool
    now: float


@dataclass(frozen=True, slots=True)
class OwnerChanged:
    """The owner took the machine back, or gave it; or a part of it, or a part of it failed."""

    available: bool
    reason: str
    grace_s: float
    """What runs may end within it, then its memory is freed. 0: now, without asking the engine to end in order."""
    now: float
    scope: str = ""
    """What it is about: empty for the whole machine, else a device's id or a variant's hash."""
    keep_loaded: bool = False
    """True: nothing new, but what runs may end, and the engine stays in memory."""
    fault: bool = False
    """True: not the owner's wish, the device failed. Its work is moved to other nodes as the node's failure."""


@dataclass(frozen=True, slots=True)
class TermsChanged:
    """The owner asks other prices, or declared other watts."""

    asks: dict[str, tuple[int, int, int]]
    """By engine: nano-USD per million tokens of input, cached input, output."""
    idle_watts: float | None
    load_watts: float | None
    now: float
    accepts_plans: bool = False
    data: DataPolicy | None = None


@dataclass(frozen=True, slots=True)
class PlanCame:
    """The gateway advises, and what the shell found out about it."""

    frame: Load | Evict
    room: Room
    now: float


@dataclass(frozen=True, slots=True)
class Stopping:
    """The agent was asked to end. A second one ends the grace."""

    grace_s: float
    now: float


@dataclass(frozen=True, slots=True)
class Tick:
    """Time passed. At least once a second."""

    now: float


WorkEvent = WorkBegan | PieceCame | VectorsCame | WorkEnded | WorkBroke | WorkStopped
EngineEvent = EngineReady | EngineFailed | IdleVerified
OwnerEvent = OwnerChanged | TermsChanged | PlanCame | Stopping
Event = Connected | Disconnected | GatewaySaid | WorkEvent | EngineEvent | OwnerEvent | Tick


# --- instructions -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Send:
    """Put the frame on the socket; without one, drop it."""

    frame: Accepted | Refused | Tokens | Vectors | Finished | Failed | Inventory | PlanAnswer


@dataclass(frozen=True, slots=True)
class SendTelemetry:
    """Sample and send now: what the gateway believes about this node is no longer true."""


@dataclass(frozen=True, slots=True)
class StartWork:
    attempt: bytes
    key: str
    body: bytes
    max_output_tokens: int
    cache_scope: str
    timeout_s: float
    prompt_tokens: int = 0
    choices: int = 1
    traceparent: str = ""


@dataclass(frozen=True, slots=True)
class StopWork:
    attempt: bytes


@dataclass(frozen=True, slots=True)
class StartEngine:
    key: str
    generation: int


@dataclass(frozen=True, slots=True)
class StopEngine:
    """End the engine's process, whatever it is doing."""

    key: str
    at_once: bool = False
    """The owner waits for the memory: kill it."""


@dataclass(frozen=True, slots=True)
class VerifyIdle:
    """Ask the engine until it is idle, for a bounded time."""

    key: str
    generation: int


@dataclass(frozen=True, slots=True)
class Delivered:
    """The gateway has an answer: note what it comes to."""

    served: Served
    usage: UsageReport


Instruction = Delivered | Send | SendTelemetry | StartWork | StopWork | StartEngine | StopEngine | VerifyIdle
