"""Identifiers like Stripe's, the same for the same seed and order of calls."""

from __future__ import annotations

import random
import string
from collections.abc import Sequence
from typing import TypeVar

ALPHABET = string.ascii_letters + string.digits
Item = TypeVar("Item")
LENGTHS = {"acct": 16, "cus": 14, "cs": 58, "whsec": 32}


class Ids:
    """Draws from seeded streams; those of requests and of shuffles stand apart, so that reading changes no object's id.

    Objects are named under the world's lock. Requests are numbered without it: one draw is one bound method call.
    """

    def __init__(self, seed: int, *, livemode: bool) -> None:
        self._random = random.Random(seed)
        self._requests = random.Random(f"requests of {seed}")
        self._shuffles = random.Random(f"shuffles of {seed}")
        self._checkout = "cs_live" if livemode else "cs_test"

    def new(self, prefix: str) -> str:
        """`prefix_` and random letters; Checkout sessions carry their mode."""
        shown = self._checkout if prefix == "cs" else prefix
        return f"{shown}_{self.letters(LENGTHS.get(prefix, 24))}"

    def letters(self, count: int) -> str:
        return "".join(self._random.choices(ALPHABET, k=count))

    def request(self) -> str:
        """The id of an HTTP request."""
        return f"req_{self._requests.getrandbits(80):020x}"

    def shuffled(self, items: Sequence[Item]) -> list[Item]:
        """A seeded permutation."""
        return self._shuffles.sample(items, len(items))
