"""Durable holds a second, through the gateway's own writer: each is an admission with its job, attempt and lease.

32 callers that each wait for their answer, over many renters; ratio `one_renter`: the same callers on one renter, to
that. The last renter has credit for half of what is asked: no overspend, or there is no figure.
"""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import ledger
from marketplace.core.database import SessionFactory, transaction
from marketplace.jobs.hot import Admit, Admitted
from marketplace.jobs.writer import HotWriter
from tests.bench.durable import durable_database, sessions
from tests.market import Market, make_market, make_renter

CALLERS = 32
RENTERS = 200
HOLDS = 12_000
CREDIT_NANO = 10**15
REFUSALS = 500


def figures() -> list[dict[str, Any]]:
    """Both figures, on a database of their own."""
    with durable_database() as url, sessions(url) as factory:
        markets = _markets(factory)
        many = asyncio.run(
            _measure(url, [market.admit() for market in itertools.islice(itertools.cycle(markets), HOLDS)])
        )
        one = asyncio.run(_measure(url, [markets[0].admit() for _ in range(HOLDS)]))
        _assert_no_overspend(url, factory, markets[0])
    return [
        {
            "figure": "holds.per_s",
            "value": round(many),
            "unit": "holds/s",
            "ratios": {"one_renter": round(one / many, 2)},
        },
        {"figure": "holds.one_renter_per_s", "value": round(one), "unit": "holds/s", "ratios": {}},
    ]


def _markets(factory: SessionFactory) -> list[Market]:
    with transaction(factory) as session:
        first = make_market(session, credit_nano=CREDIT_NANO)
        others = [make_renter(session, credit_nano=CREDIT_NANO) for _ in range(RENTERS - 1)]
    return [first, *(replace(first, renter=renter) for renter in others)]


async def _measure(url: str, records: Sequence[Admit]) -> float:
    """Holds a second; every one must be admitted."""
    answers, took_s = await _admit(url, records)
    assert all(answer.ok for answer in answers)
    return len(records) / took_s


async def _admit(url: str, records: Sequence[Admit]) -> tuple[list[Admitted], float]:
    writer = HotWriter(url)
    writer.start()
    waiting = iter(records)
    answers: list[Admitted] = []

    async def caller() -> None:
        for record in waiting:
            answers.append(await writer.submit(record))

    try:
        await writer.submit(next(waiting))
        started_s = time.perf_counter()
        await asyncio.gather(*(caller() for _ in range(CALLERS)))
        return answers, time.perf_counter() - started_s
    finally:
        await asyncio.to_thread(writer.stop)


def _assert_no_overspend(url: str, factory: SessionFactory, market: Market) -> None:
    hold_nano = market.admit().hold_nano
    with transaction(factory) as session:
        poor = replace(market, renter=make_renter(session, credit_nano=hold_nano * REFUSALS))
    records = [poor.admit() for _ in range(2 * REFUSALS + 1)]
    asyncio.run(_admit(url, records))
    with factory() as session:
        left = ledger.available(session, poor.renter.credit_account_id)
        assert (left.available_nano, left.pending_nano) == (0, hold_nano * REFUSALS)
        assert ledger.check(session) == []


FIGURES = {"holds.": figures}
