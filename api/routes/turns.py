"""Turns: the chat route in front of `TurnService.run`, and what it needs of HTTP.

A client that goes away takes its generation with it, unless others wait for the same turn.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

from litestar import Request, Response, get, post
from litestar.datastructures import State

from api.app import Worker, session_of_path
from api.callers import identify, in_conversation
from api.delivery import Delivery, disconnected
from api.dialects import chat
from api.request import BadRequest, Caller, TurnReply, TurnRequest
from api.running import ClientGone
from api.settings import Settings

AnyRequest = Request[object, object, State]
_BODY_S = 120.0
_NOBODY = 499  # as access logs call it: the client went first


@post(["/v1/chat/completions", "/sessions/{session:str}/v1/chat/completions"], status_code=200)
async def chat_completions(request: AnyRequest, state: State) -> Response[Any]:
    """OpenAI Chat Completions."""
    worker: Worker = state.worker
    caller = identify(request.headers, worker.keys, url_session=url_session(request))

    def mark(reply: TurnReply, *, delivered: bool) -> None:
        worker.store.mark(reply.key, reply.turn.turn_id, delivered=delivered)

    with worker.admission.turn():
        wanted, caller = await _read(request, worker, caller)
        try:
            reply = await worker.running.serve(
                worker.service.run(wanted, caller),
                gone=disconnected(request.receive),
                unread=lambda reply: mark(reply, delivered=False),
            )
        except ClientGone:
            return Response(b"", status_code=_NOBODY)
    return Delivery(
        chat.events(reply, wanted) if wanted.stream else [chat.encode(reply, wanted)],
        lambda delivered: mark(reply, delivered=delivered),
        headers=chat.headers(reply),
        media_type="text/event-stream" if wanted.stream else "application/json",
    )


async def _read(request: AnyRequest, worker: Worker, caller: Caller) -> tuple[TurnRequest, Caller]:
    """The request's body: read only now that the caller is known and has a place."""
    try:
        async with asyncio.timeout(_BODY_S):
            body = await request.body()
    except TimeoutError:
        raise BadRequest({"body": f"did not arrive within {_BODY_S:.0f} s"}) from None
    session = (caller.tenant, caller.session_id) if caller.session_id else None
    wanted = _with_setting(chat.decode(body, worker.service.settled, worker.transcripts, session), worker.settings)
    return wanted, in_conversation(caller, wanted.conversation_id)


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
