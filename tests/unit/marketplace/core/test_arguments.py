from __future__ import annotations

from collections.abc import Callable
from uuid import UUID

import pytest
import typer

from marketplace.core import ids
from marketplace.core.arguments import key_id, node_id


@pytest.mark.parametrize(("prefix", "read"), [("node", node_id), ("key", key_id)])
class TestIds:
    def test_are_taken_as_the_commands_and_as_the_api_show_them(self, prefix: str, read: Callable[[str], UUID]) -> None:
        made = ids.new_id()
        assert read(str(made)) == read(ids.show(prefix, made)) == made

    def test_of_no_such_form_are_refused_with_where_to_find_them(
        self, prefix: str, read: Callable[[str], UUID]
    ) -> None:
        with pytest.raises(typer.BadParameter, match=f"'this-machine' is no {prefix}'s id. `fallow {prefix} list"):
            read("this-machine")
