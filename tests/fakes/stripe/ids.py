"""Identifiers like Stripe's, the same for the same seed and order of calls."""

from __future__ import annotations

import random
import string

ALPHABET = string.ascii_letters + string.digits
LENGTHS = {"acct": 16, "cus": 14, "req": 14, "cs": 58, "whsec": 32}


class Ids:
    """Draws from one seeded stream."""

    def __init__(self, seed: int, *, livemode: bool) -> None:
        self._random = random.Random(seed)
        self._checkout = "cs_live" if livemode else "cs_test"

    def new(self, prefix: str) -> str:
        """`prefix_` and random letters; Checkout sessions carry their mode."""
        shown = self._checkout if prefix == "cs" else prefix
        return f"{shown}_{self.letters(LENGTHS.get(prefix, 24))}"

    def letters(self, count: int) -> str:
        return "".join(self._random.choices(ALPHABET, k=count))

    def shuffled(self, items: list[str]) -> list[str]:
        """A seeded permutation."""
        return self._random.sample(items, len(items))
