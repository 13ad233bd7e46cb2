"""The Litestar application: collaborators come in, routes go out. Nothing is read on import."""

from __future__ import annotations

import asyncio
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from urllib.parse import unquote, unquote_to_bytes

from litestar import Litestar, Request, Response
from litestar.config.app import AppConfig
from litestar.datastructures import State
from litestar.exceptions import HTTPException
from litestar.types import ASGIApp, Receive, Scope, Send

from api import log
from api.admission import Admission
from api.dialects.chat import Transcript
from api.engine.base import Engine
from api.errors import Problem, openai_body, problem_of
from api.facts import TurnDone
from api.keys import KeyRing
from api.metrics import Metrics
from api.readiness import Readiness
from api.request import BadRequest
from api.running import RunningTurns
from api.service import Policy, TurnService
from api.settings import Settings
from api.transcripts import Transcripts
from splice.boundary import Splicer
from splice.parsers import ReplyGrammar
from store.redis import RedisStore

_FIRST_CHECK_S = 5.0


@dataclass(frozen=True, slots=True)
class Worker:
    """What a worker's handlers work with; `app.state.worker`."""

    settings: Settings
    store: RedisStore
    engine: Engine
    service: TurnService
    running: RunningTurns
    keys: KeyRing
    metrics: Metrics
    readiness: Readiness
    admission: Admission
    transcripts: Transcripts[Transcript]


def create_app(
    settings: Settings, *, store: RedisStore, engine: Engine, splicer: Splicer, grammar: ReplyGrammar
) -> Litestar:
    """Wire a worker. The app owns `store` and `engine` from here on and closes them at shutdown."""
    from api.routes import HANDLERS

    metrics = Metrics()
    readiness = Readiness(store, engine, splicer, settings)
    admission = Admission(settings.max_in_flight, readiness, metrics)
    running = RunningTurns(store)

    def observe(fact: TurnDone) -> None:
        metrics.turn(fact)
        log.turn(fact)

    service = TurnService(
        store,
        engine,
        splicer,
        grammar,
        window=readiness.window,
        policy=Policy(
            settings.on_rendering_change, settings.on_overflow, settings.join_timeout_s or settings.engine_timeout_s
        ),
        observe=observe,
        running=running,
    )
    worker = Worker(
        settings,
        store,
        engine,
        service,
        running,
        KeyRing(settings.api_keys),
        metrics,
        readiness,
        admission,
        Transcripts(settings.transcript_cache_bytes),
    )

    @asynccontextmanager
    async def lifespan(_: Litestar) -> AsyncIterator[None]:
        # Connections wait in the backlog meanwhile: the first request is not answered before anything was checked.
        with suppress(TimeoutError):
            await asyncio.wait_for(readiness.check(), _FIRST_CHECK_S)
        settling = asyncio.create_task(readiness.watch())
        try:
            yield
        finally:
            settling.cancel()
            await asyncio.gather(settling, return_exceptions=True)
            await running.close()
            await engine.close()
            await store.close()

    return Litestar(
        HANDLERS,
        lifespan=[lifespan],
        state=State({"worker": worker}),
        exception_handlers={Exception: _answer_error},
        request_max_body_size=settings.max_body_bytes,
        openapi_config=None,
        on_app_init=[_quiet],
    )


def _quiet(config: AppConfig) -> AppConfig:
    config.logging_config = None  # api.log is the one log
    return config


def _answer_error(request: Request[object, object, State], error: Exception) -> Response[object]:
    problem = problem_of(error) or _http_problem(error)
    if problem is None:
        log.event("unplanned error", level=40, exc=error, path=request.url.path)
        problem = Problem(500, "internal_error", "an error that nobody planned; the worker's log has it")
    else:
        log.event("refused", level=30, status=problem.status, code=problem.code, why=str(error), path=request.url.path)
    worker: Worker = request.app.state.worker
    worker.metrics.errors.labels(problem.code).inc()
    headers = {} if problem.retry_after_s is None else {"retry-after": str(problem.retry_after_s)}
    return Response(openai_body(problem), status_code=problem.status, headers=headers, media_type="application/json")


_HTTP_CODES = {404: "not_found", 405: "not_found", 413: "body_too_large"}


def _http_problem(error: Exception) -> Problem | None:
    """Litestar's own refusals: unknown route, wrong method, body too large, unreadable body."""
    if not isinstance(error, HTTPException) or error.status_code >= 500:
        return None
    return Problem(error.status_code, _HTTP_CODES.get(error.status_code, "invalid_request"), error.detail)


class SessionPaths:
    """ASGI wrapper: keeps a session id of the URL whole, whatever characters it holds.

    Servers decode `%2F` before routing, which would cut `a/b` in two. The id's own segment is taken from the
    undecoded path and travels as base64 to the handlers, which call `session_of_path`.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Rewrite `/sessions/<id>[/...]`."""
        _, *segments = bytes(scope.get("raw_path", b"")).split(b"?", 1)[0].split(b"/")
        if len(segments) > 1 and unquote_to_bytes(segments[0]) == b"sessions" and segments[1]:
            token = urlsafe_b64encode(unquote_to_bytes(segments[1])).decode()
            rest = "".join(f"/{unquote(segment.decode('latin-1'))}" for segment in segments[2:])
            scope["path"] = f"/sessions/{token}{rest}"
        await self._app(scope, receive, send)


def session_of_path(token: str) -> str:
    """The session id that `SessionPaths` put into the path. Raises BadRequest."""
    try:
        return urlsafe_b64decode(token).decode()
    except ValueError:
        raise BadRequest({"session_id": "is no UTF-8 text, percent-encoded"}) from None
