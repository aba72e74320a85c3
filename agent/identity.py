"""Who this node is: an Ed25519 key that never leaves the machine, and what the marketplace called it."""

from __future__ import annotations

import base64
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import msgspec
from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

KEY_BYTES: Final = 32


class IdentityError(Exception):
    """The node's key or identity cannot be used; the message is a sentence for the owner."""


class IdentityFile(msgspec.Struct, frozen=True):
    """identity.json."""

    node_id: str
    organisation: str
    url: str
    """Base URL of the marketplace, as enrolled."""
    name: str


@dataclass(frozen=True, slots=True)
class Identity:
    """A key with the name that it is known by."""

    file: IdentityFile
    key: Ed25519PrivateKey

    def sign(self, payload: bytes) -> bytes:
        """Ed25519 signature, 64 bytes."""
        return self.key.sign(payload)


def prepare_home(home: Path) -> None:
    """Make the agent's folder, readable by its owner alone."""
    home.mkdir(parents=True, exist_ok=True, mode=0o700)
    home.chmod(0o700)


def write_private(path: Path, data: bytes, *, durable: bool = True) -> None:
    """Replace `path` with `data`, mode 0600, in one step: a crash leaves the old file or the new one. Durable: also a
    crash of the machine."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(data)
        file.flush()
        if durable:
            os.fsync(file.fileno())
    temporary.replace(path)


def load_or_make_key(home: Path) -> Ed25519PrivateKey:
    """The node's key; made and stored at the first call, so that a lost answer to enrolment costs nothing."""
    path = home / "node.key"
    if not path.exists():
        write_private(path, Ed25519PrivateKey.generate().private_bytes_raw())
    return load_key(home)


def load_key(home: Path) -> Ed25519PrivateKey:
    """Raises IdentityError if the key is missing, damaged, or readable by others."""
    path = home / "node.key"
    try:
        mode = path.stat().st_mode & 0o777
        raw = path.read_bytes()
    except FileNotFoundError as error:
        raise IdentityError(f"{path} is missing: enroll this machine again.") from error
    except OSError as error:
        raise IdentityError(f"{path} cannot be read: {error.strerror}.") from error
    if os.name == "posix" and mode & 0o077:
        raise IdentityError(f"{path} can be read by other users (mode {mode:04o}): run chmod 600 on it.")
    if len(raw) != KEY_BYTES:
        raise IdentityError(f"{path} is damaged: {len(raw)} bytes instead of {KEY_BYTES}.")
    try:
        return Ed25519PrivateKey.from_private_bytes(raw)
    except (ValueError, UnsupportedAlgorithm) as error:
        raise IdentityError(f"{path} is not an Ed25519 key.") from error


def public_key_base64(key: Ed25519PrivateKey) -> str:
    """Raw 32 bytes of the public key, base64."""
    return base64.b64encode(key.public_key().public_bytes(Encoding.Raw, PublicFormat.Raw)).decode()


def find(home: Path) -> IdentityFile | None:
    """identity.json, or None if this machine is not enrolled. Raises IdentityError if it is damaged."""
    path = home / "identity.json"
    try:
        return msgspec.json.decode(path.read_bytes(), type=IdentityFile)
    except FileNotFoundError:
        return None
    except (OSError, msgspec.DecodeError) as error:
        raise IdentityError(f"{path} cannot be read: {error}.") from error


def load(home: Path) -> Identity:
    """The enrolled identity. Raises IdentityError with what to do."""
    file = find(home)
    if file is None:
        raise IdentityError(f"This machine is not enrolled ({home}): run `fallow agent enroll` first.")
    return Identity(file=file, key=load_key(home))


def save(home: Path, file: IdentityFile) -> None:
    """Write identity.json."""
    write_private(home / "identity.json", msgspec.json.format(msgspec.json.encode(file)) + b"\n")
