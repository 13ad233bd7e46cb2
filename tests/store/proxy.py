"""A TCP proxy before Redis that loses what it is told to lose."""

from __future__ import annotations

import asyncio
from typing import Self


class Proxy:
    """Forwards bytes. Arm it, and it cuts the connection at the next request or at the next reply."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._server: asyncio.Server | None = None
        self._tasks: set[asyncio.Task[None]] = set()
        self.cut_before = 0  # requests that never reach the server
        self.cut_after = 0  # replies that never reach the client
        self.cuts = 0

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"redis://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def __aenter__(self) -> Self:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._server is not None
        self._server.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._server.wait_closed()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        up_reader, up_writer = await asyncio.open_connection("127.0.0.1", self._port)
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._pump(reader, up_writer, "cut_before", b"EVALSHA"))
                group.create_task(self._pump(up_reader, writer, "cut_after", b"committed"))
        except* ConnectionError:
            pass
        finally:
            for each in (writer, up_writer):
                each.close()

    async def _pump(self, source: asyncio.StreamReader, sink: asyncio.StreamWriter, cut: str, mark: bytes) -> None:
        while data := await source.read(1 << 20):
            if mark in data and getattr(self, cut):
                setattr(self, cut, getattr(self, cut) - 1)
                self.cuts += 1
                break
            sink.write(data)
            await sink.drain()
        raise ConnectionError
