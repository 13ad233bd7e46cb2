"""Server-sent events, decoded from bytes as they arrive. Pure: no socket, no clock.

A line may end in CR LF, LF or CR, and a chunk may end anywhere, in the middle of a character too. An event that the
stream's end cuts off is dropped, as the WHATWG text says: half an event is never an event.
"""

from __future__ import annotations

import re

import msgspec

# Two blank lines apart at most: an event larger than this is a runaway peer, not a reply.
MAX_EVENT_BYTES = 64 * 1024 * 1024

_LINE_END = re.compile(rb"\r\n|\n|\r")
_BOM = b"\xef\xbb\xbf"


class EventTooLarge(Exception):
    """The peer sent more than `MAX_EVENT_BYTES` without ending an event."""


class Event(msgspec.Struct, frozen=True):
    """One dispatched event. `data` is its data lines joined by line feeds."""

    data: str
    name: str = "message"


class SseDecoder:
    """Feed it bytes, take whole events. One decoder serves one stream."""

    def __init__(self) -> None:
        self._tail = b""  # an unfinished line
        self._data: list[bytes] = []
        self._name = b""
        self._size = 0
        self._at_start = True

    def feed(self, chunk: bytes) -> list[Event]:
        """The events that `chunk` completes, in order. Raises EventTooLarge."""
        lines = self._lines(self._tail + chunk)
        events = [event for line in lines if (event := self._take(line)) is not None]
        if self._size + len(self._tail) > MAX_EVENT_BYTES:
            raise EventTooLarge
        return events

    def _lines(self, text: bytes) -> list[bytes]:
        if self._at_start:
            if len(text) < len(_BOM) and _BOM.startswith(text):
                self._tail = text
                return []
            text = text.removeprefix(_BOM)
            self._at_start = False
        # A CR at the very end may be half of a CR LF: keep it until the next byte tells.
        held = b"\r" if text.endswith(b"\r") else b""
        *lines, tail = _LINE_END.split(text.removesuffix(b"\r") if held else text)
        self._tail = tail + held
        return lines

    def _take(self, line: bytes) -> Event | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        self._size += len(value)
        if field == b"data":
            self._data.append(value)
        elif field == b"event":
            self._name = value
        return None  # comments, ids and retry times mean nothing here

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._name, self._size = [], b"", 0
        if not data:
            return None
        text = b"\n".join(data).decode("utf-8", "replace")
        return Event(text, name.decode("utf-8", "replace") or "message")
