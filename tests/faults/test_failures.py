"""What a client sees of each failure, and that its later retry continues where the last answered turn ended."""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from api.demo.processes import Child
from store.embedded import EmbeddedRedis
from tests.e2e.conftest import running_stack
from tests.e2e.stack import CALL, TOOLS, Reply, Stack, Talk
from tests.faults.network import Link

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = {"x-stainless-retry-count": "1"}
MOST_IN_FLIGHT = 4
ENGINE_TIMEOUT_S = 1.5
# Loads each key so slowly that a server is still at it when the worker's patience is at its end.
SLOW_LOADING = ("--key-load-delay", "400000", "--loading-process-events-interval-bytes", "1024")


@dataclass
class Fragile:
    """A deployment whose parts can be hurt one by one. The engine's record outlives its kills."""

    stack: Stack
    redis: EmbeddedRedis
    link: Link  # between the workers and Redis

    @asynccontextmanager
    async def admin(self) -> AsyncIterator[Redis]:
        client = Redis.from_url(self.redis.url)
        yield client
        await client.aclose()


class _Linked(EmbeddedRedis):
    """The server as workers see it, by way of the link."""

    def __init__(self, server: EmbeddedRedis, link: Link) -> None:
        self._server = server
        self._link = link

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self._link.port}"

    def start(self) -> _Linked:
        self._server.start()
        return self

    def stop(self) -> None:
        self._server.stop()


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fragile(
    start_engine: Callable[..., Child], start_worker: Callable[..., Child], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Fragile]:
    scratch = tmp_path_factory.mktemp("fragile")
    redis = EmbeddedRedis(scratch / "redis")
    async with Link(Path(urlsplit(redis.url).path)) as link:
        worker = ("--engine-timeout-s", str(ENGINE_TIMEOUT_S), "--max-in-flight", str(MOST_IN_FLIGHT))
        async with running_stack(
            start_engine,
            start_worker,
            _Linked(redis, link),
            engine_arguments=("--record", str(scratch / "record.jsonl")),
            worker_arguments=worker,
        ) as stack:
            yield Fragile(stack, redis, link)


Fault = Callable[[Fragile], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def store_down(fragile: Fragile) -> AsyncIterator[None]:
    await asyncio.to_thread(fragile.redis.kill)
    yield
    await asyncio.to_thread(fragile.redis.start)


@asynccontextmanager
async def store_full(fragile: Fragile) -> AsyncIterator[None]:
    async with fragile.admin() as admin:
        await admin.config_set("maxmemory", 1)
        yield
        await admin.config_set("maxmemory", 0)


@asynccontextmanager
async def store_read_only(fragile: Fragile) -> AsyncIterator[None]:
    """A replica whose primary does not answer: what a client that was not told of a failover writes to."""
    async with fragile.admin() as admin:
        await admin.replicaof("127.0.0.1", "1")
        yield
        await admin.replicaof("NO", "ONE")


@asynccontextmanager
async def store_loading(fragile: Fragile) -> AsyncIterator[None]:
    async with fragile.admin() as admin:
        await admin.bgrewriteaof()  # as one snapshot, which is loaded key by key
        await _until(lambda: _rewritten(admin))
    await asyncio.to_thread(fragile.redis.kill)
    as_it_was, fragile.redis._arguments = fragile.redis._arguments, SLOW_LOADING
    fragile.redis._spawn()
    async with fragile.admin() as admin:
        await _until(lambda: _answers(admin, "LOADING"))
    yield
    await asyncio.to_thread(fragile.redis.kill)
    fragile.redis._arguments = as_it_was
    await asyncio.to_thread(fragile.redis.start)


async def _rewritten(admin: Redis) -> bool:
    return not (await admin.info("persistence"))["aof_rewrite_in_progress"]


async def _answers(admin: Redis, word: str) -> bool:
    try:
        await admin.dbsize()
    except Exception as error:  # noqa: BLE001 - whatever it says on its way up
        return word in f"{type(error).__name__} {error}".upper()
    return False


async def _until(holds: Callable[[], Awaitable[bool]], limit_s: float = 10.0) -> None:
    deadline = time.monotonic() + limit_s
    while not await holds():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.02)


@asynccontextmanager
async def store_unreachable(fragile: Fragile) -> AsyncIterator[None]:
    fragile.link.refuses = True
    fragile.link.cut()
    yield
    fragile.link.refuses = False


@asynccontextmanager
async def store_silent(fragile: Fragile) -> AsyncIterator[None]:
    """A partition, or a store without end slow: connections stand, no answer comes."""
    fragile.link.swallows = True
    yield
    fragile.link.swallows = False
    fragile.link.cut()


@asynccontextmanager
async def engine_down(fragile: Fragile) -> AsyncIterator[None]:
    await fragile.stack.engine.kill()
    yield
    await fragile.stack.engine.start()
    await fragile.stack.engine.ready(fragile.stack.client, 60)


@asynccontextmanager
async def engine_killed_in_mid_generation(fragile: Fragile) -> AsyncIterator[None]:
    engine = fragile.stack.engine
    await fragile.stack.script({"text": "too slow to be heard", "delay_s": 10})

    async def soon() -> None:
        await asyncio.sleep(0.5)
        await engine.kill()

    killing = asyncio.create_task(soon())
    yield
    await killing
    await engine.start()
    await engine.ready(fragile.stack.client, 60)


@asynccontextmanager
async def overloaded(fragile: Fragile) -> AsyncIterator[None]:
    await fragile.stack.script({"text": "slow", "delay_s": 1.0, "times": MOST_IN_FLIGHT})
    others = [Talk(fragile.stack) for _ in range(MOST_IN_FLIGHT)]
    busy = [asyncio.create_task(talk.say("Busy.", worker=first(fragile))) for talk in others]
    await asyncio.sleep(0.4)
    yield
    assert [reply.status for reply in await asyncio.gather(*busy)] == [200] * MOST_IN_FLIGHT


def scripted(**directive: object) -> Fault:
    @asynccontextmanager
    async def engine(fragile: Fragile) -> AsyncIterator[None]:
        await fragile.stack.script(directive)
        yield

    return engine


def first(fragile: Fragile) -> str:
    return fragile.stack.workers[0].url


# Fault, status, code, the longest that a client waits to be told.
FAILURES: dict[str, tuple[Fault, int, str, float]] = {
    "store down": (store_down, 503, "store_unavailable", 12),
    "store full": (store_full, 503, "store_full", 3),
    "read-only replica": (store_read_only, 503, "store_unavailable", 12),
    "loading": (store_loading, 503, "store_unavailable", 12),
    "network cut": (store_unreachable, 503, "store_unavailable", 12),
    "network silent": (store_silent, 503, "store_unavailable", 12),
    "engine down": (engine_down, 502, "engine_error", 5),
    "engine killed": (engine_killed_in_mid_generation, 502, "engine_error", 5),
    "engine slow": (scripted(text="late", delay_s=20), 504, "engine_timeout", ENGINE_TIMEOUT_S + 1),
    "engine gone before its reply": (scripted(fault="drop_before"), 502, "engine_error", 3),
    "engine gone in mid-reply": (scripted(fault="drop_midway"), 502, "engine_error", 3),
    "half a reply": (scripted(fault="garbage"), 502, "engine_contract", 3),
    "engine crashed": (scripted(fault="crash"), 502, "engine_error", 3),
    "engine aborted": (scripted(fault="abort", text="cut off in the middle of it all"), 502, "engine_aborted", 3),
    "engine busy": (scripted(fault="busy"), 429, "overloaded", 3),
    "overload": (overloaded, 429, "overloaded", 0.5),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_told_by_its_code_and_a_later_retry_is_contiguous(fragile: Fragile, name: str) -> None:
    fault, status, code, longest_s = FAILURES[name]
    talk = await _begun(fragile)
    async with fault(fragile):
        began = time.monotonic()
        refused = await _next(talk, fragile)
        waited_s = time.monotonic() - began
    assert (refused.status, refused.code) == (status, code), refused.body
    assert ("retry-after" in refused.headers) == (status in {429, 503})
    assert waited_s < longest_s
    await _assert_goes_on(fragile, talk)


async def _begun(fragile: Fragile) -> Talk:
    """A rollout whose next request answers a tool call."""
    talk = Talk(fragile.stack, tools=TOOLS)
    await fragile.stack.script({"text": CALL})
    await talk.say("List.", worker=first(fragile))
    call = talk.messages[-1]["tool_calls"][0]
    talk.messages.append({"role": "tool", "tool_call_id": call["id"], "content": "a.txt"})
    return talk


async def _next(talk: Talk, fragile: Fragile, **options: object) -> Reply:
    return await talk.turn(worker=first(fragile), **options)


async def _assert_goes_on(fragile: Fragile, talk: Talk) -> None:
    """The retry on another worker is served once, spliced; and so is the turn after it on the first one."""
    again = await talk.turn(worker=fragile.stack.workers[1].url, headers=RETRY)
    assert again.status == 200, again.body
    await talk.say("Thanks.", worker=first(fragile))
    assert [reply.splice for reply in talk.replies[1:]] == ["spliced", "spliced"]
    await talk.assert_all_contiguous()
    stored = [turn["turn_id"] for turn in await fragile.stack.turns(talk.session or "")]
    assert stored == [reply.turn_id for reply in talk.replies]


@asynccontextmanager
async def script_missing(fragile: Fragile) -> AsyncIterator[None]:
    async with fragile.admin() as admin:
        await admin.script_flush()
        yield


@asynccontextmanager
async def store_slow(fragile: Fragile) -> AsyncIterator[None]:
    fragile.link.delay_s = 0.3
    yield
    fragile.link.delay_s = 0.0


@asynccontextmanager
async def cut_in_mid_generation(fragile: Fragile) -> AsyncIterator[None]:
    await fragile.stack.script({"text": "a slow answer", "delay_s": 0.6})

    async def soon() -> None:
        await asyncio.sleep(0.3)
        fragile.link.cut()

    cutting = asyncio.create_task(soon())
    yield
    await cutting


@asynccontextmanager
async def store_away_for_a_moment(fragile: Fragile) -> AsyncIterator[None]:
    async with store_unreachable(fragile):
        healing = asyncio.get_running_loop().call_later(0.3, setattr, fragile.link, "refuses", False)
        yield
        healing.cancel()


RIDDEN_OUT: dict[str, Fault] = {
    "script missing": script_missing,
    "store slow": store_slow,
    "connection cut": cut_in_mid_generation,
    "store away for a moment": store_away_for_a_moment,
}


@pytest.mark.parametrize("name", RIDDEN_OUT)
async def test_what_passes_within_a_worker_s_patience_is_not_noticed(fragile: Fragile, name: str) -> None:
    talk = await _begun(fragile)
    async with RIDDEN_OUT[name](fragile):
        reply = await _next(talk, fragile)
    assert (reply.status, reply.splice) == (200, "spliced")
    await talk.say("Thanks.", worker=fragile.stack.workers[1].url)
    await talk.assert_all_contiguous()
    assert len(await fragile.stack.turns(talk.session or "")) == 3


@pytest.mark.parametrize("after_s", [0.05, 0.35])
async def test_a_client_that_leaves_while_the_store_is_asked_does_not_hold_up_its_own_retry(
    fragile: Fragile, after_s: float
) -> None:
    talk = await _begun(fragile)
    async with store_slow(fragile):
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(after_s):
                await _next(talk, fragile)
    began = time.monotonic()
    await _assert_goes_on(fragile, talk)
    assert time.monotonic() - began < 8


async def test_a_client_that_leaves_at_any_moment_does_not_hold_up_its_own_retry(fragile: Fragile) -> None:
    """Half a millisecond further each time: while the request is read, looked up, sent on, generated, committed."""
    for step in range(80):
        talk = Talk(fragile.stack)
        talk.messages.append({"role": "user", "content": f"Step {step}."})
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(step * 0.0005):
                await _next(talk, fragile)
                continue
        async with asyncio.timeout(5):
            again = await talk.turn(worker=fragile.stack.workers[1].url, headers=RETRY)
        assert again.status == 200, again.body
        assert len(await fragile.stack.turns(talk.session or "")) == 1
