from __future__ import annotations

import pytest
from pydantic import ValidationError

from marketplace.core.settings import Settings


class TestStores:
    @pytest.mark.parametrize(
        ("given", "meant"),
        [
            ("postgres://u@h/x", "postgresql://u@h/x"),
            ("postgresql+psycopg://u@h/x", "postgresql://u@h/x"),
            ("postgresql://postgres@/x?host=/run/pg", "postgresql://postgres@/x?host=/run/pg"),
        ],
    )
    def test_each_form_of_a_database_url_means_the_same_server(self, given: str, meant: str) -> None:
        assert Settings(database_url=given).database_url == meant

    def test_valkey_goes_by_its_own_name_too(self) -> None:
        assert Settings(valkey_url="valkey://h:6379/1").valkey_url == "redis://h:6379/1"
        assert Settings(valkey_url="unix:///run/v.sock?db=0").valkey_url == "unix:///run/v.sock?db=0"

    @pytest.mark.parametrize("given", ["", "foo", "mysql://h/x", "postgresql://u:hush@h:port/x", "postgresql:x"])
    def test_what_is_no_database_url_is_refused_before_anything_starts(self, given: str) -> None:
        with pytest.raises(ValidationError, match="it must be of the form postgresql://"):
            Settings(database_url=given)
