"""What can be sold: models, their variants, and prices by version."""

from __future__ import annotations

from datetime import datetime
from typing import Any
from uuid import UUID

from sqlalchemy import CheckConstraint, ForeignKey, Identity, LargeBinary, func
from sqlalchemy.orm import Mapped, mapped_column

from marketplace.core.database import Base
from marketplace.core.ids import new_id


class Model(Base):
    """A model as renters name it, such as `smollm2-135m-instruct`."""

    __tablename__ = "models"

    id: Mapped[str] = mapped_column(primary_key=True)
    display_name: Mapped[str]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Variant(Base):
    """Model + exact weights file + quantisation + tokenizer + template, for one task. Known by `sha256`."""

    __tablename__ = "variants"
    __table_args__ = (
        CheckConstraint("task in ('chat','embed')", name="task"),
        CheckConstraint(
            "num_nonnulls(dimensions, pooling, weights_sha256) = case task when 'embed' then 3 else 0 end",
            name="embedding",
        ),
    )

    id: Mapped[UUID] = mapped_column(primary_key=True, default=new_id)
    model_id: Mapped[str] = mapped_column(ForeignKey("models.id"), index=True)
    sha256: Mapped[str] = mapped_column(unique=True)
    """What offers and requests name it by: its file's hash for chat, else what agent.sizing.variants makes of that."""
    weights_sha256: Mapped[str | None]
    """Of the weights file, where `sha256` is not that: a file that serves two tasks is two variants."""
    task: Mapped[str] = mapped_column(server_default="chat")
    """`chat` or `embed`."""
    dimensions: Mapped[int | None]
    """Of its vectors, where it embeds."""
    pooling: Mapped[str | None]
    """How one vector is made of a text's tokens, where it embeds: mean, cls or last."""
    size_bytes: Mapped[int]
    quantisation: Mapped[str]
    training_context: Mapped[int]
    default_max_output: Mapped[int]
    """Output bound where the request gives none, in tokens."""
    shape: Mapped[dict[str, Any]]
    """The fields of agent.sizing.shape.ModelShape, and the architecture's name: what fit and speed need."""
    tokenizer_kind: Mapped[str]
    """`fast` (tokenizers, checked against the oracle at import) or `oracle`."""
    tokenizer: Mapped[bytes] = mapped_column(LargeBinary)
    """What tokenizer.py packs: a fast tokenizer, or the vocabulary file that the oracle loads; compressed."""
    chat_template: Mapped[str]
    special_tokens: Mapped[dict[str, Any]]
    """Begin and end tokens (text, id, whether the engine adds them), max_token_characters: for template and count."""
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())


class Price(Base):
    """One version of an ask. Append-only: its id is the version that attempts and receipts pin."""

    __tablename__ = "prices"
    __table_args__ = (
        CheckConstraint(
            "input_nano_usd_per_mtok >= 0 and cached_input_nano_usd_per_mtok >= 0 and output_nano_usd_per_mtok >= 0",
            name="rates",
        ),
    )

    id: Mapped[int] = mapped_column(Identity(always=True), primary_key=True)
    variant_id: Mapped[UUID] = mapped_column(ForeignKey("variants.id"), index=True)
    seller_ref: Mapped[UUID]
    """The node whose ask it is; opaque here."""
    input_nano_usd_per_mtok: Mapped[int]
    cached_input_nano_usd_per_mtok: Mapped[int]
    output_nano_usd_per_mtok: Mapped[int]
    created_at: Mapped[datetime] = mapped_column(server_default=func.now())
