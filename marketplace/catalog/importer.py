"""From a GGUF file to a variant that can be sold: hash, shape, tokenizer, template. The edge commits."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

from sqlalchemy import select
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.orm import Session

from agent.sizing.gguf import GgufError, GgufHeader, read_header, require_complete
from agent.sizing.shape import read_shape
from agent.sizing.variants import CHAT, EMBED, Pooling, Task, pooling_of, variant_sha256
from marketplace.catalog.corpus import TEXTS, chats
from marketplace.catalog.models import Model, Variant
from marketplace.catalog.oracle import Oracle, OracleFacts
from marketplace.catalog.template import ChatTemplate, TemplateError, UnsupportedMessages
from marketplace.catalog.tokenizer import (
    FAST,
    ORACLE,
    FastTokenizer,
    OracleTokenizer,
    TokenizerError,
    build_fast,
    first_difference,
    pack,
)
from marketplace.catalog.vocabulary import ARRAYS, Vocabulary, VocabularyError, read_vocabulary
from marketplace.core.errors import BadRequest
from marketplace.core.ids import new_id
from marketplace.core.logs import get_logger

log = get_logger(__name__)
DEFAULT_MAX_OUTPUT: Final = 1_024
"""Output tokens of a request that names no bound; less where a quarter of the model's context is less."""
MODEL_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._/-]{0,126}")
"""No colon and no at sign: those separate a quantisation or a hash from the model's id."""
_CHUNK_BYTES: Final = 4 * 1024 * 1024

QUANTISATIONS: Final = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M",
    13: "Q3_K_L", 14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS",
    21: "Q2_K_S", 22: "IQ3_XS", 23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S",
    29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16", 36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""general.file_type as llama.cpp numbers it."""


class UnsellableFile(BadRequest):
    """The file is no complete GGUF file, or lacks what a sale needs. The message says what."""

    code = "unsellable_file"


def import_gguf(
    session: Session,
    path: Path,
    model_id: str,
    display_name: str,
    *,
    default_max_output: int = DEFAULT_MAX_OUTPUT,
    task: Task = CHAT,
    pooling: Pooling | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> Variant:
    """The variant of this file, imported if it is new; known by the file's SHA-256, so a second import changes nothing.

    With the task `embed` it sells vectors: another variant, also of a file that is sold for chat, under a model's id of
    its own. `pooling` is how they are made, None what the file says. `on_bytes` is told of each piece hashed. Takes
    about a second per GB, and a few for the tokenizer's comparison.
    Raises UnsellableFile for a file, an id or a template that cannot be sold, OracleError (503) where llama.cpp is not
    installed to compare with, and OSError if the file cannot be read.
    """
    if not MODEL_ID.fullmatch(model_id):
        raise UnsellableFile("A model's id has up to 127 letters, digits and ._/-", param="model_id")
    weights_sha256 = hash_file(path, on_bytes)
    embedding = {"weights_sha256": weights_sha256, **_embedding(path, pooling)} if task == EMBED else {}
    sha256 = variant_sha256(weights_sha256, task, embedding.get("pooling"))
    known = session.scalars(select(Variant).where(Variant.sha256 == sha256)).one_or_none()
    if known is not None:
        return _checked_known(known, model_id)
    other = session.scalars(select(Variant.task).where(Variant.model_id == model_id, Variant.task != task)).first()
    if other is not None:
        raise UnsellableFile(
            f"{model_id!r} is a model for the task {other!r}: give the one for {task!r} an id of its own, such as "
            f"{model_id}-{task}.",
            param="model_id",
        )
    values = describe(path, default_max_output, task) | embedding
    session.execute(insert(Model).values(id=model_id, display_name=display_name).on_conflict_do_nothing())
    # Two importers of one file: the second finds the first one's row.
    row = insert(Variant).values(id=new_id(), model_id=model_id, sha256=sha256, task=task, **values)
    session.execute(row.on_conflict_do_nothing(index_elements=[Variant.sha256]))
    return _checked_known(session.scalars(select(Variant).where(Variant.sha256 == sha256)).one(), model_id)


def hash_file(path: Path, on_bytes: Callable[[int], None] | None = None) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(_CHUNK_BYTES):
            digest.update(chunk)
            if on_bytes is not None:
                on_bytes(len(chunk))
    return digest.hexdigest()


def _checked_known(variant: Variant, model_id: str) -> Variant:
    if variant.model_id != model_id:
        raise UnsellableFile(f"This file is already sold as {variant.model_id!r}.", param="model_id")
    return variant


def _embedding(path: Path, pooling: Pooling | None) -> dict[str, Any]:
    """The columns that only a variant that embeds has. Raises UnsellableFile."""
    try:
        return {"dimensions": read_shape(path).hidden, "pooling": pooling or pooling_of(read_header(path))}
    except GgufError as error:
        raise UnsellableFile(f"{path.name} cannot be sold: {error}.") from error


def describe(path: Path, default_max_output: int, task: Task = CHAT) -> dict[str, Any]:
    """The columns of a variant that come out of its file, all but the hash. Raises as `import_gguf` does."""
    try:
        header = read_header(path, ARRAYS)
        require_complete(header)
        vocabulary = read_vocabulary(header)
        shape = read_shape(path)
    except (GgufError, VocabularyError) as error:
        raise UnsellableFile(f"{path.name} cannot be sold: {error}.") from error
    kind, stored, special, source = _tokenizer_and_template(path, header, vocabulary, task)
    return {
        "size_bytes": header.file_size,
        "quantisation": quantisation_of(header),
        "training_context": shape.context_train,
        "default_max_output": max(1, min(default_max_output, shape.context_train // 4)),
        "shape": {"architecture": vocabulary.architecture, **asdict(shape)},
        "tokenizer_kind": kind,
        "tokenizer": stored,
        "chat_template": source,
        "special_tokens": special,
    }


def quantisation_of(header: GgufHeader) -> str:
    """The quantisation's usual name; the most common tensor type where the file gives no number that we know."""
    number = header.integer("general.file_type")
    if number in QUANTISATIONS:
        return QUANTISATIONS[number]
    sizes: dict[str, int] = {}
    for tensor in header.tensors:
        sizes[tensor.type_name] = sizes.get(tensor.type_name, 0) + tensor.size_bytes
    return max(sizes, key=lambda name: sizes[name]) if sizes else "unknown"


def _tokenizer_and_template(
    path: Path, header: GgufHeader, vocabulary: Vocabulary, task: Task
) -> tuple[str, bytes, dict[str, Any], str]:
    gguf = vocabulary.to_gguf()
    with Oracle(gguf) as oracle:
        special = _special_tokens(vocabulary, oracle.facts)
        if task == EMBED:
            # Texts are embedded as they are; many such models have no template.
            return *_choose_tokenizer(vocabulary, gguf, None), special, ""
        source = header.text("tokenizer.chat_template") or ""
        try:
            template = ChatTemplate(
                source, bos_token=special["bos_token"], eos_token=special["eos_token"], adds_bos=special["add_bos"]
            )
        except TemplateError as error:
            raise UnsellableFile(f"{path.name} cannot be sold: {error}.") from error
    return *_choose_tokenizer(vocabulary, gguf, template), special, source


def _choose_tokenizer(vocabulary: Vocabulary, gguf: bytes, template: ChatTemplate | None) -> tuple[str, bytes]:
    """The fast tokenizer if it exists and agrees with llama.cpp on every text of the corpus; else the oracle."""
    exact = OracleTokenizer(gguf)
    try:
        built = build_fast(vocabulary)
        differs = first_difference(FastTokenizer(built), exact, _comparison_texts(template))
    except TokenizerError as error:
        log.warning("tokenizer_oracle_chosen", reason=str(error))
        return ORACLE, pack(gguf)
    finally:
        exact.close()
    if differs is not None:
        log.warning("tokenizer_oracle_chosen", reason="the fast tokenizer differs", text=ascii(differs)[:80])
        return ORACLE, pack(gguf)
    return FAST, pack(built)


def _comparison_texts(template: ChatTemplate | None) -> list[str]:
    texts = list(TEXTS)
    if template is None:
        return texts
    for chat in chats():
        try:
            texts.append(template.render(chat))
        except UnsupportedMessages:
            # Some templates refuse some orders of roles; what they refuse is never counted.
            continue
    return texts


def _special_tokens(vocabulary: Vocabulary, facts: OracleFacts) -> dict[str, Any]:
    tokens = vocabulary.tokens

    def text(index: int) -> str:
        return tokens[index] if 0 <= index < len(tokens) else ""

    return {
        "bos_token": text(facts.bos),
        "eos_token": text(facts.eos),
        "bos_id": facts.bos,
        "eos_id": facts.eos,
        "add_bos": facts.add_bos and facts.bos >= 0,
        "add_eos": facts.add_eos and facts.eos >= 0,
        "max_token_characters": max(map(len, tokens)),
    }
