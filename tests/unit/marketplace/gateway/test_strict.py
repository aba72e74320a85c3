from __future__ import annotations

from typing import Literal

import msgspec
import pytest

from marketplace.gateway.strict import InvalidBody, decode_strict


class Inner(msgspec.Struct):
    sort: Literal["price", "latency"] | None = None


class Body(msgspec.Struct):
    events: list[Literal["ended", "failed"]] | None = None
    provider: Inner | None = None
    by_name: dict[str, Literal["on"]] = {}


class TestAValueThatIsNoChoice:
    @pytest.mark.parametrize(
        ("body", "said", "param"),
        [
            (b'{"events": ["ended", "done"]}', "`events[1]`: 'done' is none of ended, failed.", "events[1]"),
            (b'{"provider": {"sort": "luck"}}', "`provider.sort`: 'luck' is none of latency, price.", "provider.sort"),
        ],
    )
    def test_is_answered_with_the_choices(self, body: bytes, said: str, param: str) -> None:
        with pytest.raises(InvalidBody) as refused:
            decode_strict(body, Body)
        assert (refused.value.message, refused.value.param) == (said, param)

    def test_in_an_object_of_any_keys_is_still_named(self) -> None:
        with pytest.raises(InvalidBody, match="Invalid enum value 'off'"):
            decode_strict(b'{"by_name": {"x": "off"}}', Body)
