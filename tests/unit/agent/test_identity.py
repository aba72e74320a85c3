"""The node's key and name on disk."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent import identity as identities
from agent.identity import IdentityError, IdentityFile

FILE = IdentityFile(node_id="n1", organisation="owner", url="http://127.0.0.1:1", name="box")


class TestAKey:
    def test_is_made_once_and_only_its_owner_can_read_it(self, tmp_path: Path) -> None:
        home = tmp_path / "agent"
        identities.prepare_home(home)
        first = identities.load_or_make_key(home)
        again = identities.load_or_make_key(home)
        assert identities.public_key_base64(first) == identities.public_key_base64(again)
        assert (home / "node.key").stat().st_mode & 0o777 == 0o600
        assert home.stat().st_mode & 0o777 == 0o700

    def test_that_others_can_read_is_refused(self, tmp_path: Path) -> None:
        identities.load_or_make_key(tmp_path)
        (tmp_path / "node.key").chmod(0o644)
        with pytest.raises(IdentityError, match="chmod 600"):
            identities.load_key(tmp_path)

    def test_that_is_cut_short_is_refused(self, tmp_path: Path) -> None:
        identities.write_private(tmp_path / "node.key", b"short")
        with pytest.raises(IdentityError, match="damaged"):
            identities.load_key(tmp_path)


class TestAnIdentity:
    def test_comes_back_as_saved_and_signs_with_the_key(self, tmp_path: Path) -> None:
        key = identities.load_or_make_key(tmp_path)
        identities.save(tmp_path, FILE)
        identity = identities.load(tmp_path)
        assert identity.file == FILE
        key.public_key().verify(identity.sign(b"payload"), b"payload")

    def test_that_is_missing_says_what_to_do(self, tmp_path: Path) -> None:
        assert identities.find(tmp_path) is None
        with pytest.raises(IdentityError, match="enroll"):
            identities.load(tmp_path)

    def test_that_is_damaged_is_named(self, tmp_path: Path) -> None:
        (tmp_path / "identity.json").write_text('{"node_id": 7}')
        with pytest.raises(IdentityError, match=r"identity\.json"):
            identities.find(tmp_path)

    def test_leaves_no_temporary_file(self, tmp_path: Path) -> None:
        identities.save(tmp_path, FILE)
        assert [path.name for path in tmp_path.iterdir()] == ["identity.json"]
