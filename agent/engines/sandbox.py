"""What keeps an engine from the owner's files and from the network. Standard library only: a child runs it first.

Each layer is used where the system has it, none needs root. bubblewrap gives the engine a file system of its own.
Without it the child takes a network of its own, which holds nothing but a loopback, and has the kernel (Landlock)
refuse every file outside what it needs. The names of what took effect go to the owner; nothing is claimed that was not
seen to work.
"""

from __future__ import annotations

import ctypes
import fcntl
import functools
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Final

BUBBLEWRAP: Final = "bubblewrap"
NO_NETWORK: Final = "no network"
FEW_FILES: Final = "no files but its own (landlock)"

_CLONE_NEWUSER: Final = 0x10000000
_CLONE_NEWNET: Final = 0x40000000
_PR_SET_NO_NEW_PRIVS: Final = 38
_SIOCGIFFLAGS: Final = 0x8913
_SIOCSIFFLAGS: Final = 0x8914
_IFF_UP: Final = 1

_CREATE_RULESET: Final = 444
_ADD_RULE: Final = 445
_RESTRICT_SELF: Final = 446
_PATH_BENEATH: Final = 1
_EXECUTE: Final = 1
_WRITE_FILE: Final = 1 << 1
_READ_FILE: Final = 1 << 2
_READ_DIR: Final = 1 << 3
_ALL_OF_ABI_1: Final = (1 << 13) - 1
_REFER: Final = 1 << 13
_TRUNCATE: Final = 1 << 14
_READ: Final = _EXECUTE | _READ_FILE | _READ_DIR
_FILE_RIGHTS: Final = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE

SYSTEM_PATHS: Final = (
    "/usr",
    "/lib",
    "/lib64",
    "/lib32",
    "/bin",
    "/sbin",
    "/etc",
    "/opt",
    "/proc",
    "/sys",
    "/nix/store",
)
"""Read-only: programs and libraries. The owner's files are not among them."""
DEVICE_PATHS: Final = ("/dev",)


def runtime_paths() -> list[str]:
    """Where this interpreter and its packages lie: often below a home folder, of which nothing else is shown."""
    package = Path(__file__).resolve().parents[2]
    found = [sys.prefix, sys.base_prefix, sys.exec_prefix, str(package / "agent")]
    found += [entry for entry in sys.path if entry.endswith(("site-packages", "dist-packages"))]
    real = [os.path.realpath(entry) for entry in found if entry]
    return sorted({*found, *real})


@functools.cache
def bubblewrap() -> str | None:
    """The bwrap program, if it is here and this system lets it work."""
    found = shutil.which("bwrap")
    if found is None:
        return None
    trial = [found, "--ro-bind", "/", "/", "--unshare-all", "--die-with-parent", "true"]
    try:
        subprocess.run(trial, check=True, timeout=5, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    except (OSError, subprocess.SubprocessError):
        return None
    return found


def wrapped(argv: Sequence[str], program: str, *, readable: Iterable[str], writable: Iterable[str]) -> list[str]:
    """The command line of `argv` inside bubblewrap: no network, no home, a user without rights, its own files alone."""
    inside = [program, "--unshare-all", "--die-with-parent", "--new-session", "--uid", "65534", "--gid", "65534"]
    inside += ["--proc", "/proc", "--dev", "/dev", "--tmpfs", "/tmp", "--tmpfs", "/dev/shm"]  # noqa: S108
    for path in SYSTEM_PATHS:
        if path != "/proc":
            inside += ["--ro-bind-try", path, path]
    for node in sorted(Path("/dev").glob("nvidia*")):
        inside += ["--dev-bind-try", str(node), str(node)]
    for path in readable:
        inside += ["--ro-bind-try", path, path]
    for path in writable:
        inside += ["--bind", path, path]
    return [*inside, "--", *argv]


def enclose(readable: Iterable[str], writable: Iterable[str]) -> list[str]:
    """Take network and files from this process, for good. Returns the names of what took effect. Needs to be the only
    thread."""
    done = [NO_NETWORK] if _leave_network() else []
    if _leave_files(readable, writable):
        done.append(FEW_FILES)
    return done


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _leave_network() -> bool:
    """A network namespace of our own with a loopback, which engines of several processes speak over."""
    if sys.platform != "linux" or _libc().unshare(_CLONE_NEWUSER | _CLONE_NEWNET) != 0:
        return False
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        request = struct.pack("16sh14x", b"lo", 0)
        flags = struct.unpack_from("16sh", fcntl.ioctl(probe, _SIOCGIFFLAGS, request))[1]
        fcntl.ioctl(probe, _SIOCSIFFLAGS, struct.pack("16sh14x", b"lo", flags | _IFF_UP))
    return True


class _RulesetAttributes(ctypes.Structure):
    _fields_ = (("handled_access_fs", ctypes.c_uint64),)


class _PathBeneath(ctypes.Structure):
    _pack_ = 1
    _fields_ = (("allowed_access", ctypes.c_uint64), ("parent_fd", ctypes.c_int32))


def _leave_files(readable: Iterable[str], writable: Iterable[str]) -> bool:
    if sys.platform != "linux":
        return False
    libc = _libc()
    version = libc.syscall(_CREATE_RULESET, None, ctypes.c_size_t(0), ctypes.c_uint32(1))
    if version < 1:
        return False
    handled = _ALL_OF_ABI_1 | (_REFER if version >= 2 else 0) | (_TRUNCATE if version >= 3 else 0)
    attributes = _RulesetAttributes(handled)
    ruleset = libc.syscall(
        _CREATE_RULESET, ctypes.byref(attributes), ctypes.c_size_t(ctypes.sizeof(attributes)), ctypes.c_uint32(0)
    )
    if ruleset < 0:
        return False
    try:
        for path in (*SYSTEM_PATHS, *readable):
            _allow(libc, ruleset, path, _READ & handled)
        for path in (*DEVICE_PATHS, *writable):
            _allow(libc, ruleset, path, handled)
        if libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) != 0:
            return False
        return bool(libc.syscall(_RESTRICT_SELF, ruleset, ctypes.c_uint32(0)) == 0)
    finally:
        os.close(ruleset)


def _allow(libc: Any, ruleset: int, path: str, rights: int) -> None:
    """What is not there needs no rule."""
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        if not Path(path).is_dir():
            rights &= _FILE_RIGHTS
        rule = _PathBeneath(rights, descriptor)
        libc.syscall(_ADD_RULE, ruleset, _PATH_BENEATH, ctypes.byref(rule), ctypes.c_uint32(0))
    finally:
        os.close(descriptor)
