"""Keys against the real database: made, used, revoked, expired."""

from __future__ import annotations

import asyncio
from datetime import timedelta

import pytest
from sqlalchemy import func, update

from marketplace.accounts import service
from marketplace.accounts.auth import Authenticator
from marketplace.accounts.models import ApiKey, Organisation
from marketplace.core.database import SessionFactory, make_engine, make_session_factory, transaction
from marketplace.core.errors import Unauthenticated, Unavailable
from marketplace.core.settings import Settings


def make_key(session_factory: SessionFactory, **options: object) -> tuple[ApiKey, str]:
    with transaction(session_factory) as session:
        owner = service.create_organisation(session, "Acme")
        key, secret = service.create_key(session, owner.id, **options)  # type: ignore[arg-type]
    return key, f"Bearer {secret}"


class TestAuthenticate:
    def test_a_key_is_its_principal(self, session_factory: SessionFactory) -> None:
        key, header = make_key(session_factory, roles=["finance"], requests_per_minute=7, parallel_requests=3)
        found = asyncio.run(Authenticator(session_factory).authenticate(header))
        assert (found.key_id, found.organisation_id, found.organisation_name) == (key.id, key.organisation_id, "Acme")
        assert found.roles == {"finance"}
        assert (found.requests_per_minute, found.parallel_requests) == (7, 3)
        assert found.credit_account_id is None

    def test_a_credit_account_that_was_opened_is_seen(self, session_factory: SessionFactory) -> None:
        _, header = make_key(session_factory)
        with transaction(session_factory) as session:
            session.execute(update(Organisation).values(credit_account_id=42))
        assert asyncio.run(Authenticator(session_factory).authenticate(header)).credit_account_id == 42

    def test_a_first_top_up_counts_at_once(self, session_factory: SessionFactory) -> None:
        _, header = make_key(session_factory)
        authenticator = Authenticator(session_factory)

        async def act() -> int | None:
            await authenticator.authenticate(header)
            with transaction(session_factory) as session:
                session.execute(update(Organisation).values(credit_account_id=42))
            return (await authenticator.authenticate(header)).credit_account_id

        assert asyncio.run(act()) == 42

    def test_a_revoked_key_is_refused_and_its_holder_told(self, session_factory: SessionFactory) -> None:
        key, header = make_key(session_factory)
        with transaction(session_factory) as session:
            service.revoke_key(session, key.id)
        with pytest.raises(Unauthenticated, match="revoked"):
            asyncio.run(Authenticator(session_factory).authenticate(header))

    def test_an_expired_key_is_refused_and_its_holder_told(self, session_factory: SessionFactory) -> None:
        _, header = make_key(session_factory, expires_in=timedelta(hours=1))
        assert asyncio.run(Authenticator(session_factory).authenticate(header))
        with transaction(session_factory) as session:
            session.execute(update(ApiKey).values(expires_at=func.now()))
        with pytest.raises(Unauthenticated, match="expired"):
            asyncio.run(Authenticator(session_factory).authenticate(header))

    def test_many_keys_at_once_are_all_answered(self, session_factory: SessionFactory) -> None:
        made = [make_key(session_factory) for _ in range(20)]

        async def act() -> None:
            authenticator = Authenticator(session_factory)
            found = await asyncio.gather(*(authenticator.authenticate(header) for _, header in made))
            assert [principal.key_id for principal in found] == [key.id for key, _ in made]

        asyncio.run(act())

    def test_a_database_that_is_away_is_a_503(self, settings: Settings) -> None:
        away = settings.model_copy(update={"database_url": "postgresql://nobody@127.0.0.1:1/none"})
        factory = make_session_factory(make_engine(away, application_name="tests"))
        with pytest.raises(Unavailable):
            asyncio.run(Authenticator(factory).authenticate("Bearer sk-fallow-" + "a" * 43))
