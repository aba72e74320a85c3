"""One attempt as this gateway sees it: frames in, pieces and an ending out. No I/O; the socket's reader calls it.

The links fence frames by epoch and sequence before they come here; what is bounded here is the answer as a whole. After
the ending nothing more is accepted, save the one report that confirms it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Final

from agent.protocol import Accepted, Failed, Finished, Refused, Tokens, Vectors
from marketplace.fleet.links import AttemptFrame, GoneReason
from marketplace.gateway.answer import BadExtraError, read_extra
from marketplace.gateway.outcomes import Ending, of_failure, of_refusal
from marketplace.matching.types import OfferView

SPARE_TOKENS: Final = 16
"""Tokens beyond max_output_tokens that are borne, though never billed: engines count end marks in different ways."""
SPARE_CHARACTERS: Final = 64 * 1024
CHARACTERS_PER_TOKEN: Final = 256
"""No vocabulary that is served has a longer token; answers are bounded by this on average."""
FINISH_REASONS: Final = frozenset({"stop", "length", "tool_calls"})
MESSAGE_CHARACTERS: Final = 300
CODE_CHARACTERS: Final = 64


class AttemptRun:
    """The state of one attempt, and the sink of its frames."""

    __slots__ = (
        "_characters",
        "_choice",
        "_max_characters",
        "_max_tokens",
        "_waiter",
        "accepted",
        "attempt_id",
        "choices",
        "code",
        "direct",
        "eager",
        "ending",
        "epoch",
        "first_token_at",
        "lease_until",
        "max_output_tokens",
        "message",
        "offer",
        "pieces",
        "report",
        "reported",
        "token_count",
    )

    def __init__(
        self, offer: OfferView, attempt_id: bytes, epoch: int, max_output_tokens: int, choices: int = 1
    ) -> None:
        """`max_output_tokens` bounds each of the answers."""
        self.offer = offer
        self.attempt_id = attempt_id
        self.epoch = epoch
        self.pieces: list[Tokens] = []
        self.token_count = 0
        """Tokens accepted so far: ids where the engine gives them, else one a piece with text."""
        self.accepted = False
        """The node said that the request is on its way into the engine."""
        self.first_token_at: float | None = None
        self.ending: Ending | None = None
        self.code = ""
        """The attempt's end code."""
        self.message = ""
        """For the renter, where something went wrong."""
        self.eager = True
        """Whether each piece wakes the runner; one that sends nothing before the end need not hear of it."""
        self.direct: Callable[[Tokens], bool] | None = None
        """Moves a piece in the call that brought it, if it can; asked only while the runner waits for one."""
        self.lease_until = 0.0
        """When, on the loop's clock, the lease may be over. Moved on by each checkpoint that was answered."""
        self.report: Finished | Failed | None = None
        self.reported = False
        """The node has nothing more to say: it reported, refused, or is gone."""
        self.max_output_tokens = max_output_tokens
        self.choices = choices
        self._choice = 0
        """The answer that is being made: they come one after the other."""
        self._characters = 0
        self._max_tokens = max_output_tokens + SPARE_TOKENS
        self._max_characters = SPARE_CHARACTERS + max_output_tokens * CHARACTERS_PER_TOKEN
        self._waiter: asyncio.Future[None] | None = None

    @property
    def produced(self) -> bool:
        """True if a token was accepted."""
        return self.token_count > 0

    @property
    def vectors(self) -> bytes:
        """What was accepted of an embeddings request, as the node signs it; nothing of others."""
        return b""

    # --- called by the reader of the node's socket ----------------------------------------------------------------

    def on_frame(self, frame: AttemptFrame) -> None:
        """Take the next frame of this attempt."""
        if isinstance(frame, Tokens):
            if self.ending is None:
                self._on_tokens(frame)
        elif isinstance(frame, Vectors):
            self.stop(Ending.NODE, "engine_error", "The node sent vectors where text was asked for.")
        else:
            self._on_report(frame)

    def on_gone(self, reason: GoneReason) -> None:
        """The way to the node is gone: no more frames will come."""
        self.reported = True
        ours = reason in (GoneReason.LINK_LOST, GoneReason.STOPPING)
        self.stop(Ending.PLATFORM if ours else Ending.NODE, reason.value, "The connection to the node was lost.")

    @property
    def finish_reasons(self) -> tuple[str, ...]:
        """Of each answer, once all ended in order; else empty."""
        if self.ending is not Ending.FINISHED or not isinstance(self.report, Finished):
            return ()
        return tuple(self.report.finish_reasons) if self.choices > 1 else (self.report.finish_reason,)

    # --- called by whoever runs the attempt -----------------------------------------------------------------------

    def stop(self, ending: Ending, code: str = "", message: str = "") -> None:
        """End the attempt, unless it has ended: the first ending counts."""
        if self.ending is None:
            self.ending = ending
            self.code = code or ending.value
            self.message = message[:MESSAGE_CHARACTERS]
        self.wake()

    def wake(self) -> None:
        """Let the waiting runner look again."""
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    async def wait(self) -> None:
        """Sleep until something happened. One runner waits at a time."""
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    # --- inside ---------------------------------------------------------------------------------------------------

    def _on_tokens(self, frame: Tokens) -> None:
        pieces = self.pieces
        if not pieces:
            self.first_token_at = asyncio.get_running_loop().time()
        if frame.choice != self._choice and not self._turn_to(frame.choice):
            return
        if frame.extra and not self._check_extra(frame.extra):
            return
        pieces.append(frame)
        length = len(frame.text)
        self._characters += length
        self.token_count += len(frame.token_ids) or (1 if length or frame.extra else 0)
        if self.token_count > self._max_tokens or self._characters > self._max_characters:
            pieces.pop()
            self.stop(Ending.NODE, "engine_error", "The node sent more than was asked for.")
            return
        waiter = self._waiter
        if waiter is not None and self.eager and not waiter.done():
            direct = self.direct
            if direct is None or not direct(frame):
                self.wake()

    def _turn_to(self, choice: int) -> bool:
        """The answer before is over, and this one has bounds of its own. A node that named no later one lies."""
        if not self._choice < choice < self.choices:
            self.stop(Ending.NODE, "engine_error", "The node sent a piece of an answer that was not due.")
            return False
        self._choice = choice
        self._max_tokens = self.token_count + self.max_output_tokens + SPARE_TOKENS
        self._max_characters = self._characters + SPARE_CHARACTERS + self.max_output_tokens * CHARACTERS_PER_TOKEN
        return True

    def _check_extra(self, extra: bytes) -> bool:
        try:
            read_extra(extra)
        except BadExtraError:
            self.stop(Ending.NODE, "engine_error", "The node sent something that is no part of an answer.")
            return False
        return True

    def _on_report(self, frame: Accepted | Refused | Finished | Failed) -> None:
        if isinstance(frame, Accepted):
            self.accepted = True
            return
        self.reported = True
        if isinstance(frame, Refused):
            self.stop(of_refusal(frame.code), *_words(frame))
        else:
            self.report = frame
            self._end_by(frame)

    def _end_by(self, report: Finished | Failed) -> None:
        if isinstance(report, Failed):
            self.stop(of_failure(report.code), *_words(report))
        elif report.finish_reason in FINISH_REASONS and self._all_ended(report):
            self.stop(Ending.FINISHED)
        elif report.finish_reason == "cancelled":
            # Nobody here asked for it, or the ending would stand already.
            self.stop(Ending.NODE, "engine_error", "The node stopped without being asked.")
        elif report.finish_reason in FINISH_REASONS:
            self.stop(Ending.NODE, "engine_error", "The node did not give as many answers as were asked for.")
        else:
            self.stop(Ending.BLANK, "engine_empty", "The engine closed without a finish reason.")

    def _all_ended(self, report: Finished) -> bool:
        """True if every answer that was asked for has its finish reason."""
        reasons = report.finish_reasons
        return self.choices == 1 or (len(reasons) == self.choices and FINISH_REASONS.issuperset(reasons))


def _words(frame: Refused | Failed) -> tuple[str, str]:
    """The node's code and message, within bounds, and without what neither a database nor a terminal should get."""
    return _printable(frame.code[:CODE_CHARACTERS]), _printable(frame.message[:MESSAGE_CHARACTERS])


def _printable(text: str) -> str:
    return (
        text
        if text.isprintable()
        else "".join(each if each.isprintable() else "\N{REPLACEMENT CHARACTER}" for each in text)
    )
