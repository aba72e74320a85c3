"""The pipe of script calls: what happens when more wait than may."""

from __future__ import annotations

import asyncio
from typing import Any, cast

import pytest

from marketplace.core import valkey
from marketplace.core.valkey import Script, ValkeyDownError, ValkeyPipe

SCRIPT = Script("return 1")


class TestThePipe:
    def test_refuses_what_is_too_much_as_if_valkey_were_away(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(valkey, "MAX_WAITING", 2)

        async def story() -> None:
            pipe = ValkeyPipe(cast("Any", None))
            # Nothing is sent within this turn of the loop: these two wait.
            calls = [asyncio.ensure_future(pipe.run(SCRIPT, [], [])) for _ in range(2)]
            pipe._waiting.extend(cast("Any", [None, None]))
            with pytest.raises(ValkeyDownError, match="too many calls wait"):
                await pipe.run(SCRIPT, [], [])
            pipe._waiting.clear()
            for call in calls:
                call.cancel()

        asyncio.run(story())
