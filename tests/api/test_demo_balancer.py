"""The demo's balancer: plain round robin, nothing repeated, nothing swallowed."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import aiohttp
import pytest
from aiohttp import web

from api.demo.balancer import Balancer

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@asynccontextmanager
async def served(handler: Handler) -> AsyncIterator[str]:
    app = web.Application(client_max_size=1 << 26)
    app.router.add_route("*", "/{path:.*}", handler)
    runner = web.AppRunner(app, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


def named(name: str) -> Handler:
    async def answer(request: web.Request) -> web.Response:
        body = await request.read()
        return web.json_response(
            {"replica": name, "path": request.raw_path, "body": body.decode(), "header": request.headers.get("x-mark")},
            headers={"x-tokensplice-turn": "t1"},
            status=201,
        )

    return answer


def refused_url() -> str:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{held.getsockname()[1]}"


async def dies_with_the_request(request: web.Request) -> web.StreamResponse:
    await request.read()
    assert request.transport is not None
    request.transport.abort()
    return web.Response()


async def test_replicas_take_turns_in_their_order() -> None:
    async with (
        served(named("a")) as a,
        served(named("b")) as b,
        Balancer((a, b)) as balancer,
        aiohttp.ClientSession() as client,
    ):
        seen = []
        for _ in range(4):
            async with client.get(balancer.url + "/x") as answer:
                seen.append((await answer.json())["replica"])
    assert seen == ["a", "b", "a", "b"]


async def test_method_path_headers_body_and_status_pass_unchanged() -> None:
    async with (
        served(named("a")) as a,
        Balancer((a,)) as balancer,
        aiohttp.ClientSession() as client,
        client.post(f"{balancer.url}/sessions/a%2Fb/v1?x=1", data="body", headers={"x-mark": "m"}) as answer,
    ):
        assert answer.status == 201
        assert answer.headers["x-tokensplice-turn"] == "t1"
        assert await answer.json() == {"replica": "a", "path": "/sessions/a%2Fb/v1?x=1", "body": "body", "header": "m"}


async def test_a_replica_that_refuses_is_passed_over_with_the_body_intact() -> None:
    body = "x" * 300_000
    async with (
        served(named("a")) as a,
        Balancer((refused_url(), a)) as balancer,
        aiohttp.ClientSession() as client,
    ):
        for _ in range(2):
            async with client.post(balancer.url + "/", data=body) as answer:
                assert (await answer.json())["body"] == body


async def test_no_replica_left_is_a_503() -> None:
    async with (
        Balancer((refused_url(), refused_url())) as balancer,
        aiohttp.ClientSession() as client,
        client.post(balancer.url + "/", data="x") as answer,
    ):
        assert answer.status == 503


async def test_a_replica_dying_with_the_request_is_a_502_and_is_not_repeated() -> None:
    async with (
        served(dies_with_the_request) as dying,
        served(named("a")) as a,
        Balancer((dying, a)) as balancer,
        aiohttp.ClientSession() as client,
        client.post(balancer.url + "/", data="x") as answer,
    ):
        assert answer.status == 502
        assert balancer.in_flight == {dying: 0, a: 0}


async def test_a_replica_dying_in_its_reply_cuts_the_clients_body() -> None:
    async def half(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        response.content_length = 100
        await response.prepare(request)
        await response.write(b"half")
        assert request.transport is not None
        request.transport.close()
        return response

    async with served(half) as dying, Balancer((dying,)) as balancer, aiohttp.ClientSession() as client:
        with pytest.raises(aiohttp.ClientPayloadError):
            async with client.get(balancer.url + "/") as answer:
                await answer.read()


async def test_streamed_replies_arrive_chunk_by_chunk() -> None:
    go_on = asyncio.Event()

    async def streaming(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: 1\n\n")
        await asyncio.wait_for(go_on.wait(), 5)
        await response.write(b"data: 2\n\n")
        return response

    async with (
        served(streaming) as replica,
        Balancer((replica,)) as balancer,
        aiohttp.ClientSession() as client,
        client.get(balancer.url + "/") as answer,
    ):
        assert await answer.content.readany() == b"data: 1\n\n"
        assert balancer.in_flight[replica] == 1
        go_on.set()
        assert await answer.content.read() == b"data: 2\n\n"


async def test_a_client_that_hangs_up_is_seen_by_the_replica() -> None:
    entered, left = asyncio.Event(), asyncio.Event()

    async def slow(_: web.Request) -> web.Response:
        entered.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            left.set()
            raise
        return web.Response()

    async with served(slow) as replica, Balancer((replica,)) as balancer, aiohttp.ClientSession() as client:
        waiting = asyncio.create_task(client.post(balancer.url + "/", data="x"))
        await asyncio.wait_for(entered.wait(), 5)
        waiting.cancel()
        await asyncio.wait_for(left.wait(), 5)
