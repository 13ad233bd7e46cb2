"""Transcripts grow at their end: what a worker read of a session last turn is not read again.

A chat API is sent its whole history every turn. If the new bytes of `messages` begin with the old ones, less the
closing bracket, and go on with a comma, then by JSON's grammar the old messages come first, value for value; only
the rest is parsed. Anything else is read whole. A cache and nothing more: losing it costs time.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable
from typing import Generic, NamedTuple, TypeVar

Read = TypeVar("Read")

_PER_ENTRY = 4  # what is kept of a transcript beside its bytes weighs about as much again, and some


class Known(NamedTuple, Generic[Read]):
    """What was read last turn, and the JSON array of what has come since."""

    read: Read
    rest: bytes


class Transcripts(Generic[Read]):
    """The latest transcript of each session, up to a number of bytes in all."""

    def __init__(self, most_bytes: int) -> None:
        self._most = most_bytes
        self._size = 0
        self._entries: OrderedDict[Hashable, tuple[bytes, Read]] = OrderedDict()

    def known(self, key: Hashable, raw: bytes) -> Known[Read] | None:
        """What was read of the beginning of `raw`, a JSON array; None when it begins otherwise."""
        entry = self._entries.get(key)
        if entry is None:
            return None
        old, read = entry
        cut = len(old) - 1
        if not raw.startswith(old[:cut]):
            return None
        rest = raw[cut:].lstrip()
        if rest == b"]":
            return Known(read, b"[]")
        return Known(read, b"[" + rest[1:]) if rest.startswith(b",") else None

    def keep(self, key: Hashable, raw: bytes, read: Read) -> None:
        """Remember what was read of a session's `raw` transcript; the least recently used ones make room."""
        old = self._entries.pop(key, None)
        if old is not None:
            self._size -= len(old[0]) * _PER_ENTRY
        self._entries[key] = (raw.rstrip(), read)
        self._size += len(raw.rstrip()) * _PER_ENTRY
        while self._size > self._most and self._entries:
            _, (dropped, _) = self._entries.popitem(last=False)
            self._size -= len(dropped) * _PER_ENTRY
