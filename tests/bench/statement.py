"""An owner's statement over a million receipts: seconds, and memory of the process that makes it.
`make bench FIGURES=statement`.

Receipts, their jobs and attempts are written by the database itself, 5,000 of them a settlement journal, and the
statement is made as the command makes it, in a process of its own: read, add up, write all four formats.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg

import ledger
from marketplace.core.database import make_engine, make_session_factory, transaction
from marketplace.core.settings import Settings
from tests.bench.settlement import durable_database
from tests.market import make_market, make_node

RECEIPTS = 1_000_000
A_JOURNAL = 5_000
NODES = 8
START = datetime(2026, 3, 1, tzinfo=UTC)
END = datetime(2026, 4, 1, tzinfo=UTC)
CHARGE_NANO = 30_000
FEE_NANO = 6_000
CREDIT_NANO = 10**15

# Foreign keys and triggers rest while a million rows are written that are sound by construction.
_FILL = """
set session_replication_role = replica;
create temporary table made as
  select i, gen_random_uuid() as job, gen_random_uuid() as attempt, i %% %(nodes)s as node,
         %(start)s::timestamptz + (i * 2.6) * interval '1 second' as at
  from generate_series(0, %(receipts)s - 1) i;
insert into jobs (id, organisation_id, key_id, request_id, kind, state, variant_id, prompt_tokens, max_output_tokens,
                  max_input_nano_usd_per_mtok, max_cached_input_nano_usd_per_mtok, max_output_nano_usd_per_mtok,
                  hold_nano, deadline_at, created_at, ended_at, outcome)
  select job, %(renter)s, %(key)s, job::text, 'interactive', 'settled', %(variant)s, 100, 200,
         100000000, 25000000, 400000000, 0, at, at - interval '3 seconds', at, 'complete' from made;
insert into attempts (id, job_id, epoch, node_id, offer_id, gateway_id, state, price_id, input_nano_usd_per_mtok,
                      cached_input_nano_usd_per_mtok, output_nano_usd_per_mtok, lease_expires_at, accepted_tokens,
                      leased_at, ended_at, busy_ms, end_code)
  select attempt, job, 1, (%(node_ids)s::uuid[])[node + 1], (%(offer_ids)s::uuid[])[node + 1], 'gw', 'ended', %(price)s,
         100000000, 25000000, 400000000, at, 50, at - interval '3 seconds', at, 2500, 'delivered' from made;
insert into receipts (id, job_id, renter_organisation_id, key_id, owner_organisation_id, node_id, device_id, variant_id,
                      price_id, outcome, input_uncached_tokens, input_cached_tokens, output_visible_tokens,
                      output_reasoning_tokens, input_uncached_nano, input_cached_nano, output_visible_nano,
                      output_reasoning_nano, charge_nano, fee_nano, owner_nano, loss_nano, simulated, journal_id, at)
  select attempt, job, %(renter)s, %(key)s, %(owner)s, (%(node_ids)s::uuid[])[node + 1], 'cpu', %(variant)s, %(price)s,
         'complete', 60, 40, 50, 0, 9000, 1000, 20000, 0, 30000, 6000, 24000, 0, false,
         (%(journals)s::bigint[])[i / %(a_journal)s + 1], at from made;
insert into offered_intervals (offer_id, node_id, device_id, gateway_id, started_at, seen_at, ended_at)
  select (%(offer_ids)s::uuid[])[n + 1], (%(node_ids)s::uuid[])[n + 1], 'cpu', 'gw',
         %(start)s::timestamptz + h * interval '1 hour', %(start)s::timestamptz + (h + 1) * interval '1 hour',
         %(start)s::timestamptz + (h + 1) * interval '1 hour'
  from generate_series(0, %(nodes)s - 1) n, generate_series(0, 743) h;
set session_replication_role = origin;
"""


def measure(database_url: str) -> list[dict[str, Any]]:
    """Both figures on an empty, migrated database. Raises AssertionError if the statement is wrong."""
    engine = make_engine(Settings(database_url=database_url), application_name="bench")
    owner_id = _fill(database_url, engine)
    engine.dispose()
    with tempfile.TemporaryDirectory(prefix="fallow-bench-") as folder:
        done = subprocess.run(
            [sys.executable, "-m", "tests.bench.statement", database_url, owner_id.hex, folder],
            capture_output=True,
            text=True,
            check=True,
            timeout=300,
        )
        said = json.loads(done.stdout.splitlines()[-1])
        assert said["jobs"] == RECEIPTS, said
        assert said["net_nano"] == RECEIPTS * (CHARGE_NANO - FEE_NANO), said
        assert not said["problems"], said
        assert sorted(path.suffix for path in Path(folder).iterdir()) == [".csv", ".pdf", ".xlsx"]
    return [
        {"figure": "statement.million_receipts_s", "value": said["seconds"], "unit": "s", "ratios": {}},
        {"figure": "statement.rss_mb", "value": said["rss_mb"], "unit": "MB", "ratios": {}},
    ]


def _fill(database_url: str, engine: Any) -> UUID:
    factory = make_session_factory(engine)
    with transaction(factory) as session:
        market = make_market(session, credit_nano=CREDIT_NANO)
        nodes = [market.node, *(make_node(session, market.variant_id) for _ in range(NODES - 1))]
    owner_id = market.node.owner_organisation_id
    with transaction(factory) as session:
        codes = [ledger.owner_pending(owner_id.hex), ledger.FEES]
        accounts = ledger.open_accounts(session, [ledger.charted(code) for code in codes])
        journals = [
            ledger.post(session, _settlement(number, market.renter.credit_account_id, accounts, codes)).journal_id
            for number in range(RECEIPTS // A_JOURNAL)
        ]
    facts = {
        "nodes": NODES,
        "receipts": RECEIPTS,
        "a_journal": A_JOURNAL,
        "start": START,
        "renter": market.renter.organisation_id,
        "key": market.renter.key_id,
        "owner": owner_id,
        "variant": market.variant_id,
        "price": market.node.price_id,
        "node_ids": [node.node_id for node in nodes],
        "offer_ids": [node.offer_id for node in nodes],
        "journals": journals,
    }
    with psycopg.ClientCursor(psycopg.connect(database_url, autocommit=True)) as cursor:
        cursor.execute("update nodes set organisation_id = %s, enrolled_at = %s", (owner_id, START))
        cursor.execute(_FILL, facts)
        cursor.execute("vacuum analyze")
        cursor.connection.close()
    return owner_id


def _settlement(number: int, renter: int, accounts: dict[str, int], codes: list[str]) -> ledger.JournalDraft:
    owner, fees = (accounts[code] for code in codes)
    at = START + (END - START) * (number + 1) / (RECEIPTS // A_JOURNAL + 1)
    return ledger.JournalDraft(
        idempotency_key=f"settlement:{number}",
        kind="settlement",
        source="bench",
        outside_id=str(number),
        lines=(
            ledger.debit(renter, A_JOURNAL * CHARGE_NANO),
            ledger.credit(owner, A_JOURNAL * (CHARGE_NANO - FEE_NANO)),
            ledger.credit(fees, A_JOURNAL * FEE_NANO),
        ),
        effective_at=at,
    )


def child(database_url: str, owner_id: UUID, folder: Path) -> dict[str, Any]:
    """Make the statement, write it, and say how long it took and how much memory it needed."""
    import resource
    import time

    from marketplace.finance import service

    factory = make_session_factory(make_engine(Settings(database_url=database_url), application_name="bench"))
    with factory() as session:
        session.connection()
        began = time.perf_counter()
        statement = service.yield_statement(session, owner_id, START, END)
        for name in ("csv", "xlsx", "pdf"):
            service.write_statement(statement, folder / f"statement.{name}")
        seconds = time.perf_counter() - began
    return {
        "seconds": round(seconds, 2),
        "rss_mb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024),
        "jobs": statement.total.earnings.jobs,
        "net_nano": statement.total.earnings.net_nano,
        "problems": statement.problems,
    }


def figures() -> list[dict[str, Any]]:
    """The figures, on a database of their own."""
    with durable_database() as url:
        return measure(url)


FIGURES = {"statement.": figures}

if __name__ == "__main__":
    print(json.dumps(child(sys.argv[1], UUID(sys.argv[2]), Path(sys.argv[3]))))
