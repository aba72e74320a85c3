from __future__ import annotations

import os
import subprocess
import sys
import threading

import psycopg
import pytest

from marketplace.core import migrate


class TestSchema:
    def test_models_and_migrations_give_the_same_schema(self, database_url: str) -> None:
        assert migrate.check(database_url) == []

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ("alter table jobs drop column error_code", "jobs.error_code"),
            ("alter table jobs alter column hold_nano type integer", "jobs.hold_nano"),
            ("alter table ledger_balances drop constraint ck_ledger_balances_floor", "ck_ledger_balances_floor"),
            ("drop index ix_receipts_unsettled", "ix_receipts_unsettled"),
            ("create table stray (id int)", "stray.id"),
            ("alter table nodes alter column faults drop default", "nodes.faults"),
        ],
    )
    def test_any_difference_is_named(self, database_url: str, change: str, named: str) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute(change)
        assert any(named in difference for difference in migrate.check(database_url))

    def test_a_check_leaves_nothing_behind(self, database_url: str) -> None:
        migrate.check(database_url)
        with psycopg.connect(database_url) as connection:
            row = connection.execute("select to_regnamespace(%s)", [migrate.EXPECTED_SCHEMA]).fetchone()
        assert row == (None,)


class TestUpgrade:
    def test_processes_that_start_together_migrate_once(self, database_url: str) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("drop schema public cascade")
            connection.execute("create schema public")
        failures: list[BaseException] = []

        def start() -> None:
            try:
                migrate.upgrade(database_url)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=start) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(timeout=60)
        assert failures == []
        assert migrate.check(database_url) == []

    def test_an_old_database_is_reported_as_such(self, database_url: str) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("delete from alembic_version")
        assert "no migration" in migrate.check(database_url)[0]

    def test_a_program_that_is_newer_than_its_database_does_not_start(self, database_url: str) -> None:
        migrate.require_upgraded(database_url)
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("update alembic_version set version_num = '0001'")
        with pytest.raises(migrate.WrongVersion, match=r"older than this program \(0001, .*run `fallow migrate`"):
            migrate.require_upgraded(database_url)

    @pytest.mark.parametrize("command", ["worker", "beat", "gateway"])
    def test_a_process_that_is_newer_than_its_database_ends_with_a_word(self, database_url: str, command: str) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("update alembic_version set version_num = '0001'")
        environment = {**os.environ, "DATABASE_URL": database_url, "VALKEY_URL": "redis://127.0.0.1:1/0"}
        done = subprocess.run(
            [sys.executable, "-m", "marketplace.cli", command],
            env=environment,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 1
        assert "run `fallow migrate`" in done.stderr

    def test_a_program_that_is_older_serves_during_an_update_but_migrates_nothing(self, database_url: str) -> None:
        with psycopg.connect(database_url, autocommit=True) as connection:
            connection.execute("update alembic_version set version_num = '9999'")
        migrate.require_upgraded(database_url)
        with pytest.raises(migrate.WrongVersion, match=r"A newer Fallow has used this database \(its version: 9999"):
            migrate.upgrade(database_url)
