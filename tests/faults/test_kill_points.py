"""SIGKILL at each point of a turn's path, and workers that are only taken for dead: one turn, contiguous, elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
import uuid
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from api.demo.processes import Child, free_port, module
from store.embedded import EmbeddedRedis
from tests.e2e.conftest import running_stack
from tests.e2e.stack import Reply, Stack, Talk
from tests.faults.mortal import ALIVE_S, POINTS

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = {"x-stainless-retry-count": "1"}


@dataclass
class Mortals:
    """Two workers that die when told to."""

    stack: Stack
    arm: Path

    @property
    def workers(self) -> list[str]:
        return [worker.url for worker in self.stack.workers]

    async def revive(self) -> None:
        """Start the doomed one again."""
        worker = self.stack.workers[0]
        await worker.kill()
        await worker.start()
        await worker.ready(self.stack.client, 60)


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def mortals(
    start_engine: Callable[..., Child], qwen3: Path, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Mortals]:
    folder = tmp_path_factory.mktemp("mortals")
    numbers = iter(range(9))

    def start_mortal(redis_url: str, engine_url: str) -> Child:
        port, n = free_port(), next(numbers)
        command = module(
            "tests.faults.mortal", "--port", str(port), "--redis-url", redis_url, "--engine-url", engine_url,
            "--tokenizer", str(qwen3), "--arm", str(folder / f"arm{n}"),
        )  # fmt: skip
        log = folder / f"log{n}"
        return Child("mortal", command, url=f"http://127.0.0.1:{port}", ready_path="/readyz", log=log)

    async with running_stack(start_engine, start_mortal, EmbeddedRedis(folder / "redis")) as running:
        yield Mortals(running, folder / "arm0")


async def _dies(request: asyncio.Task[Reply]) -> None:
    """The client's connection breaks, before the reply or in the middle of it."""
    with pytest.raises(aiohttp.ClientError):
        await request


async def _started(stack: Stack, before: int) -> None:
    for _ in range(250):
        if len(await stack.record()) > before:
            return
        await asyncio.sleep(0.02)
    raise AssertionError("the engine was never asked")


@pytest.mark.parametrize("mark", ["retry", "key"])
@pytest.mark.parametrize("point", POINTS)
async def test_killed_at_each_point_the_retry_elsewhere_is_contiguous_and_the_turn_is_one(
    mortals: Mortals, point: str, mark: str
) -> None:
    stack, (doomed, other) = mortals.stack, mortals.workers
    talk = Talk(stack)
    first = await talk.say("One.", worker=other)
    headers = {"Idempotency-Key": uuid.uuid4().hex} if mark == "key" else {}
    if point == "in_generate":
        await stack.script({"text": "never heard", "delay_s": 20})
    talk.messages.append({"role": "user", "content": "Two."})
    mortals.arm.write_text(point)
    await _dies(asyncio.create_task(talk.turn(worker=doomed, headers=headers, stream=point == "in_mid_reply")))
    assert not mortals.arm.exists()

    again = await talk.turn(worker=other, headers=headers or RETRY)
    assert again.splice == "spliced"
    assert again.parent == first.turn_id
    assert again.replayed is (point in {"after_commit", "in_mid_reply"})
    await talk.say("Three.", worker=other)
    await talk.assert_all_contiguous()
    turns = await stack.turns(talk.session or "", other)
    assert [turn["turn_id"] for turn in turns] == [reply.turn_id for reply in talk.replies]
    samples = (await stack.call("GET", f"/sessions/{talk.session}/trajectory", worker=other)).body["samples"]
    assert [[t["turn_id"] for t in s["turns"]] for s in samples] == [[r.turn_id for r in talk.replies]]
    await mortals.revive()


@pytest.mark.parametrize("point", POINTS[1:])  # nobody looks for a session that cannot be known yet
async def test_a_first_turn_without_a_session_id_is_found_again_by_its_retry(mortals: Mortals, point: str) -> None:
    stack, (doomed, other) = mortals.stack, mortals.workers
    talk = Talk(stack, named=False, system=f"First {uuid.uuid4().hex}.")
    if point == "in_generate":
        await stack.script({"text": "never heard", "delay_s": 20})
    talk.messages.append({"role": "user", "content": "One."})
    mortals.arm.write_text(point)
    await _dies(asyncio.create_task(talk.turn(worker=doomed, stream=point == "in_mid_reply")))
    await asyncio.sleep(
        ALIVE_S + 0.2
    )  # a retry before that may be another rollout's: it would get a session of its own
    again = await talk.turn(worker=other, headers=RETRY)
    assert again.replayed is (point in {"after_commit", "in_mid_reply"})
    await talk.say("Two.", worker=other)
    await talk.assert_all_contiguous()
    assert len(await stack.turns(again.session, other)) == 2
    await mortals.revive()


async def test_of_many_who_wait_for_a_dead_worker_one_generates(mortals: Mortals) -> None:
    stack, (doomed, other) = mortals.stack, mortals.workers
    talk = Talk(stack)
    await talk.say("One.", worker=other)
    before = len(await stack.record())
    await stack.script({"text": "never heard", "delay_s": 20})
    talk.messages.append({"role": "user", "content": "Two."})
    mortals.arm.write_text("in_generate")
    await _dies(asyncio.create_task(talk.turn(worker=doomed)))
    asked = list(talk.messages)
    replies = await asyncio.gather(
        *(stack.chat(asked, session=talk.session, headers=RETRY, worker=other) for _ in range(8))
    )
    assert len({reply.turn_id for reply in replies}) == 1
    assert sum(not reply.replayed for reply in replies) == 1
    assert len(await stack.record()) - before == 2
    assert len(await stack.turns(talk.session or "", other)) == 2
    await mortals.revive()


@pytest.mark.parametrize("mark", ["retry", "key"])
async def test_a_paused_worker_that_was_taken_over_commits_nothing_and_gives_the_winners_answer(
    mortals: Mortals, mark: str
) -> None:
    stack, (paused, other) = mortals.stack, mortals.workers
    talk = Talk(stack)
    first = await talk.say("One.", worker=other)
    headers = {"Idempotency-Key": uuid.uuid4().hex} if mark == "key" else {}
    before = len(await stack.record())
    await stack.script({"text": "answered while asleep", "delay_s": 0.8})
    asked: list[dict[str, Any]] = [*talk.messages, {"role": "user", "content": "Two."}]
    sleeping = asyncio.create_task(stack.chat(asked, session=talk.session, headers=headers, worker=paused))
    await _started(stack, before)
    os.kill(stack.workers[0].pid, signal.SIGSTOP)
    winner = await stack.chat(asked, session=talk.session, headers=headers or RETRY, worker=other)
    assert not winner.replayed
    os.kill(stack.workers[0].pid, signal.SIGCONT)
    late = await sleeping
    assert (late.turn_id, late.replayed) == (winner.turn_id, True)
    assert late.message == winner.message
    turns = await stack.turns(talk.session or "", other)
    assert [turn["turn_id"] for turn in turns] == [first.turn_id, winner.turn_id]
    assert len(await stack.record()) - before == 2
