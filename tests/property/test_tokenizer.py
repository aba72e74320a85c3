"""Any text at all: the fast tokenizer gives llama.cpp's ids."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from marketplace.catalog.oracle import Oracle
from marketplace.catalog.tokenizer import FastTokenizer, build_fast
from tests.vocabularies import smollm2_vocabulary

# Code points that this Python's tables do not know yet are left out: llama.cpp's and the fast tokenizer's tables may be
# of different Unicode versions there.
CHARACTERS = st.characters(exclude_categories=("Cs", "Cn"))
PIECES = st.sampled_from(
    [
        "<|im_start|>",
        "<|im_end|>",
        "'s",
        "'LL",
        " ",
        "  ",
        "\n",
        "\r\n",
        "\t",
        "1",
        "٣",
        "😀",
        "\u200d",
        "a",
        "é",
        "e\u0301",
        "中",
    ]
)
TEXTS = st.text(CHARACTERS, max_size=200) | st.lists(PIECES | CHARACTERS, max_size=80).map("".join)

_vocabulary = smollm2_vocabulary()


@pytest.fixture(scope="module")
def pair() -> Iterator[tuple[FastTokenizer, Oracle]]:
    with Oracle(_vocabulary.to_gguf()) as oracle:
        yield FastTokenizer(build_fast(_vocabulary)), oracle


class TestEquality:
    @given(text=TEXTS, special=st.booleans())
    @example(text="", special=True)
    @example(text=" ", special=True)
    @example(text="\x00", special=False)
    @settings(max_examples=400, deadline=None)
    def test_ids_are_the_engines(self, pair: tuple[FastTokenizer, Oracle], text: str, special: bool) -> None:
        fast, oracle = pair
        assert fast.encode(text, special=special) == oracle.encode(text, special=special)
