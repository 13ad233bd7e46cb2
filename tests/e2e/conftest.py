"""One deployment for all end-to-end tests: sessions keep them apart."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from api.assets import qwen3_directory, smollm2_directory
from api.demo.processes import Child, free_port, module
from store.embedded import EmbeddedRedis
from tests.e2e.stack import Stack

_READY_S = 90.0


@pytest.fixture(scope="session")
def qwen3() -> Path:
    """A real Qwen3 tokenizer and its template."""
    return qwen3_directory()


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """SmolLM2's tokenizer: another vocabulary than Qwen3's."""
    return smollm2_directory()


@pytest.fixture(scope="session")
def start_engine(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Child]:
    """Make a simulated engine, not yet started."""

    def make(*arguments: str) -> Child:
        port = free_port()
        command = module("api.demo.engine_sim", "--port", str(port), "--tokenizer", str(qwen3), *arguments)
        log = tmp_path_factory.mktemp("engine") / "log"
        return Child("engine", command, url=f"http://127.0.0.1:{port}", ready_path="/health", log=log)

    return make


@pytest.fixture(scope="session")
def start_worker(qwen3: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Child]:
    """Make a worker, not yet started."""

    def make(redis_url: str, engine_url: str, *arguments: str) -> Child:
        port = free_port()
        command = module(
            "api", "serve", "--port", str(port), "--redis-url", redis_url, "--engine-url", engine_url,
            "--tokenizer", str(qwen3), *arguments,
        )  # fmt: skip
        log = tmp_path_factory.mktemp("worker") / "log"
        return Child("worker", command, url=f"http://127.0.0.1:{port}", ready_path="/readyz", log=log)

    return make


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def stack(
    start_engine: Callable[..., Child],
    start_worker: Callable[..., Child],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stack]:
    """Redis, an engine and two workers."""
    async with running_stack(start_engine, start_worker, EmbeddedRedis(tmp_path_factory.mktemp("redis"))) as running:
        yield running


@asynccontextmanager
async def running_stack(
    start_engine: Callable[..., Child],
    start_worker: Callable[..., Child],
    redis: EmbeddedRedis,
    *,
    workers: int = 2,
    engine_arguments: tuple[str, ...] = (),
    worker_arguments: tuple[str, ...] = (),
) -> AsyncIterator[Stack]:
    """Start a deployment of its own; stopped on the way out."""
    async with AsyncExitStack() as owned:
        client = await owned.enter_async_context(aiohttp.ClientSession())
        redis.start()
        owned.callback(redis.stop)
        engine = start_engine(*engine_arguments)
        started = [engine, *(start_worker(redis.url, engine.url, *worker_arguments) for _ in range(workers))]
        for child in started:
            await child.start()
            owned.push_async_callback(child.stop)
        for child in started:
            await child.ready(client, _READY_S)
        yield Stack(client, engine, started[1:], redis.url)
