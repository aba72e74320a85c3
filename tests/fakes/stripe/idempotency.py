"""Idempotency keys by Stripe's rules: results replayed, other bodies refused, concurrent use refused, kept for 24 h."""

from __future__ import annotations

from dataclasses import dataclass

from tests.fakes.stripe.clock import Clock
from tests.fakes.stripe.errors import Json, StripeError, invalid

KEPT_S = 24 * 3_600
MAX_KEY = 255


@dataclass
class Entry:
    """A key's first request, and its answer once there is one."""

    path: str
    params: Json
    request_id: str
    created: int
    status: int | None = None
    body: bytes = b""


class IdempotencyKeys:
    """Keys are apart by account, as in Stripe."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._entries: dict[tuple[str, str], Entry] = {}

    def claim(self, owner: str, key: str, path: str, params: Json, request_id: str) -> Entry | None:
        """None when this request is the first and may run; the entry to replay when it is a repetition.

        Raises a 400 idempotency_error for another endpoint or body, and a 409 while the first one still runs.
        """
        if len(key) > MAX_KEY:
            raise invalid(f"Idempotency keys hold up to {MAX_KEY} characters.")
        self.prune()
        entry = self._entries.get((owner, key))
        if entry is None:
            self._entries[owner, key] = Entry(path, params, request_id, self._clock.now())
            return None
        _compare(entry, key, path, params)
        if entry.status is None:
            raise in_use(key)
        return entry

    def store(self, owner: str, key: str, status: int, body: bytes) -> None:
        """Remember the answer, a failure as well."""
        entry = self._entries[owner, key]
        entry.status = status
        entry.body = body

    def free(self, owner: str, key: str) -> None:
        """The request ended before its endpoint began to execute: the key was never used."""
        self._entries.pop((owner, key), None)

    def prune(self) -> None:
        """Forget what is older than 24 hours; such a key then starts a new request."""
        oldest = self._clock.now() - KEPT_S
        for place, entry in list(self._entries.items()):
            if entry.created > oldest:
                break
            if entry.status is not None:
                del self._entries[place]


def _compare(entry: Entry, key: str, path: str, params: Json) -> None:
    if entry.path != path:
        raise _reused(
            f"Keys for idempotent requests can only be used for the same endpoint they were first used for "
            f"('{entry.path}' vs '{path}'). Try using a key other than '{key}' if you meant to execute a different "
            f"request."
        )
    if entry.params != params:
        raise _reused(
            f"Keys for idempotent requests can only be used with the same parameters they were first used with. "
            f"Try using a key other than '{key}' if you meant to execute a different request."
        )


def _reused(message: str) -> StripeError:
    return StripeError(400, "idempotency_error", message, saved=False)


def in_use(key: str) -> StripeError:
    """The first request under this key has not ended."""
    return StripeError(
        409,
        "idempotency_error",
        f"There is currently another in-progress request using this Idempotent Key (that probably means you submitted "
        f"twice, and the other request is still going through): {key}. Please try again later.",
        code="idempotency_key_in_use",
        saved=False,
        headers={"Stripe-Should-Retry": "true"},
    )
