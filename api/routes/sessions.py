"""Sessions: open, list, look at, finish, delete, and take samples from them."""

from __future__ import annotations

import asyncio
from dataclasses import fields
from typing import Any, TypeVar
from urllib.parse import quote

import msgspec
import orjson
from litestar import Request, Response, delete, get, post
from litestar.datastructures import State

from api.app import Worker, session_of_path
from api.callers import LONGEST_ID
from api.errors import Forbidden, SessionExists
from api.ids import new_session_id
from api.plain import check_plain
from api.request import BadRequest
from api.schemas import Finish, OpenSession, Reward, session_json, trajectory_json, turn_json
from splice.samples import assemble, received
from store.errors import SessionClosed, SessionMissing
from store.views import SessionKey, SessionOpening

AnyRequest = Request[object, object, State]
Body = TypeVar("Body")

_LARGEST_PAGE = 1000


@post("/sessions", status_code=201)
async def open_session(request: AnyRequest, state: State) -> Response[dict[str, Any]]:
    """Make a session, or find it again: 201 with where to send its turns."""
    worker: Worker = state.worker
    tenant = _tenant(request, worker)
    body = await _body(request, OpenSession)
    session_id = body.session_id or new_session_id()
    if len(session_id) > LONGEST_ID:
        raise BadRequest({"session_id": f"is longer than {LONGEST_ID} characters"})
    _check_pinned(body.sampling_params or {}, worker)
    opening = _opening(body)
    view, made = await worker.store.open_session(SessionKey(tenant, session_id), opening)
    if not made:
        _check_same(opening, view.opening)
    reply = {
        "session_id": session_id,
        "base_url": f"{str(request.base_url).rstrip('/')}/sessions/{quote(session_id, safe='')}/v1",
        "api_key": worker.keys.session_key(tenant, session_id),
    }
    return Response(reply, status_code=201)


@get("/sessions")
async def list_sessions(request: AnyRequest, state: State) -> dict[str, Any]:
    """A page of the tenant's sessions, most recently used first."""
    worker: Worker = state.worker
    try:
        page = await worker.store.sessions(
            _tenant(request, worker),
            run_id=request.query_params.get("run_id", ""),
            limit=_limit(request.query_params.get("limit", "100")),
            cursor=request.query_params.get("cursor", ""),
        )
    except ValueError:
        raise BadRequest({"cursor": "is none that this listing gave"}) from None
    shown = [session_json(view, durability=worker.settings.durability) for view in page.sessions]
    return {"sessions": shown, "cursor": page.cursor or None}


@get("/sessions/{session:str}")
async def show_session(request: AnyRequest, state: State) -> dict[str, Any]:
    """A session's summary."""
    worker: Worker = state.worker
    view = await worker.store.session(_key(request, worker))
    if view.state == "deleted":
        raise SessionClosed(view.key.session_id)
    return session_json(view, durability=worker.settings.durability)


@delete("/sessions/{session:str}", status_code=204)
async def delete_session(request: AnyRequest, state: State) -> None:
    """Delete a session; turns on it get 410 from now on, and its running generations are aborted."""
    worker: Worker = state.worker
    await worker.store.delete(_key(request, worker))


@get("/sessions/{session:str}/turns")
async def list_turns(request: AnyRequest, state: State) -> Response[bytes]:
    """Every turn in commit order."""
    worker: Worker = state.worker
    forest = await worker.store.turns(_key(request, worker))
    delivered = forest.delivered
    return await _json(lambda: {"turns": [turn_json(turn, delivered=delivered[turn.turn_id]) for turn in forest.turns]})


@get("/sessions/{session:str}/turns/{turn:str}")
async def show_turn(request: AnyRequest, state: State) -> Response[bytes]:
    """One turn."""
    worker: Worker = state.worker
    key, turn_id = _key(request, worker), request.path_params["turn"]
    turn = await worker.store.turn(key, turn_id)
    delivered = await worker.store.delivery(key, turn_id)
    return await _json(lambda: turn_json(turn, delivered=delivered))


@get("/sessions/{session:str}/trajectory")
async def trajectory(request: AnyRequest, state: State) -> Response[bytes]:
    """The session's samples, as JSON or (Accept: application/msgpack) MessagePack."""
    worker: Worker = state.worker
    forest = await worker.store.turns(_key(request, worker))

    def build() -> dict[str, Any]:
        return trajectory_json(forest.session, list(assemble(received(forest.turns, forest.delivered))))

    if "application/msgpack" in request.headers.get("accept", ""):
        packed = await asyncio.to_thread(lambda: msgspec.msgpack.encode(_plain(build())))
        return Response(packed, media_type="application/msgpack")
    return await _json(build)


@post("/sessions/{session:str}/reward", status_code=200)
async def reward(request: AnyRequest, state: State) -> dict[str, Any]:
    """Give a session, or one turn of it, its reward."""
    worker: Worker = state.worker
    body = await _body(request, Reward)
    key = _key(request, worker)
    await worker.store.set_reward(key, body.reward, turn_id=body.turn_id or "", source=body.source or "")
    return {"session_id": key.session_id, "reward": body.reward}


@post("/sessions/{session:str}/finish", status_code=200)
async def finish(request: AnyRequest, state: State) -> dict[str, Any]:
    """Seal a session: later turns get 409."""
    worker: Worker = state.worker
    body = await _body(request, Finish)
    key = _key(request, worker)
    view = await worker.store.finish(key, status=body.status or "", reward=body.reward)
    return session_json(view, durability=worker.settings.durability)


def _tenant(request: AnyRequest, worker: Worker) -> str:
    """The caller's tenant; a session key speaks for one session, not for a tenant."""
    identity = worker.keys.identify_request(request.headers)
    if identity.session_id:
        raise Forbidden("a session key opens its own session only")
    return identity.tenant


def _key(request: AnyRequest, worker: Worker) -> SessionKey:
    """The session of the URL, within the caller's tenant; a session key opens its own session only."""
    named = session_of_path(request.path_params["session"])
    identity = worker.keys.identify_request(request.headers)
    if identity.session_id and identity.session_id != named:
        raise Forbidden(f"this key is session {identity.session_id!r} and opens no other")
    if not named:
        raise SessionMissing(named)
    return SessionKey(identity.tenant, named)


def _opening(body: OpenSession) -> SessionOpening:
    return SessionOpening(
        run_id=body.run_id or "",
        group_id=body.group_id or "",
        group_size=body.group_size or 0,
        metadata=body.metadata or {},
        sampling_params=body.sampling_params or {},
        ttl_s=body.ttl_s or 0,
        on_rendering_change=body.on_rendering_change or "",
        on_overflow=body.on_overflow or "",
        thinking=body.thinking or "",
        parent_session_id=body.parent_session_id or "",
    )


def _check_pinned(sampling: dict[str, Any], worker: Worker) -> None:
    """Refuse now, by name, what every turn of the session would be refused for."""
    most = sampling.get("max_tokens")
    if most is not None and (isinstance(most, bool) or not isinstance(most, int) or most < 0):
        raise BadRequest({"sampling_params.max_tokens": "must be a whole number of at least 0"})
    worker.engine.sampling({name: value for name, value in sampling.items() if name != "max_tokens"})


def _check_same(wanted: SessionOpening, held: SessionOpening) -> None:
    """Opening a session again is harmless as long as it asks for nothing else."""
    names = [f.name for f in fields(SessionOpening) if f.name != "unnamed"]
    other = [name for name in names if getattr(wanted, name) and getattr(wanted, name) != getattr(held, name)]
    if other:
        raise SessionExists(f"the session was opened before with another {', '.join(other)}; what was set then stands")


async def _body(request: AnyRequest, kind: type[Body]) -> Body:
    raw = await request.body()
    try:
        body = msgspec.json.decode(raw or b"{}", type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        raise BadRequest({"body": str(error)}) from None
    except RecursionError:
        raise BadRequest({"body": "is nested too deeply"}) from None
    for name in ("metadata", "sampling_params"):
        check_plain(getattr(body, name, None), name)
    return body


def _limit(text: str) -> int:
    if not text.isdecimal() or len(text) > 4 or not 1 <= int(text) <= _LARGEST_PAGE:
        raise BadRequest({"limit": f"must be between 1 and {_LARGEST_PAGE}"})
    return int(text)


async def _json(build: Any) -> Response[bytes]:
    """Build and encode off the event loop: a long session is megabytes."""
    body = await asyncio.to_thread(lambda: orjson.dumps(build(), option=orjson.OPT_SERIALIZE_NUMPY))
    return Response(body, media_type="application/json")


def _plain(value: Any) -> Any:
    """Arrays as lists, for MessagePack."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items()}
    if isinstance(value, list):
        return [_plain(v) for v in value]
    return value.tolist() if hasattr(value, "tolist") else value
