"""Server-sent events, as engines send them: bytes in, `data` payloads out. Pure."""

from __future__ import annotations

from typing import Final

MAX_EVENT_BYTES: Final = 4 * 1024 * 1024
"""More than any honest chunk: an answer's chunk is hundreds of bytes."""


class SseError(ValueError):
    """The stream is no sane event stream."""


class SseDecoder:
    """Cuts a byte stream into events. Feed it what arrived, in order; it keeps what is not complete yet."""

    def __init__(self, max_event_bytes: int = MAX_EVENT_BYTES) -> None:
        self._max = max_event_bytes
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def feed(self, piece: bytes) -> list[bytes]:
        """Return the data of every event that `piece` completes. Comments and other fields are dropped.

        Raises SseError if one event outgrows the bound.
        """
        *lines, self._rest = (self._rest + piece).split(b"\n")
        events: list[bytes] = []
        for raw in lines:
            line = raw[:-1] if raw.endswith(b"\r") else raw
            if not line:
                self._dispatch(events)
            elif line.startswith(b"data:"):
                self._keep(line[6:] if line[5:6] == b" " else line[5:])
        if self._size + len(self._rest) > self._max:
            raise SseError(f"an event is larger than {self._max} bytes")
        return events

    def _keep(self, data: bytes) -> None:
        self._data.append(data)
        self._size += len(data)
        if self._size > self._max:
            raise SseError(f"an event is larger than {self._max} bytes")

    def _dispatch(self, events: list[bytes]) -> None:
        if self._data:
            events.append(self._data[0] if len(self._data) == 1 else b"\n".join(self._data))
            self._data = []
            self._size = 0
