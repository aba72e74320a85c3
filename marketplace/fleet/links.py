"""Links: the way from an attempt to its node and back, wherever the node's socket is.

Frames are dispatched to their sink by a direct call on the event loop, without a task or a queue between: this is the
path of every token. A route knows its carrier, its epoch and the next sequence, so that a node can neither speak for
another node's attempt, nor revive an old epoch, nor skip or repeat a piece.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import StrEnum
from typing import Final, Protocol
from uuid import UUID

from agent.protocol import (
    MAX_VECTORS_BYTES,
    Accepted,
    Cancel,
    Failed,
    Finished,
    GatewayFrame,
    Goodbye,
    Refused,
    Renew,
    ReportAck,
    ResumePoint,
    Run,
    RunningAttempt,
    Tokens,
    Vectors,
    Void,
)
from marketplace.core.errors import Unavailable
from marketplace.core.logs import get_logger
from marketplace.matching.types import OfferView

log = get_logger(__name__)

AttemptFrame = Accepted | Refused | Tokens | Vectors | Finished | Failed
"""What a sink receives."""
NodeFrame = Run | Renew | Cancel | ReportAck | Void | Goodbye
"""What may be sent to a node about its work."""

MAX_ROUTES: Final = 65_536
MAX_TEXT_CHARS: Final = 64 * 1024
"""Of one piece of an answer."""
MAX_IDS: Final = 4_096
MAX_EXTRA_BYTES: Final = 256 * 1024
SPARE_PIECES: Final = 64
"""A node may send this many pieces beyond two per token that it was asked for (empty ones, reasoning marks)."""


class GoneReason(StrEnum):
    """Why nothing more will come from a node for an attempt."""

    NODE_GONE = "node_gone"
    """Its socket closed, or it fell silent."""
    REPLACED = "replaced"
    """The agent opened a newer socket, here or elsewhere: it restarted or lost the network."""
    PROTOCOL = "protocol_violation"
    """It sent what no honest agent sends: gaps, repeats, too much."""
    LINK_LOST = "link_lost"
    """The gateway that has its socket cannot be reached: our fault, not the node's."""
    STOPPING = "gateway_stopping"
    """This gateway, or the one with the node's socket, is shutting down."""


class AttemptSink(Protocol):
    """Whoever runs an attempt. Both calls come on the event loop, must not block and should not raise."""

    def on_frame(self, frame: AttemptFrame) -> None:
        """The next frame, in order, fenced by epoch and sequence. Refused, Finished or Failed is the last."""
        ...

    def on_gone(self, reason: GoneReason) -> None:
        """Nothing more will come. Called at most once, and not after the last frame; the route is closed already."""
        ...


class NodeUnreachable(Unavailable):
    """The node's socket is neither here nor behind a living link."""

    code = "node_unreachable"


class Carrier(Protocol):
    """A way to a node: its own socket, or a link to the gateway that has it."""

    def send(self, node_id: UUID, frame: GatewayFrame) -> bool:
        """Queue a frame; False if the way is closed or full."""
        ...

    def opened(self, route: Route) -> None:
        """A route now uses this carrier."""
        ...

    def closed(self, route: Route) -> None:
        """A route was closed by its owner."""
        ...


class Route:
    """One attempt's way."""

    __slots__ = (
        "attempt",
        "carrier",
        "done",
        "epoch",
        "max_pieces",
        "next_sequence",
        "node_id",
        "offer_id",
        "parked_until",
        "sink",
    )

    def __init__(self, attempt: bytes, node_id: UUID, offer_id: UUID, carrier: Carrier, sink: AttemptSink) -> None:
        self.attempt = attempt
        self.node_id = node_id
        self.offer_id = offer_id
        self.carrier = carrier
        self.sink = sink
        self.epoch = 0
        self.next_sequence = 0
        self.max_pieces = 0
        self.parked_until: float | None = None
        """Set while the node's socket is broken and may come back: when it is given up, in monotonic seconds."""
        self.done = False
        """The last frame went to the sink; repeats and stragglers are swallowed until the route is closed."""


class _Nowhere:
    """The carrier of an attempt whose node's socket is broken."""

    def send(self, node_id: UUID, frame: GatewayFrame) -> bool:
        """Nothing goes anywhere."""
        return False

    def opened(self, route: Route) -> None:
        """Holds nothing."""

    def closed(self, route: Route) -> None:
        """Holds nothing."""


NOWHERE: Final[Carrier] = _Nowhere()


class Links:
    """All routes of this gateway. Not thread-safe: one event loop."""

    def __init__(
        self,
        find_carrier: Callable[[UUID, str], Carrier | None],
        on_full: Callable[[UUID], None],
        on_first: Callable[[bytes], None] = lambda _: None,
    ) -> None:
        """`find_carrier(node_id, gateway_id)` names the way to a node; `on_full(offer_id)` hears that an agent refused
        an attempt because its slots are taken, `on_first(attempt)` that an attempt's first tokens came."""
        self._find_carrier = find_carrier
        self._on_full = on_full
        self._on_first = on_first
        self.routes: dict[bytes, Route] = {}

    # --- the attempt's side ---------------------------------------------------------------------------------------

    def open(self, offer: OfferView, attempt_id: UUID, sink: AttemptSink) -> None:
        """Route an attempt's frames to `sink`. Open before sending Run. Raises NodeUnreachable."""
        carrier = self._find_carrier(offer.node_id, offer.gateway_id)
        if carrier is None:
            raise NodeUnreachable(f"The node of offer {offer.offer_id.hex} cannot be reached.")
        self.attach(Route(attempt_id.bytes, offer.node_id, offer.offer_id, carrier, sink))

    def send(self, node_id: UUID, frame: NodeFrame) -> None:
        """Queue a frame for a node; it leaves within this turn of the event loop. Raises NodeUnreachable.

        A frame about an open attempt takes its route; others go wherever the node is now.
        """
        route = None if isinstance(frame, (Renew, Goodbye)) else self.routes.get(frame.attempt)
        carrier = route.carrier if route else self._find_carrier(node_id, "")
        if route is not None and type(frame) is Run:
            route.epoch = frame.epoch
            route.max_pieces = 2 * frame.max_output_tokens * frame.choices + frame.inputs + SPARE_PIECES
        if carrier is None or not carrier.send(node_id, frame):
            raise NodeUnreachable(f"Node {node_id.hex} cannot be reached.")

    def close(self, attempt_id: UUID) -> None:
        """Forget an attempt: what still comes of it is answered with ReportAck or Void. Closing twice does nothing.

        Send ReportAck before this, once the end is durable; send Cancel or Void before it if the node may still work.
        """
        route = self.routes.pop(attempt_id.bytes, None)
        if route is not None:
            route.carrier.closed(route)

    # --- the carriers' side ---------------------------------------------------------------------------------------

    def attach(self, route: Route) -> None:
        """Register a route. Raises NodeUnreachable when too many are open."""
        if route.attempt in self.routes:
            raise ValueError(f"attempt {route.attempt.hex()} is already routed")
        if len(self.routes) >= MAX_ROUTES:
            raise NodeUnreachable("This gateway runs as many attempts as it may.")
        self.routes[route.attempt] = route
        route.carrier.opened(route)

    def dispatch(self, carrier: Carrier, node_id: UUID | None, frame: AttemptFrame) -> bool:
        """Hand a frame to its sink. False: nobody waits for it (unknown, another carrier's, or of another epoch).

        `node_id` is the node whose socket it came from; None from a link, where the other gateway has checked it.
        """
        route = self.routes.get(frame.attempt)
        if route is None or route.carrier is not carrier or frame.epoch != route.epoch:
            return False
        if node_id is not None and route.node_id != node_id:
            return False
        if route.done:
            return True
        if type(frame) is Tokens or type(frame) is Vectors:
            if frame.sequence != route.next_sequence or frame.sequence >= route.max_pieces or _oversized(frame):
                self._violation(route, frame)
                return True
            if not route.next_sequence:
                self._on_first(route.attempt)
            route.next_sequence += 1
        elif type(frame) is Finished or type(frame) is Failed:
            if frame.sequence != route.next_sequence:
                self._violation(route, frame)
                return True
            route.done = True
        elif type(frame) is Refused:
            route.done = True
            if frame.code == "slot_taken":
                self._on_full(route.offer_id)
        try:
            route.sink.on_frame(frame)
        except Exception:
            # The edge between a socket that carries many attempts and the code of one: the others go on.
            log.exception("attempt_sink_failed", attempt=route.attempt.hex())
            self.lose(route, GoneReason.STOPPING)
        return True

    def lose(self, route: Route, reason: GoneReason) -> None:
        """End a route from below, and tell its sink."""
        if self.routes.pop(route.attempt, None) is None:
            return
        route.carrier.closed(route)
        if route.done:
            return
        try:
            route.sink.on_gone(reason)
        except Exception:
            log.exception("attempt_sink_failed", attempt=route.attempt.hex())

    def park(self, route: Route, until: float) -> bool:
        """Keep a route whose socket broke until the node takes it up again. False: there is nothing worth waiting for,
        since an answer that has not begun is better made elsewhere."""
        if route.done or not route.next_sequence:
            return False
        route.carrier.closed(route)
        route.carrier = NOWHERE
        route.parked_until = until
        return True

    def resume(
        self, carrier: Carrier, node_id: UUID, running: Sequence[RunningAttempt]
    ) -> tuple[list[ResumePoint], list[RunningAttempt]]:
        """Take up what a node's broken socket left. Returns from where each answer goes on, and what nobody waits for;
        a parked attempt that the node does not name is lost at once."""
        points: list[ResumePoint] = []
        unknown: list[RunningAttempt] = []
        for known in running:
            route = self.routes.get(known.attempt)
            if route is None or route.parked_until is None or (route.node_id, route.epoch) != (node_id, known.epoch):
                unknown.append(known)
                continue
            route.carrier, route.parked_until = carrier, None
            carrier.opened(route)
            points.append(ResumePoint(route.attempt, route.epoch, route.next_sequence))
        for route in [route for route in self.routes.values() if route.parked_until is not None]:
            if route.node_id == node_id:
                self.lose(route, GoneReason.REPLACED)
        return points, unknown

    def expire_parked(self, now: float) -> None:
        """Give up what was not taken up in time."""
        for route in [route for route in self.routes.values() if route.parked_until is not None]:
            if route.parked_until is not None and now >= route.parked_until:
                self.lose(route, GoneReason.NODE_GONE)

    def _violation(self, route: Route, frame: Tokens | Vectors | Finished | Failed) -> None:
        log.warning(
            "node_broke_protocol",
            node=route.node_id.hex,
            attempt=route.attempt.hex(),
            frame=type(frame).__name__,
            sequence=frame.sequence,
            expected=route.next_sequence,
        )
        route.carrier.send(route.node_id, Void(route.attempt, route.epoch))
        self.lose(route, GoneReason.PROTOCOL)


def _oversized(piece: Tokens | Vectors) -> bool:
    if type(piece) is Vectors:
        return len(piece.data) > MAX_VECTORS_BYTES
    assert type(piece) is Tokens
    return len(piece.text) > MAX_TEXT_CHARS or len(piece.token_ids) > MAX_IDS or len(piece.extra) > MAX_EXTRA_BYTES
