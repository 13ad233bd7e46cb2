"""SIGKILL of a worker, and of Redis, between any two turns and in the middle of a generation."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import aiohttp
import pytest
import pytest_asyncio

from api.demo.processes import Child
from store.embedded import EmbeddedRedis
from tests.e2e.conftest import running_stack
from tests.e2e.stack import CALL, TOOLS, Stack, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = {"x-stainless-retry-count": "1"}


@pytest.fixture(scope="module")
def redis_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("crashing-redis")


@pytest.fixture(scope="module")
def redis(redis_dir: Path) -> EmbeddedRedis:
    """A Redis that these tests may kill."""
    return EmbeddedRedis(redis_dir)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def fragile(
    start_engine: Callable[..., Child], start_worker: Callable[..., Child], redis: EmbeddedRedis
) -> AsyncIterator[Stack]:
    async with running_stack(start_engine, start_worker, redis) as running:
        yield running


async def _restart(stack: Stack, worker: Child) -> None:
    await worker.kill()
    await worker.start()
    await worker.ready(stack.client, 60)


async def test_a_worker_killed_between_turns_breaks_nothing(fragile: Stack) -> None:
    talk = Talk(fragile, tools=TOOLS)
    await fragile.script({"text": CALL})
    await talk.say("List.", worker=fragile.workers[0].url)
    await _restart(fragile, fragile.workers[0])
    await talk.answer_tools("a.txt", worker=fragile.workers[1].url)
    await talk.say("Thanks.", worker=fragile.workers[0].url)
    await talk.assert_all_contiguous()
    assert [r.splice for r in talk.replies[1:]] == ["spliced", "spliced"]


async def test_redis_killed_between_turns_loses_nothing(fragile: Stack, redis: EmbeddedRedis) -> None:
    talk = Talk(fragile)
    await talk.say("One.")
    for n in range(3):
        await asyncio.to_thread(redis.kill)
        await asyncio.to_thread(redis.start)
        await talk.say(f"Then {n}.")
    await talk.assert_all_contiguous()
    assert len(await fragile.turns(talk.session or "")) == 4


async def test_a_worker_killed_in_mid_generation_leaves_no_half_turn_and_the_retry_is_contiguous(
    fragile: Stack,
) -> None:
    talk = Talk(fragile)
    await talk.say("One.")
    await fragile.script({"text": "too slow to be heard", "delay_s": 20})
    talk.messages.append({"role": "user", "content": "Two."})
    running = asyncio.create_task(talk.turn(worker=fragile.workers[0].url))
    await asyncio.sleep(0.5)
    await fragile.workers[0].kill()
    with pytest.raises(aiohttp.ClientError):
        await running
    assert len(await fragile.turns(talk.session or "", fragile.workers[1].url)) == 1
    again = await talk.turn(worker=fragile.workers[1].url, headers=RETRY)
    assert again.splice == "spliced"
    await talk.assert_all_contiguous()
    await fragile.workers[0].start()
    await fragile.workers[0].ready(fragile.client, 60)
    await talk.say("Three.", worker=fragile.workers[0].url)
    await talk.assert_all_contiguous()
    assert len(await fragile.turns(talk.session or "")) == 3


async def test_redis_killed_in_mid_generation_and_back_in_time_is_not_noticed(
    fragile: Stack, redis: EmbeddedRedis
) -> None:
    talk = Talk(fragile)
    await talk.say("One.")
    await fragile.script({"text": "a slow answer", "delay_s": 1.5})
    running = asyncio.create_task(talk.say("Two."))
    await asyncio.sleep(0.5)
    await asyncio.to_thread(redis.kill)
    await asyncio.to_thread(redis.start)
    assert (await running).status == 200
    await talk.say("Three.")
    await talk.assert_all_contiguous()


async def test_redis_away_is_503_and_a_later_retry_is_contiguous(fragile: Stack, redis: EmbeddedRedis) -> None:
    talk = Talk(fragile)
    await talk.say("One.")
    await asyncio.to_thread(redis.kill)
    talk.messages.append({"role": "user", "content": "Two."})
    away = await talk.turn()
    assert (away.status, away.code) == (503, "store_unavailable")
    assert away.headers["retry-after"]
    await asyncio.to_thread(redis.start)
    await talk.turn(headers=RETRY)
    await talk.assert_all_contiguous()


async def test_a_turn_that_redis_forgot_is_said_to_be_lost(
    fragile: Stack, redis: EmbeddedRedis, redis_dir: Path
) -> None:
    """What a failover to a lagging replica does: the client has a reply that the store lacks."""
    talk = Talk(fragile, tools=TOOLS)
    await fragile.script({"text": CALL})
    await talk.say("List.")
    await asyncio.to_thread(redis.kill)
    _forget(redis_dir)
    await asyncio.to_thread(redis.start)
    reply = await talk.answer_tools("a.txt")
    assert reply.splice == "fresh; reason=turn_lost"


def _forget(directory: Path) -> None:
    for part in directory.rglob("appendonly*"):
        if part.is_file():
            part.unlink()
    for dump in directory.rglob("*.rdb"):
        dump.unlink()


async def test_sigterm_finishes_what_runs_and_refuses_what_is_new(fragile: Stack) -> None:
    talk = Talk(fragile)
    worker = fragile.workers[0]
    await talk.say("One.", worker=worker.url)
    await fragile.script({"text": "a slow answer", "delay_s": 2})
    running = asyncio.create_task(talk.say("Two.", worker=worker.url))
    await asyncio.sleep(0.5)
    stopping = asyncio.create_task(worker.stop())
    await asyncio.sleep(0.3)
    with pytest.raises(aiohttp.ClientConnectorError):
        await fragile.chat([{"role": "user", "content": "New."}], worker=worker.url)
    assert (await running).status == 200
    await stopping
    await talk.say("Three.", worker=fragile.workers[1].url)
    await talk.assert_all_contiguous()
    await worker.start()
    await worker.ready(fragile.client, 60)
