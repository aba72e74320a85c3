"""The bundled model, imported."""

from __future__ import annotations

from typing import Any

import pytest

from marketplace.catalog.importer import DEFAULT_MAX_OUTPUT, describe, hash_file
from marketplace.catalog.models import Model, Variant
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.ids import new_id
from tests.vocabularies import MODEL_ID, smollm2_path


@pytest.fixture(scope="session")
def smollm2_columns() -> dict[str, Any]:
    """What an import finds in the file: worked out once, since it takes a second."""
    path = smollm2_path()
    return {"sha256": hash_file(path), **describe(path, DEFAULT_MAX_OUTPUT)}


@pytest.fixture
def imported(session_factory: SessionFactory, smollm2_columns: dict[str, Any]) -> Variant:
    """SmolLM2-135M-Instruct in the catalogue, as an import leaves it."""
    variant = Variant(id=new_id(), model_id=MODEL_ID, **smollm2_columns)
    with transaction(session_factory) as session:
        session.add(Model(id=MODEL_ID, display_name="SmolLM2 135M Instruct"))
        session.flush()
        session.add(variant)
    return variant
