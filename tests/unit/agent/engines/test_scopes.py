"""Slots are given so that no prefix crosses from one tenant to another, and much is reused within one."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.engines.scopes import MAX_FINGERPRINTS, Seat, SlotTable, fingerprint_messages


def prints(*messages: str) -> tuple[bytes, ...]:
    return fingerprint_messages({"messages": [{"role": "user", "content": text} for text in messages]})


class TestSeats:
    def test_a_conversation_returns_to_its_slot(self) -> None:
        table = SlotTable(3)
        first = table.take("a", prints("hello"))
        assert first == Seat(0, reuse=False)
        table.give_back(first)
        other = table.take("b", prints("hello"))
        assert other is not None
        table.give_back(other)
        assert table.take("a", prints("hello", "and then?")) == Seat(first.slot, reuse=True)

    def test_another_scope_begins_from_nothing(self) -> None:
        table = SlotTable(1)
        for scope in ("a", "b", "a"):
            seat = table.take(scope, prints("same"))
            assert seat == Seat(0, reuse=False)
            table.give_back(seat)

    def test_a_new_conversation_does_not_overwrite_an_old_one_while_a_slot_is_unused(self) -> None:
        table = SlotTable(2)
        first = table.take("a", prints("one"))
        assert first is not None
        table.give_back(first)
        second = table.take("a", prints("two"))
        assert second is not None
        assert second.slot != first.slot

    def test_the_slot_longest_unused_is_given_up(self) -> None:
        table = SlotTable(2)
        for scope in ("a", "b"):
            seat = table.take(scope, prints(scope))
            assert seat is not None
            table.give_back(seat)
        assert table.take("c", prints("c")) == Seat(0, reuse=False)

    def test_no_scope_reuses_nothing_and_leaves_nothing(self) -> None:
        table = SlotTable(1)
        for scope in ("", "", "a"):
            seat = table.take(scope, prints("same"))
            assert seat == Seat(0, reuse=False)
            table.give_back(seat)

    def test_a_full_table_says_so(self) -> None:
        table = SlotTable(1)
        assert table.take("a", ()) is not None
        assert table.take("a", ()) is None
        assert table.busy == 1

    @given(
        st.lists(
            st.tuples(st.sampled_from(["", "a", "b", "c"]), st.sampled_from(["x", "y"]), st.booleans()), max_size=60
        )
    )
    def test_reuse_never_crosses_scopes_whatever_the_order(self, steps: list[tuple[str, str, bool]]) -> None:
        table, owners, held = SlotTable(3), {}, []
        for scope, text, hold in steps:
            seat = table.take(scope, prints(text))
            if seat is None:
                assert len(held) == 3
                table.give_back(held.pop(0))
                continue
            assert seat.slot not in {other.slot for other in held}
            assert not seat.reuse or (scope and owners.get(seat.slot) == scope)
            owners[seat.slot] = scope
            held.append(seat)
            if not hold:
                table.give_back(held.pop())


class TestFingerprints:
    def test_they_tell_messages_and_tools_apart(self) -> None:
        assert prints("a", "b")[:2] == prints("a", "c")[:2]
        assert prints("a", "b")[2] != prints("a", "c")[2]
        assert fingerprint_messages({"messages": [], "tools": [1]}) != fingerprint_messages({"messages": []})

    def test_they_are_bounded(self) -> None:
        assert len(prints(*["x"] * 1000)) == MAX_FINGERPRINTS + 1
