"""Finance over HTTP: who may read what, and that streams, traces and long work answer as they promise."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Iterator
from typing import Any

import pytest
from sqlalchemy.orm import Session
from starlette.testclient import TestClient

from marketplace.accounts.service import create_key
from marketplace.app import create_app
from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.core.settings import Settings
from marketplace.finance import endpoints, service
from tests.integration.finance.conftest import World


class Api:
    """A gateway's API without a port, asked with one key at a time."""

    def __init__(self, settings: Settings, keys: dict[str, str]) -> None:
        self._settings = settings
        self._keys = keys

    def ask(self, who: str, method: str, path: str, **options: Any) -> Any:
        app = create_app(self._settings)
        # Without its lifespan: these endpoints need the database alone.
        client = TestClient(app, headers={"authorization": f"Bearer {self._keys[who]}"})
        answer = client.request(method, f"/v1/finance{path}", **options)
        app.services.session_factory.kw["bind"].dispose()
        return answer

    def get(self, who: str, path: str, **query: Any) -> Any:
        return self.ask(who, "GET", path, params=query)


@pytest.fixture
def api(settings: Settings, session: Session, world: World) -> Iterator[Api]:
    world.receipt(session, utcnow(), 1_003, tokens=(60, 40, 20, 0))
    billing.settle(session, 100)
    keys = {
        role: create_key(session, organisation, roles=[role])[1]
        for role, organisation in (("owner", world.owner), ("renter", world.renter), ("finance", world.renter))
    }
    session.commit()
    yield Api(settings, keys)
    assert endpoints._exports._value == endpoints.MAX_EXPORTS


class TestWhoMayRead:
    def test_an_owner_reads_its_own_statement_and_nobody_elses(self, api: Api) -> None:
        own = api.get("owner", "/statement")
        assert own.status_code == 200, own.text
        facts = {fact["name"]: fact["value"] for fact in own.json()["facts"]}
        assert facts["Earned in the period, net"] == "0.000000802"
        assert api.get("owner", "/statement", owner="Rita").status_code == 403
        assert api.get("owner", "/statement", owner="No such owner").status_code == 403

    def test_finance_reads_everybodys(self, api: Api) -> None:
        answer = api.get("finance", "/statement", owner="Olive's GPUs", held_back=True)
        assert [sheet["name"] for sheet in answer.json()["sheets"]][-1] == "Held back"
        assert api.get("finance", "/invoice", renter="Rita").status_code == 200
        assert api.get("finance", "/statement", owner="Nobody").status_code == 404

    @pytest.mark.parametrize("path", ["/report", "/trial-balance", "/books", "/journals/1"])
    def test_the_platforms_own_figures_take_the_role_finance(self, api: Api, path: str) -> None:
        assert api.get("owner", path).status_code == 403
        assert api.get("finance", path).status_code == 200

    @pytest.mark.parametrize("path", ["/verify", "/close", "/reconcile"])
    def test_nobody_else_works_on_the_books(self, api: Api, path: str) -> None:
        body = {"json": {"period": "2020"}} if path == "/close" else {}
        assert api.ask("owner", "POST", path, **body).status_code == 403


class TestFormats:
    @pytest.mark.parametrize(
        ("shape", "start"), [("csv", b"row,owner"), ("xlsx", b"PK"), ("pdf", b"%PDF")], ids=["csv", "xlsx", "pdf"]
    )
    def test_a_statement_comes_as_a_file(self, api: Api, shape: str, start: bytes) -> None:
        answer = api.get("owner", "/statement", format=shape)
        assert answer.content.startswith(start)
        assert answer.headers["content-disposition"] == f'attachment; filename="statement.{shape}"'

    def test_an_invoice_and_a_report_come_as_csv_of_their_lines(self, api: Api) -> None:
        rows = list(csv.DictReader(io.StringIO(api.get("renter", "/invoice", format="csv").text)))
        assert [(row["key"], row["model"], row["usd"]) for row in rows] == [("test", "tiny", "0.000001003")]
        rows = list(csv.DictReader(io.StringIO(api.get("finance", "/report", format="csv").text)))
        assert {row["account"].partition(":")[0] for row in rows} >= {"owner", "platform", "renter"}

    @pytest.mark.parametrize(
        ("query", "code"),
        [
            ({"period": "2026-13"}, "invalid_period"),
            ({"zone": "Mars/Olympus"}, "invalid_period"),
            ({"format": "docx"}, "invalid_request"),
        ],
    )
    def test_what_cannot_be_asked_is_refused_by_name(self, api: Api, query: dict[str, str], code: str) -> None:
        answer = api.get("owner", "/statement", **query)
        assert answer.status_code == 400
        assert answer.json()["error"]["code"] == code


class TestTrace:
    def test_a_line_leads_to_its_receipts_and_they_to_the_journal_and_back(self, api: Api, world: World) -> None:
        listed = api.get("owner", "/receipts", node=str(world.node), model="tiny")
        (row,) = csv.DictReader(io.StringIO(listed.text))
        receipt = api.get("owner", f"/receipts/{row['receipt']}").json()
        assert receipt["journal"]["id"] == int(row["settlement_journal"])
        assert [line["account"] for line in receipt["journal"]["lines"]] == [f"owner:{world.owner.hex}:pending"]
        journal = api.get("finance", f"/journals/{row['settlement_journal']}").json()
        assert (journal["receipts"]["count"], journal["receipts"]["charge"]) == (1, "0.000001003")
        back = api.get("finance", "/receipts", journal=row["settlement_journal"])
        assert [found["receipt"] for found in csv.DictReader(io.StringIO(back.text))] == [row["receipt"]]

    def test_another_organisations_receipt_does_not_exist(self, api: Api, session: Session, world: World) -> None:
        receipt = service.last_receipt(session, world.renter)
        assert receipt is not None
        assert api.get("renter", f"/receipts/{receipt.id}").status_code == 200
        assert api.get("owner", "/receipts/00000000-0000-7000-8000-000000000000").status_code == 404
        assert api.get("owner", "/receipts", owner="Rita").status_code == 403


class TestWork:
    def test_long_work_tells_its_progress_and_then_its_result(self, api: Api) -> None:
        answer = api.ask("finance", "POST", "/reconcile")
        lines = [json.loads(line) for line in answer.text.splitlines()]
        assert [line["event"] for line in lines[:1]] == ["running"]
        assert lines[-1] == {
            "event": "done",
            "result": {"agrees": True, "journals": 1, "receipts": 1, "findings": []},
        }

    def test_the_books_are_proved(self, api: Api) -> None:
        last = json.loads(api.ask("finance", "POST", "/verify").text.splitlines()[-1])
        assert last["result"]["in_order"] is True

    def test_a_period_is_closed_once_and_again_without_harm(self, api: Api) -> None:
        for _ in range(2):
            last = json.loads(
                api.ask(
                    "finance", "POST", "/close", json={"period": "2020", "zone": "Europe/Berlin"}
                ).text.splitlines()[-1]
            )
            assert last["result"]["state"] == "closed", last

    def test_a_period_that_has_not_ended_is_refused(self, api: Api) -> None:
        last = json.loads(api.ask("finance", "POST", "/close", json={"period": "2199"}).text.splitlines()[-1])
        assert (last["event"], last["error"]["code"]) == ("failed", "books_refuse")

    def test_an_owner_declares_the_cost_of_its_own_node_alone(self, api: Api, world: World) -> None:
        body = {"energy_usd_per_kwh": "0.1644", "pue": "1", "other_usd_per_hour": "0.01"}
        path = f"/nodes/{world.node}/cost"
        assert api.ask("owner", "PUT", path, json=body).status_code == 200
        assert api.ask("owner", "PUT", f"/nodes/{world.offer}/cost", json=body).status_code == 404
        assert api.ask("renter", "PUT", path, json=body).status_code == 403
        refused = api.ask("owner", "PUT", path, json={"capital_usd": "1600"})
        assert refused.json()["error"]["code"] == "invalid_cost"

    def test_too_many_exports_at_once_are_sent_away(self, api: Api) -> None:
        taken = [endpoints._exports.acquire(blocking=False) for _ in range(endpoints.MAX_EXPORTS)]
        try:
            assert all(taken)
            assert api.get("finance", "/books").status_code == 503
        finally:
            for _ in taken:
                endpoints._exports.release()
