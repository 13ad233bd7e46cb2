"""A round-robin HTTP reverse proxy on loopback: what stands between harnesses and workers.

It is as plain as production ones are by default, so that the demo proves something: it knows nothing of
sessions, sends every request to the next replica, and never repeats a request that a replica may have seen.
A replica that refuses the connection is passed over at once; one that dies with a request in hand costs the
client a 502, or a cut body once the reply has begun. Repeating is the client's job.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Self

import aiohttp
from aiohttp import web
from multidict import CIMultiDict
from yarl import URL

# Meant for one connection, not for the message (RFC 9110, section 7.6.1). Host is the replica's own.
_HOP_BY_HOP = frozenset(
    {
        "connection",
        "host",
        "keep-alive",
        "proxy-authenticate",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
_CHUNK_BYTES = 1 << 16
_BODY_LIMIT_BYTES = 1 << 30


class Balancer:
    """Spreads requests over `replicas` (base URLs), in their order.

    `in_flight` tells how many requests each replica has in hand: how the demo knows when a kill will hurt.
    """

    def __init__(self, replicas: tuple[str, ...]) -> None:
        self._replicas = replicas
        self._next = 0
        self._session: aiohttp.ClientSession | None = None
        self._runner: web.AppRunner | None = None
        self.in_flight: dict[str, int] = dict.fromkeys(replicas, 0)
        self.url = ""

    async def __aenter__(self) -> Self:
        """Listen on a free loopback port."""
        app = web.Application(client_max_size=_BODY_LIMIT_BYTES)
        app.router.add_route("*", "/{path:.*}", self._forward)
        # A client that hangs up must be seen by the replica: it aborts the engine's work.
        self._runner = web.AppRunner(app, handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
        await self._runner.setup()
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=2.0),
            auto_decompress=False,
            cookie_jar=aiohttp.DummyCookieJar(),
            skip_auto_headers=("User-Agent", "Accept", "Accept-Encoding", "Content-Type"),
        )
        site = web.TCPSite(self._runner, "127.0.0.1", 0)
        await site.start()
        host, port = self._runner.addresses[0][:2]
        self.url = f"http://{host}:{port}"
        return self

    async def __aexit__(self, *_: object) -> None:
        """Stop listening and drop every connection."""
        if self._runner is not None:
            await self._runner.cleanup()
        if self._session is not None:
            await self._session.close()

    def _turns(self) -> Iterator[str]:
        """Every replica once, beginning with the one whose turn it is."""
        first = self._next
        self._next = (first + 1) % len(self._replicas)
        for step in range(len(self._replicas)):
            yield self._replicas[(first + step) % len(self._replicas)]

    async def _forward(self, request: web.Request) -> web.StreamResponse:
        for replica in self._turns():
            try:
                return await self._through(replica, request)
            except aiohttp.ClientConnectorError:
                continue  # refused: this replica never saw the request
        return _refusal(503, "no replica accepts connections")

    async def _through(self, replica: str, request: web.Request) -> web.StreamResponse:
        self.in_flight[replica] += 1
        try:
            async with self._client.request(
                request.method,
                URL(replica + request.raw_path, encoded=True),
                headers=_end_to_end(request.headers),
                data=request.content if request.body_exists else None,
                allow_redirects=False,
            ) as answer:
                return await _relay(answer, request)
        except aiohttp.ClientConnectorError:
            raise
        except aiohttp.ClientError:
            return _refusal(502, "the replica went away before it answered")
        finally:
            self.in_flight[replica] -= 1

    @property
    def _client(self) -> aiohttp.ClientSession:
        assert self._session is not None, "the balancer has not been entered"
        return self._session


async def _relay(answer: aiohttp.ClientResponse, request: web.Request) -> web.StreamResponse:
    """Pass an answer on as it comes. Once it has begun, a dying replica can only cut the body short."""
    response = web.StreamResponse(status=answer.status, reason=answer.reason, headers=_end_to_end(answer.headers))
    await response.prepare(request)
    try:
        async for chunk in answer.content.iter_chunked(_CHUNK_BYTES):
            await response.write(chunk)
    except aiohttp.ClientError:
        if request.transport is not None:
            request.transport.abort()
        return response
    await response.write_eof()
    return response


def _end_to_end(headers: Mapping[str, str]) -> CIMultiDict[str]:
    return CIMultiDict((name, value) for name, value in headers.items() if name.lower() not in _HOP_BY_HOP)


def _refusal(status: int, words: str) -> web.Response:
    return web.json_response({"error": {"message": words, "type": "balancer", "code": status}}, status=status)
