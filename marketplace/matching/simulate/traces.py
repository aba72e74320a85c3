"""Requests to replay: two public formats, read into one. Sizes in tokens, times in seconds from the first request.

- CSV as the Azure LLM inference traces of 2023: TIMESTAMP, ContextTokens, GeneratedTokens.
- JSON lines as Mooncake's: timestamp (ms), input_length, output_length, hash_ids. An id names a block of 512 tokens
  and all that stands before it, so two requests that share an id share the whole beginning.

A `.gz` at the end of either name is understood.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, TextIO

BLOCK_TOKENS: Final = 512
"""Tokens of one prefix block."""
MAX_REQUESTS: Final = 5_000_000
MAX_TOKENS: Final = 10_000_000
"""Of one prompt or one answer; more is a broken line."""
HALF_WINDOWS: Final = 20
FOLDER_VARIABLE: Final = "FALLOW_TRACES"
AZURE_CODE: Final = "azure_llm_2023_code.csv"
AZURE_CONV: Final = "azure_llm_2023_conv.csv"
MOONCAKE: Final = "mooncake_conversation_full.jsonl.gz"


class TraceError(ValueError):
    """The file is no trace; the text says which line and why."""


@dataclass(frozen=True, slots=True)
class Request:
    """One request of a trace."""

    at_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()
    """Ids of its prefix blocks; empty: its prompt is like no other."""


@dataclass(frozen=True, slots=True)
class Trace:
    """Requests in order of arrival."""

    name: str
    requests: tuple[Request, ...]

    @property
    def duration_s(self) -> float:
        """From the first arrival to the last."""
        return self.requests[-1].at_s - self.requests[0].at_s if self.requests else 0.0

    @property
    def mean_prompt_tokens(self) -> float:
        """0 for an empty trace."""
        return sum(r.prompt_tokens for r in self.requests) / len(self.requests) if self.requests else 0.0

    @property
    def mean_output_tokens(self) -> float:
        """0 for an empty trace."""
        return sum(r.output_tokens for r in self.requests) / len(self.requests) if self.requests else 0.0

    def at_rate(self, requests_per_s: float) -> Trace:
        """The same arrivals, closer or further apart, so that their mean rate is this one."""
        if requests_per_s <= 0:
            raise ValueError("a rate must be above zero")
        if self.duration_s == 0:
            return self
        factor = len(self.requests) / requests_per_s / self.duration_s
        return Trace(self.name, tuple(replace(r, at_s=r.at_s * factor) for r in self.requests))

    def first(self, count: int) -> Trace:
        """Its first requests."""
        return Trace(self.name, self.requests[:count])

    def half(self, *, odd: bool) -> Trace:
        """Every other of HALF_WINDOWS equal stretches of time, put end to end: the even ones or the odd ones. What is
        tuned on one half can be judged on the other."""
        if self.duration_s == 0:
            return self
        start_s = self.requests[0].at_s
        stretch_s = self.duration_s / HALF_WINDOWS
        kept = []
        for request in self.requests:
            place = min(HALF_WINDOWS - 1, int((request.at_s - start_s) / stretch_s))
            if place % 2 == odd:
                # As many stretches were left out as there are of the other half before it.
                left_out = place - place // 2
                kept.append(replace(request, at_s=request.at_s - left_out * stretch_s))
        return Trace(f"{self.name} ({'odd' if odd else 'even'} half)", tuple(kept))


def traces_folder() -> Path | None:
    """Where real traces lie: $FALLOW_TRACES, or `shared/traces` beside the checkout; None if neither exists."""
    named = os.environ.get(FOLDER_VARIABLE)
    folder = Path(named) if named else Path(__file__).resolve().parents[4] / "shared" / "traces"
    return folder if folder.is_dir() else None


def read_trace(path: Path) -> Trace:
    """The trace in a file. Raises TraceError for a file that is none, OSError if unreadable."""
    stem = path.name.removesuffix(".gz")
    with _open(path) as file:
        rows = _read_csv(file) if stem.endswith(".csv") else _read_lines(file)
        requests = sorted(rows, key=lambda request: request.at_s)
    if not requests:
        raise TraceError(f"{path.name} has no requests")
    start = requests[0].at_s
    return Trace(stem.rpartition(".")[0], tuple(replace(r, at_s=r.at_s - start) for r in requests))


def _open(path: Path) -> TextIO:
    if path.name.endswith(".gz"):
        return io.TextIOWrapper(gzip.open(path, "rb"), encoding="utf-8", newline="")
    return path.open(encoding="utf-8", newline="")


def _read_csv(file: Iterable[str]) -> Iterator[Request]:
    reader = csv.DictReader(file)
    wanted = {"TIMESTAMP", "ContextTokens", "GeneratedTokens"}
    if not wanted <= set(reader.fieldnames or ()):
        raise TraceError(f"the first line must name the columns {', '.join(sorted(wanted))}")
    for number, row in enumerate(reader, start=2):
        _bound(number)
        try:
            # The seventh digit (100 ns) is more than datetime reads, and more than a simulation needs.
            at = datetime.fromisoformat(row["TIMESTAMP"].strip()[:26]).replace(tzinfo=UTC).timestamp()
            yield _request(at, row["ContextTokens"], row["GeneratedTokens"], ())
        except (ValueError, AttributeError, TypeError) as error:
            raise TraceError(f"line {number}: {error}") from None


def _read_lines(file: Iterable[str]) -> Iterator[Request]:
    for number, line in enumerate(file, start=1):
        _bound(number)
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            blocks = tuple(int(block) for block in row.get("hash_ids", ()))
            yield _request(float(row["timestamp"]) / 1e3, row["input_length"], row["output_length"], blocks)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(f"line {number}: {error!r}") from None


def _request(at_s: float, prompt: Any, output: Any, blocks: tuple[int, ...]) -> Request:
    prompt_tokens, output_tokens = int(prompt), int(output)
    if not math.isfinite(at_s):
        raise ValueError("no time")
    if not 0 <= prompt_tokens <= MAX_TOKENS or not 0 <= output_tokens <= MAX_TOKENS:
        raise ValueError("a count of tokens is out of range")
    # A request without prompt or answer would do nothing; engines count at least one of each.
    return Request(at_s, max(1, prompt_tokens), max(1, output_tokens), blocks)


def _bound(number: int) -> None:
    if number > MAX_REQUESTS:
        raise TraceError(f"more than {MAX_REQUESTS} requests")


def write_trace(trace: Trace, path: Path) -> None:
    """The trace as a file that `read_trace` reads: .csv as Azure's (prefix blocks are lost), else JSON lines."""
    with path.open("w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            rows = csv.writer(file, lineterminator="\n")
            rows.writerow(("TIMESTAMP", "ContextTokens", "GeneratedTokens"))
            for request in trace.requests:
                at = datetime.fromtimestamp(request.at_s, UTC).strftime("%Y-%m-%d %H:%M:%S.%f")
                rows.writerow((at, request.prompt_tokens, request.output_tokens))
            return
        for request in trace.requests:
            row = {
                "timestamp": round(request.at_s * 1e3, 3),
                "input_length": request.prompt_tokens,
                "output_length": request.output_tokens,
                "hash_ids": list(request.blocks),
            }
            file.write(json.dumps(row) + "\n")
