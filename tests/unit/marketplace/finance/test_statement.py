from __future__ import annotations

from uuid import UUID

import pytest

from marketplace.finance.export import text_cell
from marketplace.finance.period import Period
from marketplace.finance.statement import AccountMovement, DeviceYield, Earnings, Energy, Tokens, Usage, YieldStatement
from marketplace.finance.summary import duration, energy, share, summary, usd

NODE = UUID(int=1)
NOTHING = AccountMovement(0, 0, 0, 0, 0, 0)
HOUR_US = 3_600_000_000


def device(**facts: object) -> DeviceYield:
    return DeviceYield(NODE, "attic", "cpu", "CPU", **facts)  # type: ignore[arg-type]


def statement(*devices: DeviceYield, account: AccountMovement = NOTHING) -> YieldStatement:
    return YieldStatement(UUID(int=2), "Olive", Period.named("2026-03", "UTC"), devices, account)


class TestTotals:
    def test_the_total_is_the_sum_of_its_devices(self) -> None:
        first = device(tokens=Tokens(1, 2, 3, 4), earnings=Earnings(1, 100, 20, 7, 87), usage=Usage(10, 5, 2, 4.0))
        second = device(tokens=Tokens(10, 20, 30, 40), earnings=Earnings(2, 50, 10, 0, 40), usage=Usage(30, 5, 4, 6.0))
        total = statement(first, second).total
        assert total.tokens == Tokens(11, 22, 33, 44)
        assert total.earnings == Earnings(3, 150, 30, 7, 127)
        assert (total.usage.rented_share, total.usage.busy_share, total.token_share) == (0.25, 0.15, 7.7)

    def test_one_unmeasured_device_makes_the_token_share_unknown(self) -> None:
        measured, unmeasured = device(usage=Usage(10, 5, 2, 4.0)), device(usage=Usage(10, 5, 2))
        assert statement(measured, unmeasured).total.token_share is None

    def test_one_simulated_device_labels_the_total(self) -> None:
        assert statement(device(), device(simulated=True)).total.simulated
        assert "(simulated engine)" in dict(summary(statement(device(simulated=True))))["requests served"]


class TestEnergy:
    @pytest.mark.parametrize(
        ("drawn", "source", "kwh"),
        [
            (Energy(), "unknown", None),
            (Energy(unknown_us=5), "unknown", None),
            (Energy(measured_mj=3_600_000_000, measured_us=5), "measured", 1.0),
            (Energy(measured_us=5), "measured", 0.0),
            (Energy(declared_mj=1_800_000_000, declared_us=5, unknown_us=1), "declared, partly unknown", 0.5),
            (
                Energy(measured_mj=1, declared_mj=3_599_999_999, measured_us=5, declared_us=5),
                "measured and declared",
                1.0,
            ),
        ],
    )
    def test_a_figure_says_where_it_comes_from(self, drawn: Energy, source: str, kwh: float | None) -> None:
        assert (drawn.source, drawn.kwh) == (source, kwh)

    def test_people_read_unknown_and_declared_as_such(self) -> None:
        assert energy(device()) == "unknown"
        declared = Energy(declared_mj=1_800_000_000, declared_us=5, unknown_us=90_000_000)
        assert energy(device(energy=declared)) == "0.500000 kWh (declared, partly unknown for 1 min 30.0 s)"


class TestProblems:
    def test_an_account_that_adds_up_has_none(self) -> None:
        account = AccountMovement(
            opening_nano=5, carried_in_nano=10, carried_out_nano=3, settled_nano=94, posted_nano=94, closing_nano=99
        )
        found = statement(device(earnings=Earnings(net_nano=87)), account=account)
        assert found.problems == []
        assert account.other_nano == 0

    def test_a_nano_that_does_not_trace_is_told(self) -> None:
        account = AccountMovement(0, 0, 0, settled_nano=87, posted_nano=86, closing_nano=86)
        (sentence,) = statement(device(earnings=Earnings(net_nano=87)), account=account).problems
        assert sentence == "Receipts say 87 nano were settled, the ledger 86."


class TestForPeople:
    @pytest.mark.parametrize("text", ["=1+1", "+1", "-1", "@SUM(A1)", "\tx", "\rx"])
    def test_no_spreadsheet_takes_a_name_for_a_formula(self, text: str) -> None:
        assert text_cell(text) == f"'{text}"

    def test_ordinary_names_stay_as_they_are(self) -> None:
        assert text_cell("NVIDIA GeForce RTX 4090") == "NVIDIA GeForce RTX 4090"

    def test_amounts_are_exact_and_carry_their_sign_in_front(self) -> None:
        assert (usd(1), usd(-1_500_000_000), usd(0)) == ("$0.000000001", "-$1.50", "$0.00")

    def test_an_unknown_share_is_not_zero(self) -> None:
        assert (share(None), share(0.0), share(0.1234)) == ("unknown", "0.0%", "12.3%")

    def test_durations_read_at_their_own_scale(self) -> None:
        assert [duration(us) for us in (5_500_000, 90_000_000, HOUR_US * 3 // 2)] == ["5.5 s", "1 min 30.0 s", "1.50 h"]

    def test_a_summary_ends_with_the_balance_and_tells_what_is_carried_over(self) -> None:
        rows = summary(statement(device(), account=AccountMovement(1, 2, 3, 4, 4, 5)))
        names = [name for name, _ in rows]
        assert names[-1] == "balance after"
        assert {"of which delivered before", "delivered, not yet settled"} <= set(names)
        assert "payouts and corrections" not in names
