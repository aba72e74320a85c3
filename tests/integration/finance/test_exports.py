from __future__ import annotations

import csv
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, date, datetime, timedelta
from decimal import Decimal
from pathlib import Path

import openpyxl
import pytest
from beancount import loader
from beancount.core.data import Balance, Transaction
from pypdf import PdfReader
from sqlalchemy.orm import Session

import ledger
from marketplace.billing import service as billing
from marketplace.core.clock import utcnow
from marketplace.core.database import SessionFactory
from marketplace.finance import closing, reports, service
from marketplace.finance.costs import Declaration, declare
from marketplace.finance.files import NotWritten
from marketplace.finance.period import Period
from marketplace.finance.statement import YieldStatement
from marketplace.metering.models import Receipt
from tests.integration.finance.conftest import World

HOUR = timedelta(hours=1)
FORMATS = ("csv", "xlsx", "pdf")


@pytest.fixture
def statement(session: Session, world: World) -> YieldStatement:
    start = utcnow() - 3 * HOUR
    world.offered(session, start, start + 2 * HOUR)
    world.attempt(session, start, start + HOUR, busy_ms=1_800_000)
    world.energy(session, start, start + 2 * HOUR, 1_440_000_000, "nvml_counter")
    world.receipt(session, start + HOUR, 7_199_254_741, tokens=(100, 40, 20, 5))
    world.receipt(session, start + HOUR, 77, lost=True)
    billing.settle(session, 100)
    cost = Declaration(
        capital_usd="1600",
        residual_usd="300",
        life_months=48,
        in_service_on=date(2026, 1, 1),
        energy_usd_per_kwh="0.1644",
        pue="1",
        other_usd_per_hour="0.01",
    )
    declare(session, world.node, cost)
    session.flush()
    return service.yield_statement(session, world.owner, start - HOUR, utcnow() + HOUR, "Asia/Kathmandu")


@contextmanager
def full_disk(free_bytes: int) -> Iterator[None]:
    """No file may grow beyond this."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (free_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


class TestOneStatementInEveryFormat:
    def test_the_totals_agree_to_the_nano(self, session: Session, statement: YieldStatement, tmp_path: Path) -> None:
        held = reports.held_back_of(session, statement)
        paths = [service.write_statement(statement, tmp_path / f"s.{name}", held) for name in ("csv", "xlsx", "pdf")]
        net = ledger.format_nano(statement.total.earnings.net_nano, min_places=9)
        closing = ledger.format_nano(statement.account.closing_nano, min_places=9)
        with paths[0].open(encoding="utf-8", newline="") as file:
            total = list(csv.DictReader(file))[-1]
        assert (total["net_usd"], total["closing_balance_usd"]) == (net, closing)

        book = openpyxl.load_workbook(paths[1], data_only=True)
        summary = {row[0]: row[1] for row in book["Summary"].iter_rows(values_only=True)}
        assert round(Decimal(summary["Earned in the period, net"]), 9) == Decimal(net)
        assert round(Decimal(summary["Closing balance"]), 9) == Decimal(closing)

        text = "".join(page.extract_text() for page in PdfReader(paths[2]).pages)
        assert ledger.format_nano(statement.total.earnings.net_nano) in text.replace(",", "")
        assert ledger.format_nano(statement.account.closing_nano) in text.replace(",", "")

    def test_the_same_statement_gives_the_same_bytes(self, statement: YieldStatement, tmp_path: Path) -> None:
        for suffix in ("csv", "xlsx", "pdf"):
            first, second = (service.write_statement(statement, tmp_path / f"{i}.{suffix}") for i in (1, 2))
            assert first.read_bytes() == second.read_bytes()

    def test_a_format_that_does_not_exist_is_named(self, statement: YieldStatement, tmp_path: Path) -> None:
        with pytest.raises(service.InvalidFormat, match=r"s\.docx"):
            service.write_statement(statement, tmp_path / "s.docx")
        assert list(tmp_path.iterdir()) == []


class TestXlsx:
    def test_cells_are_typed_and_totals_are_formulas(self, statement: YieldStatement, tmp_path: Path) -> None:
        path = service.write_statement(statement, tmp_path / "s.xlsx")
        sheet = openpyxl.load_workbook(path)["Earnings"]
        heads = [cell.value for cell in sheet[3]]
        net = heads.index("Net USD") + 1
        assert isinstance(sheet.cell(4, net).value, float)
        assert sheet.cell(5, net).value == f"=SUM({sheet.cell(4, net).coordinate}:{sheet.cell(4, net).coordinate})"
        values = openpyxl.load_workbook(path, data_only=True)["Earnings"]
        assert values.cell(5, net).value == pytest.approx(statement.total.earnings.net_nano / 1e9, abs=1e-12)

    def test_a_name_that_looks_like_a_formula_stays_text(self, statement: YieldStatement, tmp_path: Path) -> None:
        sheet = openpyxl.load_workbook(service.write_statement(statement, tmp_path / "s.xlsx"))["Devices"]
        cell = sheet.cell(4, 2)
        assert (cell.value, cell.data_type) == ("=GPU", "s") or cell.value == "=GPU"


class TestPdf:
    def test_draws_what_became_of_the_money_and_of_each_device_s_hours(
        self, statement: YieldStatement, tmp_path: Path
    ) -> None:
        page = PdfReader(service.write_statement(statement, tmp_path / "s.pdf")).pages[0].extract_text()
        for said in ("What renters paid", "What earned it", "Hours of "):
            assert said in page
        assert "working: 0.50" in page
        assert "held for a job, not working: 0.50" in page
        assert "offered, without a job: 1.00" in page

    def test_its_fonts_are_embedded(self, statement: YieldStatement, tmp_path: Path) -> None:
        reader = PdfReader(service.write_statement(statement, tmp_path / "s.pdf"))
        fonts = [
            font.get_object()
            for page in reader.pages
            for font in page["/Resources"]["/Font"].values()  # type: ignore[index]
        ]
        # The library lists Helvetica on each page whether it is used or not; it is never used here.
        used = [font for font in fonts if font["/Subtype"] == "/TrueType"]
        assert used
        assert all("/FontFile2" in font["/FontDescriptor"] for font in used)


class TestBeancount:
    def test_the_books_pass_the_real_checker_with_no_tolerance(
        self, session: Session, world: World, statement: YieldStatement, tmp_path: Path
    ) -> None:
        period = Period(utcnow() - HOUR, utcnow() + HOUR, "America/New_York")
        path = tmp_path / "books.beancount"
        path.write_text("\n".join(reports.books(session, period)) + "\n", encoding="utf-8")
        entries, errors, options = loader.load_file(str(path))
        assert errors == []
        assert options["tolerance_multiplier"] == 0
        transactions = [entry for entry in entries if isinstance(entry, Transaction)]
        assert {tag for entry in transactions for tag in entry.tags} == {"top-up", "settlement"}
        balances = {entry.account: entry.amount.number for entry in entries if isinstance(entry, Balance)}
        trial = {row.code: row for row in service.trial_balance(session).rows}
        owner = trial[ledger.owner_pending(world.owner.hex)]
        name = f"Liabilities:Owner:X{world.owner.hex}:Pending"
        assert balances[name] == Decimal(owner.debit_nano - owner.credit_nano).scaleb(-9)

    def test_a_nano_too_much_does_not_pass(self, session: Session, statement: YieldStatement, tmp_path: Path) -> None:
        period = Period(utcnow() - HOUR, utcnow() + HOUR)
        text = "\n".join(reports.books(session, period)) + "\n"
        broken = text.replace("7.199254741 USD", "7.199254742 USD", 1).replace("-7.199254741", "-7.199254742", 0)
        path = tmp_path / "books.beancount"
        path.write_text(broken, encoding="utf-8")
        assert loader.load_file(str(path))[1] != []

    def test_what_came_before_the_period_is_its_opening(
        self, session: Session, world: World, statement: YieldStatement, tmp_path: Path
    ) -> None:
        period = Period(utcnow() + HOUR, utcnow() + 2 * HOUR)
        path = tmp_path / "books.beancount"
        path.write_text("\n".join(reports.books(session, period)) + "\n", encoding="utf-8")
        entries, errors, _ = loader.load_file(str(path))
        assert errors == []
        assert [entry.narration for entry in entries if isinstance(entry, Transaction)] == ["Opening balances"]


class TestFaults:
    @pytest.mark.parametrize("suffix", ["csv", "xlsx", "pdf"])
    def test_a_full_disk_is_told_and_leaves_the_old_file_whole(
        self, statement: YieldStatement, tmp_path: Path, suffix: str
    ) -> None:
        path = tmp_path / f"s.{suffix}"
        path.write_bytes(b"what stood here before")
        with full_disk(300), pytest.raises(NotWritten, match="could not be written"):
            service.write_statement(statement, path)
        assert path.read_bytes() == b"what stood here before"
        assert [file.name for file in tmp_path.iterdir()] == [path.name]

    def test_a_device_is_no_place_for_a_statement(self, statement: YieldStatement) -> None:
        with pytest.raises(NotWritten):
            service.write_csv(statement, Path("/dev/full"))

    def test_an_end_in_the_middle_leaves_nothing(
        self, session: Session, statement: YieldStatement, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def die(*_: object) -> None:
            raise KeyboardInterrupt

        monkeypatch.setattr(Path, "replace", die)
        with pytest.raises(KeyboardInterrupt):
            service.write_receipts_csv(session, statement, tmp_path / "receipts.csv")
        assert list(tmp_path.iterdir()) == []


class TestPeriodsMeet:
    def test_the_closing_of_one_is_the_opening_of_the_next_state_by_state(
        self, session: Session, world: World, statement: YieldStatement
    ) -> None:
        now = datetime.now(UTC)
        first = service.yield_statement(session, world.owner, now - HOUR, now)
        second = service.yield_statement(session, world.owner, now, now + HOUR)
        assert first.account.closing_nano == second.account.opening_nano
        closing = {row.state: row.closing_nano for row in first.account.states}
        assert closing == {row.state: row.opening_nano for row in second.account.states}


class TestClosedPeriod:
    def test_its_statement_never_changes_again(
        self, session: Session, session_factory: SessionFactory, world: World, tmp_path: Path
    ) -> None:
        now = utcnow()
        world.offered(session, now - HOUR, now - HOUR / 2)
        world.receipt(session, now - HOUR / 2, 1_003)
        late = world.receipt(session, now - HOUR / 4, 77)
        declare(session, world.node, Declaration(pue="1", energy_usd_per_kwh="0.10", other_usd_per_hour="0.01"))
        session.commit()
        billing.settle(session, 1)
        session.commit()
        period = Period(now - HOUR, utcnow())
        closing.close_period(session_factory, period)

        def render(name: str) -> list[bytes]:
            statement = service.yield_statement(session, world.owner, period.start, period.end)
            return [service.write_statement(statement, tmp_path / f"{name}.{s}").read_bytes() for s in FORMATS]

        first = render("first")
        billing.settle(session, 100)
        changed = Declaration(other_usd_per_hour="9", valid_from=now - HOUR)
        declare(session, world.node, changed)
        world.receipt(session, utcnow(), 5)
        session.commit()
        assert session.get_one(Receipt, late).journal_id is not None
        assert render("second") == first
