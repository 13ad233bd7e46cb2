"""A local engine that answers as it is told, and remembers what it was sent."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Self

import orjson
from aiohttp import web

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@dataclass(frozen=True)
class Answer:
    """What a route answers. `body` is JSON unless it is bytes already."""

    body: Any
    status: int = 200
    headers: Mapping[str, str] = field(default_factory=dict)

    async def __call__(self, _request: web.Request) -> web.StreamResponse:
        body = self.body if isinstance(self.body, bytes) else orjson.dumps(self.body)
        headers = {"Content-Type": "application/json", **self.headers}
        return web.Response(status=self.status, body=body, headers=headers)


@dataclass(frozen=True)
class Seen:
    method: str
    path: str
    headers: Mapping[str, str]
    body: bytes

    @property
    def json(self) -> Any:
        return orjson.loads(self.body)


async def hang(_request: web.Request) -> web.StreamResponse:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def drop(request: web.Request) -> web.StreamResponse:
    """Close the connection without a word."""
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def cut(request: web.Request) -> web.StreamResponse:
    """Promise a thousand bytes, send a few, close."""
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"text": "hal')
    assert request.transport is not None
    request.transport.close()
    return response


class ReplayServer:
    """Routes by "METHOD /path"; a route that nobody set is a 404. Cancels a handler whose client left."""

    def __init__(self, answers: Mapping[str, Handler] | None = None) -> None:
        self.answers: dict[str, Handler] = dict(answers or {})
        self.seen: list[Seen] = []
        self.left: list[str] = []  # paths whose client left before the answer
        self.url = ""

    async def __aenter__(self) -> Self:
        application = web.Application(client_max_size=256 << 20)
        application.router.add_route("*", "/{path:.*}", self._answer)
        self._runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.seen.append(Seen(request.method, request.path, request.headers.copy(), await request.read()))
        handler = self.answers.get(f"{request.method} {request.path}", Answer({"detail": "Not Found"}, 404))
        try:
            return await handler(request)
        except asyncio.CancelledError:
            self.left.append(request.path)
            raise

    def close_connections(self) -> None:
        """Close what clients keep alive, as an engine does after some idle seconds."""
        assert self._runner.server is not None
        for connection in self._runner.server.connections:
            assert connection.transport is not None
            connection.transport.close()

    def bodies(self, path: str) -> list[Any]:
        return [seen.json for seen in self.seen if seen.path == path]


def refusing_url() -> str:
    """A URL where nobody listens."""
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{unused.getsockname()[1]}"


async def eventually(condition: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `condition` holds."""
    async with asyncio.timeout(within_s):
        while not condition():  # noqa: ASYNC110  what is awaited happens in another task, unsignalled
            await asyncio.sleep(0.005)
