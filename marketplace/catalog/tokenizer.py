"""Counting tokens as the engine will. Two tokenizers behind one door: a fast one, and the exact one.

The fast one is a `tokenizers` object built from the GGUF file's metadata. At import it is compared with llama.cpp's own
code (oracle.py); a vocabulary on which the two differ is counted by the oracle for good. Both give the same ids.
"""

from __future__ import annotations

import re
import zlib
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

from tokenizers import AddedToken, Encoding, Regex, Tokenizer, models, normalizers, pre_tokenizers

from marketplace.catalog.oracle import Oracle
from marketplace.catalog.pretokenizers import SPLITS, WHOLE_WORDS_FIRST
from marketplace.catalog.vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary

FAST: Final = "fast"
ORACLE: Final = "oracle"
INLINE_CHARACTERS: Final = 2_000
"""Some 500 tokens, half a millisecond. Longer texts are counted off the event loop."""
MAX_STORED_BYTES: Final = 256 * 1024 * 1024
"""Of a stored tokenizer, unpacked."""
_SPACE: Final = "▁"


class TokenizerError(ValueError):
    """A vocabulary that the fast tokenizer cannot represent, or a stored one that is damaged."""


@dataclass(frozen=True, slots=True)
class BuiltTokenizer:
    """A fast tokenizer as text."""

    text: str
    """JSON of the `tokenizers` object."""
    tokens: int
    """Size of the vocabulary. Ids from here on stand for bytes that it lacks."""


class TextTokenizer(Protocol):
    """Turns text into the engine's token ids, without begin and end tokens."""

    @property
    def blocking(self) -> bool:
        """True if every call waits for another process, and so belongs off the event loop."""
        ...

    def encode(self, text: str, *, special: bool) -> list[int]:
        """Ids. `special`: a text such as `<|im_end|>` counts as that token, as it does in a prompt."""
        ...

    def count(self, text: str, *, special: bool) -> int:
        """How many ids `encode` gives."""
        ...


class FastTokenizer:
    """The `tokenizers` object. Safe to share between threads; releases the interpreter lock."""

    blocking = False

    def __init__(self, built: BuiltTokenizer) -> None:
        self._built = built
        self._parsing = _load(built.text)
        self._plain: Tokenizer | None = None
        self._special = _special_pattern(self._parsing)

    def encode(self, text: str, *, special: bool) -> list[int]:
        ids: list[int] = self._encoding(text, special=special).ids
        tokens = self._built.tokens
        # A byte that the vocabulary lacks keeps its neighbours apart while they merge, and then counts for nothing.
        return ids if max(ids, default=0) < tokens else [index for index in ids if index < tokens]

    def count(self, text: str, *, special: bool) -> int:
        return len(self.encode(text, special=special))

    def _encoding(self, text: str, *, special: bool) -> Encoding:
        tokenizer = self._parsing
        if not special and self._special is not None and self._special.search(text):
            tokenizer = self._literal()
        # This call keeps no offsets, a fifth of the work, and releases the interpreter lock; none takes just one text.
        return tokenizer.encode_batch_fast([text], add_special_tokens=False)[0]

    def _literal(self) -> Tokenizer:
        # Rare: a text that spells out a special token. Reading it as plain text needs a tokenizer set so.
        if self._plain is None:
            plain = _load(self._built.text)
            plain.encode_special_tokens = True
            self._plain = plain
        return self._plain


class OracleTokenizer:
    """llama.cpp's own code, in a child process."""

    blocking = True

    def __init__(self, vocabulary_gguf: bytes) -> None:
        self._oracle = Oracle(vocabulary_gguf)

    def encode(self, text: str, *, special: bool) -> list[int]:
        return self._oracle.encode(text, special=special)

    def count(self, text: str, *, special: bool) -> int:
        return len(self._oracle.encode(text, special=special))

    def close(self) -> None:
        """End the child process."""
        self._oracle.close()


def build_fast(vocabulary: Vocabulary) -> BuiltTokenizer:
    """The `tokenizers` object for a vocabulary. Raises TokenizerError for kinds that have no fast form."""
    if vocabulary.model == "gpt2":
        tokenizer = _byte_level(vocabulary)
    elif vocabulary.model == "llama":
        tokenizer = _sentencepiece(vocabulary)
    else:
        raise TokenizerError(f"there is no fast tokenizer for vocabularies of the kind {vocabulary.model!r}")
    _add_special(tokenizer, vocabulary)
    return BuiltTokenizer(text=tokenizer.to_str(), tokens=len(vocabulary.tokens))


def first_difference(fast: TextTokenizer, oracle: TextTokenizer, texts: Iterable[str]) -> str | None:
    """The first text on which the two do not give the same ids, with or without special tokens; None if they agree."""
    for text in texts:
        for special in (True, False):
            if fast.encode(text, special=special) != oracle.encode(text, special=special):
                return text
    return None


def pack(content: BuiltTokenizer | bytes) -> bytes:
    """What the catalogue stores: a fast tokenizer, or the vocabulary file that the oracle loads; compressed."""
    if isinstance(content, BuiltTokenizer):
        content = f"{content.tokens}\n{content.text}".encode()
    return zlib.compress(content, 6)


def unpack(kind: str, stored: bytes) -> FastTokenizer | OracleTokenizer:
    """The tokenizer of a stored one. Raises TokenizerError if it is damaged."""
    try:
        unpacker = zlib.decompressobj()
        content = unpacker.decompress(stored, MAX_STORED_BYTES)
        if not unpacker.eof:
            raise TokenizerError("the stored tokenizer is cut short, or larger than any sound one")
        if kind == ORACLE:
            return OracleTokenizer(content)
        tokens, _, text = content.decode().partition("\n")
        return FastTokenizer(BuiltTokenizer(text=text, tokens=int(tokens)))
    except (zlib.error, ValueError) as error:
        raise TokenizerError(f"the stored tokenizer is damaged: {error}") from error


def _load(text: str) -> Tokenizer:
    try:
        return Tokenizer.from_str(text)
    except Exception as error:  # the library raises plain Exception
        raise TokenizerError(f"the stored tokenizer is damaged: {error}") from error


def _special_pattern(tokenizer: Tokenizer) -> re.Pattern[str] | None:
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    return re.compile("|".join(map(re.escape, sorted(special)))) if special else None


def _byte_level(vocabulary: Vocabulary) -> Tokenizer:
    if vocabulary.pre not in SPLITS:
        raise TokenizerError(f"there is no fast form of the splitting rules {vocabulary.pre!r}")
    ids = _ids(vocabulary.tokens)
    for byte in sorted(pre_tokenizers.ByteLevel.alphabet()):
        ids.setdefault(byte, len(ids))
    merges = [
        (left, right) for left, right in vocabulary.merges if left in ids and right in ids and left + right in ids
    ]
    whole = vocabulary.pre in WHOLE_WORDS_FIRST
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, ignore_merges=whole))
    splits = [pre_tokenizers.Split(Regex(regex), "isolated") for regex in SPLITS[vocabulary.pre]]
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, byte_level])
    return tokenizer


def _sentencepiece(vocabulary: Vocabulary) -> Tokenizer:
    if len(vocabulary.scores) != len(vocabulary.tokens):
        raise TokenizerError("a SentencePiece vocabulary needs one score for each token")
    ids = _ids(vocabulary.tokens)
    unknown = next(
        (t for t, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True) if kind == UNKNOWN), None
    )
    merges = _merges_by_score(vocabulary, ids)
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=merges, byte_fallback=True, unk_token=unknown, fuse_unk=False))
    steps: list[normalizers.Normalizer] = [normalizers.Replace(" ", _SPACE)]
    if vocabulary.flag("add_space_prefix", default=True):
        steps.insert(0, normalizers.Prepend(_SPACE))
    tokenizer.normalizer = normalizers.Sequence(steps)
    return tokenizer


def _merges_by_score(vocabulary: Vocabulary, ids: dict[str, int]) -> list[tuple[str, str]]:
    """Each way to split a token into two tokens, best score first: merging by rank is then merging by score."""
    ranked = sorted(
        (
            (-score, token)
            for token, score, kind in zip(vocabulary.tokens, vocabulary.scores, vocabulary.token_types, strict=True)
            if len(token) > 1 and kind not in {CONTROL, UNKNOWN, BYTE}
        ),
        key=lambda item: item[0],
    )
    merges = []
    for _, token in ranked:
        for cut in range(1, len(token)):
            left, right = token[:cut], token[cut:]
            if left in ids and right in ids:
                merges.append((left, right))
    return merges


def _ids(tokens: list[str]) -> dict[str, int]:
    ids = {token: index for index, token in enumerate(tokens)}
    if len(ids) != len(tokens):
        raise TokenizerError("two tokens have the same text")
    return ids


def _add_special(tokenizer: Tokenizer, vocabulary: Vocabulary) -> None:
    """Control and unknown tokens are special; tokens that the model's author defined are cut out of any text."""
    special, defined = [], []
    for token, kind in zip(vocabulary.tokens, vocabulary.token_types, strict=True):
        if kind in {CONTROL, UNKNOWN}:
            special.append(AddedToken(token, special=True, normalized=False))
        elif kind == USER_DEFINED:
            defined.append(AddedToken(token, special=False, normalized=False))
    tokenizer.add_special_tokens(special)
    tokenizer.add_tokens(defined)
