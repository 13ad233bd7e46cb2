"""The simulated engine as a web application: authorisation, and every route beside `/generate`.

    POST /sim/script    a list of directives (`sim/script.py`) for the next generations
    GET  /sim/record    {"entries": [...]}: every request with n > `since`, and what became of it
    POST /sim/reset     as if just started, save what is in flight

The `/sim` routes need no key: they are the test's side door, not the engine's.
"""

from __future__ import annotations

import hmac
import time
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

import msgspec
import orjson
from aiohttp import web

from api.demo.sim.bench import Bench
from api.demo.sim.config import SimConfig
from api.demo.sim.record import dump
from api.demo.sim.requests import Refusal, http_error, value_error
from api.demo.sim.script import Directive
from api.demo.sim.server import Engine

Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]

_BODY_LIMIT_BYTES = 1 << 30
_OPEN_PREFIXES = ("/health", "/metrics", "/ready", "/sim/")
_ADMIN_PATHS = frozenset(
    {"/abort_request", "/flush_cache", "/pause_generation", "/continue_generation", "/update_weight_version"}
)
_CACHE_FLUSHED = (
    "Cache flushed.\nPlease check backend logs for more details. "
    "(When there are running or waiting requests, the operation will not be performed.)\n"
)


def create_sim(config: SimConfig) -> web.Application:
    """The engine as an aiohttp application. Run it with `handler_cancellation=True`, or use `running`."""
    engine = Engine(config)
    routes = _Routes(engine)
    app = web.Application(client_max_size=_BODY_LIMIT_BYTES, middlewares=[_guard(config)])
    generate: Handler = Bench(config, engine.vocabulary).generate if config.bench else engine.generate
    app.router.add_post("/generate", generate)
    app.router.add_put("/generate", generate)
    for path, handler in routes.reading(config).items():
        app.router.add_get(path, handler)
    for path, handler in routes.acting().items():
        app.router.add_post(path, handler)
    app.router.add_get("/flush_cache", routes.flush_cache)
    return app


def _guard(config: SimConfig) -> Any:
    """Bearer keys as SGLang checks them, and refusals turned into responses."""

    @web.middleware
    async def guard(request: web.Request, handler: Handler) -> web.StreamResponse:
        if not _allowed(request, config):
            return _json({"error": "Unauthorized"}, 401)
        try:
            return await handler(request)
        except Refusal as refusal:
            if isinstance(refusal.body, str):
                return web.Response(status=refusal.status, text=refusal.body, content_type=refusal.content_type)
            return _json(refusal.body, refusal.status)

    return guard


def _allowed(request: web.Request, config: SimConfig) -> bool:
    if request.method == "OPTIONS" or request.path.startswith(_OPEN_PREFIXES):
        return True
    # Where an admin key is set, admin routes want that one and nothing else.
    admin = config.admin_api_key if request.path in _ADMIN_PATHS else None
    expected = admin or config.api_key
    if not expected:
        return True
    scheme, _, token = request.headers.get("authorization", "").partition(" ")
    return scheme.lower() == "bearer" and hmac.compare_digest(token.encode(), expected.encode())


def _json(body: object, status: int = 200) -> web.Response:
    return web.Response(body=orjson.dumps(body), status=status, content_type="application/json")


async def _object(request: web.Request) -> dict[str, Any]:
    """The request's JSON object. Raises Refusal."""
    try:
        body = orjson.loads(await request.read())
    except orjson.JSONDecodeError as error:
        raise http_error(400, f"JSON decode error: {error}", "Bad Request") from None
    if not isinstance(body, dict):
        raise http_error(400, "Input should be a valid dictionary", "Bad Request")
    return body


class _Routes:
    """Everything but `/generate`."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._config = engine.config
        self._batch = engine.batch
        self._vocabulary = engine.vocabulary

    def reading(self, config: SimConfig) -> Mapping[str, Handler]:
        routes: dict[str, Handler] = {
            "/health": self.health,
            "/health_generate": self.health,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/v1/models": self.models,
            "/sim/record": self.record,
        }
        if config.release.checks_contract:
            return routes | {"/ready": self.ready}
        return routes | {"/get_weight_version": self.weight_version, "/weight_version": self.weight_version}

    def acting(self) -> Mapping[str, Handler]:
        return {
            "/tokenize": self.tokenize,
            "/v1/tokenize": self.tokenize,
            "/detokenize": self.detokenize,
            "/v1/detokenize": self.detokenize,
            "/abort_request": self.abort_request,
            "/flush_cache": self.flush_cache,
            "/pause_generation": self.pause_generation,
            "/continue_generation": self.continue_generation,
            "/update_weight_version": self.update_weight_version,
            "/sim/script": self.add_to_script,
            "/sim/reset": self.reset,
        }

    async def health(self, _: web.Request) -> web.Response:
        return web.Response()

    async def ready(self, _: web.Request) -> web.Response:
        return web.Response(status=503 if self._batch.paused else 200)

    async def weight_version(self, _: web.Request) -> web.Response:
        return _json({"weight_version": self._batch.weight_version})

    async def server_info(self, _: web.Request) -> web.Response:
        config = self._config
        info = self._identity() | {
            "context_length": config.context_length,
            "max_total_num_tokens": config.max_total_tokens,
            "max_req_input_len": config.max_prompt_length,
            "allow_auto_truncate": config.allow_auto_truncate,
            "incremental_streaming_output": config.incremental_streaming,
            "stream_interval": config.stream_interval,
            "max_running_requests": config.max_running,
            "skip_tokenizer_init": False,
            "internal_states": [{"weight_version": self._batch.weight_version}],
            "version": config.version,
        }
        return _json(info | ({"frontend": "python"} if config.release.checks_contract else {}))

    async def model_info(self, _: web.Request) -> web.Response:
        info = self._identity() | {
            "is_generation": True,
            "preferred_sampling_params": None,
            "has_image_understanding": False,
            "has_audio_understanding": False,
            "model_type": "simulated",
            "architectures": ["SimulatedForCausalLM"],
        }
        return _json(info)

    def _identity(self) -> dict[str, Any]:
        return {
            "model_path": self._config.model,
            "served_model_name": self._config.model,
            "tokenizer_path": str(self._config.tokenizer),
            "weight_version": self._batch.weight_version,
        }

    async def models(self, _: web.Request) -> web.Response:
        card = {"id": self._config.model, "object": "model", "created": int(time.time()), "owned_by": "sglang"}
        card |= {"root": self._config.model, "parent": None, "max_model_len": self._config.context_length}
        return _json({"object": "list", "data": [card]})

    async def tokenize(self, request: web.Request) -> web.Response:
        body = await _object(request)
        prompt, add = body.get("prompt"), bool(body.get("add_special_tokens", True))
        if isinstance(prompt, str):
            ids = self._vocabulary.encode(prompt, add_special_tokens=add)
            counted: dict[str, Any] = {"tokens": ids, "count": len(ids)}
        elif isinstance(prompt, list):
            batch = [self._vocabulary.encode(each, add_special_tokens=add) for each in prompt]
            counted = {"tokens": batch, "count": [len(ids) for ids in batch]}
        else:
            raise http_error(400, "the simulated engine tokenizes a prompt, not messages", "BadRequestError")
        return _json(counted | {"max_model_len": self._config.context_length})

    async def detokenize(self, request: web.Request) -> web.Response:
        body = await _object(request)
        tokens, skip = body.get("tokens"), bool(body.get("skip_special_tokens", True))
        if not isinstance(tokens, list):
            raise http_error(400, "tokens: Input should be a valid list", "Bad Request")
        if tokens and isinstance(tokens[0], list):
            return _json({"text": [self._vocabulary.decode(ids, skip_special_tokens=skip) for ids in tokens]})
        return _json({"text": self._vocabulary.decode(tokens, skip_special_tokens=skip)})

    async def abort_request(self, request: web.Request) -> web.Response:
        body = await _object(request)
        self._batch.abort(body.get("rid") or "", everything=bool(body.get("abort_all")))
        return web.Response()

    async def flush_cache(self, _: web.Request) -> web.Response:
        if self._batch.count("queued", "running"):
            return web.Response(status=400, text="Flush cache failed.\n")
        return web.Response(text=_CACHE_FLUSHED)

    async def pause_generation(self, request: web.Request) -> web.Response:
        mode = (await _object(request)).get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise value_error(f"Invalid mode: {mode}")
        await self._batch.pause(mode)
        return _json({"message": "Generation paused successfully.", "status": "ok"})

    async def continue_generation(self, request: web.Request) -> web.Response:
        await _object(request)
        self._batch.resume()
        return _json({"message": "Generation continued successfully.", "status": "ok"})

    async def update_weight_version(self, request: web.Request) -> web.Response:
        body = await _object(request)
        version = body.get("new_version")
        if not isinstance(version, str):
            raise http_error(400, "new_version: Input should be a valid string", "Bad Request")
        if body.get("abort_all_requests", True):
            self._batch.abort("", everything=True)
        self._batch.set_weight_version(version)
        message = f"Weight version updated to {version}"
        return _json({"success": True, "message": message, "new_version": version})

    async def add_to_script(self, request: web.Request) -> web.Response:
        try:
            directives = msgspec.json.decode(await request.read(), type=list[Directive])
        except msgspec.MsgspecError as error:
            raise value_error(str(error)) from None
        self._engine.script.extend(directives)
        return _json({"waiting": len(self._engine.script)})

    async def record(self, request: web.Request) -> web.Response:
        since = int(request.query.get("since", "0"))
        entries = [entry for entry in self._engine.record.entries if entry.n > since]
        return web.Response(body=dump({"entries": entries}), content_type="application/json")

    async def reset(self, _: web.Request) -> web.Response:
        self._engine.reset()
        return _json({})
