"""What is measured, each a process of its own: Redis, the zero-latency engine, one worker, the pass-through floor."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from api.bench.scale import MOST_CONTEXT, SAMPLED_TOKENS
from api.demo.processes import Child, free_port, module
from store.embedded import EmbeddedRedis

_READY_S = 120.0


@dataclass(frozen=True, slots=True)
class Deployment:
    """Everything that runs. bodies: where the floor finds what it sends the engine."""

    client: aiohttp.ClientSession
    redis: EmbeddedRedis
    engine: Child
    worker: Child
    floor: Child
    bodies: Path


@asynccontextmanager
async def deployed(model: Path, scratch: Path) -> AsyncIterator[Deployment]:
    """Start everything; stop everything on the way out, however that comes about."""
    bodies = scratch / "bodies"
    bodies.mkdir()
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        redis = EmbeddedRedis(scratch / "redis")
        stack.push_async_callback(asyncio.to_thread, redis.stop)
        await asyncio.to_thread(redis.start)
        engine = _engine(model, scratch)
        worker = _worker(model, redis, engine, scratch)
        floor = _floor(engine, bodies, scratch)
        for child in (engine, floor, worker):
            stack.push_async_callback(child.stop)
            await child.start()
        for child in (engine, floor, worker):
            await child.ready(client, _READY_S)
        yield Deployment(client, redis, engine, worker, floor, bodies)


def _engine(model: Path, scratch: Path) -> Child:
    knobs = ("--bench", "--bench-tokens", str(SAMPLED_TOKENS), "--context-length", str(MOST_CONTEXT))
    return _child("engine", "/health", scratch, "api.demo.engine_sim", "--tokenizer", str(model), *knobs)


def _worker(model: Path, redis: EmbeddedRedis, engine: Child, scratch: Path) -> Child:
    told = ("--redis-url", redis.url, "--engine-url", engine.url, "--tokenizer", str(model))
    return _child("worker", "/readyz", scratch, "api", "serve", "--workers", "1", *told)


def _floor(engine: Child, bodies: Path, scratch: Path) -> Child:
    return _child("floor", "/", scratch, "api.bench.floor", "--engine-url", engine.url, "--bodies", str(bodies))


def _child(name: str, ready_path: str, scratch: Path, *command: str) -> Child:
    port = str(free_port())
    url = f"http://127.0.0.1:{port}"
    return Child(name, [*module(*command), "--port", port], url=url, ready_path=ready_path, log=scratch / f"{name}.log")
