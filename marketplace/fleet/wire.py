"""The wire between two gateways: an agent's frames, and who they are for. Messages are msgpack arrays."""

from __future__ import annotations

import hashlib
import hmac
from typing import Final, NamedTuple

import msgspec

from agent.protocol import (
    Accepted,
    Cancel,
    Failed,
    Finished,
    Frame,
    Refused,
    Renew,
    ReportAck,
    Run,
    Tokens,
    Vectors,
    Void,
)

VERSION: Final = 1
LINK_PATH: Final = "/internal/v1/link"
MAX_MESSAGE_BYTES: Final = 16 * 1024 * 1024


class LinkChallenge(Frame, frozen=True, array_like=True, tag="link_challenge"):
    """Home -> caller, first frame."""

    version: int
    gateway_id: str
    nonce: bytes


class LinkHello(Frame, frozen=True, array_like=True, tag="link_hello"):
    """Caller -> home: proves that it knows the cluster's secret."""

    version: int
    gateway_id: str
    nonce: bytes
    proof: bytes


class LinkWelcome(Frame, frozen=True, array_like=True, tag="link_welcome"):
    """Home -> caller: proves the same."""

    proof: bytes


class OpenRoute(Frame, frozen=True, array_like=True, tag="open"):
    """Caller -> home: frames of this attempt come to me."""

    attempt: bytes
    node_id: bytes
    offer_id: bytes


class CloseRoute(Frame, frozen=True, array_like=True, tag="close"):
    """Caller -> home: I no longer wait for this attempt."""

    attempt: bytes


class ToNode(Frame, frozen=True, array_like=True, tag="to"):
    """Caller -> home: pass this on."""

    node_id: bytes
    frame: Run | Renew | Cancel | ReportAck | Void


class Gone(Frame, frozen=True, array_like=True, tag="gone"):
    """Home -> caller: nothing more comes for this attempt. `reason` is a GoneReason."""

    attempt: bytes
    reason: str


CallerFrame = LinkHello | OpenRoute | CloseRoute | ToNode
HomeFrame = LinkChallenge | LinkWelcome | Gone | Accepted | Refused | Tokens | Vectors | Finished | Failed

_encoder = msgspec.msgpack.Encoder()
_caller_decoder = msgspec.msgpack.Decoder(list[CallerFrame])
_home_decoder = msgspec.msgpack.Decoder(list[HomeFrame])


def decode_from_caller(message: bytes) -> list[CallerFrame]:
    """Raises msgspec.DecodeError."""
    return _caller_decoder.decode(message)


def decode_from_home(message: bytes) -> list[HomeFrame]:
    """Raises msgspec.DecodeError."""
    return _home_decoder.decode(message)


class Parties(NamedTuple):
    """Who greets whom, with which nonces."""

    caller: str
    home: str
    caller_nonce: bytes
    home_nonce: bytes


def prove(secret: str, role: str, parties: Parties) -> bytes:
    """HMAC-SHA256 over both names and both nonces. `role`, `caller` or `home`, keeps a proof from being sent back."""
    return hmac.new(secret.encode(), _encoder.encode(["fallow-link-1", role, *parties]), hashlib.sha256).digest()


def proves(proof: bytes, expected: bytes) -> bool:
    """Compare in constant time."""
    return hmac.compare_digest(proof, expected)
