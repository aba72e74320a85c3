"""Webhooks: registered over HTTP, written with the end of a job, sent, tried again, given up, told again."""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any
from uuid import UUID

import pytest
from sqlalchemy import select, text
from sqlalchemy.exc import OperationalError

from marketplace.core import ids
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.settings import Settings
from marketplace.gateway.webhooks import service, work
from marketplace.gateway.webhooks.checks import AddressChecks
from marketplace.gateway.webhooks.models import WebhookDelivery, WebhookEndpoint
from marketplace.gateway.webhooks.post import Answer, Poster
from marketplace.gateway.webhooks.retries import DELAYS_S, MAX_TRIES
from marketplace.gateway.webhooks.service import Registered
from marketplace.gateway.webhooks.tasks import send_all
from tests.fleet_world import until
from tests.gateway_world import CHAT, MODEL_ID, Renter, World, add_renter, answers, world
from tests.queue_world import QueueWorld
from tests.receivers import Call, Receiver, receiver

JOB: dict[str, Any] = {"request": {"model": MODEL_ID, "messages": CHAT}}


@pytest.fixture
def hook(tmp_path: Path) -> Iterator[Receiver]:
    with receiver(tmp_path) as running:
        yield running


@pytest.fixture
def queue(settings: Settings, session_factory: SessionFactory) -> QueueWorld:
    return QueueWorld.make(settings, session_factory)


def poster(hook: Receiver) -> Poster:
    return Poster(allow_private=True, ca_file=str(hook.ca_file))


def register(queue: QueueWorld, url: str | None, *events: str) -> Registered:
    with transaction(queue.factory) as session:
        return service.register(session, queue.market.renter.organisation_id, url, events)


def deliveries(factory: SessionFactory) -> list[WebhookDelivery]:
    with factory() as session:
        return list(session.query(WebhookDelivery).order_by(WebhookDelivery.event, WebhookDelivery.id))


def endpoint(factory: SessionFactory) -> WebhookEndpoint:
    with factory() as session:
        return session.query(WebhookEndpoint).one()


def end(queue: QueueWorld, outcome: str = "node_failed", **admit: Any) -> UUID:
    """A job that ends as it came."""
    job = queue.admit(**admit)
    queue.write(queue.market.voided(job, attempt_id=None, outcome=outcome))
    return job.job_id


def pass_time(factory: SessionFactory, interval: str) -> None:
    with transaction(factory) as session:
        session.execute(text(f"update webhook_deliveries set next_try_at = next_try_at - interval '{interval}'"))


def is_signed(call: Call, secret: str) -> bool:
    """What a renter's code does."""
    key = base64.b64decode(secret.removeprefix("whsec_"))
    content = f"{call.headers['webhook-id']}.{call.headers['webhook-timestamp']}.".encode() + call.body
    wanted = base64.b64encode(hmac.digest(key, content, hashlib.sha256)).decode()
    said = [entry.partition(",")[2] for entry in call.headers["webhook-signature"].split(" ")]
    return any(hmac.compare_digest(wanted, each) for each in said)


class TestWhatIsWritten:
    @pytest.mark.parametrize(
        ("outcome", "event"),
        [
            ("node_failed", "job.failed"),
            ("no_capacity", "job.failed"),
            ("cancelled_early", "job.cancelled"),
            ("expired", "job.expired"),
        ],
    )
    def test_is_the_event_of_the_job_s_end_once(self, queue: QueueWorld, outcome: str, event: str) -> None:
        register(queue, "https://example.org/", "job.failed", "job.cancelled", "job.expired")
        job_id = end(queue, outcome)
        (delivery,) = deliveries(queue.factory)
        assert (delivery.event, delivery.subject_id, delivery.state, delivery.url) == (event, job_id, "pending", None)
        with queue.factory() as session:
            assert session.scalars(text("select task from outbox where task = 'webhooks.send'")).all() != []

    def test_is_nothing_for_other_events_other_renters_chats_and_disabled_endpoints(self, queue: QueueWorld) -> None:
        register(queue, "https://example.org/", "job.completed")
        end(queue)
        stranger = queue.another_renter()
        end(queue, renter=stranger)
        chat = queue.market.admit()
        queue.write(chat)
        queue.write(queue.market.delivered(chat))
        assert deliveries(queue.factory) == []
        with transaction(queue.factory) as session:
            session.execute(text("update webhook_endpoints set disabled_at = now(), events = array['job.failed']"))
        end(queue)
        assert deliveries(queue.factory) == []

    def test_vanishes_with_the_transaction_that_ends_the_job(self, queue: QueueWorld) -> None:
        register(queue, "https://example.org/", "job.failed")
        job = queue.admit()
        with queue.factory() as session:
            session.execute(
                text("update jobs set state = 'voided', outcome = 'expired' where id = :id"), {"id": job.job_id}
            )
            session.rollback()
        assert deliveries(queue.factory) == []

    @pytest.mark.parametrize("status", ["completed", "failed", "expired", "cancelled"])
    def test_is_a_batch_s_end_too(self, queue: QueueWorld, status: str) -> None:
        register(queue, "https://example.org/", f"batch.{status}")
        batch_id, file_id = ids.new_id(), ids.new_id()
        renter = queue.market.renter
        facts = {"id": batch_id, "file": file_id, "org": renter.organisation_id, "key": renter.key_id}
        with transaction(queue.factory) as session:
            session.execute(
                text(
                    "insert into files (id, organisation_id, purpose, filename, size_bytes, expires_at)"
                    " values (:file, :org, 'batch', 'a', 1, now() + interval '1 day')"
                ),
                facts,
            )
            session.execute(
                text(
                    "insert into batches (id, organisation_id, key_id, input_file_id, endpoint, status,"
                    " completion_window, price_basis_points, expires_at)"
                    " values (:id, :org, :key, :file, '/v1/completions', 'in_progress', '24h', 5000, now())"
                ),
                facts,
            )
            session.execute(text("update batches set status = 'finalizing'"))
        assert deliveries(queue.factory) == []
        with transaction(queue.factory) as session:
            session.execute(text("update batches set status = :status"), {"status": status})
        (delivery,) = deliveries(queue.factory)
        assert (delivery.event, delivery.subject_id) == (f"batch.{status}", batch_id)


class TestSending:
    def test_says_ids_and_state_signed_and_nothing_else(self, queue: QueueWorld, hook: Receiver) -> None:
        made = register(queue, hook.url, "job.failed")
        job_id = end(queue)
        assert send_all(queue.factory, poster(hook)) == 1
        (call,) = hook.calls
        (delivery,) = deliveries(queue.factory)
        assert call.headers["webhook-id"] == ids.show("msg", delivery.id)
        assert is_signed(call, made.secret)
        said = json.loads(call.body)
        assert said["type"] == "job.failed"
        assert said["data"] == {"id": ids.show("job", job_id), "object": "job", "status": "failed"}
        assert said["timestamp"].endswith("Z")
        assert (delivery.state, delivery.tries, delivery.last_status) == ("delivered", 1, 204)
        assert send_all(queue.factory, poster(hook)) == 0
        assert len(hook.calls) == 1

    def test_by_two_at_once_sends_each_delivery_once(self, queue: QueueWorld) -> None:
        register(queue, "https://example.org/", "job.failed")
        for _ in range(4):
            end(queue)
        with queue.factory() as one, queue.factory() as two:
            first = work.take(one, limit=2)
            second = work.take(two, limit=10)
            one.commit()
            two.commit()
        taken = [each.delivery_id for each in first + second]
        assert len(taken) == len(set(taken)) == 4

    def test_serves_each_renter_s_first_before_anybody_s_second(self, queue: QueueWorld) -> None:
        register(queue, "https://example.org/", "job.failed")
        for _ in range(3):
            end(queue)
        stranger = queue.another_renter()
        with transaction(queue.factory) as session:
            service.register(session, stranger.organisation_id, "https://example.net/", ["job.failed"])
        end(queue, renter=stranger)
        with transaction(queue.factory) as session:
            urls = {each.url for each in work.take(session, limit=2)}
        assert urls == {"https://example.org/", "https://example.net/"}

    def test_lets_a_receiver_that_does_not_answer_hold_up_its_own_renter_only(self, queue: QueueWorld) -> None:
        register(queue, "https://tar.example.org/", "job.failed")
        for _ in range(work.AT_ONCE + 2):
            end(queue)
        stranger = queue.another_renter()
        with transaction(queue.factory) as session:
            service.register(session, stranger.organisation_id, "https://quick.example.net/", ["job.failed"])
        quick = work.FOR_ONE + 2
        for _ in range(quick):
            end(queue, renter=stranger)

        class Sends:
            def __init__(self) -> None:
                self.urls: Counter[str] = Counter()
                self.stuck = 0

            def send(self, url: str, headers: dict[str, str], body: bytes) -> Answer:
                self.urls[url] += 1
                if "quick" in url:
                    if self.urls[url] == quick:
                        self.stuck = self.urls["https://tar.example.org/"]
                        released.set()
                    return Answer(204)
                released.wait(20)
                return Answer(204)

        released, sends = threading.Event(), Sends()
        assert work.send_due(queue.factory, sends, Random(1)) == work.AT_ONCE + 2 + quick
        assert 0 < sends.stuck <= work.FOR_ONE

    def test_after_a_kill_in_between_repeats_it_under_the_same_id(self, queue: QueueWorld, hook: Receiver) -> None:
        register(queue, hook.url, "job.failed")
        end(queue)
        with transaction(queue.factory) as session:
            (lost,) = work.take(session, limit=1)
        poster(hook).send(hook.url, {"webhook-id": ids.show("msg", lost.delivery_id)}, b"{}")
        assert send_all(queue.factory, poster(hook)) == 0
        pass_time(queue.factory, f"{work.CLAIM_S} s")
        assert send_all(queue.factory, poster(hook)) == 1
        assert len({call.headers["webhook-id"] for call in hook.calls}) == 1
        with transaction(queue.factory) as session:
            # The one that was taken for dead comes back with bad news: it is not believed any more.
            work.note(session, lost, Answer(None, "late"), Random(1))
        (delivery,) = deliveries(queue.factory)
        assert (delivery.state, delivery.last_error, delivery.tries) == ("delivered", None, 2)

    def test_that_fails_is_tried_by_the_table_and_given_up(self, queue: QueueWorld, hook: Receiver) -> None:
        hook.decide = lambda call: 500
        register(queue, hook.url, "job.failed")
        end(queue)
        for tries in range(1, MAX_TRIES + 1):
            assert send_all(queue.factory, poster(hook)) == 0
            (delivery,) = deliveries(queue.factory)
            assert (delivery.tries, delivery.last_status) == (tries, 500)
            assert delivery.last_error == "It answered 500."
            if tries < MAX_TRIES:
                assert delivery.state == "pending"
                pass_time(queue.factory, f"{DELAYS_S[tries - 1] * 1.2 + 1} s")
        assert delivery.state == "failed"
        assert len(hook.calls) == MAX_TRIES
        assert len({(call.headers["webhook-id"], call.body) for call in hook.calls}) == 1
        assert endpoint(queue.factory).failing_since is not None

    def test_with_a_turned_secret_is_signed_by_both_for_a_day(self, queue: QueueWorld, hook: Receiver) -> None:
        old = register(queue, hook.url, "job.failed")
        organisation_id = queue.market.renter.organisation_id
        with transaction(queue.factory) as session:
            new = service.rotate(session, organisation_id, old.endpoint.id)
        end(queue)
        send_all(queue.factory, poster(hook))
        assert is_signed(hook.calls[0], old.secret)
        assert is_signed(hook.calls[0], new.secret)
        with transaction(queue.factory) as session:
            session.execute(text("update webhook_endpoints set previous_until = now()"))
        end(queue)
        send_all(queue.factory, poster(hook))
        assert not is_signed(hook.calls[1], old.secret)
        assert is_signed(hook.calls[1], new.secret)


class TestAnEndpointThatTakesNothing:
    def test_is_disabled_in_time_and_told_again_when_it_is_enabled(self, queue: QueueWorld, hook: Receiver) -> None:
        hook.decide = lambda call: 404
        made = register(queue, hook.url, "job.failed")
        for _ in range(2):
            end(queue)
        with transaction(queue.factory) as session:
            session.execute(text("update webhook_endpoints set failing_since = now() - interval '73 hours'"))
        send_all(queue.factory, poster(hook))
        assert endpoint(queue.factory).disabled_reason == "It has taken nothing for 3 days."
        assert {delivery.state for delivery in deliveries(queue.factory)} == {"failed"}
        hook.decide = lambda call: 200
        organisation_id = queue.market.renter.organisation_id
        with transaction(queue.factory) as session:
            service.enable(session, organisation_id, made.endpoint.id)
            for delivery in deliveries(queue.factory):
                service.redeliver(session, organisation_id, made.endpoint.id, delivery.id)
        assert send_all(queue.factory, poster(hook)) == 2
        assert endpoint(queue.factory).failing_since is None

    def test_says_so_itself_with_410(self, queue: QueueWorld, hook: Receiver) -> None:
        hook.decide = lambda call: 410
        register(queue, hook.url, "job.failed")
        end(queue)
        send_all(queue.factory, poster(hook))
        assert endpoint(queue.factory).disabled_at is not None

    def test_is_left_alone_if_it_is_only_one_job_s(self, queue: QueueWorld, hook: Receiver) -> None:
        hook.decide = lambda call: 410
        register(queue, None)
        end(queue, webhook_url=hook.url)
        send_all(queue.factory, poster(hook))
        assert len(hook.calls) == 1
        assert endpoint(queue.factory).disabled_at is None


class TestAnEndpointThatIsDeletedMeanwhile:
    def test_does_not_hold_up_the_end_of_a_job(self, queue: QueueWorld) -> None:
        made = register(queue, "https://example.org/", "job.failed")
        register(queue, "https://example.net/", "job.failed")
        organisation_id = queue.market.renter.organisation_id
        with transaction(queue.factory) as session:
            service.remove(session, organisation_id, made.endpoint.id)
            job_id = end(queue)
        (delivery,) = deliveries(queue.factory)
        assert (delivery.subject_id, queue.job(job_id).outcome) == (job_id, "node_failed")

    def test_is_waited_for_by_who_notes_a_try_before_anything_is_locked(self, queue: QueueWorld) -> None:
        made = register(queue, "https://example.org/", "job.failed")
        end(queue)
        with transaction(queue.factory) as session:
            (taken,) = work.take(session, limit=1)
        with queue.factory() as deleting, queue.factory() as noting, queue.factory() as looking:
            deleting.get_one(WebhookEndpoint, made.endpoint.id, with_for_update=True)
            noting.execute(text("set local lock_timeout = '100ms'"))
            with pytest.raises(OperationalError):
                work.note(noting, taken, Answer(200), Random(1))
            lock = select(WebhookDelivery.id).where(WebhookDelivery.id == taken.delivery_id)
            assert looking.scalars(lock.with_for_update(nowait=True)).all() == [taken.delivery_id]
            for session in (looking, noting):
                session.rollback()
            service.remove(deleting, queue.market.renter.organisation_id, made.endpoint.id)
            deleting.commit()
        with transaction(queue.factory) as session:
            work.note(session, taken, Answer(200), Random(1))
        assert deliveries(queue.factory) == []


class TestForgetting:
    def test_comes_a_month_after_the_end(self, queue: QueueWorld) -> None:
        register(queue, "https://example.org/", "job.failed")
        for _ in range(3):
            end(queue)
        old, new, _ = deliveries(queue.factory)
        with transaction(queue.factory) as session:
            ended = "update webhook_deliveries set ended_at = now() - cast(:age as interval) where id = :id"
            session.execute(text(ended), {"age": "31 days", "id": old.id})
            session.execute(text(ended), {"age": "29 days", "id": new.id})
            assert work.erase_old(session, limit=10) == 1
        assert old.id not in {delivery.id for delivery in deliveries(queue.factory)}


async def post(market: World, renter: Renter, path: str, body: dict[str, Any] | None = None) -> Any:
    return await market.call("POST", path, renter, json=body or {})


class TestOverHttp:
    def test_an_endpoint_is_made_shown_turned_and_deleted(
        self, settings: Settings, session_factory: SessionFactory, hook: Receiver
    ) -> None:
        renter, other = add_renter(session_factory), add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, webhook_allow_private=True) as market:
                made = await post(market, renter, "/v1/webhooks", {"url": hook.url, "events": ["job.completed"]})
                assert made.status == 201
                assert made.json["secret"].startswith("whsec_")
                path = f"/v1/webhooks/{made.json['id']}"
                shown = await market.call("GET", path, renter)
                assert shown.json == {name: value for name, value in made.json.items() if name != "secret"}
                assert (shown.json["status"], shown.json["events"]) == ("enabled", ["job.completed"])
                listed = await market.call("GET", "/v1/webhooks", renter)
                assert [each["id"] for each in listed.json["data"]] == [made.json["id"]]
                turned = await post(market, renter, f"{path}/rotate")
                assert turned.json["secret"] != made.json["secret"]
                for method, hidden in (("GET", path), ("DELETE", path), ("GET", f"{path}/deliveries")):
                    assert (await market.call(method, hidden, other)).status == 404
                assert (await market.call("DELETE", path, renter)).json["deleted"] is True
                assert (await market.call("GET", path, renter)).status == 404

        asyncio.run(story())

    def test_a_job_s_own_address_hears_of_its_end_and_the_delivery_can_be_told_again(
        self, settings: Settings, session_factory: SessionFactory, hook: Receiver
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory, webhook_allow_private=True) as market:
                await market.connect(answers)
                body = {**JOB, "webhook": hook.url}
                without = await post(market, renter, "/v1/jobs", body)
                assert (without.status, without.json["error"]["code"]) == (400, "webhook_secret_needed")
                made = await post(market, renter, "/v1/webhooks")
                again = await post(market, renter, "/v1/webhooks")
                assert (again.status, again.json["error"]["code"]) == (409, "webhook_exists")
                job = (await post(market, renter, "/v1/jobs", body)).json
                await post(market, renter, f"/v1/jobs/{job['id']}/cancel")
                assert await asyncio.to_thread(send_all, session_factory, poster(hook)) == 1
                assert is_signed(hook.calls[0], made.json["secret"])
                assert json.loads(hook.calls[0].body)["data"]["id"] == job["id"]
                path = f"/v1/webhooks/{made.json['id']}/deliveries"
                (delivery,) = (await market.call("GET", f"{path}?status=delivered", renter)).json["data"]
                assert (delivery["subject"], delivery["url"], delivery["tries"]) == (job["id"], hook.url, 1)
                told = await post(market, renter, f"{path}/{delivery['id']}/redeliver")
                assert (told.status, told.json["status"]) == (202, "pending")
                assert await asyncio.to_thread(send_all, session_factory, poster(hook)) == 1
                assert len({call.headers["webhook-id"] for call in hook.calls}) == 1
                assert (await market.call("GET", f"{path}?status=failed", renter)).json["data"] == []

        asyncio.run(story())

    def test_a_name_that_is_slow_holds_up_its_own_registrations_alone(
        self, settings: Settings, session_factory: SessionFactory
    ) -> None:
        hostile, other = add_renter(session_factory), add_renter(session_factory)
        asked: list[str] = []
        go_on = threading.Event()

        def slowly(host: str, port: int) -> list[str]:
            asked.append(host)
            if host != "quick.example.org":
                go_on.wait(timeout=30)
            return ["93.184.215.14"]

        async def story() -> None:
            async with world(settings, session_factory) as market:
                market.gateway.services.addresses = AddressChecks(allow_private=False, resolver=slowly)
                slow = [
                    asyncio.create_task(post(market, hostile, "/v1/webhooks", {"url": f"https://{n}.example.org/"}))
                    for n in range(service.MAX_ENDPOINTS + 20)
                ]
                await until(lambda: bool(asked))
                async with asyncio.timeout(10):
                    assert (await market.call("GET", "/v1/key", hostile)).status == 200
                    quick = await post(market, other, "/v1/webhooks", {"url": "https://quick.example.org/"})
                assert (quick.status, len(asked)) == (201, 2)
                go_on.set()
                statuses = Counter([reply.status for reply in await asyncio.gather(*slow)])
                # Above the endpoints that an organisation may have, and above what a key may ask at once.
                assert (statuses[201], statuses[409] + statuses[429]) == (service.MAX_ENDPOINTS, 20)

        asyncio.run(story())

    @pytest.mark.parametrize(
        ("body", "param"),
        [
            ({"url": "http://example.org/"}, "url"),
            ({"url": "https://127.0.0.1/"}, "url"),
            ({"url": "https://localhost/"}, "url"),
            ({"url": "https://2130706433/"}, "url"),
            ({"url": "https://example.org/", "events": []}, "events"),
            ({"url": "https://example.org/", "events": ["job.started"]}, "events[0]"),
            ({"events": ["job.failed"]}, "events"),
            ({"secret": "mine"}, "secret"),
        ],
    )
    def test_a_wrong_registration_is_refused(
        self, settings: Settings, session_factory: SessionFactory, body: dict[str, Any], param: str
    ) -> None:
        renter = add_renter(session_factory)

        async def story() -> None:
            async with world(settings, session_factory) as market:
                reply = await post(market, renter, "/v1/webhooks", body)
                assert (reply.status, reply.param) == (400, param)

        asyncio.run(story())

    def test_endpoints_are_bounded(self, queue: QueueWorld) -> None:
        for number in range(service.MAX_ENDPOINTS):
            register(queue, f"https://example.org/{number}", "job.failed")
        with pytest.raises(service.TooManyWebhooks):
            register(queue, "https://example.org/", "job.failed")
