"""Organisations and keys in the database."""

from __future__ import annotations

import threading
from collections.abc import Collection
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from typing import Any
from uuid import uuid4

import pytest
from sqlalchemy import func, select, text
from sqlalchemy.orm import Session

from marketplace.accounts import keys, service
from marketplace.accounts.models import ApiKey, Organisation
from marketplace.accounts.service import InvalidAccount, UnknownKey, UnknownOrganisation
from marketplace.core.database import SessionFactory, transaction
from tests.stack import until


def waiting_for_locks(session: Session) -> int:
    """Connections that wait for a lock of this one."""
    query = "select count(*) from pg_locks where not granted and pg_backend_pid() = any(pg_blocking_pids(pid))"
    return int(session.execute(text(query)).scalar_one())


class TestOrganisations:
    def test_the_same_name_is_the_same_organisation(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            first = service.create_organisation(session, "Acme")
        with transaction(session_factory) as session:
            assert service.create_organisation(session, "  Acme ").id == first.id
            assert service.find_organisation(session, "Acme").id == first.id

    def test_two_callers_at_once_get_the_same_one(self, session_factory: SessionFactory) -> None:
        barrier = threading.Barrier(4)
        ids = set()

        def create() -> None:
            barrier.wait()
            with transaction(session_factory) as session:
                ids.add(service.create_organisation(session, "Acme").id)

        threads = [threading.Thread(target=create) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert len(ids) == 1
        with session_factory() as session:
            assert session.scalar(select(func.count()).select_from(Organisation)) == 1

    @pytest.mark.parametrize("name", ["", "   ", "a\nb", "a\x00b", "x" * 201])
    def test_a_name_that_nobody_can_read_is_refused(self, session_factory: SessionFactory, name: str) -> None:
        with pytest.raises(InvalidAccount), transaction(session_factory) as session:
            service.create_organisation(session, name)

    def test_an_unknown_name_is_not_found(self, session_factory: SessionFactory) -> None:
        with pytest.raises(UnknownOrganisation), session_factory() as session:
            service.find_organisation(session, "Nobody")

    def test_they_are_listed_by_name(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            for name in ("b", "c", "a"):
                service.create_organisation(session, name)
            assert [found.name for found in service.list_organisations(session)] == ["a", "b", "c"]
            assert [found.name for found in service.list_organisations(session, limit=2)] == ["a", "b"]


class TestKeys:
    def test_the_secret_is_in_no_column(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            key, secret = service.create_key(session, owner.id, roles=["owner", "renter", "owner"])
            assert key.roles == ["owner", "renter"]
            assert key.sha256 == keys.digest(secret)
            values = [getattr(key, column.key) for column in ApiKey.__table__.columns]
        assert not any(secret in str(value) for value in values)
        assert secret.startswith(key.shown_prefix)

    def test_newest_is_listed_first_and_revoked_ones_stay(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner_id = service.create_organisation(session, "Acme").id
        for name in ("first", "second"):
            with transaction(session_factory) as session:
                service.create_key(session, owner_id, name=name)
        with transaction(session_factory) as session:
            listed = service.list_keys(session, owner_id)
            assert [key.name for key in listed] == ["second", "first"]
            service.revoke_key(session, listed[1].id)
            assert len(service.list_keys(session, owner_id)) == 2

    def test_revoking_again_keeps_the_first_moment(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            key, _ = service.create_key(session, service.create_organisation(session, "Acme").id)
        moments = []
        for _ in range(2):
            with transaction(session_factory) as session:
                moments.append(service.revoke_key(session, key.id).revoked_at)
        assert moments[0] is not None
        assert moments[0] == moments[1]

    def test_unknown_ids_are_not_found(self, session_factory: SessionFactory) -> None:
        with pytest.raises(UnknownOrganisation), transaction(session_factory) as session:
            service.create_key(session, uuid4())
        with pytest.raises(UnknownKey), transaction(session_factory) as session:
            service.revoke_key(session, uuid4())

    @pytest.mark.parametrize(
        ("roles", "per_minute", "parallel", "expires_in", "param"),
        [
            (["king"], 1, 1, None, "roles"),
            ([], 1, 1, None, "roles"),
            (["renter"], 0, 1, None, "requests_per_minute"),
            (["renter"], 10**9, 1, None, "requests_per_minute"),
            (["renter"], 1, 0, None, "parallel_requests"),
            (["renter"], 1, 10**9, None, "parallel_requests"),
            (["renter"], 1, 1, timedelta(0), "expires_in"),
        ],
    )
    def test_a_key_that_cannot_be_is_refused_by_the_fields_name(
        self,
        session_factory: SessionFactory,
        roles: Collection[str],
        per_minute: int,
        parallel: int,
        expires_in: timedelta | None,
        param: str,
    ) -> None:
        with transaction(session_factory) as session:
            owner_id = service.create_organisation(session, "Acme").id
            with pytest.raises(InvalidAccount) as caught:
                service.create_key(
                    session,
                    owner_id,
                    roles=roles,
                    requests_per_minute=per_minute,
                    parallel_requests=parallel,
                    expires_in=expires_in,
                )
        assert caught.value.param == param


class TestMembers:
    def test_a_member_that_leaves_takes_their_keys_along(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            member = service.add_member(session, owner.id, " Ann@Example.org ", ["renter", "finance"])
            assert member.email == "ann@example.org"
            theirs, _ = service.create_key(session, owner.id, roles=["renter"], member=member)
            other, _ = service.create_key(session, owner.id)
            assert service.remove_member(session, owner.id, "ann@example.org") == 1
            session.refresh(theirs)
            assert theirs.revoked_at is not None
            assert other.revoked_at is None
            assert service.list_members(session, owner.id) == []

    def test_a_key_has_no_role_that_its_member_lacks(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            member = service.add_member(session, owner.id, "ann@example.org", ["renter"])
            with pytest.raises(service.InvalidAccount):
                service.create_key(session, owner.id, roles=["finance"], member=member)
            key, _ = service.create_key(session, owner.id, roles=["renter"], member=member)
            service.add_member(session, owner.id, "ann@example.org", ["finance"])
            session.refresh(key)
            assert key.revoked_at is not None

    def test_a_key_that_is_made_while_its_member_leaves_ends_too(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            member = service.add_member(session, owner.id, "ann@example.org", ["renter"])

        def leave() -> int:
            with transaction(session_factory) as session:
                return service.remove_member(session, owner.id, "ann@example.org")

        with ThreadPoolExecutor(1) as pool:
            with transaction(session_factory) as session:
                key, _ = service.create_key(session, owner.id, member=member)
                leaving = pool.submit(leave)
                until(lambda: waiting_for_locks(session) == 1, "a removal that waits")
            assert leaving.result(timeout=10) == 1
        with session_factory() as session:
            assert service.find_key(session, key.id).revoked_at is not None
            with pytest.raises(service.UnknownMember):
                service.create_key(session, owner.id, member=member)

    @pytest.mark.parametrize("email", ["", "ann", "a b@example.org", "a@b", "x" * 300 + "@example.org"])
    def test_are_known_by_an_address(self, session_factory: SessionFactory, email: str) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            with pytest.raises(service.InvalidAccount):
                service.add_member(session, owner.id, email, ["renter"])


class TestBoundsOfAKey:
    @pytest.mark.parametrize(
        "bounds",
        [
            {"networks": ["10.0.0.1/8"]},
            {"networks": []},
            {"models": []},
            {"tokens_per_minute": 0},
            {"budget": service.Budget(-1)},
            {"budget": service.Budget(1, "year")},
        ],
    )
    def test_that_cannot_be_are_refused(self, session_factory: SessionFactory, bounds: Any) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            with pytest.raises(service.InvalidAccount):
                service.create_key(session, owner.id, **bounds)

    def test_a_budget_can_be_changed_and_taken_away(self, session_factory: SessionFactory) -> None:
        with transaction(session_factory) as session:
            owner = service.create_organisation(session, "Acme")
            key, _ = service.create_key(session, owner.id, budget=service.Budget(5))
            service.set_budget(session, key.id, service.Budget(7, "day"))
            assert service.budget_of(session, key.id) == service.BudgetState(7, "day", 0, 0)
            service.set_budget(session, key.id, None)
            assert service.budget_of(session, key.id) is None
