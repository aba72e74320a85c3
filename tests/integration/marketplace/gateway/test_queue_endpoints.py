"""Jobs over HTTP: accepted, shown, listed, cancelled; refused in OpenAI's shape, with one outcome each."""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, text
from starlette.testclient import TestClient

from marketplace.accounts.auth import Authenticator
from marketplace.accounts.limits import Limiter
from marketplace.accounts.service import create_key, create_organisation
from marketplace.catalog.service import PromptCount, UnknownModel
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import Unavailable
from marketplace.core.settings import Settings
from marketplace.core.valkey import ValkeyPipe, connect_async
from marketplace.gateway import queue_endpoints
from marketplace.gateway.api import Bounded, make_api
from marketplace.gateway.load import Load
from marketplace.gateway.services import Services
from marketplace.gateway.webhooks.checks import AddressChecks
from marketplace.jobs.hot import Admit, Close
from marketplace.jobs.models import Outcome
from marketplace.jobs.tasks import assign_until_done
from marketplace.jobs.writer import HotWriter
from marketplace.matching.rank import Rules
from marketplace.matching.types import OfferView
from marketplace.metering.pricing import worst_case
from tests.market import PROMPT_TOKENS, RATES, Renter
from tests.queue_world import QueueWorld, wait_until

MODEL = "tiny"
CHAT = '"model": "tiny", "messages": [{"role": "user", "content": "hi"}]'

BAD_BODIES = (
    ("", None),
    ("[]", None),
    ('{"request": 1}', "request"),
    ('{"deadline_s": 5}', "request"),
    ('{"request": {"model": "tiny"}}', "request.messages"),
    ('{"request": {"model": "tiny", "messages": []}}', "request.messages"),
    ('{"request": {CHAT, "nope": 1}}', "request.nope"),
    ('{"request": {CHAT}, "prio": 1}', "prio"),
    ('{"request": {CHAT}, "deadline_s": 0}', "deadline_s"),
    ('{"request": {CHAT}, "deadline_s": NaN}', None),
    ('{"request": {CHAT, "temperature": 1e999}}', "request.temperature"),
    ('{"request": {CHAT, "model": "b"}}', "model"),
    ('{"request": {CHAT, "user": "\\u0000"}}', None),
    ('{"request": {CHAT, "user": "\\ud800"}}', None),
    ('{"request": {CHAT, "stream": true}}', "request.stream"),
    ('{"request": {CHAT, "tool_choice": "required"}}', "request.tool_choice"),
)
"""CHAT stands for a sound request; then the field that the error must name."""


@dataclass
class FakeVariant:
    """Counts PROMPT_TOKENS for every prompt."""

    id: UUID
    model_id: str = MODEL
    training_context: int = 2_048
    default_max_output: int = 256
    task: str = "chat"

    async def count_prompt_async(self, messages: Any, tools: Any = None) -> PromptCount:
        return PromptCount(PROMPT_TOKENS, list(range(PROMPT_TOKENS)))


@dataclass
class FakeCatalog:
    variant: FakeVariant

    def resolve(self, model: str) -> FakeVariant:
        if model != MODEL:
            raise UnknownModel(f"There is no model {model!r}.", param="model")
        return self.variant

    def by_id(self, variant_id: UUID) -> FakeVariant | None:
        return self.variant if variant_id == self.variant.id else None


@dataclass
class Door:
    """A renter's side of the queue."""

    client: TestClient
    world: QueueWorld
    renter: Renter
    key: str
    woken: list[bool] = field(default_factory=list)

    def call(self, method: str, path: str, *, key: str | None = None, **more: Any) -> Any:
        return self.client.request(method, path, headers={"authorization": f"Bearer {key or self.key}"}, **more)

    def submit(self, *, request: dict[str, Any] | None = None, **fields: Any) -> Any:
        chat = {"model": MODEL, "messages": [{"role": "user", "content": "hi"}], **(request or {})}
        return self.call("POST", "/v1/jobs", json={"request": chat, **fields})

    def new_key(self, organisation_id: UUID, **changes: Any) -> str:
        with transaction(self.world.factory) as session:
            return create_key(session, organisation_id, name=secrets.token_hex(4), **changes)[1]

    def outcome_rows(self) -> list[tuple[str, str, str | None]]:
        with self.world.factory() as session:
            rows = session.execute(select(Outcome.endpoint, Outcome.outcome, Outcome.code).order_by(Outcome.at))
            return [(row.endpoint, row.outcome, row.code) for row in rows]

    def job_count(self) -> int:
        with self.world.factory() as session:
            return int(session.scalars(text("select count(*) from jobs")).one())


@pytest.fixture
def door(settings: Settings, session_factory: SessionFactory) -> Iterator[Door]:
    world = QueueWorld.make(settings, session_factory)
    writer = HotWriter(settings.database_url)
    pipe = ValkeyPipe(connect_async(settings.valkey_url))
    woken: list[bool] = []

    def offers(variant_id: UUID) -> list[OfferView]:
        return [offer for offer in world.offers if offer.variant_id == variant_id]

    def largest_context(variant_id: UUID) -> int:
        return max((offer.context_per_slot for offer in offers(variant_id)), default=0)

    view = SimpleNamespace(offers=offers, largest_context=largest_context)
    services = Services(
        settings=settings,
        session_factory=session_factory,
        pipe=pipe,
        catalog=FakeCatalog(FakeVariant(world.market.variant_id)),  # type: ignore[arg-type]
        authenticator=Authenticator(session_factory),
        limiter=Limiter(pipe),
        fleet=SimpleNamespace(view=view, rules=Rules(), resting=lambda variant_id: frozenset()),  # type: ignore[arg-type]
        writer=writer,
        cancels=None,  # type: ignore[arg-type]
        signatures=None,  # type: ignore[arg-type]
        pulse=None,  # type: ignore[arg-type]
        waiting=None,  # type: ignore[arg-type]
        load=Load(lambda: 0, most_requests=100),
        addresses=AddressChecks(allow_private=False),
        pump=SimpleNamespace(wake=lambda: woken.append(True)),  # type: ignore[arg-type]
    )
    api = make_api(services, (queue_endpoints.router,))
    bounded = Bounded(api, settings.body_limit_bytes)

    async def app(scope: Any, receive: Any, send: Any) -> None:
        await (bounded if scope["type"] == "http" else api)(scope, receive, send)

    writer.start()
    with TestClient(app) as client:
        made = Door(client, world, world.market.renter, "", woken)
        made.key = made.new_key(made.renter.organisation_id)
        yield made
    writer.stop()


class TestSubmitting:
    def test_a_job_is_accepted_durable_and_held_at_its_maximum(self, door: Door) -> None:
        answer = door.submit(
            request={"max_tokens": 50},
            max_price={"input": "0.2", "cached_input": "0.1", "output": "0.8"},
            deadline_s=120,
        )
        assert answer.status_code == 202
        job = answer.json()
        assert (job["object"], job["status"], job["model"]) == ("job", "queued", MODEL)
        assert job["max_price"] == {"input": "0.2", "cached_input": "0.1", "output": "0.8"}
        assert job["deadline_at"] - job["created_at"] == 120
        assert (job["prompt_tokens"], job["max_output_tokens"]) == (PROMPT_TOKENS, 50)
        assert door.world.held_nano() == PROMPT_TOKENS * 200 + 50 * 800
        assert job["held"] == "0.00006"
        assert answer.headers["x-request-id"] == job["request_id"]
        assert "x-ratelimit-remaining-requests" in answer.headers
        assert door.woken == [True]

    def test_the_engine_gets_allow_listed_fields_and_its_bound(self, door: Door) -> None:
        job_id = door.submit(
            request={"max_tokens": 5, "temperature": 0, "user": "someone"}, max_price={"input": "1", "output": "1"}
        ).json()["id"]
        body = door.world.job(UUID(hex=job_id.removeprefix("job_"))).body
        assert body == {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5, "temperature": 0}

    def test_without_a_maximum_the_dearest_live_offer_counts(self, door: Door) -> None:
        door.world.connect()
        job = door.submit(request={"max_tokens": 5}).json()
        assert job["max_price"] == {"input": "0.1", "cached_input": "0.025", "output": "0.4"}
        assert door.world.held_nano() == worst_case(RATES, PROMPT_TOKENS, 5)

    def test_without_a_maximum_and_without_an_offer_a_maximum_is_asked_for(self, door: Door) -> None:
        answer = door.submit()
        assert (answer.status_code, answer.json()["error"]["code"]) == (400, "max_price_needed")
        assert answer.json()["error"]["param"] == "max_price"
        assert door.outcome_rows() == [("/v1/jobs", "request_rejected", "max_price_needed")]

    def test_a_small_balance_lowers_an_answer_that_nobody_bounded_and_says_so(self, door: Door) -> None:
        poor = door.world.another_renter(credit_nano=worst_case(RATES, PROMPT_TOKENS, 30))
        door.world.connect()
        door.key = door.new_key(poor.organisation_id)
        answer = door.submit()
        assert answer.status_code == 202
        assert answer.headers["x-fallow-max-tokens"] == str(answer.json()["max_output_tokens"]) == "30"

    def test_a_bound_that_the_client_set_is_not_lowered(self, door: Door) -> None:
        poor = door.world.another_renter(credit_nano=worst_case(RATES, PROMPT_TOKENS, 30))
        door.world.connect()
        door.key = door.new_key(poor.organisation_id)
        answer = door.submit(request={"max_tokens": 31})
        error = answer.json()["error"]
        assert (answer.status_code, error["code"]) == (402, "insufficient_balance")
        assert error["affordable_output_tokens"] == 30
        assert error["shortfall"] == "0.0000004"
        assert (door.job_count(), door.world.held_nano(poor)) == (0, 0)
        assert door.outcome_rows() == [("/v1/jobs", "no_balance", "insufficient_balance")]

    def test_an_organisation_that_never_had_credit_is_told_what_is_missing(self, door: Door) -> None:
        door.world.connect()
        with transaction(door.world.factory) as session:
            organisation_id = create_organisation(session, "newcomer").id
        door.key = door.new_key(organisation_id)
        assert door.submit().status_code == 402

    def test_the_rate_limit_refuses_and_leaves_its_row(self, door: Door) -> None:
        door.world.connect()
        door.key = door.new_key(door.renter.organisation_id, requests_per_minute=1)
        assert door.submit().status_code == 202
        answer = door.submit()
        assert answer.status_code == 429
        assert "retry-after" in answer.headers
        assert [row[1] for row in door.outcome_rows()] == ["rate_limited"]


class TestBadInput:
    def test_it_is_a_400_in_openais_shape_that_names_the_field(self, door: Door, subtests: pytest.Subtests) -> None:
        for body, param in BAD_BODIES:
            with subtests.test(body=body):
                answer = door.call("POST", "/v1/jobs", content=body.replace("CHAT", CHAT).encode())
                assert answer.status_code == 400, answer.text
                error = answer.json()["error"]
                assert (error["type"], error["param"]) == ("invalid_request_error", param)
        assert (door.job_count(), door.outcome_rows()) == (0, [])

    def test_a_price_is_a_plain_decimal_string(self, door: Door, subtests: pytest.Subtests) -> None:
        for text_ in ("-1", "1e3", "free", "0.0000000001", ""):
            with subtests.test(price=text_):
                answer = door.submit(max_price={"input": "1", "output": text_})
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "max_price.output")
        assert [row[1] for row in door.outcome_rows()] == ["request_rejected"] * 5

    def test_a_price_as_a_number_is_refused_since_numbers_lose_digits(self, door: Door) -> None:
        assert door.submit(max_price={"input": 0.1, "output": "1"}).status_code == 400

    def test_a_body_over_the_limit_is_a_413(self, door: Door) -> None:
        big = json.dumps({"request": {"content": "x" * (3 * 1024 * 1024)}}).encode()
        assert door.call("POST", "/v1/jobs", content=big).status_code == 413

    def test_an_unknown_model_is_a_404_with_its_outcome(self, door: Door) -> None:
        answer = door.submit(request={"model": "large"})
        assert answer.status_code == 404
        assert door.outcome_rows() == [("/v1/jobs", "request_rejected", "model_not_found")]

    def test_a_prompt_over_every_slot_is_refused_before_anything_is_held(self, door: Door) -> None:
        door.world.connect(context_per_slot=120)
        answer = door.submit(request={"max_tokens": 21})
        assert answer.json()["error"]["code"] == "context_length_exceeded"
        assert door.world.held_nano() == 0

    def test_a_wrong_key_is_a_401(self, door: Door) -> None:
        assert door.call("POST", "/v1/jobs", key="sk-fallow-wrong", json={}).status_code == 401

    def test_an_owners_key_may_not_spend(self, door: Door) -> None:
        door.key = door.new_key(door.renter.organisation_id, roles=["owner"])
        assert door.submit().status_code == 403


class TestReading:
    def test_a_finished_job_shows_its_result_and_cost(self, door: Door) -> None:
        door.world.connect()
        job_id = UUID(hex=door.submit(request={"max_tokens": 200}).json()["id"].removeprefix("job_"))
        assign_until_done(door.world.factory, door.world.client, door.world.matcher())
        (attempt,) = door.world.attempts(job_id)
        receipt = door.world.market.receipt(50)
        door.world.write(
            Close(
                job_id, attempt.id, 1, "delivered", "complete", "delivered", None, 50, 5, True,
                result='{"object":"chat.completion"}', receipt=receipt,
            )
        )  # fmt: skip
        job = door.call("GET", f"/v1/jobs/job_{job_id.hex}").json()
        assert (job["status"], job["result"], job["attempts"]) == ("completed", {"object": "chat.completion"}, 1)
        assert job["cost"] == f"{receipt.charge_nano / 1e9:.9f}".rstrip("0")

    def test_others_jobs_do_not_exist(self, door: Door) -> None:
        door.world.connect()
        job_id = door.submit().json()["id"]
        stranger = door.new_key(door.world.another_renter().organisation_id)
        for method, path in (("GET", ""), ("DELETE", ""), ("POST", "/cancel")):
            answer = door.call(method, f"/v1/jobs/{job_id}{path}", key=stranger)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "not_found")
        assert door.call("GET", "/v1/jobs", key=stranger).json()["data"] == []

    @pytest.mark.parametrize("job_id", ["job_", "job_xyz", "x" * 70, "job_" + "0" * 32])
    def test_an_id_that_is_none_is_a_404(self, door: Door, job_id: str) -> None:
        assert door.call("GET", f"/v1/jobs/{job_id}").status_code == 404

    def test_a_list_is_paged_newest_first_without_a_gap(self, door: Door) -> None:
        door.world.connect()
        made = [door.submit(request={"max_tokens": 1}).json()["id"] for _ in range(5)]
        first = door.call("GET", "/v1/jobs", params={"limit": 2}).json()
        assert ([job["id"] for job in first["data"]], first["has_more"]) == (made[:2:-1], True)
        rest = door.call("GET", "/v1/jobs", params={"limit": 10, "after": first["last_id"]}).json()
        assert ([job["id"] for job in rest["data"]], rest["has_more"]) == (made[2::-1], False)

    def test_a_list_narrows_to_a_status(self, door: Door) -> None:
        door.world.connect()
        waiting, gone = (door.submit(request={"max_tokens": 1}).json()["id"] for _ in range(2))
        door.call("DELETE", f"/v1/jobs/{gone}")
        ids = {
            status: [job["id"] for job in door.call("GET", "/v1/jobs", params={"status": status}).json()["data"]]
            for status in ("queued", "running", "ended")
        }
        assert ids == {"queued": [waiting], "running": [], "ended": [gone]}

    @pytest.mark.parametrize("query", [{"limit": 0}, {"limit": 101}, {"status": "odd"}])
    def test_a_bad_query_is_a_400_in_openais_shape(self, door: Door, query: dict[str, Any]) -> None:
        answer = door.call("GET", "/v1/jobs", params=query)
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, next(iter(query)))


class TestCancelling:
    @pytest.mark.parametrize(("method", "path"), [("DELETE", ""), ("POST", "/cancel")])
    def test_a_waiting_job_ends_at_once_for_free(self, door: Door, method: str, path: str) -> None:
        door.world.connect()
        job_id = door.submit().json()["id"]
        job = door.call(method, f"/v1/jobs/{job_id}{path}").json()
        assert (job["status"], job["outcome"], job["cost"], job["held"]) == ("cancelled", "cancelled_early", "0", "0")
        assert door.world.held_nano() == 0
        assert door.outcome_rows() == [("/v1/jobs", "cancelled_early", "cancelled")]

    def test_cancelling_twice_says_the_same(self, door: Door) -> None:
        door.world.connect()
        job_id = door.submit().json()["id"]
        answers = [door.call("DELETE", f"/v1/jobs/{job_id}") for _ in range(2)]
        assert answers[0].json() == answers[1].json()

    def test_a_running_job_is_asked_to_stop(self, door: Door) -> None:
        door.world.connect()
        job_id = door.submit().json()["id"]
        assign_until_done(door.world.factory, door.world.client, door.world.matcher())
        for _ in range(2):
            answer = door.call("DELETE", f"/v1/jobs/{job_id}")
            assert (answer.status_code, answer.json()["status"]) == (200, "cancelling")
        assert door.world.job(UUID(hex=job_id.removeprefix("job_"))).cancel_requested_at is not None

    def test_a_job_that_ended_otherwise_is_a_409(self, door: Door) -> None:
        door.world.connect()
        job_id = door.submit(deadline_s=1).json()["id"]
        job = UUID(hex=job_id.removeprefix("job_"))
        door.world.write(Close(job, None, 0, "voided", "expired", "expired", None, 0, None, False))
        answer = door.call("DELETE", f"/v1/jobs/{job_id}")
        assert (answer.status_code, answer.json()["error"]["code"]) == (409, "job_ended")


class TestWithoutTheDatabase:
    def test_an_unconfirmed_job_is_a_503_and_is_withdrawn(self, door: Door, monkeypatch: pytest.MonkeyPatch) -> None:
        """The statement was committed, its answer lost: the client sends again, so the first must not run."""
        door.world.connect()
        submit = HotWriter.submit

        async def lose_the_answer(self: HotWriter, record: Any) -> Any:
            answer = await submit(self, record)
            if isinstance(record, Admit):
                raise Unavailable("The database does not answer.")
            return answer

        monkeypatch.setattr(HotWriter, "submit", lose_the_answer)
        assert door.submit().status_code == 503
        with door.world.factory() as session:
            (job_id,) = session.scalars(text("select id from jobs")).all()
        assert wait_until(lambda: door.world.job(job_id).state == "voided")
        assert door.world.held_nano() == 0
