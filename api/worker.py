"""One worker process: build the collaborators from settings, serve until told to stop, finish what runs.

Loads the prepared model with `tokenizers` and `jinja2` only; transformers is the parent's affair.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from types import FrameType

from litestar import Litestar
from litestar.types import ASGIApp

import migrations
from api import log
from api.app import SessionPaths, Worker, create_app
from api.engine.base import Engine
from api.engine.create import create_engine
from api.rendering import ModelRenderer
from api.settings import Settings
from splice.boundary import Splicer
from splice.parsers import ReplyGrammar, choose_formats
from store.connection import open_client
from store.durability import parse_durability
from store.redis import RedisStore
from store.replication import Replication

# Set by the parent: the directory that workers load, and whose children they are.
PREPARED = "TOKENSPLICE_PREPARED_MODEL"
PARENT = "TOKENSPLICE_PARENT"
_PARENT_POLL_S = 1.0


def build_store(settings: Settings) -> RedisStore:
    """The Redis store; connects on first use, and upgrades old records as it reads them."""
    return RedisStore(
        open_client(settings.redis_url),
        default_ttl_s=settings.session_ttl_s,
        cache_bytes=settings.lineage_cache_bytes,
        upgrade=migrations.upgrade,
        replication=_replication(settings),
    )


def _replication(settings: Settings) -> Replication | None:
    replicas = parse_durability(settings.durability).replicas
    return Replication(replicas, settings.replication_timeout_s) if replicas else None


def build_engine(settings: Settings) -> Engine:
    """The engine client; connects on first use."""
    return create_engine(
        settings.engine, settings.engine_url, api_key=settings.engine_api_key, timeout_s=settings.engine_timeout_s
    )


def build_splicer(settings: Settings, prepared: Path) -> Splicer:
    """The prepared model behind the splicer."""
    as_text = settings.control_tokens_in_content == "text"
    return Splicer(ModelRenderer.load(prepared), control_tokens="text" if as_text else "engine")


def build_grammar(settings: Settings, splicer: Splicer) -> ReplyGrammar:
    """How replies are read: as set, else chosen from the template. Raises ValueError for an unknown name."""
    renderer = splicer.renderer
    return ReplyGrammar(
        choose_formats(renderer.template, tools=settings.tool_parser, reasoning=settings.reasoning_parser),
        control_tokens=renderer.control_tokens,
        decode=renderer.decode,
        stop_ids=renderer.eos_ids,
    )


def build_app(settings: Settings, prepared: Path) -> Litestar:
    """A worker's application."""
    splicer = build_splicer(settings, prepared)
    return create_app(
        settings,
        store=build_store(settings),
        engine=build_engine(settings),
        splicer=splicer,
        grammar=build_grammar(settings, splicer),
    )


def app() -> ASGIApp:
    """The factory that uvicorn calls in each worker process, told by the environment."""
    settings = Settings.from_env(os.environ)
    log.configure(settings.log_level)
    application = build_app(settings, Path(os.environ[PREPARED]))
    worker: Worker = application.state.worker
    application.on_startup += [lambda: _drain_on_sigterm(worker), _follow_parent]
    return SessionPaths(application)


def _drain_on_sigterm(worker: Worker) -> None:
    """Refuse what is new from the signal on; uvicorn, whose handler comes next, waits for what runs."""
    handler = signal.getsignal(signal.SIGTERM)

    def drain(number: int, frame: FrameType | None) -> None:
        worker.readiness.draining = True
        if callable(handler):
            handler(number, frame)

    signal.signal(signal.SIGTERM, drain)


async def _follow_parent() -> None:
    """A worker whose parent is gone stops as if told to: nobody would ever stop it, and it holds the port."""
    parent = int(os.environ.get(PARENT, "0"))
    if parent not in {0, os.getpid()}:
        _background.add(asyncio.create_task(_until_orphaned(parent)))


_background: set[asyncio.Task[None]] = set()  # asyncio keeps no strong reference of its own


async def _until_orphaned(parent: int) -> None:
    while os.getppid() == parent:  # noqa: ASYNC110 - nobody tells an orphan
        await asyncio.sleep(_PARENT_POLL_S)
    os.kill(os.getpid(), signal.SIGTERM)
