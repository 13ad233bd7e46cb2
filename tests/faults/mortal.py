"""A worker that kills itself at a named point of a turn's path: `python -m tests.faults.mortal --arm FILE ...`.

The product has no hook for this: the store, the engine and the connection are wrapped from outside. The worker dies at
the point that FILE names, once, and the file goes with it.
"""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any

import click
import uvicorn
from litestar.types import ASGIApp, Receive, Scope, Send

from api.app import SessionPaths, create_app
from api.doctor import prepared
from api.settings import Settings
from api.worker import build_engine, build_grammar, build_splicer, build_store
from store import liveness
from store.views import FindQuery, Found, Generate

POINTS = ("after_find", "in_generate", "after_engine", "after_commit", "in_mid_reply")
ALIVE_S = 1.5  # how soon these workers are taken for dead


class Death:
    """Waits at the points."""

    def __init__(self, arm: Path) -> None:
        self._arm = arm

    def armed(self, point: str) -> bool:
        return self._arm.exists() and self._arm.read_text() == point

    def at(self, point: str) -> None:
        if self.armed(point):
            self._arm.unlink()
            os.kill(os.getpid(), signal.SIGKILL)


def wrap_store(store: Any, death: Death) -> None:
    find, commit = store.find, store.commit

    async def dying_find(query: FindQuery) -> Found:
        found: Found = await find(query)
        if isinstance(found.verdict, Generate):
            death.at("after_find")
        return found

    async def dying_commit(*args: Any, **options: Any) -> None:
        await commit(*args, **options)
        death.at("after_commit")

    store.find, store.commit = dying_find, dying_commit


def wrap_engine(engine: Any, death: Death) -> None:
    generate = engine.generate

    async def dying_generate(*args: Any, **options: Any) -> Any:
        task = asyncio.ensure_future(generate(*args, **options))
        if death.armed("in_generate"):
            await asyncio.sleep(0.5)
            death.at("in_generate")
        completion = await task
        death.at("after_engine")
        return completion

    engine.generate = dying_generate


def wrap_app(app: ASGIApp, death: Death) -> ASGIApp:
    async def dying(scope: Scope, receive: Receive, send: Send) -> None:
        async def dying_send(message: Any) -> None:
            await send(message)
            if message["type"] == "http.response.body" and message.get("more_body"):
                death.at("in_mid_reply")

        await app(scope, receive, dying_send)

    return dying


@click.command()
@click.option("--port", type=int, required=True)
@click.option("--redis-url", required=True)
@click.option("--engine-url", required=True)
@click.option("--tokenizer", required=True)
@click.option("--arm", type=click.Path(path_type=Path), required=True)
def main(port: int, redis_url: str, engine_url: str, tokenizer: str, arm: Path) -> None:
    """Serve until killed."""
    liveness.TTL_S, liveness.REFRESH_S = ALIVE_S, ALIVE_S / 5
    settings = Settings.from_env({}, redis_url=redis_url, engine_url=engine_url, tokenizer=tokenizer)
    death, splicer = Death(arm), build_splicer(settings, prepared(settings))
    store, engine = build_store(settings), build_engine(settings)
    wrap_store(store, death)
    wrap_engine(engine, death)
    app = create_app(settings, store=store, engine=engine, splicer=splicer, grammar=build_grammar(settings, splicer))
    uvicorn.run(wrap_app(SessionPaths(app), death), host="127.0.0.1", port=port, log_config=None, access_log=False)


if __name__ == "__main__":
    main()
