"""Items of a dispatch list."""

from __future__ import annotations

import pytest

from marketplace.core.ids import new_id
from marketplace.jobs.dispatch import attempt_of, dispatch_key


def test_an_item_names_its_attempt() -> None:
    attempt_id = new_id()
    assert attempt_of(attempt_id.hex.encode()) == attempt_id


@pytest.mark.parametrize("item", [b"", b"nonsense", b"\xff\xfe", b"0" * 33])
def test_anything_else_names_none(item: bytes) -> None:
    assert attempt_of(item) is None


def test_each_gateway_has_its_list() -> None:
    assert dispatch_key("gw-1") != dispatch_key("gw-2")
