"""A loopback proxy in front of a real engine that keeps a record of what the engine received and sampled.

llama.cpp has no log that a judge could read. Everything is passed on as it is; generations are also recorded and
served at `GET /sim/record?since=0`, as the simulated engine serves its own: `{"entries": [{n, rid, input_ids,
output_ids, text, outcome}]}`, the oldest first. A completion that does not ask for its tokens (`return_tokens`) is
no generation: its client scores ids that it has. `rid` is the request's `x-request-id` header.
"""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Iterator, Mapping
from typing import Any

import aiohttp
import msgspec
import orjson
from aiohttp import web

LOOPBACK = "127.0.0.1"
_MAX_BODY = 256 << 20
_COMPLETION_PATHS = frozenset({"/completion", "/completions"})
_HOP_BY_HOP = frozenset({"connection", "content-length", "host", "keep-alive", "transfer-encoding"})
_TIMEOUT = aiohttp.ClientTimeout(total=None, connect=10)


class RecordedCompletion(msgspec.Struct):
    """One generation that was asked of the engine. `n` counts from 1."""

    n: int
    rid: str
    input_ids: list[int]
    output_ids: list[int] = []
    text: str = ""
    outcome: str = "running"  # then answered, aborted (the client went) or failed

    def close(self, outcome: str, reply: bytearray) -> None:
        """Note how it ended, and as much of the reply as the engine gave."""
        for part in _parts(reply):
            self.output_ids += part.get("tokens", [])
            self.text += part.get("content", "")
        self.outcome = outcome


class Witness:
    """Serves the proxy and its record."""

    def __init__(self, engine_url: str) -> None:
        self._engine_url = engine_url
        self._record: list[RecordedCompletion] = []

    @contextlib.asynccontextmanager
    async def serving(self, port: int = 0) -> AsyncIterator[str]:
        """Serve on loopback, port 0 for a free one; yields the URL."""
        application = web.Application(client_max_size=_MAX_BODY)
        application.router.add_get("/sim/record", self._show_record)
        application.router.add_route("*", "/{path:.*}", self._pass_on)
        # Without cancellation a client's leaving would go unseen, and the engine would sample on for nobody.
        runner = web.AppRunner(application, handler_cancellation=True, access_log=None, shutdown_timeout=2)
        # llama.cpp drops kept-alive connections unannounced: each request has its own.
        connector = aiohttp.TCPConnector(force_close=True, limit=0)
        async with aiohttp.ClientSession(connector=connector, timeout=_TIMEOUT, auto_decompress=False) as self._session:
            await runner.setup()
            try:
                await web.TCPSite(runner, LOOPBACK, port).start()
                yield f"http://{LOOPBACK}:{runner.addresses[0][1]}"
            finally:
                await runner.cleanup()

    async def _show_record(self, request: web.Request) -> web.Response:
        since = int(request.query.get("since", "0"))
        return web.Response(
            content_type="application/json", body=msgspec.json.encode({"entries": self._record[since:]})
        )

    async def _pass_on(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        asked = _json(body)
        rid = request.headers.get("x-request-id", "")
        entry = RecordedCompletion(len(self._record) + 1, rid, _prompt_ids(asked))
        if request.path in _COMPLETION_PATHS and asked.get("return_tokens"):
            self._record.append(entry)
        reply = bytearray()
        outcome = "aborted"  # unless the end is reached: a client that leaves cancels this handler
        try:
            async with self._asked(request, body) as upstream:
                answer = await _relayed(request, upstream, reply)
            outcome = "answered" if answer.status == web.HTTPOk.status_code and _whole(reply) else "failed"
        except aiohttp.ClientConnectionResetError:  # ours: the client went while it was written to
            raise
        except aiohttp.ClientError as error:
            outcome = "failed"
            return web.json_response({"error": {"code": 502, "message": repr(error)}}, status=502)
        finally:
            entry.close(outcome, reply)
        return answer

    def _asked(
        self, request: web.Request, body: bytes
    ) -> contextlib.AbstractAsyncContextManager[aiohttp.ClientResponse]:
        url = self._engine_url + request.raw_path
        return self._session.request(request.method, url, data=body or None, headers=_end_to_end(request.headers))


async def _relayed(request: web.Request, upstream: aiohttp.ClientResponse, reply: bytearray) -> web.StreamResponse:
    """Write the engine's answer to the client, save for its end, which is the client's sign to go on."""
    if upstream.content_type != "text/event-stream":
        reply += await upstream.read()
        return web.Response(status=upstream.status, headers=_end_to_end(upstream.headers), body=bytes(reply))
    answer = web.StreamResponse(status=upstream.status, headers=_end_to_end(upstream.headers))
    await answer.prepare(request)
    async for chunk in upstream.content.iter_any():
        reply += chunk
        await answer.write(chunk)
    return answer


def _end_to_end(headers: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in headers.items() if name.lower() not in _HOP_BY_HOP}


def _whole(reply: bytes | bytearray) -> bool:
    """Whether a stream reached its last event; a reply with a length is whole or an error."""
    return not _streamed(reply) or any(part.get("stop") is True for part in _parts(reply))


def _prompt_ids(asked: Mapping[str, Any]) -> list[int]:
    """The prompt of a completion request, where it came as ids."""
    sent = asked.get("prompt")
    return sent if isinstance(sent, list) and all(type(number) is int for number in sent) else []


def _parts(reply: bytes | bytearray) -> Iterator[dict[str, Any]]:
    """The JSON objects of a reply: one, or one an event."""
    if not _streamed(reply):
        yield _json(reply)
        return
    for line in reply.splitlines():
        if line.startswith(b"data:"):
            yield _json(line.removeprefix(b"data:"))


def _streamed(reply: bytes | bytearray) -> bool:
    return reply.startswith(b"data:")


def _json(text: bytes | bytearray) -> dict[str, Any]:
    try:
        value = orjson.loads(text)
    except orjson.JSONDecodeError:  # another protocol's body, or a stream cut in mid-line
        return {}
    return value if isinstance(value, dict) else {}
