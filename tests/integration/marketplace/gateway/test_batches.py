"""Files and batches with the official client: checked, run, paid at half price, cancelled, expired, fetched, erased."""

from __future__ import annotations

import asyncio
import base64
import contextlib
import dataclasses
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import openai
import pytest
from sqlalchemy import or_, select, text

from agent.engines.simulated_vectors import embed
from agent.protocol import DataPolicy
from marketplace.catalog.service import Catalog
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.core.valkey import connect
from marketplace.fleet.snapshot import read_fleet
from marketplace.gateway.batches import files
from marketplace.gateway.batches.models import BatchLine
from marketplace.gateway.batches.tasks import advance_all
from marketplace.gateway.batches.work import Means
from marketplace.jobs.models import Job
from marketplace.jobs.tasks import assign_until_done, make_matcher, sweep
from marketplace.metering.pricing import Rates, price
from marketplace.metering.tokens import TokenCounts
from tests.embedding_world import EMBED_MODEL, embedding_world, embeds
from tests.embedding_world import connect as connect_embedder
from tests.gateway_world import (
    CHAT,
    MODEL_ID,
    WORDS,
    Renter,
    World,
    add_renter,
    answers,
    fails,
    stalls,
    until,
    world,
)

HALF = Rates(input=50_000_000, cached_input=25_000_000, output=200_000_000)
ANSWER = "".join(WORDS)


def chat_line(custom_id: str, **changes: Any) -> dict[str, Any]:
    body = {"model": MODEL_ID, "messages": CHAT, "max_tokens": 32, **changes}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body}


def jsonl(*lines: dict[str, Any]) -> bytes:
    return b"".join(json.dumps(line).encode() + b"\n" for line in lines)


class Worker:
    """What a worker does about batches, done when a test says so."""

    def __init__(self, market: World) -> None:
        self.factory, self.settings = market.factory, market.settings
        self.client = connect(market.settings.valkey_url)
        self.matcher = make_matcher(self.client, market.settings)
        catalog = Catalog(market.factory)
        catalog.load()
        self.means = Means(
            catalog=catalog, offers=lambda: read_fleet(self.client), hold_margin_s=900.0, keep_files_s=86_400.0
        )

    def tick(self) -> None:
        advance_all(self.factory, self.means)
        assign_until_done(self.factory, self.client, self.matcher)


@contextlib.asynccontextmanager
async def working(market: World) -> AsyncIterator[Worker]:
    """A worker beside the gateway, until the block ends."""
    worker = await asyncio.to_thread(Worker, market)

    async def work() -> None:
        while True:
            await asyncio.to_thread(worker.tick)
            await asyncio.sleep(0.05)

    task = asyncio.create_task(work())
    try:
        yield worker
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def begin(client: openai.AsyncOpenAI, *lines: dict[str, Any], **changes: Any) -> Any:
    file = await client.files.create(file=("in.jsonl", jsonl(*lines)), purpose="batch")
    wish = {"endpoint": "/v1/chat/completions", "completion_window": "24h", **changes}
    return await client.batches.create(input_file_id=file.id, **wish)


async def ended(client: openai.AsyncOpenAI, batch_id: str, timeout_s: float = 20.0) -> Any:
    async with asyncio.timeout(timeout_s):
        batch = await client.batches.retrieve(batch_id)
        while batch.status not in ("completed", "failed", "expired", "cancelled"):
            await asyncio.sleep(0.05)
            batch = await client.batches.retrieve(batch_id)
        return batch


async def read(client: openai.AsyncOpenAI, file_id: str | None) -> dict[str, Any]:
    assert file_id is not None
    content = await client.files.content(file_id)
    return {line["custom_id"]: line for line in map(json.loads, content.text.splitlines())}


class TestABatch:
    def test_answers_each_line_at_half_price(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                agent = await market.connect(answers)
                client = market.client(renter)
                batch = await begin(client, *(chat_line(f"line-{n}") for n in range(5)), metadata={"run": "one"})
                assert (batch.object, batch.status, batch.metadata) == ("batch", "validating", {"run": "one"})
                done = await ended(client, batch.id)
                assert done.status == "completed"
                assert (done.request_counts.total, done.request_counts.completed) == (5, 5)
                assert done.error_file_id is None
                results = await read(client, done.output_file_id)
                assert sorted(results) == [f"line-{n}" for n in range(5)]
                first = results["line-0"]
                assert first["error"] is None
                assert first["response"]["status_code"] == 200
                body = first["response"]["body"]
                assert body["object"] == "chat.completion"
                assert body["choices"][0]["message"]["content"] == ANSWER
                counts = TokenCounts.of(prompt=agent.runs[0].prompt_tokens, cached=0, output=len(WORDS))
                gross = price(counts, HALF, 0).gross_nano
                assert round(float(body["usage"]["cost"]) * 1e9) == gross
                receipts = market.books.receipts()
                assert [receipt.charge_nano for receipt in receipts] == [gross] * 5
                assert all(receipt.charge_nano == receipt.owner_nano + receipt.fee_nano for receipt in receipts)
                assert round(float(done.model_extra["cost"]) * 1e9) == 5 * gross
                assert done.model_extra["price_share"] == "0.5"
                assert market.books.outcomes() == ["complete"] * 5
                assert set(market.books.endpoints()) == {"/v1/batches"}
                assert market.books.credit(renter).held_nano == 5 * gross
                assert market.books.broken_rules() == []
                usage = await market.call("GET", f"/v1/usage/{first['response']['request_id']}", renter)
                assert usage.json["endpoint"] == "/v1/batches"
                with session_factory() as session:
                    kept = select(Job.id).where(or_(Job.body.is_not(None), Job.result.is_not(None)))
                    assert session.scalars(kept).all() == []
                    said = select(BatchLine.number).where(
                        or_(BatchLine.body.is_not(None), BatchLine.result.is_not(None))
                    )
                    assert session.scalars(said).all() == []
                assert (await market.call("GET", "/v1/jobs", renter)).json["data"] == []
                rates = session.execute(text("select distinct input_nano_usd_per_mtok from prices order by 1"))
                assert list(rates.scalars()) == [50_000_000, 100_000_000]

        asyncio.run(story())

    def test_and_a_job_may_want_several_answers_which_old_agents_do_not_get(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                old = await market.connect(answers, choices=False)
                wish = {"request": {"model": MODEL_ID, "messages": CHAT, "max_tokens": 32, "n": 2}}
                job = (await market.call("POST", "/v1/jobs", renter, json=wish)).json
                batch = await begin(market.client(renter), chat_line("one"), chat_line("three", n=3))
                await until(lambda: len(old.runs) == 1)
                new = await market.connect(answers)
                done = await ended(market.client(renter), batch.id)
                results = await read(market.client(renter), done.output_file_id)
                told = {line: len(result["response"]["body"]["choices"]) for line, result in results.items()}
                assert told == {"one": 1, "three": 3}
                assert results["three"]["response"]["body"]["usage"]["completion_tokens"] == 3 * len(WORDS)
                await until(lambda: market.books.outcomes() == ["complete"] * 3)
                result = (await market.call("GET", f"/v1/jobs/{job['id']}", renter)).json["result"]
                assert [one["message"]["content"] for one in result["choices"]] == [ANSWER] * 2
                assert ([run.choices for run in old.runs], sorted(run.choices for run in new.runs)) == ([1], [2, 3])
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_waits_with_its_lines_while_the_queue_is_full(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await market.connect(answers)
                worker = await asyncio.to_thread(Worker, market)
                worker.means = dataclasses.replace(worker.means, most_queued_own=2)
                await begin(market.client(renter), *(chat_line(name) for name in "abc"))

                async def advance_to(jobs: int) -> None:
                    # Lines become jobs once the worker sees that somebody offers to run them.
                    async with asyncio.timeout(15):
                        while len(market.books.jobs()) < jobs:
                            await asyncio.to_thread(advance_all, worker.factory, worker.means)

                await advance_to(2)
                await asyncio.to_thread(advance_all, worker.factory, worker.means)
                assert [job.state for job in market.books.jobs()] == ["queued"] * 2
                await asyncio.to_thread(assign_until_done, worker.factory, worker.client, worker.matcher)
                await until(lambda: market.books.outcomes() == ["complete"] * 2)
                await advance_to(3)

        asyncio.run(story())

    def test_ends_with_its_key(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                client = market.client(renter)
                batch = await begin(client, chat_line("a"))
                await until(lambda: states(session_factory) == ["in_progress"])
                with transaction(session_factory) as session:
                    session.execute(text("update api_keys set revoked_at = now()"))
                await until(lambda: states(session_factory) == ["completed"])
                with session_factory() as session:
                    assert list(session.scalars(select(BatchLine.error_code))) == ["invalid_api_key"]
                assert market.books.outcomes() == ["request_rejected"]
                assert market.books.jobs() == []
                assert batch.status == "validating"

        asyncio.run(story())

    def test_of_embeddings_runs_where_each_input_fits_and_costs_its_input(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        texts = ["word " * 150, "A fox.", "word " * 150]

        def line(custom_id: str, **changes: Any) -> dict[str, Any]:
            body = {"model": EMBED_MODEL, "input": texts, **changes}
            return {"custom_id": custom_id, "method": "POST", "url": "/v1/embeddings", "body": body}

        async def story() -> None:
            async with embedding_world(settings, session_factory) as market, working(market):
                node = await connect_embedder(market, embeds, context_per_slot=256)
                client = market.client(renter)
                wrong = await ended(
                    client, (await begin(client, line("a", model=MODEL_ID), endpoint="/v1/embeddings")).id
                )
                assert [error.code for error in wrong.errors.data] == ["wrong_task"]
                lines = line("numbers"), line("packed", encoding_format="base64"), line("long", input="word " * 400)
                done = await ended(client, (await begin(client, *lines, endpoint="/v1/embeddings")).id)
                assert (done.request_counts.completed, done.request_counts.failed) == (2, 1)
                results = await read(client, done.output_file_id)
                numbers, packed = (results[name]["response"]["body"] for name in ("numbers", "packed"))
                assert [each["embedding"] for each in numbers["data"]] == [embed(each, 576).tolist() for each in texts]
                assert len(base64.b64decode(packed["data"][2]["embedding"])) == 576 * 4
                counts = TokenCounts.of(prompt=node.runs[0].prompt_tokens, cached=0, output=0)
                assert [receipt.charge_nano for receipt in market.books.receipts()] == [
                    price(counts, HALF, 0).gross_nano
                ] * 2
                failed = await read(client, done.error_file_id)
                assert failed["long"]["error"]["code"] == "context_length_exceeded"
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_of_text_completions_answers_in_their_shape(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        line = {
            "custom_id": "a",
            "method": "POST",
            "url": "/v1/completions",
            "body": {"model": MODEL_ID, "prompt": "The fox"},
        }

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                agent = await market.connect(answers)
                client = market.client(renter)
                done = await ended(client, (await begin(client, line, endpoint="/v1/completions")).id)
                body = (await read(client, done.output_file_id))["a"]["response"]["body"]
                assert (body["object"], body["choices"][0]["text"]) == ("text_completion", ANSWER)
                assert body["id"].startswith("cmpl-")
                assert json.loads(agent.runs[0].body)["prompt"] == "The fox"

        asyncio.run(story())

    def test_tells_failed_lines_apart_and_charges_nothing_for_them(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                await market.connect(fails("engine_rejected"))
                client = market.client(renter)
                long = chat_line("long", messages=[{"role": "user", "content": "fox " * 4_000}])
                done = await ended(client, (await begin(client, chat_line("refused"), long)).id)
                assert (done.status, done.output_file_id) == ("completed", None)
                assert (done.request_counts.completed, done.request_counts.failed) == (0, 2)
                errors = await read(client, done.error_file_id)
                assert errors["refused"]["error"]["code"] == "engine_rejected"
                assert errors["long"]["error"]["code"] == "context_length_exceeded"
                assert errors["long"]["response"] is None
                assert market.books.receipts() == []
                assert market.books.outcomes() == ["request_rejected"] * 2
                assert market.books.credit(renter).held_nano == 0
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_waits_while_nobody_serves_its_model_and_expires_for_free(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                client = market.client(renter)
                batch = await begin(client, chat_line("a"), chat_line("b"))
                await until(lambda: states(session_factory) == ["in_progress"])
                hurry(session_factory)
                done = await ended(client, batch.id)
                assert (done.status, done.request_counts.failed) == ("expired", 2)
                errors = await read(client, done.error_file_id)
                assert errors["a"]["error"]["code"] == "batch_expired"
                assert market.books.outcomes() == ["expired"] * 2
                assert market.books.jobs() == []

        asyncio.run(story())

    def test_that_is_cut_by_its_deadline_pays_nothing_for_the_line_that_ran(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, checkpoint_s=0.1) as market, working(market) as worker:
                client = market.client(renter)
                batch = await begin(client, chat_line("a"))
                await until(lambda: states(session_factory) == ["in_progress"])
                hurry(session_factory, in_s=1.5)
                agent = await market.connect(stalls)
                done = await ended(client, batch.id)
                assert len(agent.runs) == 1
                assert done.status == "expired"
                assert market.books.receipts() == []
                assert market.books.outcomes() == ["expired"]
                assert market.books.credit(renter).held_nano == 0
                await asyncio.to_thread(sweep, session_factory, worker.client, settings)
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_that_is_cancelled_ends_waiting_lines_for_free_and_pays_what_was_delivered(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, checkpoint_s=0.1) as market, working(market):
                agent = await market.connect(stalls, slots=1)
                client = market.client(renter)
                batch = await begin(client, *(chat_line(f"line-{n}") for n in range(3)))
                await until(lambda: bool(agent.runs))
                await until(lambda: any(attempt.accepted_tokens == 3 for attempt in market.books.attempts()))
                cancelling = await client.batches.cancel(batch.id)
                assert cancelling.status == "cancelling"
                assert (await client.batches.cancel(batch.id)).status in ("cancelling", "cancelled")
                done = await ended(client, batch.id)
                assert (done.status, done.request_counts.failed, done.output_file_id) == ("cancelled", 3, None)
                errors = await read(client, done.error_file_id)
                cut = [line for line in errors.values() if line["response"] is not None]
                assert [line["response"]["status_code"] for line in cut] == [499]
                assert cut[0]["response"]["body"]["choices"][0]["message"]["content"] == "".join(WORDS[:3])
                (receipt,) = market.books.receipts()
                assert receipt.output_visible_tokens == 3
                assert sorted(market.books.outcomes()) == ["cancelled", "cancelled_early", "cancelled_early"]
                with pytest.raises(openai.ConflictError) as caught:
                    await client.batches.cancel((await failed_batch(client)).id)
                assert caught.value.code == "batch_ended"
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_on_a_small_balance_goes_on_line_by_line_and_never_below_zero(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        prompt = 40
        one = price(TokenCounts.of(prompt=prompt, cached=0, output=32), HALF, 0).gross_nano
        renter = add_renter(session_factory, credit_nano=one * 2)

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                await market.connect(answers)
                client = market.client(renter)
                done = await ended(client, (await begin(client, *(chat_line(f"{n}") for n in range(8)))).id)
                assert done.status == "completed"
                assert done.request_counts.completed >= 2
                assert done.request_counts.completed + done.request_counts.failed == 8
                if done.request_counts.failed:
                    errors = await read(client, done.error_file_id)
                    assert {line["error"]["code"] for line in errors.values()} == {"insufficient_balance"}
                    assert market.books.outcomes().count("no_balance") == done.request_counts.failed
                credit = market.books.credit(renter)
                assert credit.available_nano >= 0
                assert market.books.broken_rules() == []

        asyncio.run(story())


async def failed_batch(client: openai.AsyncOpenAI) -> Any:
    return await ended(client, (await begin(client, {**chat_line("x"), "url": "/v1/elsewhere"})).id)


def states(factory: SessionFactory) -> list[str]:
    with factory() as session:
        return list(session.scalars(text("select status from batches order by created_at")))


def hurry(factory: SessionFactory, in_s: float = 0.0) -> None:
    """Let the time of every batch be up soon."""
    with transaction(factory) as session:
        session.execute(text("update batches set expires_at = now() + make_interval(secs => :s)"), {"s": in_s})


class TestATick:
    def test_leaves_the_workers_to_others_while_another_one_is_at_work(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                await begin(market.client(renter), chat_line("a"))
                worker = await asyncio.to_thread(Worker, market)
                with session_factory() as other:
                    other.execute(text("select pg_advisory_xact_lock(hashtextextended('batches.advance', 0))"))
                    await asyncio.to_thread(worker.tick)
                    assert states(session_factory) == ["validating"]
                await asyncio.to_thread(worker.tick)
                assert states(session_factory) == ["in_progress"]

        asyncio.run(story())

    def test_gives_up_a_file_that_was_never_checked_in_time(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                client = market.client(renter)
                batch = await begin(client, chat_line("a"))
                hurry(session_factory)
                worker = await asyncio.to_thread(Worker, market)
                await asyncio.to_thread(worker.tick)
                failed = await client.batches.retrieve(batch.id)
                assert failed.status == "failed"
                assert [error.code for error in failed.errors.data] == ["batch_expired"]

        asyncio.run(story())


class TestAChoice:
    def test_is_the_lines_own_or_its_keys_and_what_cannot_run_holds_up_nobody(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, routing={"regions": ["eu"]})

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                abroad = await market.connect(answers, data=DataPolicy("us"))
                near = await market.connect(answers, data=DataPolicy("eu"))
                client = market.client(renter)
                nobody = [chat_line(f"nobody-{n}", provider={"regions": ["mars"]}) for n in range(70)]
                named = {"only": [f"node_{abroad.node.node_id.hex}"], "regions": [], "quantizations": ["int4"]}
                rest = [chat_line("own", provider=named), chat_line("key")]
                batch = await begin(client, *nobody, *rest)
                await until(lambda: market.books.outcomes() == ["complete"] * 2)
                assert (len(abroad.runs), len(near.runs)) == (1, 1)
                await client.batches.cancel(batch.id)
                done = await ended(client, batch.id)
                results = await read(client, done.output_file_id)
                assert sorted(results) == ["key", "own"]
                stored = {
                    job.choice["regions"][0] if job.choice and "regions" in job.choice else None
                    for job in market.books.jobs()
                }
                assert stored == {"eu", None}
                assert market.books.broken_rules() == []

        asyncio.run(story())

    def test_of_a_precision_that_is_not_sold_fails_the_file(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory, routing={"quantizations": ["fp32"]})

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                client = market.client(renter)
                failed = await ended(client, (await begin(client, chat_line("a"))).id)
                (error,) = failed.errors.data
                assert (error.code, error.param) == ("no_matching_variant", "body.provider.quantizations")

        asyncio.run(story())


class TestTheInput:
    def test_is_checked_line_by_line_before_anything_costs(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter = add_renter(session_factory)
        lines = [
            b"{",
            json.dumps(chat_line("a")).encode(),
            json.dumps(chat_line("a")).encode(),
            json.dumps({**chat_line("b"), "url": "/v1/completions"}).encode(),
            json.dumps(chat_line("c", stream=True)).encode(),
            json.dumps(chat_line("d", model="nonesuch")).encode(),
            json.dumps(chat_line("e", temperatur=1)).encode(),
            json.dumps(chat_line("g", provider={"only": ["somebody"]})).encode(),
            b'{"custom_id":"f","method":"GET","url":"/v1/chat/completions","body":{}}',
            b"\xff\xfe",
        ]

        async def story() -> None:
            async with world(settings, session_factory) as market, working(market):
                client = market.client(renter)
                file = await client.files.create(file=("in.jsonl", b"\n".join(lines)), purpose="batch")
                batch = await client.batches.create(
                    input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
                )
                failed = await ended(client, batch.id)
                assert failed.status == "failed"
                found = {error.line: (error.code, error.param) for error in failed.errors.data}
                assert found == {
                    1: ("invalid_request", None),
                    3: ("invalid_request", "custom_id"),
                    4: ("invalid_request", "url"),
                    5: ("invalid_request", "body.stream"),
                    6: ("model_not_found", "body.model"),
                    7: ("invalid_request", "body.temperatur"),
                    8: ("invalid_request", "body.provider.only"),
                    9: ("invalid_request", "method"),
                    10: ("invalid_request", None),
                }
                assert market.books.outcomes() == []

        asyncio.run(story())


class TestFiles:
    def test_are_kept_listed_and_erased_for_their_organisation_alone(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        renter, stranger = add_renter(session_factory), add_renter(session_factory)
        data = jsonl(*(chat_line(str(n), user="x" * 700) for n in range(600)))

        async def story() -> None:
            async with world(settings, session_factory) as market:
                client = market.client(renter)
                file = await client.files.create(file=("in.jsonl", data), purpose="batch")
                assert (file.bytes, file.purpose, file.filename) == (len(data), "batch", "in.jsonl")
                assert file.bytes > files.CHUNK_BYTES * 2
                assert (await client.files.content(file.id)).content == data
                second = await client.files.create(file=("b.jsonl", b"{}"), purpose="batch")
                first_page = await client.files.list(limit=1)
                assert [one.id for one in first_page.data] == [second.id]
                assert [one.id async for one in first_page] == [second.id, file.id]
                other = market.client(stranger)
                assert (await other.files.list()).data == []
                for call in (other.files.retrieve, other.files.content, other.files.delete):
                    with pytest.raises(openai.NotFoundError):
                        await call(file.id)
                assert (await client.files.delete(file.id)).deleted is True
                with pytest.raises(openai.NotFoundError):
                    await client.files.content(file.id)
                with transaction(session_factory) as session:
                    session.execute(text("update files set expires_at = now() where erased_at is null"))
                    assert files.erase_expired(session, limit=10) == 1
                    assert session.scalar(text("select count(*) from file_chunks")) == 0
                assert (await client.files.list()).data == []

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("form", "param"),
        [
            ({"purpose": "fine-tune"}, "purpose"),
            ({"purpose": "batch", "colour": "red"}, "colour"),
            (
                {"purpose": "batch", "expires_after[anchor]": "never", "expires_after[seconds]": "3600"},
                "expires_after[anchor]",
            ),
            ({"purpose": "batch", "expires_after[anchor]": "created_at"}, "expires_after[seconds]"),
        ],
    )
    def test_are_refused_naming_the_field(
        self, settings: Settings, session_factory: SessionFactory, form: dict[str, str], param: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                reply = await upload(market, renter, b"{}", form)
                assert (reply.status, reply.param) == (400, param)

        asyncio.run(story())

    def test_are_bounded_one_by_one_and_in_all(self, settings: Settings, session_factory: SessionFactory) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(
                settings, session_factory, file_limit_bytes=4_096, files_limit_bytes=6_000, body_limit_bytes=1_024
            ) as market:
                form = {"purpose": "batch"}
                assert (await upload(market, renter, b"x" * 4_096, form)).status == 200
                assert (await upload(market, renter, b"x" * 5_000, form)).status == 413
                assert (await upload(market, renter, b"x" * 200_000, form)).status == 413
                full = await upload(market, renter, b"x" * 4_000, form)
                assert (full.status, full.json["error"]["code"]) == (400, "storage_full")
                assert (await upload(market, renter, b"", form)).param == "file"
                nothing = await market.call("POST", "/v1/files", renter, data=form)
                assert nothing.param == "file"

        asyncio.run(story())


async def upload(market: World, renter: Renter, data: bytes, form: dict[str, str]) -> Any:

    body = aiohttp.FormData(form)
    body.add_field("file", data, filename="in.jsonl")
    return await market.call("POST", "/v1/files", renter, data=body)


class TestWhatABatchMayBe:
    @pytest.mark.parametrize(
        ("changes", "status", "param"),
        [
            ({"endpoint": "/v1/moderations"}, 400, "endpoint"),
            ({"completion_window": "1m"}, 400, "completion_window"),
            ({"completion_window": "30d"}, 400, "completion_window"),
            ({"input_file_id": "file_" + "0" * 32}, 404, None),
            ({"input_file_id": "nonsense"}, 404, None),
            ({"priority": 1}, 400, "priority"),
        ],
    )
    def test_is_said_at_once(
        self,
        settings: Settings,
        session_factory: SessionFactory,
        changes: dict[str, Any],
        status: int,
        param: str | None,
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                file = await market.client(renter).files.create(file=("in.jsonl", b"{}"), purpose="batch")
                wish = {"input_file_id": file.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
                reply = await market.call("POST", "/v1/batches", renter, json={**wish, **changes})
                assert (reply.status, reply.param) == (status, param)

        asyncio.run(story())
