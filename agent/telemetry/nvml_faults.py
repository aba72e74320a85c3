"""What NVML's error codes, Xids and oddities mean for the agent. Pure, but for looking whether device nodes exist."""

from __future__ import annotations

import os
from collections.abc import Sequence
from enum import StrEnum
from pathlib import Path
from typing import Final

from agent.telemetry.port import GpuProcess

NOT_SUPPORTED: Final = 3
NO_PERMISSION: Final = 4
INSUFFICIENT_SIZE: Final = 7
DRIVER_NOT_LOADED: Final = 9
TIMEOUT: Final = 10
LIBRARY_NOT_FOUND: Final = 12
FUNCTION_NOT_FOUND: Final = 13
GPU_IS_LOST: Final = 15
RESET_REQUIRED: Final = 16
LIBRARY_MISMATCH: Final = 18
VERSION_MISMATCH: Final = 25
UNINITIALISED: Final = 1
UNKNOWN: Final = 999

MAX_PID: Final = 4_194_304
"""The kernel's own limit."""
MAX_PROCESSES: Final = 256
MAX_POWER_MW: Final = 3_000_000
MAX_TEMPERATURE_C: Final = 150


class Trouble(StrEnum):
    """How far an error reaches."""

    FIELD = "field"
    """This figure is unknown; the sample still goes."""
    DEVICE = "device"
    """This card cannot be used; the others can."""
    DRIVER = "driver"
    """No card answers until the driver's library was opened anew."""


def reach(code: int) -> Trouble:
    """How far an error of one call reaches. What is not known costs a figure: fields come and go between drivers."""
    if code in (UNINITIALISED, DRIVER_NOT_LOADED, LIBRARY_MISMATCH):
        return Trouble.DRIVER
    if code in (GPU_IS_LOST, RESET_REQUIRED, NO_PERMISSION):
        return Trouble.DEVICE
    return Trouble.FIELD


def device_state(code: int) -> tuple[str, str]:
    """(state, reason) of a card that answers this instead of its memory."""
    match code:
        case 15:
            return "lost", "the GPU fell off the bus (NVML error 15): reboot, or reset it"
        case 16:
            return "unavailable", "the GPU needs a reset (NVML error 16)"
        case 4:
            return "refused", "no permission to read this device"
        case _:
            return "unavailable", f"NVML error {code}"


def init_reason(code: int, root: Path = Path("/")) -> str:
    """Why NVML does not start, with what would help."""
    match code:
        case 4:
            return missing_nodes(root)
        case 9:
            return "the NVIDIA driver is not loaded"
        case 12:
            return "the NVIDIA driver library was not found"
        case 18:
            return "the NVIDIA driver was upgraded underneath: reboot this machine"
        case 999:
            return "NVML error 999: if this is a container, start it anew; else look at the kernel's log"
        case _:
            return f"NVML error {code} at start"


def missing_nodes(root: Path = Path("/")) -> str:
    """Which device node keeps us out."""
    for name in ("nvidiactl", "nvidia0", "nvidia-uvm"):
        node = root / "dev" / name
        if not node.exists():
            return f"no permission: the device node /dev/{name} is missing; in a container it must be passed in"
        if not os.access(node, os.R_OK | os.W_OK):
            return f"no permission to open /dev/{name}: add the agent's user to the group that owns it"
    return "no permission to open the NVIDIA device nodes"


FATAL_XIDS: Final = {
    48: "an uncorrectable memory error",
    62: "the card's microcontroller halted",
    64: "a memory row could not be repaired",
    74: "an NVLink error",
    79: "the GPU fell off the bus",
    95: "an uncontained memory error",
    119: "the card's firmware does not answer",
    120: "the card's firmware failed",
    140: "an unrecovered memory error",
    143: "the card's start failed",
    154: "the card asks for a reset",
}
"""Events after which a card must not get work until it was reset. Others (31, 43, 45, ...) are a program's."""


def xid_state(xid: int) -> tuple[str, str] | None:
    """(state, reason) after this event, or None if the card works on."""
    told = FATAL_XIDS.get(xid)
    if told is None:
        return None
    return ("lost" if xid == 79 else "unavailable"), f"{told} (Xid {xid}): reboot, or reset the card"


THROTTLE_REASONS: Final = {
    0x2: "application_clocks",
    0x4: "power_cap",
    0x8: "hardware_slowdown",
    0x10: "sync_boost",
    0x20: "heat",
    0x40: "hardware_heat",
    0x80: "power_brake",
    0x100: "display_clocks",
    0x200: "board_limit",
    0x400: "reliability",
}
"""Bit 1, an idle card, holds nothing down."""


def throttle_names(mask: int | None) -> list[str] | None:
    """What holds the clocks down."""
    return None if mask is None else [name for bit, name in THROTTLE_REASONS.items() if mask & bit]


def sane(processes: Sequence[GpuProcess], memory_total_bytes: int | None) -> bool:
    """False if the list cannot be true. Drivers R535.43 to R535.98 write records of another size than they are asked
    for, and from the second one on pid and memory are garbled."""
    if len(processes) > MAX_PROCESSES or len({process.pid for process in processes}) != len(processes):
        return False
    limit = memory_total_bytes if memory_total_bytes is not None else 1 << 48
    return all(
        0 < process.pid <= MAX_PID and (process.memory_bytes is None or process.memory_bytes <= limit)
        for process in processes
    )


def inside_wsl(root: Path = Path("/")) -> bool:
    """True under Windows' Linux, where utilisation is stuck at 0 and processes have neither names nor memory."""
    try:
        return "microsoft" in (root / "proc/sys/kernel/osrelease").read_text().lower()
    except OSError:
        return False
