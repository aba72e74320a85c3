"""An hour that was not earned in: every minute has a cause, and together they are sixty."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from marketplace.finance.idle import HOUR_US, MINUTE_US, Cause, Explanation, Minute, Part, Rows, explain

START = datetime(2026, 11, 30, 13, tzinfo=UTC)
WHOLE = [(0, HOUR_US)]


def hour(**changes: Any) -> Explanation:
    facts: dict[str, Any] = {
        "node_name": "attic",
        "start": START,
        "now": START + timedelta(days=1),
        "rented": [],
        "offered": WHOLE,
        "held": [],
        "connected": WHOLE,
        "joined": START - timedelta(days=1),
    }
    return explain(Rows(**{**facts, **changes}))


def minutes(found: Explanation) -> dict[Cause, float]:
    out: dict[Cause, float] = {}
    for part in found.parts:
        out[part.cause] = out.get(part.cause, 0.0) + part.us / MINUTE_US
    return out


def of(cause: Cause, found: Explanation) -> Part:
    (part,) = [part for part in found.parts if part.cause is cause]
    return part


def at(first: int, last: int) -> tuple[int, int]:
    return first * MINUTE_US, last * MINUTE_US


class TestTime:
    def test_before_the_node_joined_is_no_loss(self) -> None:
        late = START + timedelta(minutes=40)
        found = hour(joined=late, offered=[at(40, 60)], connected=[at(40, 60)])
        assert minutes(found) == {Cause.BEFORE: 40.0, Cause.DEMAND: 20.0}
        assert found.bottleneck == of(Cause.DEMAND, found)

    def test_without_any_row_it_was_disconnected(self) -> None:
        assert minutes(hour(offered=[], connected=[])) == {Cause.DISCONNECTED: 60.0}

    def test_the_owners_own_is_told_by_reason_and_is_no_loss(self) -> None:
        held = [(*at(0, 20), "somebody uses the machine"), (*at(20, 30), "outside the owner's hours")]
        found = hour(held=held, offered=[at(30, 60)])
        assert minutes(found) == {Cause.OWNER: 30.0, Cause.DEMAND: 30.0}
        assert "Somebody uses the machine. No loss." in [part.sentence for part in found.parts]

    def test_connected_without_an_offer_says_where_to_look(self) -> None:
        found = hour(offered=[at(0, 15)])
        assert minutes(found) == {Cause.NOT_OFFERED: 45.0, Cause.DEMAND: 15.0}
        assert "fallow agent status" in of(Cause.NOT_OFFERED, found).sentence

    def test_what_is_to_come_is_no_cause(self) -> None:
        found = hour(now=START + timedelta(minutes=10))
        assert minutes(found) == {Cause.AHEAD: 50.0, Cause.DEMAND: 10.0}
        assert found.bottleneck is not None
        assert found.bottleneck.cause is Cause.DEMAND


class TestAnIdleMinute:
    @pytest.mark.parametrize(
        ("minute", "cause", "words"),
        [
            (Minute(refused={"BREAKER": 3}), Cause.BREAKER, "3 requests"),
            (Minute(refused={"UNPROVEN": 2}), Cause.PROBATION, "proven"),
            (Minute(refused={"MEMORY": 1}), Cause.MEMORY, "memory"),
            (Minute(refused={"CONTEXT": 1}), Cause.CONTEXT, "longer than a slot"),
            (Minute(refused={"PRICE": 4}, highest_bid=150_000_000), Cause.PRICE, "the highest 0.15 USD"),
            (Minute(cheaper=5), Cause.PRICE, "lower the ask"),
            (Minute(dearer=5), Cause.CHOICE, "at its ask or above"),
            (Minute(refused={"SEVERAL": 5}), Cause.OTHER, "several rules"),
            (Minute(refused={"CONTEXT": 1}, cheaper=5), Cause.PRICE, "5 requests"),
        ],
    )
    def test_has_the_cause_that_most_requests_show(self, minute: Minute, cause: Cause, words: str) -> None:
        found = hour(minutes={7: minute})
        assert minutes(found) == {cause: 1.0, Cause.DEMAND: 59.0}
        assert words in of(cause, found).sentence

    def test_without_any_request_had_no_demand_and_says_what_was_asked_for_instead(self) -> None:
        sentence = of(Cause.DEMAND, hour(unserved=[("other-model", 12)])).sentence
        assert sentence == "Nobody asked for what it serves. 12 requests were for other-model, which nobody offered."

    def test_that_was_rented_earned_whatever_else_happened(self) -> None:
        found = hour(rented=[at(7, 8)], minutes={7: Minute(cheaper=5)})
        assert minutes(found) == {Cause.EARNING: 1.0, Cause.DEMAND: 59.0}


class TestTelemetry:
    def test_that_is_missing_is_named_and_not_made_up(self) -> None:
        notes = " ".join(hour().notes)
        assert notes.count("is not recorded") == 3

    def test_tells_use_and_power(self) -> None:
        used, capped, _ = hour(utilisation_pct=41.6, capped_us=90_000_000).notes
        assert "42%" in used
        assert "1.5 minutes" in capped


spans = st.lists(
    st.tuples(st.integers(0, HOUR_US - 1), st.integers(1, HOUR_US)).map(lambda pair: (pair[0], max(pair))), max_size=6
)


@given(
    rented=spans,
    offered=spans,
    connected=spans,
    held=spans.map(lambda found: [(*span, "busy") for span in found]),
    busy=st.dictionaries(st.integers(0, 59), st.builds(Minute, cheaper=st.integers(0, 3), dearer=st.integers(0, 3))),
    elapsed_s=st.integers(0, 7_200),
    joined_s=st.integers(-3_600, 7_200),
)
def test_the_parts_always_make_an_hour(busy: dict[int, Minute], elapsed_s: int, joined_s: int, **kinds: Any) -> None:
    now, joined = (START + timedelta(seconds=each) for each in (elapsed_s, joined_s))
    found = hour(**kinds, minutes=busy, now=now, joined=joined)
    assert sum(part.us for part in found.parts) == HOUR_US
    assert all(part.us > 0 for part in found.parts)
