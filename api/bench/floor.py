"""The floor: a proxy that moves a turn's bytes and does nothing else. What a turn costs at least, on this machine.

It reads the chat request and lets it be, sends the engine a body of as many ids as the turn's prompt has, and
returns the engine's reply. Same HTTP server, event loop and client as a worker. The body to send is made beforehand
and named by the request's `x-engine-body` header.
"""

from __future__ import annotations

import ctypes
import io
from collections.abc import Awaitable, Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import aiohttp
import click
import uvicorn

ENGINE_BODY = "x-engine-body"

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # of mallopt(3)
_KEPT_BYTES = 64 * 2**20

_JSON = [(b"content-type", b"application/json")]


class PassThrough:
    """The proxy as an ASGI application. `GET` answers 200 with nothing; `POST` passes through."""

    def __init__(self, engine_url: str, bodies: Path) -> None:
        self._url = f"{engine_url}/generate"
        self._client: aiohttp.ClientSession | None = None  # made inside the event loop
        self._engine_body = cache(lambda name: (bodies / name).read_bytes())

    async def __call__(
        self,
        scope: Mapping[str, Any],
        receive: Callable[[], Awaitable[Mapping[str, Any]]],
        send: Callable[[Mapping[str, Any]], Awaitable[None]],
    ) -> None:
        """One request."""
        content = b""
        if scope["method"] == "POST":
            await _body(receive)
            headers = dict(scope["headers"])
            content = await self._generate(headers[ENGINE_BODY.encode()].decode())
        await send({"type": "http.response.start", "status": 200, "headers": _JSON})
        await send({"type": "http.response.body", "body": content})

    async def _generate(self, name: str) -> bytes:
        if self._client is None:
            self._client = aiohttp.ClientSession()
        # Wrapped, because aiohttp warns of bytes above 1 MB.
        data = io.BytesIO(self._engine_body(name))
        headers = {"content-type": "application/json"}
        async with self._client.post(self._url, data=data, headers=headers) as answer:
            return await answer.read()


async def _body(receive: Callable[[], Awaitable[Mapping[str, Any]]]) -> bytes:
    parts: list[bytes] = []
    more = True
    while more:
        event = await receive()
        parts.append(event.get("body", b""))
        more = event.get("more_body", False)
    return b"".join(parts)


def _keep_memory() -> None:
    """Have the C library keep what it is given back.

    A young process returns each large buffer to the kernel and faults its pages in anew for the next request. A
    worker, whose heap is larger, does not; so neither may the floor, or it would be no floor.
    """
    library = ctypes.CDLL(None)
    if hasattr(library, "mallopt"):  # only glibc needs it
        library.mallopt(_TRIM_THRESHOLD, _KEPT_BYTES)
        library.mallopt(_MMAP_THRESHOLD, _KEPT_BYTES // 4)


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--engine-url", required=True)
@click.option("--bodies", type=click.Path(path_type=Path, exists=True, file_okay=False), required=True)
def main(port: int, engine_url: str, bodies: Path) -> None:
    """Serve until told to stop."""
    _keep_memory()
    uvicorn.run(
        PassThrough(engine_url, bodies),
        host="127.0.0.1",
        port=port,
        loop="uvloop",
        http="httptools",
        lifespan="off",
        access_log=False,
        log_level="warning",
    )


if __name__ == "__main__":
    main()
