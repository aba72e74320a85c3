"""Lines of a batch's file, however the file is cut."""

from __future__ import annotations

import json
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from marketplace.gateway.batches.lines import MAX_ERRORS, MAX_LINE_BYTES, check, result_line, split_lines
from marketplace.gateway.parse import Inference


def line(custom_id: str, **changes: object) -> bytes:
    body = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
    return json.dumps(
        {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": body, **changes}
    ).encode()


def every_model(_: Inference) -> None:
    """Sells everything."""


class TestSplitting:
    @given(st.lists(st.binary(max_size=20), max_size=8), st.lists(st.integers(0, 200), max_size=6))
    def test_does_not_depend_on_how_the_file_comes_in(self, parts: list[bytes], cuts: list[int]) -> None:
        whole = b"\n".join(parts)
        edges = sorted({0, len(whole), *(min(cut, len(whole)) for cut in cuts)})
        pieces = [whole[start:end] for start, end in pairwise(edges)]
        expected = whole.split(b"\n")
        if expected[-1] == b"":
            expected.pop()
        assert list(split_lines(pieces)) == expected

    def test_keeps_no_more_of_an_endless_line_than_shows_that_it_is_too_long(self) -> None:
        pieces = [b"x" * 1_000_000] * 5 + [b"\nshort\n"]
        long, short = split_lines(pieces)
        assert len(long) == MAX_LINE_BYTES + 1
        assert short == b"short"


class TestChecking:
    def test_takes_good_lines_and_skips_empty_ones(self) -> None:
        checked = check([line("a") + b"\n\n" + line("b") + b"\r\n"], "/v1/chat/completions", every_model)
        assert checked.errors == []
        assert [(one.number, one.custom_id) for one in checked.lines] == [(1, "a"), (3, "b")]

    def test_tells_of_a_bounded_number_of_errors(self) -> None:
        checked = check([b"{\n" * (MAX_ERRORS * 2)], "/v1/chat/completions", every_model)
        assert len(checked.errors) == MAX_ERRORS
        assert [error["line"] for error in checked.errors[:2]] == [1, 2]

    def test_refuses_a_file_without_requests(self) -> None:
        (error,) = check([b"\n \n"], "/v1/chat/completions", every_model).errors
        assert (error["code"], error["line"]) == ("empty_file", None)


class TestResults:
    def test_hold_answer_and_error_apart(self) -> None:
        good = json.loads(result_line("r", "a", answer='{"id":"x"}', status_code=200, request_id="req_1", error=None))
        assert good["response"] == {"status_code": 200, "request_id": "req_1", "body": {"id": "x"}}
        assert good["error"] is None
        bad = json.loads(
            result_line("r", "a", answer=None, status_code=None, request_id=None, error=("batch_expired", "late"))
        )
        assert (bad["response"], bad["error"]) == (None, {"code": "batch_expired", "message": "late"})
