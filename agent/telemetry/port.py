"""What the agent asks of any source of device figures."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Protocol

from agent.protocol import DeviceReport


@dataclass(frozen=True, slots=True)
class GpuProcess:
    """A program with a context on a device. Stays on this machine: no process of the owner's is ever reported."""

    pid: int
    kind: Literal["compute", "graphics"]
    memory_bytes: int | None = None


Processes = dict[str, tuple[GpuProcess, ...] | None]
"""By device. None: the device does not say, or says nonsense. A device that is left out has no such notion."""


class Source(Protocol):
    """Devices of one kind."""

    def sample(self) -> list[DeviceReport]:
        """One report per device, now. Never raises for a device that does not answer: a figure that is not known is
        None, a device that is gone has a `state` and a `reason`. May block for milliseconds."""
        ...

    def processes(self) -> Processes:
        """Who used the devices at the last sample."""
        ...

    @property
    def problem(self) -> str:
        """Why the source as a whole gives less than it should; empty if it does not."""
        ...

    @property
    def needs_restart(self) -> bool:
        """True if only a new process can help: the driver's library is stuck in this one."""
        ...

    def close(self) -> None:
        """Let go of the driver. Never raises."""
        ...


def worth_sending(last: DeviceReport, now: DeviceReport) -> bool:
    """True if `now` differs from `last` in a way that placement or pay would notice. Utilisation always flickers, and
    travels with the next heartbeat, as clocks do."""
    if (last.device_id, last.state, last.reason, last.xid) != (now.device_id, now.state, now.reason, now.xid):
        return True
    if last.power_source != now.power_source or last.power_limit_mw != now.power_limit_mw:
        return True
    step_bytes = max(128 * 1024 * 1024, (now.memory_total_bytes or 0) // 50)
    return (
        _moved(last.memory_used_bytes, now.memory_used_bytes, step_bytes)
        or _moved(last.power_mw, now.power_mw, max(5_000, (last.power_mw or 0) // 4))
        or _moved(last.temperature_c, now.temperature_c, 5.0)
        or last.memory_total_bytes != now.memory_total_bytes
    )


def _moved(last: float | None, now: float | None, step: float) -> bool:
    if last is None or now is None:
        return last is not now
    return abs(now - last) >= step
