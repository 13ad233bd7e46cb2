"""Turns: the chat route in front of `TurnService.run`, and what it needs of HTTP.

A client that goes away takes its generation with it: the engine's request is aborted.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable
from dataclasses import replace
from typing import Any, TypeVar

from litestar import Request, Response, get, post
from litestar.datastructures import State
from litestar.response import Stream

from api.app import Worker, session_of_path
from api.callers import identify
from api.dialects import chat
from api.request import TurnReply, TurnRequest
from api.settings import Settings

AnyRequest = Request[object, object, State]
Result = TypeVar("Result")


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


@post(["/v1/chat/completions", "/sessions/{session:str}/v1/chat/completions"], status_code=200)
async def chat_completions(request: AnyRequest, state: State) -> Response[Any]:
    """OpenAI Chat Completions."""
    worker: Worker = state.worker
    body = await request.body()
    wanted = _with_setting(chat.decode(body), worker.settings)
    caller = identify(
        request.headers, worker.keys, url_session=url_session(request), conversation_id=wanted.conversation_id
    )
    with worker.admission.turn():
        reply = await _while_connected(request, worker.service.run(wanted, caller))
    headers = chat.headers(reply)
    if wanted.stream:
        return Stream(_stream(reply, wanted), media_type="text/event-stream", headers=headers)
    return Response(chat.encode(reply, wanted), media_type="application/json", headers=headers)


@get(["/v1/models", "/sessions/{session:str}/v1/models"])
async def models(request: AnyRequest, state: State) -> dict[str, Any]:
    """The engine's models."""
    worker: Worker = state.worker
    identify(request.headers, worker.keys)
    return {"object": "list", "data": await worker.engine.models()}


def url_session(request: AnyRequest) -> str:
    """The session id of the URL; "" when it names none."""
    token = request.path_params.get("session")
    return session_of_path(token) if token else ""


def _with_setting(request: TurnRequest, settings: Settings) -> TurnRequest:
    always = {"always": True, "never": False}.get(settings.reply_token_ids)
    return request if always is None else replace(request, token_ids=always)


async def _while_connected(request: AnyRequest, work: Awaitable[Result]) -> Result:
    """Run `work`, cancelled when the client closes its connection."""
    task = asyncio.ensure_future(work)
    gone = asyncio.ensure_future(_disconnected(request))
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            return task.result()
        raise ClientGone
    finally:
        task.cancel()
        gone.cancel()
        await asyncio.gather(task, gone, return_exceptions=True)


async def _disconnected(request: AnyRequest) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


async def _stream(reply: TurnReply, wanted: TurnRequest) -> AsyncIterator[bytes]:
    for event in chat.events(reply, wanted):
        yield event
