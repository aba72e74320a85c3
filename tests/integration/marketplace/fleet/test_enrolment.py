"""How nodes join, and what their owners see of them."""

from __future__ import annotations

import base64
from datetime import timedelta
from uuid import UUID

import msgspec
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from sqlalchemy import func, select
from starlette.testclient import TestClient
from typer.testing import CliRunner

from agent.protocol import ENROL_PATH, EnrolAnswer, EnrolRequest
from marketplace.accounts.service import create_organisation
from marketplace.core import process
from marketplace.core.database import SessionFactory, transaction
from marketplace.core.errors import FallowError
from marketplace.fleet import enrolment
from marketplace.fleet.cli import app as node_cli
from marketplace.fleet.endpoints import make_router
from marketplace.fleet.models import EnrolmentToken, Node
from tests.fleet_world import enrol_node, public_key_of


def request_of(token: str, key: Ed25519PrivateKey | None = None, **changes: str) -> EnrolRequest:
    public_key = public_key_of(key or Ed25519PrivateKey.generate())
    return msgspec.structs.replace(EnrolRequest(token, public_key, "box", "1"), **changes)


@pytest.fixture
def client(session_factory: SessionFactory) -> TestClient:
    app = FastAPI()
    app.include_router(make_router(session_factory))

    def render(_: Request, error: Exception) -> Response:
        assert isinstance(error, FallowError)
        return JSONResponse(error.body(), error.status)

    app.add_exception_handler(FallowError, render)
    return TestClient(app)


def make_token(factory: SessionFactory, *, owner: str = "owner", life: timedelta = enrolment.DEFAULT_LIFE) -> str:
    with transaction(factory) as session:
        return enrolment.create_token(session, create_organisation(session, owner).id, life=life)


def post(client: TestClient, request: EnrolRequest) -> tuple[int, dict[str, object]]:
    answer = client.post(ENROL_PATH, content=msgspec.json.encode(request))
    return answer.status_code, answer.json()


class TestEnrolling:
    def test_makes_the_node_known_to_its_owner(self, client: TestClient, session_factory: SessionFactory) -> None:
        status, body = post(client, request_of(make_token(session_factory)))
        assert status == 200
        answer = msgspec.convert(body, EnrolAnswer)
        assert answer.organisation == "owner"
        with session_factory() as session:
            node = session.execute(select(Node)).scalar_one()
            assert (str(node.id), node.name, node.state) == (answer.node_id, "box", "active")

    def test_again_with_the_same_key_gives_the_same_answer(
        self, client: TestClient, session_factory: SessionFactory
    ) -> None:
        request = request_of(make_token(session_factory))
        assert post(client, request) == post(client, request)
        with session_factory() as session:
            assert session.execute(select(func.count()).select_from(Node)).scalar_one() == 1

    def test_with_a_new_token_of_the_same_owner_keeps_the_node(
        self, client: TestClient, session_factory: SessionFactory
    ) -> None:
        key = Ed25519PrivateKey.generate()
        first = post(client, request_of(make_token(session_factory), key))
        assert post(client, request_of(make_token(session_factory), key)) == first

    @pytest.mark.parametrize("what", ["unknown", "used", "old"])
    def test_with_a_bad_token_is_refused(self, what: str, client: TestClient, session_factory: SessionFactory) -> None:
        token = "fallow-enrol-nonsense"
        if what == "used":
            token = make_token(session_factory)
            assert post(client, request_of(token))[0] == 200
        elif what == "old":
            token = make_token(session_factory, life=timedelta(seconds=-1))
        status, body = post(client, request_of(token))
        assert status == 401
        assert body["error"]["code"] == "invalid_enrolment_token"  # type: ignore[index]

    def test_of_another_owners_node_is_refused_and_spends_no_token(
        self, client: TestClient, session_factory: SessionFactory
    ) -> None:
        key = Ed25519PrivateKey.generate()
        post(client, request_of(make_token(session_factory), key))
        status, body = post(client, request_of(make_token(session_factory, owner="other"), key))
        assert status == 409
        assert body["error"]["code"] == "node_belongs_elsewhere"  # type: ignore[index]
        with session_factory() as session:
            unused = session.execute(select(func.count()).where(EnrolmentToken.used_at.is_(None))).scalar_one()
        assert unused == 1

    @pytest.mark.parametrize(
        "change",
        [
            {"public_key": "not base64!"},
            {"public_key": base64.b64encode(b"short").decode()},
            {"name": ""},
            {"name": "x" * 201},
            {"name": "a\0b"},
            {"agent_version": "a\nb"},
        ],
    )
    def test_with_a_bad_field_is_refused(
        self, change: dict[str, str], client: TestClient, session_factory: SessionFactory
    ) -> None:
        status, body = post(client, request_of(make_token(session_factory), **change))
        assert (status, body["error"]["param"]) == (400, next(iter(change)))  # type: ignore[index]

    @pytest.mark.parametrize(
        ("body", "status"), [(b"", 400), (b"[]", 400), (b"\xff", 400), (b'{"token": 1}', 400), (b"x" * 9_000, 413)]
    )
    def test_with_a_malformed_body_is_refused(self, body: bytes, status: int, client: TestClient) -> None:
        assert client.post(ENROL_PATH, content=body).status_code == status

    def test_with_a_lone_surrogate_in_the_token_is_no_server_error(self, client: TestClient) -> None:
        body = rb'{"token":"\ud800","public_key":"","name":"a","agent_version":"1"}'
        assert client.post(ENROL_PATH, content=body).status_code == 400

    def test_keeps_no_token_in_the_clear(self, session_factory: SessionFactory) -> None:
        token = make_token(session_factory)
        with session_factory() as session:
            stored = session.execute(select(EnrolmentToken)).scalar_one()
        assert token.encode() not in stored.sha256


class TestTheCommand:
    @pytest.fixture(autouse=True)
    def on_the_tests_database(self, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(process, "session_factory", lambda: session_factory)

    def test_makes_a_token_that_works(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            create_organisation(session, "owner")
        result = CliRunner().invoke(node_cli, ["enrol-token", "--organisation", "owner"])
        assert result.exit_code == 0
        with transaction(session_factory) as session:
            answer = enrolment.enrol(session, request_of(result.stdout.strip()))
        assert UUID(answer.node_id)

    def test_names_an_organisation_that_does_not_exist(self) -> None:
        result = CliRunner().invoke(node_cli, ["enrol-token", "--organisation", "nobody"])
        assert result.exit_code == 1
        assert "nobody" in result.stderr

    def test_lists_nodes(self, session_factory: SessionFactory, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("COLUMNS", "200")
        assert "No node" in CliRunner().invoke(node_cli, ["list"]).stdout
        node = enrol_node(session_factory)
        listed = CliRunner().invoke(node_cli, ["list", "--organisation", "owner"]).stdout
        assert str(node.node_id) in listed
        assert "never" in listed
