"""How byte-level BPE vocabularies split text into words before they merge: llama.cpp's names, as regular expressions.

A name that is not here is not guessed: such a vocabulary is counted by the oracle. Each entry is compared with the
oracle in the tests, and each vocabulary once more when it is imported.
"""

from __future__ import annotations

from typing import Final

_CONTRACTIONS: Final = "'s|'t|'re|'ve|'m|'ll|'d"
_CONTRACTIONS_ANY_CASE: Final = "'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD]"
_SPACES: Final = r"\s+(?!\S)|\s+"
_LINE_ENDS: Final = r"\s*[\r\n]+"

_GPT2: Final = rf"{_CONTRACTIONS}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)"
_DIGIT: Final = r"\p{N}"


def _cl100k(digits: str) -> str:
    words = r"[^\r\n\p{L}\p{N}]?\p{L}+"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
    return rf"(?:{_CONTRACTIONS_ANY_CASE})|{words}|\p{{N}}{digits}|{symbols}|{_LINE_ENDS}|{_SPACES}"


def _o200k(digits: str, contractions: str) -> str:
    # llama.cpp has no classes for upper and lower case: a letter that is not a-z, a letter that is not A-Z.
    not_lower, not_upper = r"((?=[\p{L}])([^a-z]))", r"((?=[\p{L}])([^A-Z]))"
    start = r"[^\r\n\p{L}\p{N}]?"
    words = rf"{start}{not_lower}*{not_upper}+{contractions}|{start}{not_lower}+{not_upper}*{contractions}"
    symbols = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"
    return rf"{words}|\p{{N}}{digits}|{symbols}|{_LINE_ENDS}|{_SPACES}"


SPLITS: Final[dict[str, tuple[str, ...]]] = {
    **dict.fromkeys(("gpt-2", "phi-2", "jina-es", "jina-de", "mpt", "olmo", "jais", "trillion"), (_GPT2,)),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), (_DIGIT, _GPT2)
    ),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "dbrx", "smaug-bpe"), (_cl100k("{1,3}"),)
    ),
    **dict.fromkeys(("glm4", "chatglm-bpe"), (_cl100k("{1,3}"),)),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen", "stablelm2", "hunyuan", "megrez"), (_cl100k(""),)),
    **dict.fromkeys(("gpt-4o", "llama4"), (_o200k("{1,3}", f"(?:{_CONTRACTIONS_ANY_CASE})?"),)),
    "tekken": (_o200k("", ""),),
}
"""Each regular expression in turn cuts the pieces that the one before left; what it does not match stays a piece."""

WHOLE_WORDS_FIRST: Final = frozenset({"llama-bpe", "llama3", "llama-v3", "falcon3", "pixtral", "tekken"})
"""Vocabularies that take a word that is itself a token as it is, without merging."""
