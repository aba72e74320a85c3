"""What a node must have cached, by its own promise."""

from __future__ import annotations

from uuid import UUID, uuid4

from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.prefixes import MAX_IDS, PrefixMemory, pack

RENTER, VARIANT, NODE = UUID(int=1), UUID(int=2), UUID(int=3)
ids = st.lists(st.integers(0, 5), min_size=1, max_size=40)


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


class TestAPrefix:
    @given(ids, ids)
    def test_is_as_long_as_both_agree_and_leaves_one_token_to_compute(
        self, before: list[int], after: list[int]
    ) -> None:
        memory = PrefixMemory()
        memory.remember(RENTER, VARIANT, NODE, pack(before), for_s=60)
        common = 0
        for a, b in zip(before, after, strict=False):
            if a != b:
                break
            common += 1
        assert memory.proven(RENTER, VARIANT, NODE, pack(after)) == min(common, len(after) - 1)

    def test_is_forgotten_when_the_promise_ends(self) -> None:
        clock = Clock()
        memory = PrefixMemory(clock)
        memory.remember(RENTER, VARIANT, NODE, pack([1, 2, 3]), for_s=10)
        clock.now = 9.9
        assert memory.proven(RENTER, VARIANT, NODE, pack([1, 2, 3, 4])) == 3
        clock.now = 10.0
        assert memory.proven(RENTER, VARIANT, NODE, pack([1, 2, 3, 4])) == 0

    def test_is_never_shared_between_renters_nodes_or_variants(self) -> None:
        memory = PrefixMemory()
        memory.remember(RENTER, VARIANT, NODE, pack([1, 2, 3]), for_s=10)
        for key in ((uuid4(), VARIANT, NODE), (RENTER, uuid4(), NODE), (RENTER, VARIANT, uuid4())):
            assert memory.proven(*key, pack([1, 2, 3, 4])) == 0

    def test_is_not_proven_without_a_promise(self) -> None:
        memory = PrefixMemory()
        memory.remember(RENTER, VARIANT, NODE, pack([1, 2]), for_s=0)
        assert memory.proven(RENTER, VARIANT, NODE, pack([1, 2])) == 0

    def test_is_told_by_node_where_there_is_one(self) -> None:
        memory = PrefixMemory()
        memory.remember(RENTER, VARIANT, NODE, pack([1, 2, 3]), for_s=10)
        memory.remember(RENTER, VARIANT, uuid4(), pack([9]), for_s=10)
        assert memory.held(RENTER, VARIANT, pack([1, 2, 3, 4, 5, 6])) == {NODE: 3}
        assert memory.held(uuid4(), VARIANT, pack([1, 2, 3])) == {}

    def test_takes_a_bounded_room_and_the_oldest_goes(self) -> None:
        memory = PrefixMemory(max_bytes=40)
        nodes = [uuid4() for _ in range(4)]
        for node in nodes:
            memory.remember(RENTER, VARIANT, node, pack([1, 2, 3, 4]), for_s=10)
        kept = [node for node in nodes if memory.proven(RENTER, VARIANT, node, pack([1, 2, 3, 4, 5]))]
        assert kept == nodes[2:]
        assert memory.held(RENTER, VARIANT, pack([1, 2])).keys() == set(nodes[2:])

    def test_of_a_long_prompt_is_remembered_up_to_a_bound(self) -> None:
        assert len(pack(list(range(MAX_IDS * 2)))) == MAX_IDS * 4
