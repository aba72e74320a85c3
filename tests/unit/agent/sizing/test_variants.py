"""By what a variant is known."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent.sizing.gguf import read_header
from agent.sizing.variants import pooling_of, variant_sha256
from tests.vocabularies import smollm2_path

SHA256 = "ab" * 32


def test_for_chat_it_is_the_files_own_hash() -> None:
    assert variant_sha256(SHA256, "chat", None) == variant_sha256(SHA256, "chat", "mean") == SHA256


def test_each_way_to_embed_is_another_variant() -> None:
    names = {variant_sha256(SHA256, "embed", pooling) for pooling in ("mean", "cls", "last")}
    assert len(names | {SHA256}) == 4
    assert all(len(name) == 64 and set(name) <= set("0123456789abcdef") for name in names)


def test_the_name_is_the_same_in_every_release() -> None:
    assert variant_sha256(SHA256, "embed", "mean").startswith("290add326950bea0")


@pytest.mark.parametrize(
    ("number", "pooling"), [(None, "mean"), (0, "mean"), (1, "mean"), (2, "cls"), (3, "last"), (4, "mean")]
)
def test_pooling_is_what_the_file_says_or_the_mean(number: int | None, pooling: str) -> None:
    header = read_header(Path(smollm2_path()))
    told = {} if number is None else {"llama.pooling_type": number}
    assert pooling_of(replace(header, metadata={**header.metadata, **told})) == pooling
