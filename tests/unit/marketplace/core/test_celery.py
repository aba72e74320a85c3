"""Celery's configuration: where messages go, and what bounds them."""

from __future__ import annotations

import pytest

from marketplace.core.celery import MATCH, MONEY, QUEUES, SWEEP, broker_url, make_celery
from marketplace.core.settings import Settings
from marketplace.worker import SCHEDULE_S, make_worker


@pytest.fixture
def settings() -> Settings:
    return Settings(_env_file=None, valkey_url="redis://127.0.0.1:6379/3")  # type: ignore[call-arg]


class TestBrokerUrl:
    @pytest.mark.parametrize(
        ("valkey", "broker"),
        [
            ("redis://host:1/2", "redis://host:1/2"),
            ("rediss://:pw@host:1/2", "rediss://:pw@host:1/2"),
            ("unix:///run/v.sock", "redis+socket:///run/v.sock?virtual_host=0"),
            ("unix:///run/v.sock?db=4", "redis+socket:///run/v.sock?virtual_host=4"),
            ("unix:///run/v.sock?db=1&password=a%2Fb", "redis+socket://:a%2Fb@/run/v.sock?virtual_host=1"),
        ],
    )
    def test_a_unix_socket_is_spelt_as_kombu_knows_it(self, valkey: str, broker: str) -> None:
        assert broker_url(valkey) == broker


class TestConfiguration:
    def test_every_scheduled_task_exists_and_has_its_queue(self, settings: Settings) -> None:
        app = make_worker(settings)
        app.loader.import_default_modules()
        routed = {name: app.amqp.router.route({}, name)["queue"].name for name in SCHEDULE_S}
        assert set(SCHEDULE_S) <= set(app.tasks)
        assert routed["jobs.assign"] == MATCH
        assert {routed["billing.settle"], routed["billing.check"]} == {MONEY}
        assert {routed["jobs.sweep"], routed["jobs.outbox"]} == {SWEEP}

    def test_a_message_is_only_a_nudge(self, settings: Settings) -> None:
        conf = make_celery(settings).conf
        assert not conf.task_acks_late
        assert not conf.task_reject_on_worker_lost
        assert conf.result_backend is None
        assert conf.task_ignore_result
        assert set(conf.task_queues) == set(QUEUES)

    def test_no_call_to_the_broker_can_hang(self, settings: Settings) -> None:
        conf = make_celery(settings).conf
        assert 0 < conf.broker_transport_options["socket_timeout"] <= 5
        assert 0 < conf.broker_transport_options["socket_connect_timeout"] <= 2
        assert conf.task_publish_retry_policy["max_retries"] <= 1

    def test_each_tick_expires(self, settings: Settings) -> None:
        schedule = make_worker(settings).conf.beat_schedule
        assert all(0 < entry["options"]["expires"] <= 300 for entry in schedule.values())
