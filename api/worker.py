"""One worker process: build the collaborators from settings, serve until told to stop, finish what runs.

Loads the prepared model with `tokenizers` and `jinja2` only; transformers is the parent's affair.
"""

from __future__ import annotations

import os
import socket
from pathlib import Path
from types import FrameType

import uvicorn
from litestar import Litestar

from api import log
from api.app import SessionPaths, Worker, create_app
from api.engine import create_engine
from api.engine.base import Engine
from api.rendering import ModelRenderer
from api.settings import Settings
from splice.boundary import Splicer
from splice.parsers import ReplyFormats, choose_formats
from store.redis import RedisStore

PREPARED = "TOKENSPLICE_PREPARED_MODEL"  # set by the parent: the directory that workers load


def build_store(settings: Settings) -> RedisStore:
    """The Redis store; connects on first use."""
    return RedisStore.connect(
        settings.redis_url, default_ttl_s=settings.session_ttl_s, cache_bytes=settings.lineage_cache_bytes
    )


def build_engine(settings: Settings) -> Engine:
    """The engine client; connects on first use."""
    return create_engine(
        settings.engine, settings.engine_url, api_key=settings.engine_api_key, timeout_s=settings.engine_timeout_s
    )


def build_splicer(settings: Settings, prepared: Path) -> Splicer:
    """The prepared model behind the splicer."""
    return Splicer(ModelRenderer.load(prepared), control_tokens=settings.control_tokens_in_content)


def build_formats(settings: Settings, splicer: Splicer) -> ReplyFormats:
    """The reply formats: as set, else chosen from the template. Raises ValueError for an unknown name."""
    renderer = splicer.renderer
    return choose_formats(
        renderer.template,
        renderer.control_tokens,
        tool=settings.tool_parser or None,
        reasoning=settings.reasoning_parser or None,
    )


def build_app(settings: Settings, prepared: Path) -> Litestar:
    """A worker's application."""
    splicer = build_splicer(settings, prepared)
    return create_app(
        settings,
        store=build_store(settings),
        engine=build_engine(settings),
        splicer=splicer,
        formats=build_formats(settings, splicer),
    )


class _Server(uvicorn.Server):
    """Marks the worker as draining on the signal that ends it."""

    def __init__(self, config: uvicorn.Config, worker: Worker) -> None:
        super().__init__(config)
        self._worker = worker

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """SIGTERM or SIGINT: refuse what is new from now on; uvicorn waits for what runs."""
        self._worker.readiness.draining = True
        log.event("draining", signal=sig)
        super().handle_exit(sig, frame)


def serve_worker(sockets: list[socket.socket]) -> None:
    """Run one worker on the parent's listening sockets until it is told to stop."""
    settings = Settings.from_env(os.environ)
    log.configure(settings.log_level)
    app = build_app(settings, Path(os.environ[PREPARED]))
    config = uvicorn.Config(SessionPaths(app), **uvicorn_options(settings))
    _Server(config, app.state.worker).run(sockets=sockets)


def uvicorn_options(settings: Settings) -> dict[str, object]:
    """What parent and workers tell uvicorn."""
    return {
        "loop": "uvloop",
        "http": "httptools",
        "log_config": None,
        "access_log": False,
        "timeout_graceful_shutdown": int(settings.drain_s),
        "timeout_keep_alive": 75,  # longer than usual balancers keep theirs, so that they close first
        "backlog": 4096,
    }
