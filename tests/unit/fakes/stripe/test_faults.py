"""Which request a planned fault strikes."""

from __future__ import annotations

from tests.fakes.stripe.faults import STAGES, FaultKind, Faults, Stage


def test_each_kind_has_a_stage() -> None:
    assert set(STAGES) == set(FaultKind)


def test_a_fault_strikes_what_matches_as_often_as_planned() -> None:
    faults = Faults()
    fault = faults.add(FaultKind.RATE_LIMITED, "/v1/transfers*", times=2, skip=1)
    struck = [
        faults.take(Stage.ARRIVAL, "POST", path) is not None
        for path in ("/v1/payouts", "/v1/transfers", "/v1/transfers", "/v1/transfers/tr_1", "/v1/transfers")
    ]
    assert struck == [False, False, True, True, False]
    assert fault.struck == 2


def test_other_methods_and_stages_pass() -> None:
    faults = Faults()
    faults.add(FaultKind.LOST)
    assert faults.take(Stage.RESPONSE, "GET", "/v1/transfers") is None
    assert faults.take(Stage.ARRIVAL, "POST", "/v1/transfers") is None
    assert faults.take(Stage.RESPONSE, "POST", "/v1/transfers") is not None


def test_random_faults_follow_their_seed_and_spare_reads() -> None:
    def drawn(seed: int) -> list[str | None]:
        faults = Faults()
        faults.at_random(seed, {FaultKind.RATE_LIMITED: 0.3, FaultKind.REFUSED: 0.3})
        assert all(faults.take(Stage.ARRIVAL, "GET", "/v1/balance") is None for _ in range(50))
        taken = [faults.take(Stage.ARRIVAL, "POST", "/v1/payouts") for _ in range(200)]
        return [fault and fault.kind.name for fault in taken]

    first = drawn(1)
    assert first == drawn(1)
    assert {"RATE_LIMITED", "REFUSED", None} == set(first)


def test_clear_lets_a_paused_request_go_on() -> None:
    faults = Faults()
    faults.add(FaultKind.PAUSED)
    fault = faults.take(Stage.EXECUTION, "POST", "/v1/transfers")
    assert fault is not None
    faults.clear()
    assert fault.resumed.is_set()
