"""`tokensplice serve`: the parent. Prepares the model once, checks what must hold, then supervises workers."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from ipaddress import ip_address
from pathlib import Path

import uvicorn
from uvicorn.supervisors import Multiprocess

from api import log
from api.doctor import examine, prepared
from api.migrate import migrate
from api.settings import PREFIX, BadSettings, Settings
from api.worker import (
    PARENT,
    PREPARED,
)
from store.embedded import EmbeddedRedis

_BACKLOG = 4096


class CannotStart(Exception):
    """A fault that waiting will not heal; `problems` names each, with the fix."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def serve(
    flags: Mapping[str, str | None], *, host: str, port: int, workers: int, embedded_redis: Path | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. Raises BadSettings, CannotStart."""
    # uvicorn raises the signal again once it has drained: what we own is to be stopped then, not left behind.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with ExitStack() as owned:
        if embedded_redis is not None:
            flags = {**flags, "redis_url": _own_redis(owned, embedded_redis, flags)}
        settings = Settings.from_env(os.environ, **flags)
        log.configure(settings.log_level)
        if not settings.tokenizer:
            raise BadSettings([f"{PREFIX}TOKENIZER: is required: a directory or hub id of the model's tokenizer"])
        _refuse_open_doors(settings, host)
        listener = owned.enter_context(_listening(host, port))
        model = prepared(settings)
        _preflight(settings)
        owned.enter_context(_environment(flags, model, workers))
        _supervise(settings, listener, workers)


def _own_redis(owned: ExitStack, directory: Path, flags: Mapping[str, str | None]) -> str:
    if flags.get("redis_url"):
        raise BadSettings(["--redis-url and --embedded-redis name two servers: give one of them"])
    server = owned.enter_context(EmbeddedRedis(directory))
    asyncio.run(migrate(server.url))
    return server.url


def _listening(host: str, port: int) -> socket.socket:
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except (OSError, OverflowError) as error:
        raise CannotStart([f"cannot listen on {host} port {port} ({error}); choose another with --port"]) from None


def _supervise(settings: Settings, listener: socket.socket, workers: int) -> None:
    config = uvicorn.Config(
        "api.worker:app",
        factory=True,
        workers=workers,
        loop="uvloop",
        http="httptools",
        log_config=None,
        access_log=False,
        timeout_graceful_shutdown=int(settings.drain_s),
        timeout_keep_alive=75,  # longer than usual balancers keep theirs, so that they close first
        backlog=_BACKLOG,
    )
    listener.set_inheritable(True)
    address, port = listener.getsockname()[:2]
    log.event("serving", url=f"http://{address}:{port}", redis=_without_password(settings.redis_url), workers=workers)
    if workers == 1:
        uvicorn.Server(config).run(sockets=[listener])
    else:
        Multiprocess(config, sockets=[listener]).run()


def _without_password(url: str) -> str:
    scheme, _, rest = url.partition("://")
    return f"{scheme}://{rest.rpartition('@')[2]}"


def _refuse_open_doors(settings: Settings, host: str) -> None:
    """Without keys anybody who reaches the port is served, so it must be loopback."""
    if settings.api_keys or host == "localhost":
        return
    try:
        loopback = ip_address(host).is_loopback
    except ValueError:
        loopback = ip_address(socket.gethostbyname(host)).is_loopback
    if not loopback:
        raise CannotStart([f"--host {host} is reachable from outside: set {PREFIX}API_KEYS, or bind 127.0.0.1"])


def _preflight(settings: Settings) -> None:
    """The checks that stop a start; an engine or Redis that is only away does not."""
    checks = asyncio.run(examine(settings))
    for name, check in checks.items():
        log.event("check", name=name, ok=check.ok, detail=check.detail)
    fatal = [f"{name}: {check.detail}" for name, check in checks.items() if check.fatal]
    if fatal:
        raise CannotStart(fatal)


@contextmanager
def _environment(flags: Mapping[str, str | None], model: Path, workers: int) -> Iterator[None]:
    """Workers are told by the environment what the parent was told by flags."""
    told = {PREFIX + name.upper(): value for name, value in flags.items() if value is not None}
    told |= {PREPARED: str(model), PARENT: str(os.getpid())}
    scratch = tempfile.mkdtemp(prefix="tokensplice-metrics-") if workers > 1 else None
    if scratch:
        told["PROMETHEUS_MULTIPROC_DIR"] = scratch
    before = {name: os.environ.get(name) for name in told}
    os.environ.update(told)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        if scratch:
            shutil.rmtree(scratch, ignore_errors=True)
