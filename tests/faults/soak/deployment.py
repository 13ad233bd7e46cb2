"""What is soaked, each a process of its own: Redis, the simulated engine, workers; and the network between them.

    clients -> edge -> balancer -> workers -> one link each -> Redis
                                      `-----> engine, which keeps its record in a file

Edge, balancer and links live in the driver's process, so that a test can cut them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from urllib.parse import urlsplit

import aiohttp

from api.demo.balancer import Balancer
from api.demo.processes import Child, ChildFailed, free_port, module
from store.embedded import EmbeddedRedis
from tests.faults.network import Link
from tests.faults.soak.plan import REDIS_ARGUMENTS, Plan

READY_S = 120.0
_STARTS = 5
# Enough that a kill finds turns in mid-generation.
_ENGINE_PACE = ("--first-token-s", "0.05", "--per-token-s", "0.0005")


@dataclass(slots=True, kw_only=True)
class Deployment:
    """Everything that runs, and the ways to hurt it."""

    client: aiohttp.ClientSession
    redis: EmbeddedRedis
    engine: Child
    record: Path
    workers: tuple[Child, ...]
    links: tuple[Link, ...]
    balancer: Balancer
    edge: Link
    scratch: Path
    model: Path
    durability: str
    booting: set[Child] = field(default_factory=set)
    boots_s: list[float] = field(default_factory=list)
    failed_starts: list[str] = field(default_factory=list)

    @property
    def url(self) -> str:
        """Where clients go."""
        return f"http://127.0.0.1:{self.edge.port}"

    async def restart(self, worker: Child) -> None:
        """SIGKILL, and start again at once; and again if that fails, as a supervisor would."""
        self.booting.add(worker)
        began = time.monotonic()
        try:
            await worker.kill()
            for _ in range(_STARTS):
                await worker.start()
                if await self._serves(worker):
                    self.boots_s.append(time.monotonic() - began)
                    return
        finally:
            self.booting.discard(worker)

    async def _serves(self, worker: Child) -> bool:
        try:
            await worker.ready(self.client, READY_S)
        except ChildFailed as error:
            self.failed_starts.append(str(error))
            return False
        return True

    async def restart_redis(self, down_s: float) -> None:
        """SIGKILL, a while of nothing, and start again on the same data."""
        await asyncio.to_thread(self.redis.kill)
        await asyncio.sleep(down_s)
        await asyncio.to_thread(self.redis.start)

    async def settled(self) -> None:
        """Wait until every worker serves."""
        for worker in self.workers:
            await worker.ready(self.client, READY_S)

    def worker(self, name: str, link: Link, *arguments: str) -> Child:
        """One more worker, not yet started."""
        port = str(free_port())
        command = module(
            "api", "serve", "--port", port, "--workers", "1", "--redis-url", f"redis://127.0.0.1:{link.port}",
            "--engine-url", self.engine.url, "--tokenizer", str(self.model), "--durability", self.durability,
            "--log-level", "warning", *arguments,
        )  # fmt: skip
        url = f"http://127.0.0.1:{port}"
        return Child(name, command, url=url, ready_path="/readyz", log=self.scratch / f"{name}.log")


@asynccontextmanager
async def deployed(plan: Plan, model: Path, scratch: Path) -> AsyncIterator[Deployment]:
    """Start everything; stop everything on the way out, however that comes about."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        redis = EmbeddedRedis(scratch / "redis", arguments=REDIS_ARGUMENTS[plan.durability])
        stack.push_async_callback(asyncio.to_thread, redis.stop)
        await asyncio.to_thread(redis.start)
        socket = Path(urlsplit(redis.url).path)
        links = tuple([await stack.enter_async_context(Link(socket)) for _ in range(plan.workers)])
        record = scratch / "record.jsonl"
        built = Deployment(
            client=client, redis=redis, engine=_engine(plan, model, scratch, record), record=record, workers=(),
            links=links, balancer=Balancer(()), edge=Link(0), scratch=scratch, model=model,
            durability=plan.durability,
        )  # fmt: skip
        built.workers = tuple(built.worker(f"worker-{n}", link) for n, link in enumerate(links))
        # The first worker alone: it prepares the tokenizer for all.
        for group in ((built.engine,), built.workers[:1], built.workers[1:]):
            for child in group:
                stack.push_async_callback(child.stop)
            await asyncio.gather(*(_start(child, client) for child in group))
        built.balancer = await stack.enter_async_context(Balancer(tuple(worker.url for worker in built.workers)))
        built.edge = await stack.enter_async_context(Link(urlsplit(built.balancer.url).port or 0))
        yield built


async def _start(child: Child, client: aiohttp.ClientSession) -> None:
    await child.start()
    await child.ready(client, READY_S)


def _engine(plan: Plan, model: Path, scratch: Path, record: Path) -> Child:
    port = str(free_port())
    own = ("--port", port, "--tokenizer", str(model), "--seed", str(plan.seed), "--record", str(record))
    command = module("api.demo.engine_sim", *own, *_ENGINE_PACE)
    return Child("engine", command, url=f"http://127.0.0.1:{port}", ready_path="/health", log=scratch / "engine.log")
