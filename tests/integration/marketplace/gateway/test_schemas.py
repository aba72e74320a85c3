"""Answers that were to follow a JSON Schema: checked, charged either way, and what was found is said."""

from __future__ import annotations

import asyncio
import json
import os
from typing import Any

import openai
import pytest

from agent.protocol import Accepted, Run
from marketplace.core.database import SessionFactory
from marketplace.core.settings import Settings
from marketplace.gateway.schemas import SchemaChecker
from marketplace.gateway.strict import InvalidBody
from tests.gateway_world import CHAT, MODEL_ID, Behaviour, ScriptedAgent, add_renter, world

SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"colour": {"enum": ["red", "blue"]}, "weight": {"type": "number"}},
    "required": ["colour"],
    "additionalProperties": False,
}


def wanted(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "thing", "schema": schema}}


def writes(text: str) -> Behaviour:
    """Exactly this answer."""

    async def behave(agent: ScriptedAgent, run: Run) -> None:
        await agent.say(Accepted(run.attempt, run.epoch))
        await agent.tokens(run, (text,))
        await agent.finish(run, 1)

    return behave


class TestAnAnswer:
    @pytest.mark.parametrize(
        ("text", "valid", "words"),
        [
            ('{"colour": "red"}', True, None),
            ('{"colour": "green"}', False, "$.colour"),
            ('{"colour": "red", "size": 1}', False, "Additional"),
            ('{"colour": ', False, "not JSON"),
            ('{"colour": "red", "weight": NaN}', False, "NaN"),
        ],
    )
    def test_says_whether_it_follows_its_schema_and_costs_the_same(
        self, settings: Settings, session_factory: SessionFactory, text: str, valid: bool, words: str | None
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(writes(text))
                client: Any = market.client(renter)
                sent = {"model": MODEL_ID, "messages": CHAT, "response_format": wanted(SCHEMA)}
                done = await client.chat.completions.create(**sent)
                check = done.choices[0].model_extra["schema_check"]
                assert check["valid"] is valid
                assert (words is None and check["error"] is None) or words in check["error"]
                stream = await client.chat.completions.create(**sent, stream=True)
                chunks = [chunk async for chunk in stream]
                assert chunks[-1].choices[0].finish_reason == "stop"
                assert chunks[-1].choices[0].model_extra["schema_check"] == check
                assert json.loads(agent.runs[0].body)["response_format"] == sent["response_format"]
                await market.settled()
                assert market.books.outcomes() == ["complete", "complete"]
                assert len({receipt.charge_nano for receipt in market.books.receipts()}) == 1
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_without_a_schema_says_nothing_of_one(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(writes("{}"))
                client: Any = market.client(renter)
                for form in (
                    {"type": "text"},
                    {"type": "json_object"},
                    {"type": "json_schema", "json_schema": {"name": "x"}},
                ):
                    done = await client.chat.completions.create(model=MODEL_ID, messages=CHAT, response_format=form)
                    assert "schema_check" not in (done.choices[0].model_extra or {})

        asyncio.run(story())

    def test_is_not_begun_for_a_schema_that_is_none(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                agent = await market.connect(writes("{}"))
                client: Any = market.client(renter)
                with pytest.raises(openai.BadRequestError) as caught:
                    await client.chat.completions.create(
                        model=MODEL_ID, messages=CHAT, response_format=wanted({"type": "nonsense"})
                    )
                assert caught.value.param == "response_format.json_schema.schema"
                assert agent.runs == []
                await market.settled()
                assert market.books.outcomes() == ["request_rejected"]

        asyncio.run(story())


class TestTheChecker:
    def test_is_not_held_up_by_a_schema_made_to_take_for_ever(self) -> None:
        backtracking = {"type": "string", "pattern": "^(a+)+$"}
        branching: dict[str, Any] = {"$defs": {"d0": {"type": "string"}}, "$ref": "#/$defs/d40"}
        for depth in range(1, 41):
            same = {"$ref": f"#/$defs/d{depth - 1}"}
            branching["$defs"][f"d{depth}"] = {"allOf": [same, same]}

        async def story() -> None:
            checker = SchemaChecker()
            try:
                for schema, text in ((backtracking, '"' + "a" * 40 + '!"'), (branching, '"x"')):
                    check = await checker.check(schema, text)
                    assert (check.valid, "longer than" in (check.error or "")) == (None, True)
                    assert (await checker.check(SCHEMA, '{"colour":"red"}')).valid is True
            finally:
                await checker.close()

        asyncio.run(story())

    def test_fetches_nothing_and_survives_the_end_of_its_process(self) -> None:
        async def story() -> None:
            checker = SchemaChecker()
            try:
                remote = await checker.check({"$ref": "http://127.0.0.1:9/schema.json"}, "1")
                assert remote.valid is False
                assert "refers to" in (remote.error or "")
                assert checker._child is not None
                os.kill(checker._child.pid, 9)
                await checker._child.wait()
                assert (await checker.check({"type": "integer"}, "1")).valid is True
                with pytest.raises(InvalidBody):
                    await checker.require_schema({"minimum": "low"})
                await checker.require_schema({"minimum": 1})
            finally:
                await checker.close()

        asyncio.run(story())
