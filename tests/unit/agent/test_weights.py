"""Weights found, hashed, and hashed again only when they changed."""

from __future__ import annotations

import hashlib
import os
import sys
from pathlib import Path

import pytest

from agent.config import ConfigError
from agent.weights import HashStore, locate, verify


class TestLocating:
    def test_takes_a_path(self, tmp_path: Path) -> None:
        file = tmp_path / "w.gguf"
        file.write_bytes(b"GGUF")
        assert locate(str(file)) == file

    def test_finds_a_file_in_a_package_without_importing_it(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        package = tmp_path / "package_with_weights"
        package.mkdir()
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "w.gguf").write_bytes(b"GGUF")
        monkeypatch.syspath_prepend(str(tmp_path))
        assert locate("package:package_with_weights/w.gguf") == package / "w.gguf"
        assert "package_with_weights" not in sys.modules

    @pytest.mark.parametrize(
        "weights", ["/nowhere/w.gguf", "package:no_such_package_here/w.gguf", "package:json", "package:json/../../x"]
    )
    def test_says_what_is_missing(self, weights: str) -> None:
        with pytest.raises(ConfigError):
            locate(weights)


class TestHashing:
    def test_remembers_while_the_file_stays_the_same(self, tmp_path: Path) -> None:
        file = tmp_path / "w.gguf"
        file.write_bytes(b"one")
        stat = file.stat()
        assert HashStore(tmp_path / "weights.json").sha256(file) == hashlib.sha256(b"one").hexdigest()
        store = HashStore(tmp_path / "weights.json")
        file.write_bytes(b"two")
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert store.sha256(file) == hashlib.sha256(b"one").hexdigest(), "not read again: nothing told of a change"
        os.utime(file, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
        assert store.sha256(file) == hashlib.sha256(b"two").hexdigest()

    def test_survives_a_damaged_memory(self, tmp_path: Path) -> None:
        (tmp_path / "weights.json").write_bytes(b"{not json")
        file = tmp_path / "w.gguf"
        file.write_bytes(b"one")
        assert HashStore(tmp_path / "weights.json").sha256(file) == hashlib.sha256(b"one").hexdigest()

    def test_refuses_another_file_than_the_configured_one(self, tmp_path: Path) -> None:
        file = tmp_path / "w.gguf"
        file.write_bytes(b"one")
        store = HashStore(tmp_path / "weights.json")
        assert verify(store, file, hashlib.sha256(b"one").hexdigest()) == verify(store, file, None)
        with pytest.raises(ConfigError, match="is not the file"):
            verify(store, file, "0" * 64)
