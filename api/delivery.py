"""A reply on its way out, and whether it was handed to an open connection."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from litestar import Litestar, Request, Response
from litestar.response.base import ASGIResponse
from litestar.types import Receive, Scope, Send

Told = Callable[[bool], None]


async def disconnected(receive: Receive) -> None:
    """Returns when the client has closed its connection."""
    while (await receive())["type"] != "http.disconnect":
        pass


class Delivery(Response[bytes]):
    """A body in chunks; `told` hears whether the last of them went to a client that was still there."""

    def __init__(self, chunks: Iterable[bytes], told: Told, *, headers: Mapping[str, str], media_type: str) -> None:
        super().__init__(b"", headers=dict(headers), media_type=media_type)
        self._sending = _Sending(chunks, told, headers, media_type)

    def to_asgi_response(
        self,
        app: Litestar | None,  # noqa: ARG002 - the library's signature
        request: Request[Any, Any, Any],  # noqa: ARG002
        **_: Any,
    ) -> ASGIResponse:
        """See Litestar."""
        return self._sending


class _Sending(ASGIResponse):
    _should_set_content_length = False

    def __init__(self, chunks: Iterable[bytes], told: Told, headers: Mapping[str, str], media_type: str) -> None:
        length = {"content-length": str(sum(map(len, chunks)))} if isinstance(chunks, list) else {}
        super().__init__(headers={**headers, **length}, media_type=media_type)
        self._chunks = chunks
        self._told = told

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:  # noqa: ARG002 - ASGI's signature
        gone = asyncio.ensure_future(disconnected(receive))
        delivered = False
        try:
            delivered = await self._sent(gone, send)
        finally:
            gone.cancel()
            self._told(delivered)

    async def _sent(self, gone: asyncio.Future[None], send: Send) -> bool:
        await self.start_response(send)
        for chunk in self._chunks:
            await asyncio.sleep(0)  # lets a disconnect be seen: servers take what is sent to nobody without a word
            if gone.done():
                return False
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await asyncio.sleep(0)
        there = not gone.done()
        await send({"type": "http.response.body", "body": b"", "more_body": False})
        return there
