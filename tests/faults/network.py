"""A piece of network that can fail: relays bytes to one server; cuts, refuses, delays or swallows them on demand."""

from __future__ import annotations

import asyncio
import contextlib
import random
from pathlib import Path
from typing import Self, cast

_HIGH_WATER_BYTES = 1 << 18


class Link:
    """Listens on a free loopback port and relays every connection to `target`: a Unix socket or a loopback port."""

    def __init__(self, target: Path | int) -> None:
        self._target = target
        self._server: asyncio.Server | None = None
        self._ends: dict[_End, _End] = {}  # the client's end -> the server's
        self._tasks: set[asyncio.Task[None]] = set()
        self.refuses = False  # new connections are closed at once
        self.swallows = False  # bytes go nowhere, connections stay
        self.delay_s = 0.0  # of everything that the server says
        self.cuts = 0

    @property
    def port(self) -> int:
        assert self._server is not None
        return int(self._server.sockets[0].getsockname()[1])

    @property
    def open(self) -> int:
        """Connections that stand now."""
        return len(self._ends)

    async def __aenter__(self) -> Self:
        loop = asyncio.get_running_loop()
        self._server = await loop.create_server(lambda: _End(self, server=False), "127.0.0.1", 0, backlog=1024)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        self.cut()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    def cut(self, share: float = 1.0, rng: random.Random | None = None) -> int:
        """Break standing connections, both ends at once, whatever is under way; returns how many."""
        draw = (rng or random).random
        victims = [end for end in list(self._ends) if draw() < share]
        for end in victims:
            end.abort()
        self.cuts += len(victims)
        return len(victims)

    def accepted(self, end: _End) -> None:
        """A client has come."""
        if self.refuses:
            end.abort()
            return
        task = asyncio.get_running_loop().create_task(self._connect(end))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _connect(self, end: _End) -> None:
        loop = asyncio.get_running_loop()
        try:
            if isinstance(self._target, Path):
                _, other = await loop.create_unix_connection(lambda: _End(self, server=True), str(self._target))
            else:
                _, other = await loop.create_connection(lambda: _End(self, server=True), "127.0.0.1", self._target)
        except OSError:
            end.abort()
            return
        if end.gone:
            other.abort()
            return
        self._ends[end] = other
        end.join(other)
        other.join(end)

    def ended(self, end: _End) -> None:
        """Forget a connection."""
        self._ends.pop(end, None)


class _End(asyncio.Protocol):
    """One end of a relayed connection."""

    def __init__(self, link: Link, *, server: bool) -> None:
        self._link = link
        self._from_server = server
        self._transport: asyncio.Transport | None = None
        self._other: _End | None = None
        self._early: list[bytes] = []
        self.gone = False

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)  # uvloop's own is no subclass
        self._transport.set_write_buffer_limits(high=_HIGH_WATER_BYTES)
        if not self._from_server:
            self._link.accepted(self)

    def join(self, other: _End) -> None:
        """Relay to the other end from now on, what has come already first."""
        self._other = other
        for data in self._early:
            self.data_received(data)
        self._early.clear()

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._early.append(data)
        elif self._link.swallows:
            return
        elif self._from_server and self._link.delay_s:
            asyncio.get_running_loop().call_later(self._link.delay_s, self._other.write, data)
        else:
            self._other.write(data)

    def write(self, data: bytes) -> None:
        """Send on."""
        if self._transport is not None and not self.gone:
            self._transport.write(data)

    def pause_writing(self) -> None:
        self._of_other("pause_reading")

    def resume_writing(self) -> None:
        self._of_other("resume_reading")

    def _of_other(self, what: str) -> None:
        transport = self._other._transport if self._other is not None else None
        if transport is not None and not transport.is_closing():
            with contextlib.suppress(RuntimeError):
                getattr(transport, what)()

    def connection_lost(self, exc: Exception | None) -> None:
        self.gone = True
        self._link.ended(self)
        if self._other is not None and self._other._transport is not None and not self._other.gone:
            self._other._transport.close()

    def abort(self) -> None:
        """Both ends, unsent bytes lost."""
        for end in (self, self._other):
            if end is not None and end._transport is not None:
                end._transport.abort()
