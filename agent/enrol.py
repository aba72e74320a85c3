"""Joins a machine to an organisation: one request with a one-time token, once."""

from __future__ import annotations

from pathlib import Path
from typing import Final
from urllib.parse import urlsplit

import aiohttp
import msgspec

from agent import identity as identities
from agent.config import ConfigError, Initial, check_url, render
from agent.identity import IdentityFile
from agent.protocol import ENROL_PATH, EnrolAnswer, EnrolRequest

TIMEOUT_S: Final = 20.0
MAX_ANSWER_BYTES: Final = 64 * 1024
MAX_NAME_CHARS: Final = 80


class EnrolError(Exception):
    """Enrolment did not happen; the message is a sentence for the owner."""


class _ErrorDetail(msgspec.Struct):
    message: str = ""


class _ErrorBody(msgspec.Struct):
    error: _ErrorDetail


def is_private(url: str) -> bool:
    """True if what is sent to the URL cannot be read on the way: https, or this very machine."""
    parts = urlsplit(url)
    return parts.scheme == "https" or parts.hostname in ("localhost", "127.0.0.1", "::1")


async def enrol(home: Path, *, url: str, token: str, name: str, initial: Initial, agent_version: str) -> IdentityFile:
    """Enrol with the token, store the identity, and write a config.toml if there is none.

    Raises EnrolError, ConfigError, identity.IdentityError. Nothing is lost when the answer is: the same token and key
    may be sent again.
    """
    url = check_url(url)
    if not 1 <= len(name) <= MAX_NAME_CHARS:
        raise ConfigError(f"The machine's name must have 1 to {MAX_NAME_CHARS} characters.")
    known = identities.find(home)
    if known is not None:
        raise EnrolError(
            f"This machine is already enrolled as node {known.node_id} of {known.organisation} at {known.url}. "
            f"To start over, move {home} away first."
        )
    text = render(initial)
    identities.prepare_home(home)
    key = identities.load_or_make_key(home)
    answer = await _ask(
        url,
        EnrolRequest(token=token, public_key=identities.public_key_base64(key), name=name, agent_version=agent_version),
    )
    if not (home / "config.toml").exists():
        identities.write_private(home / "config.toml", text.encode())
    file = IdentityFile(node_id=answer.node_id, organisation=answer.organisation, url=url, name=name)
    identities.save(home, file)
    return file


async def _ask(url: str, request: EnrolRequest) -> EnrolAnswer:
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    headers = {"Content-Type": "application/json"}
    try:
        async with (
            aiohttp.ClientSession(timeout=timeout) as session,
            session.post(url + ENROL_PATH, data=msgspec.json.encode(request), headers=headers) as response,
        ):
            body = await response.content.read(MAX_ANSWER_BYTES)
            if not response.ok:
                raise EnrolError(f"The marketplace refused: {_reason(body) or response.reason} ({response.status}).")
            return msgspec.json.decode(body, type=EnrolAnswer)
    except msgspec.DecodeError as error:
        raise EnrolError(f"{url} did not answer as a marketplace does: {error}.") from error
    except (TimeoutError, aiohttp.ClientError, OSError) as error:
        raise EnrolError(f"{url} cannot be reached: {str(error) or 'no answer in time'}.") from error


def _reason(body: bytes) -> str:
    try:
        return msgspec.json.decode(body, type=_ErrorBody).error.message[:500].rstrip(".")
    except msgspec.DecodeError:
        return ""
