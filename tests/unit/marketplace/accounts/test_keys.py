"""Keys as text."""

from __future__ import annotations

import pytest

from marketplace.accounts import keys


class TestSecrets:
    def test_each_is_new_well_formed_and_carries_256_bits(self) -> None:
        made = {keys.new_secret() for _ in range(200)}
        assert len(made) == 200
        assert all(keys.well_formed(secret) for secret in made)
        assert all(len(secret) == len(keys.PREFIX) + 43 for secret in made)

    def test_what_is_shown_is_far_from_the_whole(self) -> None:
        secret = keys.new_secret()
        assert secret.startswith(keys.shown(secret))
        assert len(secret) - len(keys.shown(secret)) > 35

    def test_what_is_stored_is_not_the_secret(self) -> None:
        secret = keys.new_secret()
        assert len(keys.digest(secret)) == 32
        assert secret.encode() not in keys.digest(secret)

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "sk-fallow-",
            "sk-" + "a" * 48,
            "sk-fallow-" + "a" * 42,
            "sk-fallow-" + "a" * 44,
            "sk-fallow-" + "é" * 43,
            "sk-fallow-" + "a" * 42 + "\n",
            "SK-FALLOW-" + "a" * 43,
            "sk-fallow-" + "a" * 43 + "\n",
        ],
    )
    def test_anything_else_is_not_well_formed(self, text: str) -> None:
        assert not keys.well_formed(text)
