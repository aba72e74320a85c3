"""Which attempts of the queue are a job's last."""

from __future__ import annotations

from uuid import UUID

import pytest

from marketplace.gateway.dispatched import ends_with
from marketplace.gateway.outcomes import RETRYABLE, Ending
from marketplace.matching.choice import ANY, Choice

FIRST_ONLY = Choice(fallbacks=False)
NODES_FAULT = {Ending.NODE, Ending.BLANK}


class TestAJobThatMayNotMoveOn:
    @pytest.mark.parametrize("ending", sorted(RETRYABLE))
    def test_ends_with_the_failure_of_its_node_and_with_nothing_else_that_may_be_tried_again(
        self, ending: Ending
    ) -> None:
        assert ends_with(FIRST_ONLY, ending) == (ending in NODES_FAULT)

    @pytest.mark.parametrize("choice", [ANY, Choice(order=(UUID(int=1),), fallbacks=False)])
    def test_is_only_one_of_a_first_pick(self, choice: Choice) -> None:
        assert not any(ends_with(choice, ending) for ending in Ending)
