"""A stranger's prompt earns an owner money: the real engine through the official client."""

from __future__ import annotations

import asyncio
import http.client
import json
from decimal import Decimal
from typing import Any, cast

import openai
import pytest

from marketplace.finance import service as finance
from tests.stack import Renter, Stack
from tests.vocabularies import MODEL_ID
from tests.witness import ask, assert_invariants, ended, stream, submit

CHAT: list[Any] = [{"role": "user", "content": "Name three colours, separated by commas."}]
ASK_INPUT, ASK_CACHED, ASK_OUTPUT = Decimal("0.05"), Decimal("0.01"), Decimal("0.20")


@pytest.fixture(scope="module")
def renter(stack: Stack) -> Renter:
    return stack.renter()


@pytest.fixture
def client(stack: Stack, renter: Renter) -> openai.OpenAI:
    return stack.client("gw-0", renter)


def raw(stack: Stack, renter: Renter, body: bytes, path: str = "/v1/chat/completions") -> tuple[int, Any]:
    """POST bytes as they are: (status, JSON). Every answer has a request id."""
    connection = http.client.HTTPConnection("127.0.0.1", stack.ports["gw-0"], timeout=20)
    headers = {"Authorization": f"Bearer {renter.secret}", "Content-Type": "application/json"}
    connection.request("POST", path, body, headers)
    answer = connection.getresponse()
    content = answer.read()
    connection.close()
    assert (answer.headers["x-request-id"] or "").startswith("req_")
    assert answer.headers["content-type"] == "application/json"
    return answer.status, json.loads(content)


class TestAChat:
    def test_streams_the_same_answer_that_it_gives_whole(self, stack: Stack, client: openai.OpenAI) -> None:
        whole = client.chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=24, temperature=0)
        chunks = list(
            client.chat.completions.create(
                model=MODEL_ID,
                messages=CHAT,
                max_tokens=24,
                temperature=0,
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
        assert text
        assert text == whole.choices[0].message.content
        assert chunks[0].choices[0].delta.role == "assistant"
        finishes = [
            chunk.choices[0].finish_reason for chunk in chunks if chunk.choices and chunk.choices[0].finish_reason
        ]
        assert finishes == [whole.choices[0].finish_reason]
        assert not chunks[-1].choices
        assert (whole.usage is not None, chunks[-1].usage is not None) == (True, True)
        assert whole.usage.completion_tokens == chunks[-1].usage.completion_tokens  # type: ignore[union-attr]
        assert whole.usage.prompt_tokens == chunks[-1].usage.prompt_tokens  # type: ignore[union-attr]

    def test_costs_what_its_tokens_cost_and_cached_ones_cost_less(self, stack: Stack, client: openai.OpenAI) -> None:
        prompt = "In one sentence: what is a lighthouse for? " * 6
        first, again = (ask(client, prompt, max_tokens=16) for _ in range(2))
        for seen in (first, again):
            assert seen.usage is not None
            cached = seen.usage["prompt_tokens_details"]["cached_tokens"]
            uncached = seen.usage["prompt_tokens"] - cached
            exact = uncached * ASK_INPUT + cached * ASK_CACHED + seen.usage["completion_tokens"] * ASK_OUTPUT
            assert abs(Decimal(seen.usage["cost"]) * 1_000_000 - exact) <= Decimal("0.0005")
        assert first.usage is not None
        assert again.usage is not None
        assert first.usage["prompt_tokens_details"]["cached_tokens"] < 10
        assert again.usage["prompt_tokens_details"]["cached_tokens"] > first.usage["prompt_tokens"] - 5
        assert Decimal(again.usage["cost"]) < Decimal(first.usage["cost"])
        assert_invariants(stack, [first, again])

    def test_is_served_through_the_async_client_several_at_once(self, stack: Stack, renter: Renter) -> None:
        async def chat(number: int) -> str:
            gateway = f"gw-{number % 2}"
            async with openai.AsyncOpenAI(
                api_key=renter.secret, base_url=f"{stack.url(gateway)}/v1", max_retries=4
            ) as client:
                answer = await client.chat.completions.create(
                    model=MODEL_ID,
                    messages=[{"role": "user", "content": f"Say the number {number}."}],
                    max_tokens=8,
                )
                return answer.choices[0].message.content or ""

        async def several() -> list[str]:
            return await asyncio.gather(*(chat(number) for number in range(4)))

        assert all(asyncio.run(several()))
        assert_invariants(stack)

    def test_that_is_left_half_way_pays_for_what_was_delivered(self, stack: Stack, client: openai.OpenAI) -> None:
        seen = stream(
            client, "Tell a long story about a ship.", max_tokens=300, on_piece=lambda seen: len(seen.pieces) >= 10
        )
        assert seen.left
        assert_invariants(stack, [seen])
        ((outcome, output),) = stack.rows(
            "select r.outcome, r.output_visible_tokens from receipts r join jobs j on j.id = r.job_id"
            " where j.request_id = :request",
            request=seen.request_id,
        )
        assert outcome == "cancelled"
        assert 10 <= output < 300


class TestModelsAndQuotes:
    def test_models_say_what_they_cost(self, stack: Stack, client: openai.OpenAI) -> None:
        (model,) = [model for model in client.models.list() if model.id == MODEL_ID]
        facts = model.model_dump()
        assert (model.id, facts["nodes"], facts["simulated"]) == (MODEL_ID, 1, False)
        assert facts["pricing"] == {"input": "0.05", "cached_input": "0.01", "output": "0.2"}
        assert client.models.retrieve(MODEL_ID).id == MODEL_ID

    def test_a_quote_bounds_the_cost_and_counts_as_the_bill_does(self, stack: Stack, client: openai.OpenAI) -> None:
        body = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 12}
        quote = cast("dict[str, Any]", client.post("/quote", body=body, cast_to=object))
        assert quote["capacity"]["available"] is True
        done = client.chat.completions.create(**body)  # type: ignore[call-overload]
        assert done.usage.prompt_tokens == quote["prompt_tokens"]
        assert Decimal(quote["cost"]["at_least"]) <= Decimal(done.usage.model_extra["cost"])
        assert Decimal(done.usage.model_extra["cost"]) <= Decimal(quote["cost"]["at_most"])


class TestRefusals:
    def test_a_wrong_key_is_an_authentication_error(self, stack: Stack, renter: Renter) -> None:
        wrong = Renter(renter.organisation_id, "sk-fallow-" + "0" * 40)
        with pytest.raises(openai.AuthenticationError) as caught:
            stack.client("gw-0", wrong).chat.completions.create(model=MODEL_ID, messages=CHAT)
        assert caught.value.code == "invalid_api_key"
        assert caught.value.request_id is not None

    def test_an_unknown_model_is_not_found_and_names_the_nearest(self, client: openai.OpenAI) -> None:
        with pytest.raises(openai.NotFoundError) as caught:
            client.chat.completions.create(model="smollm2-135m-instrukt", messages=CHAT)
        assert caught.value.code == "model_not_found"
        assert MODEL_ID in caught.value.message

    def test_an_empty_balance_says_what_is_short_and_what_would_be_affordable(self, stack: Stack) -> None:
        poor = stack.renter(credit_nano=5_000)
        client = stack.client("gw-0", poor)
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=500)
        error = cast("dict[str, Any]", caught.value.body)
        assert (caught.value.status_code, error["code"]) == (402, "insufficient_balance")
        assert Decimal(error["shortfall"]) > 0
        affordable = error["affordable_output_tokens"]
        assert 1 <= affordable < 500
        # What is called affordable is served; without a bound the answer is lowered to it, and says so.
        done = client.chat.completions.with_raw_response.create(model=MODEL_ID, messages=CHAT, temperature=0)
        assert int(done.headers["x-fallow-max-tokens"]) == affordable
        assert done.parse().usage.completion_tokens <= affordable  # type: ignore[union-attr]
        assert_invariants(stack)

    def test_a_prompt_over_the_slots_context_is_refused_before_any_charge(
        self, stack: Stack, renter: Renter, client: openai.OpenAI
    ) -> None:
        query = "select count(*) from jobs where organisation_id = :renter"
        before = stack.rows(query, renter=renter.organisation_id)
        with pytest.raises(openai.BadRequestError) as caught:
            client.chat.completions.create(
                model=MODEL_ID, messages=[{"role": "user", "content": "word " * 1100}], max_tokens=8
            )
        assert caught.value.code == "context_length_exceeded"
        assert stack.rows(query, renter=renter.organisation_id) == before

    @pytest.mark.parametrize(
        ("body", "says"),
        [
            (b'{"model": "m", "messages": [', "JSON"),
            (b'{"model":"M","messages":[{"role":"user","content":"x"}],"temperature":NaN}', ""),
            (b'{"model":"M","messages":[{"role":"user","content":"x"}],"temperature":1e999}', ""),
            (b'{"model":"M","model":"N","messages":[{"role":"user","content":"x"}]}', "twice"),
            (b'{"model":"M","messages":[{"role":"user","content":"\\ud800"}]}', ""),
            (b'{"model":"M","messages":[{"role":"user","content":"a\\u0000b"}]}', "NUL"),
            (b'{"model":"M","messages":[{"role":"user","content":"x"}],"colour":"red"}', "colour"),
            (b"\xff\xfe", ""),
            (b"", ""),
        ],
    )
    def test_a_malformed_body_is_a_bad_request(self, stack: Stack, renter: Renter, body: bytes, says: str) -> None:
        status, answer = raw(stack, renter, body.replace(b'"M"', f'"{MODEL_ID}"'.encode()))
        assert status == 400
        assert answer["error"]["type"] == "invalid_request_error"
        assert says in answer["error"]["message"]

    def test_an_oversized_body_is_too_large(self, stack: Stack, client: openai.OpenAI) -> None:
        with pytest.raises(openai.APIStatusError) as caught:
            client.chat.completions.create(model=MODEL_ID, messages=[{"role": "user", "content": "x" * 70_000}])
        assert (caught.value.status_code, caught.value.code) == (413, "request_too_large")

    def test_no_capacity_says_which_filter_refused_and_when_to_come_back(self, stack: Stack) -> None:
        renter = stack.renter()
        stack.only()
        try:
            with pytest.raises(openai.InternalServerError) as caught:
                stack.client("gw-1", renter).chat.completions.create(model=MODEL_ID, messages=CHAT, max_tokens=4)
        finally:
            stack.heal()
        assert (caught.value.status_code, caught.value.code) == (503, "no_capacity")
        assert int(caught.value.response.headers["retry-after"]) > 0
        assert "Nothing was charged" in caught.value.message

    def test_a_route_that_is_not_there_answers_in_the_same_shape(self, stack: Stack, renter: Renter) -> None:
        status, answer = raw(stack, renter, b"{}", "/v1/images/generations")
        assert (status, answer["error"]["type"]) == (404, "invalid_request_error")


class TestTheQueue:
    def test_ten_jobs_are_answered_and_billed(self, stack: Stack) -> None:
        client = stack.client("gw-0", stack.renter())
        ids = [submit(client, f"Name one use of number {number}.", max_tokens=8) for number in range(10)]
        shown = [ended(client, job_id) for job_id in ids]
        assert {job["status"] for job in shown} == {"completed"}
        for job in shown:
            result = job["result"]
            assert result["object"] == "chat.completion"
            assert result["choices"][0]["message"]["content"]
            assert result["usage"]["cost"] == job["cost"]
        assert_invariants(stack)


class TestTheStatement:
    def test_shows_what_renters_paid_less_the_fee(self, stack: Stack) -> None:
        assert_invariants(stack)
        ((start, end, owner_id),) = stack.rows(
            "select min(r.at) - interval '1 hour', now() + interval '1 second', n.organisation_id"
            " from receipts r join nodes n on n.id = r.node_id where n.name = 'llama' group by n.organisation_id"
        )
        ((fee, owner),) = stack.rows(
            "select sum(fee_nano)::bigint, sum(owner_nano)::bigint from receipts where owner_organisation_id = :owner",
            owner=owner_id,
        )
        with stack.factory() as session:
            statement = finance.yield_statement(session, owner_id, start, end, "UTC")
        earnings = statement.total.earnings
        assert owner > 0
        assert (earnings.fee_nano, earnings.net_nano) == (fee, owner)
        assert statement.account.closing_nano == owner
