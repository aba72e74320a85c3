from __future__ import annotations

import pytest

from ledger import CHART, CLEARING, FEES, LOSS, Kind, UnknownAccount, charted, owner_pending, renter_credit


class TestChart:
    def test_a_code_carries_the_reference_of_whoever_it_belongs_to(self) -> None:
        spec = charted(renter_credit("0193ab"))
        assert (spec.kind, spec.reference, spec.checked, spec.floor_nano) == (Kind.LIABILITY, "0193ab", True, 0)

    def test_hot_accounts_keep_no_running_balance(self) -> None:
        for code in (FEES, LOSS, CLEARING, owner_pending("0193ab")):
            assert not charted(code).checked

    @pytest.mark.parametrize("code", ["platform:nothing", "renter::credit", "renter:a:b:credit", "", "xplatform:fees"])
    def test_a_code_outside_the_chart_is_unknown(self, code: str) -> None:
        with pytest.raises(UnknownAccount):
            charted(code)

    def test_only_checked_accounts_have_a_floor(self) -> None:
        assert all(template.checked for template in CHART if template.floor_nano is not None)

    def test_what_we_own_and_spend_grows_by_debits(self) -> None:
        assert [kind.sign for kind in (Kind.ASSET, Kind.EXPENSE, Kind.LIABILITY, Kind.INCOME)] == [1, 1, -1, -1]
