"""Importing a real model file, and refusing what cannot be sold."""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path

import pytest
from sqlalchemy import func, select

from agent.sizing.shape import ModelShape, read_shape
from agent.sizing.variants import variant_sha256
from marketplace.catalog import importer
from marketplace.catalog.importer import UnsellableFile, hash_file, import_gguf
from marketplace.catalog.models import Model, Variant
from marketplace.catalog.service import Catalog
from marketplace.catalog.tokenizer import ORACLE, BuiltTokenizer, build_fast
from marketplace.catalog.vocabulary import Vocabulary
from marketplace.core.database import SessionFactory, transaction
from tests.vocabularies import MODEL_ID, smollm2_path, smollm2_vocabulary, with_pre


@pytest.fixture
def imported(session_factory: SessionFactory) -> Variant:
    """The bundled model, really imported."""
    with transaction(session_factory) as session:
        return import_gguf(session, smollm2_path(), MODEL_ID, "SmolLM2 135M Instruct")


class TestImport:
    def test_the_file_tells_everything(self, imported: Variant) -> None:
        path = smollm2_path()
        assert imported.model_id == MODEL_ID
        assert imported.sha256 == hash_file(path)
        assert imported.size_bytes == path.stat().st_size
        assert imported.quantisation == "Q4_1"
        assert imported.training_context == 8_192
        assert imported.default_max_output == 1_024
        assert imported.tokenizer_kind == "fast"
        assert imported.special_tokens["eos_token"] == "<|im_end|>"
        assert not imported.special_tokens["add_bos"]
        names = {field.name for field in fields(ModelShape)}
        shape = {name: value for name, value in imported.shape.items() if name in names}
        assert ModelShape(**shape) == read_shape(path), "what the formulas of fit take"
        assert imported.shape["architecture"] == "llama"

    def test_importing_again_changes_nothing(self, session_factory: SessionFactory, imported: Variant) -> None:
        with transaction(session_factory) as session:
            again = import_gguf(session, smollm2_path(), MODEL_ID, "another name")
            assert again.id == imported.id
            assert session.scalar(select(func.count()).select_from(Variant)) == 1
            assert session.get_one(Model, MODEL_ID).display_name == "SmolLM2 135M Instruct"
            with pytest.raises(UnsellableFile, match=MODEL_ID):
                import_gguf(session, smollm2_path(), "other", "a file is sold under one model")

    def test_the_same_file_is_sold_for_its_vectors_under_an_id_of_its_own(
        self, session_factory: SessionFactory, imported: Variant
    ) -> None:
        with transaction(session_factory) as session, pytest.raises(UnsellableFile, match="an id of its own"):
            import_gguf(session, smollm2_path(), MODEL_ID, "SmolLM2", task="embed")
        with transaction(session_factory) as session:
            made = import_gguf(session, smollm2_path(), "vectors", "SmolLM2 vectors", task="embed")
            again = import_gguf(session, smollm2_path(), "vectors", "SmolLM2 vectors", task="embed", pooling="mean")
            assert (made.id, made.task, made.dimensions, made.pooling) == (again.id, "embed", 576, "mean")
            assert made.sha256 == variant_sha256(imported.sha256, "embed", "mean") != imported.sha256
            assert made.weights_sha256 == imported.sha256
            last = import_gguf(session, smollm2_path(), "vectors", "SmolLM2 vectors", task="embed", pooling="last")
            assert last.id != made.id
        catalog = Catalog(session_factory)
        catalog.load()
        view = catalog.resolve("vectors")
        assert (view.id, view.task, view.supports_tools) == (made.id, "embed", False)
        assert catalog.resolve(MODEL_ID).id == imported.id

    def test_hashing_reports_its_progress(self, tmp_path: Path) -> None:
        path = tmp_path / "file"
        path.write_bytes(b"x" * (9 * 1024 * 1024))
        seen: list[int] = []
        hash_file(path, seen.append)
        assert sum(seen) == 9 * 1024 * 1024
        assert len(seen) > 1

    def test_a_tokenizer_that_differs_from_llama_cpp_is_replaced_by_llama_cpp(
        self, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def with_other_rules(vocabulary: Vocabulary) -> BuiltTokenizer:
            return build_fast(with_pre(vocabulary, "qwen2"))

        monkeypatch.setattr(importer, "build_fast", with_other_rules)
        with transaction(session_factory) as session:
            variant = import_gguf(session, smollm2_path(), MODEL_ID, "SmolLM2")
            assert variant.tokenizer_kind == ORACLE
        monkeypatch.undo()
        catalog = Catalog(session_factory)
        catalog.load()
        try:
            view = catalog.resolve(MODEL_ID)
            chat = [{"role": "user", "content": "naïve 😀\n\n\n<|im_end|>"}]
            fast_ids = importer.FastTokenizer(build_fast(smollm2_vocabulary())).encode(view.render(chat), special=True)
            assert view.count_prompt(chat).ids == fast_ids
            assert view.count_text("<|im_end|>") > 1
        finally:
            catalog.close()


class TestRefusals:
    def test_half_a_file_is_refused(self, session_factory: SessionFactory, tmp_path: Path) -> None:
        half = tmp_path / "half.gguf"
        with smollm2_path().open("rb") as source:
            half.write_bytes(source.read(smollm2_path().stat().st_size // 2))
        with pytest.raises(UnsellableFile, match="cut short"), transaction(session_factory) as session:
            import_gguf(session, half, MODEL_ID, "SmolLM2")

    @pytest.mark.parametrize("content", [b"", b"not a model", b"GGUF", b"GGUF\x03\x00\x00\x00" + b"\xff" * 64])
    def test_what_is_no_model_is_refused(self, session_factory: SessionFactory, tmp_path: Path, content: bytes) -> None:
        path = tmp_path / "file.gguf"
        path.write_bytes(content)
        with pytest.raises(UnsellableFile), transaction(session_factory) as session:
            import_gguf(session, path, MODEL_ID, "SmolLM2")

    def test_a_vocabulary_without_weights_is_refused(self, session_factory: SessionFactory, tmp_path: Path) -> None:
        path = tmp_path / "vocabulary.gguf"
        path.write_bytes(smollm2_vocabulary().to_gguf())
        with pytest.raises(UnsellableFile), transaction(session_factory) as session:
            import_gguf(session, path, MODEL_ID, "SmolLM2")

    @pytest.mark.parametrize("model_id", ["", " ", "a b", "a:b", "a@b", "-a", "ü", "x" * 128, "a\n"])
    def test_an_id_that_renters_could_not_write_is_refused(
        self, session_factory: SessionFactory, model_id: str
    ) -> None:
        with pytest.raises(UnsellableFile), transaction(session_factory) as session:
            import_gguf(session, smollm2_path(), model_id, "SmolLM2")

    def test_a_refused_import_leaves_nothing(self, session_factory: SessionFactory, tmp_path: Path) -> None:
        path = tmp_path / "file.gguf"
        path.write_bytes(b"no")
        with pytest.raises(UnsellableFile), transaction(session_factory) as session:
            import_gguf(session, path, MODEL_ID, "SmolLM2")
        with session_factory() as session:
            assert session.scalar(select(func.count()).select_from(Model)) == 0
