"""What the agent asks of any source of device figures."""

from __future__ import annotations

from typing import Protocol

from agent.protocol import DeviceReport


class Source(Protocol):
    """Devices of one kind."""

    def sample(self) -> list[DeviceReport]:
        """One report per device, now. Never raises for a device that does not answer: a figure that is not known is
        None, a device that is gone has a `state` and a `reason`. May block for milliseconds."""
        ...

    def close(self) -> None:
        """Let go of the driver. Never raises."""
        ...


def worth_sending(last: DeviceReport, now: DeviceReport) -> bool:
    """True if `now` differs from `last` in a way that placement or pay would notice. Utilisation always flickers, and
    travels with the next heartbeat."""
    if (last.device_id, last.state, last.reason) != (now.device_id, now.state, now.reason):
        return True
    if last.power_source != now.power_source:
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
