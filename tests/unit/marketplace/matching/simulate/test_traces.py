"""Public formats are read as they are, and what is none is refused with the line."""

from __future__ import annotations

import gzip
from itertools import pairwise
from pathlib import Path

import pytest

from marketplace.matching.simulate.generator import CODE, CONVERSATION, LONG, QUANTILES, Pattern, draw, generate
from marketplace.matching.simulate.traces import (
    Request,
    Trace,
    TraceError,
    read_trace,
    traces_folder,
    write_trace,
)

CSV = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:17:04.0319600,3180,8
2023-11-16 18:17:03.9799600,4808,10
"""
LINES = """{"timestamp": 3000, "input_length": 900, "output_length": 5, "hash_ids": [0, 1]}
{"timestamp": 0, "input_length": 600, "output_length": 0, "hash_ids": [0, 7]}
"""


class TestReading:
    def test_azures_csv(self, tmp_path: Path) -> None:
        path = tmp_path / "code.csv"
        path.write_text(CSV)
        trace = read_trace(path)
        assert trace.name == "code"
        assert [(r.prompt_tokens, r.output_tokens) for r in trace.requests] == [(4808, 10), (3180, 8)]
        assert trace.requests[0].at_s == 0
        assert trace.duration_s == pytest.approx(0.052, abs=1e-5)

    def test_mooncakes_lines_packed_or_not(self, tmp_path: Path) -> None:
        plain, packed = tmp_path / "m.jsonl", tmp_path / "m.jsonl.gz"
        plain.write_text(LINES)
        packed.write_bytes(gzip.compress(LINES.encode()))
        assert read_trace(plain) == read_trace(packed)
        # An answer of nothing still ends with a token of the engine's.
        assert read_trace(plain).requests[0] == Request(0.0, 600, 1, (0, 7))

    @pytest.mark.parametrize(
        ("name", "text", "complaint"),
        [
            ("a.csv", "when,what\n1,2\n", "must name the columns"),
            ("a.csv", CSV + "not a time,1,2\n", "line 4"),
            ("a.csv", CSV + "2023-11-16 18:17:05,-1,2\n", "line 4.*out of range"),
            ("a.csv", CSV + "2023-11-16 18:17:05,1\n", "line 4"),
            ("a.jsonl", LINES + "[]\n", "line 3"),
            ("a.jsonl", '{"timestamp": NaN, "input_length": 1, "output_length": 1}\n', "line 1"),
            ("a.jsonl", '{"timestamp": 1, "input_length": 99999999999, "output_length": 1}\n', "line 1"),
            ("a.jsonl", "\n\n", "no requests"),
        ],
    )
    def test_what_is_no_trace_is_refused_with_the_place(
        self, tmp_path: Path, name: str, text: str, complaint: str
    ) -> None:
        path = tmp_path / name
        path.write_text(text)
        with pytest.raises(TraceError, match=complaint):
            read_trace(path)

    def test_a_trace_written_is_the_trace_read(self, tmp_path: Path) -> None:
        made = generate(LONG, 60, 3)
        write_trace(made, tmp_path / "long.jsonl")
        assert read_trace(tmp_path / "long.jsonl").requests == made.requests
        talk = generate(CONVERSATION, 20, 3)
        write_trace(talk, tmp_path / "conversation.csv")
        again = read_trace(tmp_path / "conversation.csv")
        assert [r.prompt_tokens for r in again.requests] == [r.prompt_tokens for r in talk.requests]
        assert again.duration_s == pytest.approx(talk.duration_s, abs=1e-4)

    def test_the_folder_of_real_traces_can_be_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("FALLOW_TRACES", str(tmp_path))
        assert traces_folder() == tmp_path
        monkeypatch.setenv("FALLOW_TRACES", str(tmp_path / "absent"))
        assert traces_folder() is None


class TestScaling:
    def test_a_new_rate_moves_arrivals_and_nothing_else(self) -> None:
        trace = Trace("t", tuple(Request(float(n), 10 + n, 5) for n in range(11)))
        twice = trace.at_rate(2.2)
        assert twice.duration_s == pytest.approx(5.0)
        assert [r.prompt_tokens for r in twice.requests] == [r.prompt_tokens for r in trace.requests]
        with pytest.raises(ValueError, match="above zero"):
            trace.at_rate(0)

    def test_the_halves_make_up_the_whole_and_keep_its_pace(self) -> None:
        whole = generate(CONVERSATION, 600, 3)
        odd, even = whole.half(odd=True), whole.half(odd=False)
        assert len(odd.requests) + len(even.requests) == len(whole.requests)
        sizes = sorted((r.prompt_tokens, r.output_tokens) for r in (*odd.requests, *even.requests))
        assert sizes == sorted((r.prompt_tokens, r.output_tokens) for r in whole.requests)
        for half in (odd, even):
            assert half.duration_s == pytest.approx(whole.duration_s / 2, rel=0.1)
            assert all(a.at_s <= b.at_s for a, b in pairwise(half.requests))
            assert half.name != whole.name


def rate_spread(trace: Trace, seconds: int) -> float:
    """Variance over mean of arrivals in windows: 1 for a Poisson process."""
    counts = [0] * (int(trace.duration_s) // seconds + 1)
    for request in trace.requests:
        counts[int(request.at_s) // seconds] += 1
    mean = sum(counts) / len(counts)
    return sum((count - mean) ** 2 for count in counts) / len(counts) / mean


class TestGenerator:
    def test_the_same_seed_makes_the_same_trace(self) -> None:
        assert generate(CODE, 100, 5) == generate(CODE, 100, 5)
        assert generate(CODE, 100, 5) != generate(CODE, 100, 6)

    # Of the real traces: mean prompt and answer, variance over mean of arrivals in 1 s.
    @pytest.mark.parametrize(
        ("pattern", "prompt", "output", "burst"),
        [(CODE, 2048, 27.9, 13.2), (CONVERSATION, 1155, 211, 1.39), (LONG, 12_035, 343, 7.9)],
        ids=lambda value: getattr(value, "name", ""),
    )
    def test_made_up_demand_has_the_statistics_of_the_real(
        self, pattern: Pattern, prompt: float, output: float, burst: float
    ) -> None:
        made = generate(pattern, 3500, 1)
        assert len(made.requests) / made.duration_s == pytest.approx(pattern.requests_per_s, rel=0.15)
        assert made.mean_prompt_tokens == pytest.approx(prompt, rel=0.1)
        assert made.mean_output_tokens == pytest.approx(output, rel=0.2)
        assert rate_spread(made, 1) == pytest.approx(burst, rel=0.4)

    def test_follow_ups_share_as_much_as_real_conversations(self) -> None:
        made = generate(LONG, 3500, 1)
        seen: set[int] = set()
        hits = 0
        for request in made.requests:
            held = 0
            while held < len(request.blocks) and request.blocks[held] in seen:
                held += 1
            hits += min(512 * held, request.prompt_tokens)
            seen.update(request.blocks)
            assert len(request.blocks) == -(-request.prompt_tokens // 512)
            assert len(set(request.blocks)) == len(request.blocks)
        assert hits / sum(r.prompt_tokens for r in made.requests) == pytest.approx(0.374, abs=0.06)

    def test_lengths_follow_their_quantiles(self) -> None:
        import random

        rng = random.Random(2)
        drawn = sorted(draw(CONVERSATION.output_quantiles, rng) for _ in range(20_000))
        for part, expected in list(zip(QUANTILES, CONVERSATION.output_quantiles, strict=True))[1:-1]:
            assert drawn[int(part * len(drawn))] == pytest.approx(expected, rel=0.1)

    @pytest.mark.parametrize("duration", [0.0, -1.0, 1e12])
    def test_a_trace_of_no_or_endless_length_is_refused(self, duration: float) -> None:
        with pytest.raises(ValueError, match="a trace must be"):
            generate(CODE, duration, 1)
