"""Vocabularies: read from a header, and written back as a file that says the same."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.sizing.gguf import GgufHeader, read_header
from marketplace.catalog.vocabulary import ARRAYS, PREFIX, Vocabulary, VocabularyError, read_vocabulary
from tests.vocabularies import sentencepiece_vocabulary, smollm2_vocabulary


def header(metadata: dict[str, object]) -> GgufHeader:
    return GgufHeader(3, metadata, (), 0, 0, 0)


class TestRoundTrip:
    @pytest.mark.parametrize("vocabulary", [smollm2_vocabulary(), sentencepiece_vocabulary(add_space_prefix=False)])
    def test_a_written_vocabulary_reads_back_the_same(self, vocabulary: Vocabulary, tmp_path: Path) -> None:
        path = tmp_path / "vocabulary.gguf"
        path.write_bytes(vocabulary.to_gguf())
        assert read_vocabulary(read_header(path, ARRAYS)) == vocabulary

    def test_bytes_that_are_no_unicode_survive(self, tmp_path: Path) -> None:
        metadata = {PREFIX + "model": "gpt2", PREFIX + "tokens": ["a", "\udcff"], PREFIX + "token_type": [1, 1]}
        path = tmp_path / "vocabulary.gguf"
        path.write_bytes(Vocabulary("llama", metadata).to_gguf())
        assert read_vocabulary(read_header(path, ARRAYS)).tokens == ["a", "\udcff"]


class TestRefusals:
    @pytest.mark.parametrize(
        "metadata",
        [
            {},
            {"general.architecture": "llama"},
            {"general.architecture": "llama", PREFIX + "model": "gpt2"},
            {"general.architecture": "llama", PREFIX + "model": "gpt2", PREFIX + "tokens": []},
            {
                "general.architecture": "llama",
                PREFIX + "model": "gpt2",
                PREFIX + "tokens": ["a", "b"],
                PREFIX + "token_type": [1],
            },
        ],
    )
    def test_a_header_without_a_vocabulary_is_refused(self, metadata: dict[str, object]) -> None:
        with pytest.raises(VocabularyError):
            read_vocabulary(header(metadata))

    def test_values_of_a_strange_type_are_refused(self) -> None:
        with pytest.raises(VocabularyError, match="mixes"):
            Vocabulary("llama", {PREFIX + "odd": [1, "a"]}).to_gguf()
        with pytest.raises(VocabularyError, match="dict"):
            Vocabulary("llama", {PREFIX + "odd": {}}).to_gguf()


class TestMerges:
    def test_the_separator_is_the_first_space_behind_the_first_character(self) -> None:
        vocabulary = Vocabulary("llama", {PREFIX + "merges": ["a b", "  b", "ab cd"]})
        assert vocabulary.merges == [("a", "b"), (" ", "b"), ("ab", "cd")]
