"""The fast tokenizer against llama.cpp's own code: the same ids, on everything that people and machines write."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
import zlib
from collections.abc import Iterator

import psutil
import pytest

from marketplace.catalog.corpus import TEXTS, chats
from marketplace.catalog.oracle import Oracle, OracleError
from marketplace.catalog.pretokenizers import SPLITS
from marketplace.catalog.template import ChatTemplate
from marketplace.catalog.tokenizer import (
    FAST,
    ORACLE,
    FastTokenizer,
    OracleTokenizer,
    TokenizerError,
    build_fast,
    first_difference,
    pack,
    unpack,
)
from marketplace.catalog.vocabulary import PREFIX, Vocabulary
from tests.vocabularies import (
    sentencepiece_vocabulary,
    smollm2_header,
    smollm2_vocabulary,
    varied_texts,
    with_pre,
)

RULES = {rules: name for name, rules in SPLITS.items()}
"""One name for each distinct set of splitting rules."""


@pytest.fixture(scope="module")
def oracle() -> Iterator[Oracle]:
    with Oracle(smollm2_vocabulary().to_gguf()) as started:
        yield started


@pytest.fixture(scope="module")
def fast() -> FastTokenizer:
    return FastTokenizer(build_fast(smollm2_vocabulary()))


class TestEquality:
    """With the bundled model's vocabulary."""

    def test_every_text_of_the_corpus_has_the_engines_ids(self, fast: FastTokenizer, oracle: Oracle) -> None:
        assert len(TEXTS) > 150
        for text in TEXTS:
            assert fast.encode(text, special=True) == oracle.encode(text, special=True), ascii(text)

    def test_five_hundred_other_texts_have_the_engines_ids(self, fast: FastTokenizer, oracle: Oracle) -> None:
        for text in varied_texts(500, seed=11):
            assert fast.encode(text, special=True) == oracle.encode(text, special=True), ascii(text)

    def test_answers_are_counted_with_special_tokens_as_plain_text(self, fast: FastTokenizer, oracle: Oracle) -> None:
        for text in (*TEXTS, *varied_texts(100, seed=12)):
            assert fast.encode(text, special=False) == oracle.encode(text, special=False), ascii(text)

    def test_whole_chats_have_the_engines_ids(self, fast: FastTokenizer, oracle: Oracle) -> None:
        template = ChatTemplate(smollm2_header().text("tokenizer.chat_template") or "")
        rendered = [template.render(chat) for chat in chats()]
        assert len(rendered) > 40
        for text in rendered:
            assert fast.encode(text, special=True) == oracle.encode(text, special=True), ascii(text)

    def test_long_texts_take_another_road_to_the_same_ids(self, fast: FastTokenizer, oracle: Oracle) -> None:
        for text in ("price of a token " * 2_000, " " * 9_000, "\n" * 9_000, "9" * 9_000, "漢字" * 3_000, "😀" * 3_000):
            assert fast.encode(text, special=True) == oracle.encode(text, special=True), ascii(text[:20])

    def test_a_byte_that_the_vocabulary_lacks_keeps_its_neighbours_apart(
        self, fast: FastTokenizer, oracle: Oracle
    ) -> None:
        # Of the lead bytes F1-F3 this vocabulary has none: merging over the gap would count one token too few.
        text = "\U0007f826\U000829bd"
        assert fast.encode(text, special=False) == oracle.encode(text, special=False)

    def test_a_spelled_out_end_token_is_one_token_in_a_prompt_and_several_in_an_answer(
        self, fast: FastTokenizer
    ) -> None:
        assert fast.count("<|im_end|>", special=True) == 1
        assert fast.count("<|im_end|>", special=False) > 1


class TestOtherVocabularies:
    @pytest.mark.parametrize("pre", sorted(RULES.values()))
    def test_each_set_of_splitting_rules_splits_as_llama_cpp_does(self, pre: str) -> None:
        vocabulary = with_pre(smollm2_vocabulary(), pre)
        fast = FastTokenizer(build_fast(vocabulary))
        with Oracle(vocabulary.to_gguf()) as oracle:
            for text in (*TEXTS, *varied_texts(70, seed=13)):
                assert fast.encode(text, special=True) == oracle.encode(text, special=True), ascii(text)

    @pytest.mark.parametrize("pre", sorted(SPLITS))
    def test_llama_cpp_knows_every_name_that_has_a_fast_form(self, pre: str) -> None:
        # Under a name that it does not know, llama.cpp refuses a vocabulary.
        with Oracle(with_pre(smollm2_vocabulary(), pre).to_gguf()) as oracle:
            assert oracle.encode("idle GPUs", special=True)

    @pytest.mark.parametrize("add_space_prefix", [True, False])
    def test_sentencepiece_vocabularies_merge_by_score(self, add_space_prefix: bool) -> None:
        vocabulary = sentencepiece_vocabulary(add_space_prefix=add_space_prefix)
        fast = FastTokenizer(build_fast(vocabulary))
        own = ("<s>a</s> b<|user|>hi <|user|> x", "<|user|>", " a", "▁x", "\u0378\U0001f9ff")
        with Oracle(vocabulary.to_gguf()) as oracle:
            for text in (*own, *TEXTS, *varied_texts(140, seed=14)):
                for special in (True, False):
                    assert fast.encode(text, special=special) == oracle.encode(text, special=special), ascii(text)

    def test_unknown_splitting_rules_are_not_guessed(self) -> None:
        with pytest.raises(TokenizerError, match="falcon"):
            build_fast(with_pre(smollm2_vocabulary(), "falcon"))

    def test_unknown_kinds_are_not_guessed(self) -> None:
        with pytest.raises(TokenizerError, match="bert"):
            build_fast(Vocabulary("bert", {PREFIX + "model": "bert", PREFIX + "tokens": ["a"]}))


class TestComparison:
    def test_tokenizers_that_agree_have_no_first_difference(self, fast: FastTokenizer) -> None:
        exact = OracleTokenizer(smollm2_vocabulary().to_gguf())
        try:
            assert first_difference(fast, exact, TEXTS[:20]) is None
        finally:
            exact.close()

    def test_a_tokenizer_with_other_rules_is_found_out(self) -> None:
        wrong = FastTokenizer(build_fast(with_pre(smollm2_vocabulary(), "qwen2")))
        exact = OracleTokenizer(smollm2_vocabulary().to_gguf())
        try:
            assert first_difference(wrong, exact, ["hello", "a\n\n\nb", "world"]) == "a\n\n\nb"
        finally:
            exact.close()


class TestStored:
    def test_a_fast_tokenizer_survives_being_stored(self, fast: FastTokenizer) -> None:
        stored = pack(build_fast(smollm2_vocabulary()))
        assert unpack(FAST, stored).encode("naïve 😀 \U0007f826", special=True) == fast.encode(
            "naïve 😀 \U0007f826", special=True
        )

    def test_an_oracle_survives_being_stored(self, fast: FastTokenizer) -> None:
        again = unpack(ORACLE, pack(smollm2_vocabulary().to_gguf()))
        assert isinstance(again, OracleTokenizer)
        assert again.encode("naïve 😀", special=True) == fast.encode("naïve 😀", special=True)
        again.close()

    @pytest.mark.parametrize(
        "stored", [b"", b"rubbish", zlib.compress(b"no number"), zlib.compress(b"3\n{}"), pack(b"x" * 99)[:-8]]
    )
    def test_damage_is_named(self, stored: bytes) -> None:
        with pytest.raises(TokenizerError):
            unpack(FAST, stored)


class TestThreads:
    def test_counting_a_long_text_does_not_stop_the_others(self, fast: FastTokenizer) -> None:
        worker = threading.Thread(target=lambda: fast.count("12345 " * 60_000, special=True))
        worker.start()
        turns = 0
        while worker.is_alive():
            time.sleep(0.001)
            turns += 1
        assert turns > 5


class TestOracle:
    def test_it_says_what_llama_cpp_adds(self, oracle: Oracle) -> None:
        facts = oracle.facts
        assert (facts.tokens, facts.bos, facts.eos) == (49_152, 1, 2)
        assert (facts.add_bos, facts.add_eos) == (False, False)

    def test_a_child_that_died_is_replaced(self, oracle: Oracle) -> None:
        before = oracle.encode("hello", special=True)
        child = oracle._child
        assert child is not None
        child._process.kill()
        child._process.wait()
        assert oracle.encode("hello", special=True) == before

    def test_no_child_is_left_behind(self) -> None:
        oracle = Oracle(smollm2_vocabulary().to_gguf())
        oracle.encode("hello", special=True)
        child = oracle._child
        assert child is not None
        oracle.close()
        assert child._process.returncode is not None

    def test_it_ends_with_its_parent_however_that_dies(self) -> None:
        script = (
            "import sys; from marketplace.catalog.oracle import Oracle;"
            "from tests.vocabularies import smollm2_vocabulary;"
            "oracle = Oracle(smollm2_vocabulary().to_gguf()); oracle.encode('x', special=True);"
            "print(oracle._child._process.pid, flush=True); sys.stdin.read()"
        )
        parent = subprocess.Popen([sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert parent.stdout is not None
        assert parent.stdin is not None
        with parent.stdout, parent.stdin:
            pid = int(parent.stdout.readline())
            parent.kill()
            parent.wait()
        end = time.monotonic() + 5
        while psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE:
            assert time.monotonic() < end
            time.sleep(0.01)

    def test_a_vocabulary_that_llama_cpp_refuses_is_an_error_not_a_crash(self) -> None:
        with Oracle(with_pre(smollm2_vocabulary(), "no such rules").to_gguf()) as oracle, pytest.raises(OracleError):
            oracle.encode("hello", special=True)

    def test_rubbish_is_an_error_not_a_crash(self) -> None:
        with Oracle(b"GGUF" + b"\xff" * 100) as oracle, pytest.raises(OracleError):
            oracle.encode("hello", special=True)

    def test_text_that_is_no_unicode_is_refused(self, oracle: Oracle) -> None:
        with pytest.raises(ValueError, match="surrogates"):
            oracle.encode("\ud800", special=True)
        assert oracle.encode("hello", special=True)

    def test_threads_take_turns(self, oracle: Oracle) -> None:
        wanted = {text: oracle.encode(text, special=True) for text in TEXTS[:30]}
        wrong: list[str] = []

        def ask() -> None:
            wrong.extend(text for text, ids in wanted.items() if oracle.encode(text, special=True) != ids)

        threads = [threading.Thread(target=ask) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert not wrong
