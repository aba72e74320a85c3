"""The writer's pure parts: its pace."""

from __future__ import annotations

from marketplace.jobs.writer import BUSY_RECORDS_PER_S, LINGER_S, PACE_WINDOW_S, Pace


class TestPace:
    def test_a_quiet_writer_never_waits(self) -> None:
        pace = Pace(0.0)
        for turn in range(1, 100):
            assert pace.linger_s(turn * 0.1) == 0.0
            pace.count(1)

    def test_a_busy_writer_waits_for_company(self) -> None:
        pace = Pace(0.0)
        pace.count(int(BUSY_RECORDS_PER_S * PACE_WINDOW_S) + 10)
        assert pace.linger_s(PACE_WINDOW_S) == LINGER_S

    def test_the_rate_of_the_last_window_holds_until_the_next_is_full(self) -> None:
        pace = Pace(0.0)
        pace.count(1_000)
        assert pace.linger_s(PACE_WINDOW_S / 2) == 0.0
        assert pace.linger_s(PACE_WINDOW_S) == LINGER_S
        assert pace.linger_s(PACE_WINDOW_S * 1.5) == LINGER_S

    def test_after_a_silence_the_first_record_goes_at_once(self) -> None:
        pace = Pace(0.0)
        pace.count(10_000)
        assert pace.linger_s(PACE_WINDOW_S) == LINGER_S
        pace.count(100)
        assert pace.linger_s(10.0) == 0.0
