from __future__ import annotations

import csv
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy.exc import DBAPIError
from sqlalchemy.orm import Session

import ledger
from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory
from marketplace.core.ids import new_id
from marketplace.finance import service
from marketplace.finance.period import InvalidPeriod, Period
from marketplace.finance.statement import Usage, YieldStatement
from tests.integration.finance.conftest import World

NOON = datetime(2026, 3, 10, 12, tzinfo=UTC)
HOUR = timedelta(hours=1)
HOUR_US = 3_600_000_000


def of(session: Session, world: World, start: datetime = NOON, end: datetime = NOON + 4 * HOUR) -> YieldStatement:
    session.flush()
    return service.yield_statement(session, world.owner, start, end)


def minutes(count: float) -> timedelta:
    return timedelta(minutes=count)


class TestMoney:
    def test_net_is_gross_less_fee_plus_what_our_failures_cost_to_the_nano(
        self, session: Session, world: World
    ) -> None:
        world.receipt(session, NOON, 1_003, tokens=(100, 40, 20, 5))
        world.receipt(session, NOON + HOUR, 77, lost=True)
        statement = of(session, world)
        (device,) = statement.devices
        earnings = device.earnings
        assert (earnings.jobs, earnings.gross_nano, earnings.fee_nano) == (2, 1_003, 201)
        assert (earnings.adjustments_nano, earnings.net_nano) == (77, 879)
        assert device.tokens.input == 150
        assert device.tokens.input_cached == 40
        assert device.tokens.output == 30
        assert statement.total.earnings == earnings

    def test_the_account_closes_at_opening_plus_settled_and_receipts_agree_with_the_ledger(
        self, session: Session, world: World
    ) -> None:
        start = utcnow() - HOUR
        world.receipt(session, start + minutes(1), 1_000)
        world.receipt(session, start + minutes(2), 500, lost=True)
        billing.settle(session, 100)
        world.receipt(session, start + minutes(3), 300)
        statement = of(session, world, start, utcnow() + HOUR)
        account = statement.account
        assert (account.opening_nano, account.settled_nano, account.posted_nano) == (0, 1_300, 1_300)
        assert (account.carried_out_nano, account.closing_nano, account.other_nano) == (240, 1_300, 0)
        assert statement.problems == []

    def test_what_was_delivered_before_and_settled_later_is_carried_over(self, session: Session, world: World) -> None:
        start = utcnow() - HOUR
        world.receipt(session, start - minutes(1), 1_000)
        before = of(session, world, start - HOUR, start)
        assert (before.total.earnings.net_nano, before.account.carried_out_nano) == (800, 800)
        billing.settle(session, 100)
        before = of(session, world, start - HOUR, start)
        assert (before.account.carried_out_nano, before.account.settled_nano) == (800, 0)
        after = of(session, world, start, utcnow() + HOUR)
        assert (after.account.carried_in_nano, after.account.settled_nano) == (800, 800)
        assert after.total.earnings.net_nano == 0
        assert before.problems == after.problems == []

    def test_a_payout_shows_as_another_movement(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        accounts = ledger.open_accounts(
            session, [ledger.charted(ledger.owner_pending(world.owner.hex)), ledger.charted(ledger.CLEARING)]
        )
        pending, clearing = accounts[ledger.owner_pending(world.owner.hex)], accounts[ledger.CLEARING]
        lines = (ledger.debit(pending, 300), ledger.credit(clearing, 300))
        ledger.post(session, ledger.JournalDraft("p", "payout", "test", "p", lines))
        account = of(session, world, utcnow() - HOUR, utcnow() + HOUR).account
        assert (account.settled_nano, account.other_nano, account.closing_nano) == (800, -300, 500)

    def test_a_receipt_that_the_ledger_never_saw_is_told(self, session: Session, world: World) -> None:
        world.receipt(session, utcnow(), 1_000)
        billing.settle(session, 100)
        settled = service.last_receipt(session, world.renter)
        assert settled is not None
        world.receipt(session, utcnow(), 10)
        forged = service.last_receipt(session, world.renter)
        assert forged is not None
        forged.journal_id = settled.journal_id
        statement = of(session, world, utcnow() - HOUR, utcnow() + HOUR)
        assert statement.problems == ["Receipts say 808 nano were settled, the ledger 800."]

    @pytest.mark.parametrize(
        "zone_name", ["UTC", "Europe/Berlin", "America/New_York", "Asia/Kathmandu", "Australia/Lord_Howe"]
    )
    def test_days_around_a_clock_change_hold_each_receipt_once(
        self, session: Session, world: World, zone_name: str
    ) -> None:
        for first in (datetime(2026, 3, 7), datetime(2026, 10, 31)):  # noqa: DTZ001  # only their dates are used
            periods = [
                Period.of_days(*(first.date() + timedelta(days=day + i) for i in (0, 1)), zone_name) for day in range(3)
            ]
            for period in periods:
                world.receipt(session, period.start, 10)
                world.receipt(session, period.end - timedelta(microseconds=1), 10)
            for period in periods:
                statement = service.yield_statement(session, world.owner, period.start, period.end, zone_name)
                assert statement.total.earnings.jobs == 2
            whole = service.yield_statement(session, world.owner, periods[0].start, periods[-1].end, zone_name)
            assert whole.total.earnings.jobs == 6


class TestTime:
    def test_overlapping_leases_count_once(self, session: Session, world: World) -> None:
        world.offered(session, NOON, NOON + 2 * HOUR)
        world.attempt(session, NOON + minutes(10), NOON + minutes(30), busy_ms=10 * 60_000)
        world.attempt(session, NOON + minutes(20), NOON + minutes(40), busy_ms=15 * 60_000)
        usage = of(session, world).total.usage
        assert (usage.offered_us, usage.rented_us, usage.busy_us) == (2 * HOUR_US, HOUR_US // 2, HOUR_US // 3)
        assert (usage.rented_share, usage.busy_share) == (0.25, pytest.approx(1 / 6))

    def test_offers_of_two_models_on_one_device_are_one_offered_time(self, session: Session, world: World) -> None:
        world.offered(session, NOON, NOON + HOUR)
        world.offered(session, NOON + minutes(30), NOON + minutes(90))
        assert of(session, world).total.usage.offered_us == HOUR_US * 3 // 2

    def test_only_what_lies_within_the_period_and_the_offer_counts(self, session: Session, world: World) -> None:
        world.offered(session, NOON - HOUR, NOON + HOUR)
        world.attempt(session, NOON - minutes(30), NOON + minutes(15), busy_ms=60 * 60_000)
        world.attempt(session, NOON + minutes(50), NOON + minutes(80), busy_ms=10 * 60_000)
        usage = of(session, world).total.usage
        assert usage.offered_us == HOUR_US
        assert usage.rented_us == 25 * 60_000_000
        # An hour of work in a lease of 45 minutes is at most the lease; the other's work came after the offer's end.
        assert usage.busy_us == 15 * 60_000_000

    def test_offered_time_without_a_match_is_in_the_denominator(self, session: Session, world: World) -> None:
        world.offered(session, NOON, NOON + 4 * HOUR)
        usage = of(session, world).total.usage
        assert (usage.rented_share, usage.busy_share) == (0.0, 0.0)

    def test_without_an_offer_a_share_is_unknown_and_not_zero(self, session: Session, world: World) -> None:
        world.receipt(session, NOON, 10)
        total = of(session, world).total
        assert (total.usage.rented_share, total.usage.busy_share, total.token_share) == (None, None, None)

    def test_a_dead_gateways_stretch_ends_where_it_was_last_seen(self, session: Session, world: World) -> None:
        world.offered(session, NOON, None, seen=NOON + minutes(5))
        assert of(session, world).total.usage.offered_us == 5 * 60_000_000

    def test_a_live_offer_and_a_running_lease_last_until_now(self, session: Session, world: World) -> None:
        now = utcnow()
        world.offered(session, now - HOUR, None, seen=now)
        world.attempt(session, now - minutes(30), None, expires=now + minutes(30))
        usage = of(session, world, now - 2 * HOUR, now + HOUR).total.usage
        assert usage.offered_us == pytest.approx(HOUR_US, abs=30_000_000)
        assert usage.rented_us == pytest.approx(HOUR_US // 2, abs=30_000_000)

    def test_token_share_compares_with_the_measured_speed_in_all_slots(self, session: Session, world: World) -> None:
        world.offered(session, NOON, NOON + HOUR)
        world.receipt(session, NOON, 10, tokens=(1, 0, 36_000, 0))
        assert of(session, world).total.token_share == pytest.approx(0.1)


class TestEnergy:
    def test_a_sample_over_the_bound_counts_in_proportion(self, session: Session, world: World) -> None:
        world.energy(session, NOON - minutes(15), NOON + minutes(45), 7_200_000_000, "nvml_counter")
        energy = of(session, world).total.energy
        assert (energy.measured_mj, energy.measured_us) == (5_400_000_000, HOUR_US * 3 // 4)
        assert (energy.kwh, energy.source) == (1.5, "measured")

    def test_declared_energy_is_labelled_and_unknown_stays_unknown(self, session: Session, world: World) -> None:
        world.energy(session, NOON, NOON + HOUR, 3_600_000_000, "declared")
        world.energy(session, NOON + HOUR, NOON + 2 * HOUR, None, "unknown")
        energy = of(session, world).total.energy
        assert (energy.kwh, energy.source, energy.unknown_us) == (1.0, "declared, partly unknown", HOUR_US)

    def test_nothing_known_is_not_zero(self, session: Session, world: World) -> None:
        world.energy(session, NOON, NOON + HOUR, None, "unknown")
        energy = of(session, world).total.energy
        assert (energy.kwh, energy.source) == (None, "unknown")


class TestAsking:
    def test_an_owner_without_anything_gets_an_empty_statement(self, session: Session, world: World) -> None:
        statement = of(session, world)
        assert statement.devices == ()
        assert statement.total.usage == Usage()
        assert statement.problems == []

    def test_nobody_and_no_period_are_refused(self, session: Session, world: World) -> None:
        with pytest.raises(service.UnknownOrganisation):
            service.yield_statement(session, new_id(), NOON, NOON + HOUR)
        with pytest.raises(InvalidPeriod):
            service.yield_statement(session, world.owner, NOON, NOON)

    def test_a_snapshot_sees_one_moment_and_writes_nothing(
        self, session: Session, session_factory: SessionFactory, world: World
    ) -> None:
        with service.snapshot(session_factory) as reading:
            assert service.unsettled_receipts(reading) == 0
            world.receipt(session, NOON, 10)
            session.commit()
            assert service.unsettled_receipts(reading) == 0
            world.offered(reading, NOON, NOON + HOUR)
            with pytest.raises(DBAPIError, match="read-only"):
                reading.flush()
        with service.snapshot(session_factory) as reading:
            assert service.unsettled_receipts(reading) == 1


class TestCsv:
    def test_rows_carry_exact_amounts_and_no_formula(self, session: Session, world: World, tmp_path: Path) -> None:
        world.offered(session, NOON, NOON + 2 * HOUR)
        world.receipt(session, NOON, 7_199_254_741, tokens=(100, 40, 20, 5))
        path = service.write_csv(of(session, world), tmp_path / "new" / "statement.csv")
        with path.open(encoding="utf-8", newline="") as file:
            device, total = csv.DictReader(file)
        assert (device["row"], total["row"]) == ("device", "total")
        assert device["device_name"] == "'=GPU"
        assert device["gross_usd"] == "7.199254741"
        assert device["input_cached_tokens"] == "40"
        assert device["energy_kwh"] == ""
        assert device["energy_source"] == "unknown"
        assert device["closing_balance_usd"] == ""
        assert total["closing_balance_usd"] == "0.000000000"
        assert float(device["fee_usd"]) + float(device["net_usd"]) == pytest.approx(float(device["gross_usd"]))
        assert [file.name for file in path.parent.iterdir()] == ["statement.csv"]

    def test_each_receipt_behind_a_statement_can_be_written(
        self, session: Session, world: World, tmp_path: Path
    ) -> None:
        first = world.receipt(session, NOON, 1_003)
        second = world.receipt(session, NOON + HOUR, 77, lost=True)
        statement = of(session, world)
        path = service.write_receipts_csv(session, statement, tmp_path / "receipts.csv")
        with path.open(encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        assert [row["receipt"] for row in rows] == [first.hex, second.hex]
        net = sum(ledger.parse_nano(row["net_usd"]) for row in rows)
        assert net == statement.total.earnings.net_nano
        assert [row["platform_paid_usd"] for row in rows] == ["0.000000000", "0.000000077"]
