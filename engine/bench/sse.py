"""Server-sent events out of bytes, wherever the reads were cut. Lines may end with LF, CR LF or CR."""

from __future__ import annotations

from engine.core.errors import TwinferError

MAX_EVENT_BYTES = 16 << 20


class EventTooLongError(TwinferError):
    """An event, or a line, that does not end."""


class EventParser:
    """``push`` returns the data of the events that are complete. An event that the stream leaves without its blank line is none."""

    def __init__(self) -> None:
        self._rest = b""  # a line without its end
        self._data: list[bytes] = []
        self._num_bytes = 0

    def push(self, chunk: bytes) -> list[bytes]:
        """Raises EventTooLongError where an event has more than 16 MiB."""
        lines = (self._rest + chunk).splitlines(keepends=True)
        self._rest = b""
        # A CR at the end may be the first half of CR LF.
        if lines and not lines[-1].endswith(b"\n"):
            self._rest = lines.pop()
            if len(self._rest) + self._num_bytes > MAX_EVENT_BYTES:
                raise EventTooLongError(f"an event has more than {MAX_EVENT_BYTES} bytes")
        events: list[bytes] = []
        for line in lines:
            if line.startswith(b"data:"):
                self._add(line[5:].rstrip(b"\r\n"))
            elif line in (b"\n", b"\r\n", b"\r"):
                if self._data:
                    events.append(b"\n".join(self._data))
                    self._data.clear()
                    self._num_bytes = 0
            elif line.startswith(b"data") and line.rstrip(b"\r\n") == b"data":
                self._add(b"")
            # Comments (keep-alive pings), event names and ids say nothing that the data does not.
        return events

    def _add(self, data: bytes) -> None:
        self._data.append(data.removeprefix(b" "))
        self._num_bytes += len(data)
        if self._num_bytes > MAX_EVENT_BYTES:
            raise EventTooLongError(f"an event has more than {MAX_EVENT_BYTES} bytes")
