"""Answers checked against the JSON Schema that their renter asked for, in a process that may be ended at any time."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import msgspec

from agent.protocol import Tokens
from marketplace.core.logs import get_logger
from marketplace.gateway.answer import by_choice, gather
from marketplace.gateway.strict import InvalidBody

log = get_logger(__name__)
CHECK_S: Final = 1.0
"""One check may take this long."""
WAIT_S: Final = 3.0
"""And wait this long for its turn."""
START_S: Final = 10.0
MAX_LINE_BYTES: Final = 64 * 1024
FIELD: Final = "response_format.json_schema.schema"


@dataclass(frozen=True, slots=True)
class Check:
    """What was found. `valid` None: it could not be said, for the reason in `error`."""

    valid: bool | None
    error: str | None

    def shown(self) -> dict[str, Any]:
        """As it stands beside an answer."""
        return {"valid": self.valid, "error": self.error}


class _Verdict(msgspec.Struct):
    valid: bool | None
    error: str | None


class SchemaChecker:
    """One child process, started when it is needed and again after it had to be ended. One event loop."""

    def __init__(self) -> None:
        self._child: asyncio.subprocess.Process | None = None
        self._turn = asyncio.Lock()

    async def require_schema(self, schema: dict[str, Any]) -> None:
        """Raise InvalidBody (400) unless it is a JSON Schema."""
        found = await self._ask(schema, None)
        if found.valid is False:
            raise InvalidBody(f"`{FIELD}`: {found.error}.", param=FIELD)

    async def check(self, schema: dict[str, Any], text: str) -> Check:
        """Check an answer. Never raises: what cannot be checked is said to be unknown."""
        return await self._ask(schema, text)

    async def close(self) -> None:
        """End the process."""
        child, self._child = self._child, None
        if child is not None and child.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                child.kill()
            await child.wait()

    async def _ask(self, schema: dict[str, Any], text: str | None) -> Check:
        line = msgspec.json.encode({"schema": schema, "text": text}) + b"\n"
        try:
            async with asyncio.timeout(WAIT_S):
                await self._turn.acquire()
        except TimeoutError:
            return Check(None, "too many answers are being checked")
        try:
            return await self._exchange(line)
        except TimeoutError:
            await self.close()
            return Check(None, f"checking took longer than {CHECK_S:g} s")
        except (OSError, msgspec.DecodeError, asyncio.IncompleteReadError, ValueError) as error:
            log.warning("schema_check_failed", error=type(error).__name__)
            await self.close()
            return Check(None, "the check broke")
        except BaseException:
            # Its answer would be taken for that of the next question.
            await self.close()
            raise
        finally:
            self._turn.release()

    async def _exchange(self, line: bytes) -> Check:
        child = await self._running()
        assert child.stdin is not None
        assert child.stdout is not None
        async with asyncio.timeout(CHECK_S):
            child.stdin.write(line)
            await child.stdin.drain()
            verdict = msgspec.json.decode(await child.stdout.readuntil(b"\n"), type=_Verdict)
        return Check(verdict.valid, verdict.error)

    async def _running(self) -> asyncio.subprocess.Process:
        """The child, ready. Starting it is not counted as checking."""
        if self._child is None or self._child.returncode is not None:
            self._child = await asyncio.create_subprocess_exec(
                sys.executable,
                "-m",
                "marketplace.gateway.schema_child",
                stdin=asyncio.subprocess.PIPE,
                stdout=asyncio.subprocess.PIPE,
                stderr=asyncio.subprocess.DEVNULL,
                limit=MAX_LINE_BYTES,
            )
            assert self._child.stdin is not None
            assert self._child.stdout is not None
            self._child.stdin.write(b'{"schema":{},"text":null}\n')
            async with asyncio.timeout(START_S):
                await self._child.stdout.readuntil(b"\n")
        return self._child


async def check_answers(
    checker: SchemaChecker, schema: dict[str, Any], pieces: Sequence[Tokens], choices: int
) -> list[dict[str, Any] | None]:
    """What stands beside each of the answers that were to follow a schema; None where one calls tools instead."""
    return [await _check_answer(checker, schema, own) for own in by_choice(pieces, choices)]


async def _check_answer(
    checker: SchemaChecker, schema: dict[str, Any], pieces: Sequence[Tokens]
) -> dict[str, Any] | None:
    texts = gather(pieces)
    if texts.called:
        return None
    return (await checker.check(schema, texts.visible)).shown()


def put_checks(body: dict[str, Any], checks: Sequence[dict[str, Any] | None]) -> None:
    """Put what was found into the choices of a whole answer; without a schema there is nothing to put."""
    for choice, check in zip(body["choices"], checks, strict=False):
        if check is not None:
            choice["schema_check"] = check
