"""Several answers of one engine become one attempt's end."""

from __future__ import annotations

import pytest

from agent.choices import combined, request_for, seeded
from agent.engines.port import Done, Usage
from agent.events import StartWork

WORK = StartWork(attempt=b"a", key="k", body=b"{}", max_output_tokens=5, cache_scope="s", timeout_s=9.0, choices=3)


class TestTheSeed:
    @pytest.mark.parametrize(
        ("given", "choice", "own"),
        [(7, 0, 7), (7, 2, 9), (-1, 1, 0), (2**63 - 1, 1, -(2**63)), (None, 2, None)],
    )
    def test_is_each_choices_own_and_stays_within_64_bits(
        self, given: int | None, choice: int, own: int | None
    ) -> None:
        body: dict[str, object] = {"messages": []} if given is None else {"messages": [], "seed": given}
        assert seeded(body, choice).get("seed") == own


class TestARequest:
    def test_is_the_same_for_each_choice_and_never_has_negative_time(self) -> None:
        request = request_for(WORK, {"messages": []}, 1, -2.0)
        assert (request.max_output_tokens, request.cache_scope, request.timeout_s) == (5, "s", 0.0)


class TestTheEnd:
    def test_of_one_answer_is_its_own(self) -> None:
        usage = Usage(10, 0, 4, 1)
        assert combined([Done("stop", usage)]) == ("stop", usage, ())

    def test_of_several_has_one_prompt_and_all_outputs(self) -> None:
        ends = [Done("stop", Usage(10, 2, 4, 1)), Done("length", Usage(10, 9, 5, 0))]
        assert combined(ends) == ("length", Usage(10, 2, 9, 1), ("stop", "length"))

    def test_does_not_know_a_sum_of_which_it_lacks_a_part(self) -> None:
        ends = [Done("stop", Usage(10, None, 4, None)), Done("stop", Usage(10, None, None, None))]
        assert combined(ends)[1] == Usage(10, None, None, None)

    def test_is_blank_as_soon_as_one_answer_is(self) -> None:
        assert combined([Done("stop"), Done("")])[0] == ""
