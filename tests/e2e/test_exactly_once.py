"""The table of retries through HTTP, on four workers: what a request equal to an earlier one gets, cell by cell.

Generations are counted by the engine's own record, never by the product.
"""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any

import pytest
import pytest_asyncio
from redis.asyncio import Redis

from api.demo.processes import Child
from store.embedded import EmbeddedRedis
from tests.e2e.conftest import running_stack
from tests.e2e.stack import CALL, TOOLS, Reply, Stack, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = {"x-stainless-retry-count": "1"}
Messages = Sequence[Mapping[str, Any]]


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def four(
    start_engine: Callable[..., Child],
    start_worker: Callable[..., Child],
    tmp_path_factory: pytest.TempPathFactory,
) -> AsyncIterator[Stack]:
    redis = EmbeddedRedis(tmp_path_factory.mktemp("exactly-once"))
    async with running_stack(
        start_engine, start_worker, redis, workers=4, worker_arguments=("--join-timeout-s", "4")
    ) as running:
        yield running


class Request:
    """One request, sent as often as a test wants, on another worker each time."""

    def __init__(self, stack: Stack, *, named: bool = True, mark: str = "none", said: str = "Hello.") -> None:
        self.stack = stack
        self.session = f"once-{uuid.uuid4().hex[:12]}" if named else None
        self.messages: list[Mapping[str, Any]] = [{"role": "user", "content": f"{said} {uuid.uuid4().hex[:8]}"}]
        self.first = {"Idempotency-Key": uuid.uuid4().hex} if mark == "key" else {}
        self.again = {"none": {}, "retry": RETRY, "key": self.first}[mark]

    async def send(self, headers: Mapping[str, str], **options: Any) -> Reply:
        return await self.stack.chat(self.messages, session=self.session, headers=headers, **options)

    async def answered(self) -> Reply:
        return await self.send(self.first)

    async def repeat(self, **options: Any) -> Reply:
        return await self.send(self.again, **options)

    async def running(self, delay_s: float = 1.5) -> asyncio.Task[Reply]:
        """Started, and under its lease; a session that nobody can know yet has none."""
        await self.stack.script({"text": "a slow answer", "delay_s": delay_s})
        task = asyncio.create_task(self.send(self.first))
        async with Redis.from_url(self.stack.redis_url) as redis:
            for _ in range(50):
                if [name async for name in redis.scan_iter(f"ts1:*:attempts:{self.session or '*'}", count=10_000)]:
                    break
                await asyncio.sleep(0.02)
        return task

    async def extend(self, reply: Reply) -> None:
        await self.stack.chat(
            [*self.messages, reply.message, {"role": "user", "content": "Go on."}], session=reply.session
        )

    async def set_delivered(self, reply: Reply, entry: str) -> None:
        """What the store would hold had the delivery gone otherwise: "0" undelivered, or the name of a worker."""
        redis = Redis.from_url(self.stack.redis_url)
        await asyncio.sleep(0.3)  # the reply's own mark comes first
        await redis.hset(f"ts1:{{default:{reply.session}}}:delivered", reply.turn_id, entry)
        await redis.aclose()

    async def generations(self) -> int:
        said = self.messages[0]["content"]
        rendered = [entry for entry in (await self.stack.record()).values() if entry["outcome"] != "refused"]
        texts = await asyncio.gather(*(self.stack.rendered(entry["rid"]) for entry in rendered[-64:]))
        return sum(said in text and "Go on." not in text for text in texts)


# Row by row. What a repeat gets: join and replay are the first turn again, the rest another one.

RUNNING = {"key": "same", "retry": "same", "none": "other"}
UNDELIVERED = {"key": "same", "retry": "same", "none": "same"}
DELIVERED = {"key": "same", "retry": "same", "none": "other"}
EXTENDED = {"key": "same", "retry": "other", "none": "other"}


async def _expect(request: Request, first: Reply, again: Reply, expected: str) -> None:
    assert again.session == first.session
    if expected == "same":
        assert again.replayed
        assert (again.body["id"], again.message) == (first.body["id"], first.message)
    else:
        assert not again.replayed
        assert again.turn_id != first.turn_id
        assert again.parent == first.parent
    assert await request.generations() == (1 if expected == "same" else 2)


@pytest.mark.parametrize("mark", RUNNING)
async def test_while_the_first_attempt_runs(four: Stack, mark: str) -> None:
    request = Request(four, mark=mark)
    task = await request.running()
    again = await request.repeat()
    await _expect(request, await task, again, RUNNING[mark])


@pytest.mark.parametrize("entry", ["0", "a-worker-that-is-gone"])
@pytest.mark.parametrize("mark", UNDELIVERED)
async def test_once_it_is_committed_but_not_known_to_be_delivered(four: Stack, mark: str, entry: str) -> None:
    request = Request(four, mark=mark)
    first = await request.answered()
    await request.set_delivered(first, entry)
    shown = (await four.turns(first.session))[0]["delivered"]
    assert shown is (False if entry == "0" else None)
    await _expect(request, first, await request.repeat(), UNDELIVERED[mark])
    await asyncio.sleep(0.3)
    assert (await four.turns(first.session))[0]["delivered"] is True


@pytest.mark.parametrize("mark", DELIVERED)
async def test_once_it_is_delivered_and_nobody_has_gone_on(four: Stack, mark: str) -> None:
    request = Request(four, mark=mark)
    first = await request.answered()
    await asyncio.sleep(0.3)
    assert (await four.turns(first.session))[0]["delivered"] is True
    await _expect(request, first, await request.repeat(), DELIVERED[mark])


@pytest.mark.parametrize("mark", EXTENDED)
async def test_once_the_conversation_has_gone_on(four: Stack, mark: str) -> None:
    request = Request(four, mark=mark)
    first = await request.answered()
    await request.extend(first)
    await _expect(request, first, await request.repeat(), EXTENDED[mark])


async def test_a_retry_without_a_session_id_is_known_by_an_echoed_id(four: Stack) -> None:
    talk = Talk(four, named=False, system=f"Echoed {uuid.uuid4().hex}.", tools=TOOLS)
    await four.script({"text": CALL})
    await talk.say("List.")
    await four.script({"text": "a slow answer", "delay_s": 1.5})
    running = asyncio.create_task(talk.answer_tools("a.txt"))
    await asyncio.sleep(0.6)
    again = await four.chat(talk.messages, headers=RETRY, tools=TOOLS)
    first = await running
    assert again.replayed
    assert (again.turn_id, again.session) == (first.turn_id, first.session)


# The third row: a first turn that named no session.


async def test_a_first_turn_without_a_session_id_is_new_while_it_runs_or_once_it_is_delivered(four: Stack) -> None:
    request = Request(four, named=False, mark="retry")
    task = await request.running()
    second = await request.repeat()
    first = await task
    await asyncio.sleep(0.3)
    third = await request.repeat()
    assert len({r.session for r in (first, second, third)}) == 3
    assert not any(r.replayed for r in (first, second, third))


@pytest.mark.parametrize("entry", ["0", "a-worker-that-is-gone"])
async def test_a_first_turn_without_a_session_id_is_replayed_to_one_retry_when_undelivered(
    four: Stack, entry: str
) -> None:
    request = Request(four, named=False, mark="retry")
    replies = [await request.answered() for _ in range(3)]  # three equal rollouts
    await request.set_delivered(replies[1], entry)
    unmarked = await request.answered()
    assert not unmarked.replayed
    again = await request.repeat()
    assert again.replayed
    assert (again.session, again.turn_id) == (replies[1].session, replies[1].turn_id)
    await asyncio.sleep(0.3)
    assert not (await request.repeat()).replayed


async def test_a_key_finds_a_first_turn_without_a_session_id_while_it_runs(four: Stack) -> None:
    request = Request(four, named=False, mark="key")
    task = await request.running()
    again = await request.repeat()
    await _expect(request, await task, again, "same")


# Many at once.


async def test_32_equal_marked_retries_at_once_are_one_generation(four: Stack) -> None:
    request = Request(four, mark="retry")
    await four.script({"text": "the only answer", "delay_s": 0.3})
    replies = await asyncio.gather(*(request.repeat(return_token_ids=True) for _ in range(32)))
    assert len({r.body["id"] for r in replies}) == 1
    assert all(r.message == replies[0].message for r in replies)
    assert sum(not r.replayed for r in replies) == 1
    assert await request.generations() == 1
    assert len(await four.turns(replies[0].session)) == 1


@pytest.mark.parametrize("run", range(5))
async def test_32_unmarked_repeats_at_once_are_32_siblings(four: Stack, run: int) -> None:
    request = Request(four)
    replies = await asyncio.gather(*(request.answered() for _ in range(32)))
    assert len({r.turn_id for r in replies}) == 32
    assert not any(r.replayed for r in replies)
    assert len(await four.turns(replies[0].session)) == 32


async def test_32_retries_of_one_key_at_once_streamed_or_not_are_one_generation(four: Stack) -> None:
    request = Request(four, named=False, mark="key")
    replies = await asyncio.gather(*(request.repeat(stream=n % 2 == 0) for n in range(32)))
    assert {r.status for r in replies} == {200}
    assert len({r.headers["x-tokensplice-turn"] for r in replies}) == 1
    assert await request.generations() == 1


async def test_a_streamed_replay_carries_the_stored_ids(four: Stack) -> None:
    request = Request(four, mark="retry")
    first = await request.send({}, return_token_ids=True)
    again = await request.repeat(return_token_ids=True, stream=True)
    assert again.replayed
    ids = first.message["generation_token_ids"]
    assert f'"generation_token_ids":[{",".join(map(str, ids))}]' in again.body
    assert f'"id":"chatcmpl-{first.turn_id}"' in again.body


# Who waits, and who leaves.


async def test_a_failed_generation_lets_a_joined_retry_generate(four: Stack) -> None:
    request = Request(four, mark="retry")
    await four.script({"fault": "crash", "delay_s": 1.0})
    failing = asyncio.create_task(request.answered())
    await asyncio.sleep(0.4)
    again = await request.repeat()
    assert (await failing).status >= 500
    assert (again.status, again.replayed) == (200, False)
    assert len(await four.turns(again.session)) == 1


async def test_a_retry_that_waits_too_long_is_told_so(four: Stack) -> None:
    request = Request(four, mark="retry")
    task = await request.running(delay_s=6.0)
    again = await request.repeat()
    assert (again.status, again.code) == (409, "turn_in_progress")
    assert (await task).status == 200


async def test_a_joiner_that_leaves_changes_nothing(four: Stack) -> None:
    request = Request(four, mark="retry")
    task = await request.running()
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(request.repeat(), 0.5)
    assert (await task).status == 200
    assert await request.generations() == 1


async def test_the_generation_goes_on_when_its_client_leaves_while_another_waits(four: Stack) -> None:
    request = Request(four, mark="retry")
    task = await request.running(delay_s=3.0)
    joined = asyncio.create_task(request.repeat())
    await asyncio.sleep(0.4)
    task.cancel()
    reply = await joined
    assert reply.replayed
    assert await request.generations() == 1
    await asyncio.sleep(0.4)
    assert (await four.turns(reply.session))[0]["delivered"] is True


async def test_the_engine_is_told_to_stop_when_the_last_client_has_left(four: Stack) -> None:
    request = Request(four, mark="retry")
    task = await request.running(delay_s=30.0)
    joined = asyncio.create_task(request.repeat())
    await asyncio.sleep(0.4)
    task.cancel()
    await asyncio.sleep(0.6)
    assert list((await four.record()).values())[-1]["outcome"] != "aborted"
    joined.cancel()
    await four.assert_last_aborted()
    again = await request.repeat()
    assert (again.status, again.replayed) == (200, False)


async def test_deleting_the_session_ends_a_turn_and_all_who_wait_for_it(four: Stack) -> None:
    request = Request(four, mark="retry")
    await request.answered()
    request.messages = [*request.messages, {"role": "user", "content": "More."}]
    task = await request.running(delay_s=30.0)
    joined = [asyncio.create_task(request.repeat()) for _ in range(4)]
    await asyncio.sleep(0.4)
    assert (await four.call("DELETE", f"/sessions/{request.session}")).status == 204
    replies = await asyncio.wait_for(asyncio.gather(task, *joined), 10)
    assert {(r.status, r.code) for r in replies} == {(410, "session_closed")}
    await four.assert_last_aborted()


async def test_an_answer_whose_last_client_left_before_it_is_noted_and_kept_for_a_repeat(four: Stack) -> None:
    request = Request(four)
    task = await request.running(delay_s=1.0)
    retry = asyncio.create_task(request.send(RETRY))  # keeps it running
    await asyncio.sleep(0.3)
    task.cancel()
    await asyncio.sleep(0.2)
    retry.cancel()
    await asyncio.gather(task, retry, return_exceptions=True)
    await asyncio.sleep(1.5)
    turns = await four.turns(request.session or "")
    assert [turn["delivered"] for turn in turns] == [False]
    samples = (await four.call("GET", f"/sessions/{request.session}/trajectory")).body["samples"]
    assert samples == []
    again = await request.answered()
    assert (again.replayed, again.turn_id) == (True, turns[0]["turn_id"])


# What it costs.


async def test_a_turn_of_a_named_session_is_one_find_and_one_commit(four: Stack) -> None:
    talk = Talk(four)
    await talk.say("One.")
    redis = Redis.from_url(four.redis_url)
    await asyncio.sleep(1.3)  # last uses and deliveries are written by now
    await redis.config_resetstat()
    for n in range(10):
        await talk.say(f"And {n}?", worker=four.workers[0].url)
    calls = {name: facts["calls"] for name, facts in (await redis.info("commandstats")).items()}
    await redis.aclose()
    # Two a turn before its reply; deliveries come after it, in batches of a tenth of a second.
    assert 20 <= calls["cmdstat_evalsha"] <= 30
    asked_beside = {"cmdstat_get", "cmdstat_exists", "cmdstat_hgetall", "cmdstat_zrange", "cmdstat_eval"}
    assert not asked_beside & calls.keys()


async def test_deliveries_of_64_sessions_cost_a_fifth_of_a_command_a_turn_at_most(four: Stack) -> None:
    talks, turns = [Talk(four) for _ in range(64)], 5
    async with Redis.from_url(four.redis_url) as redis:
        await redis.config_resetstat()
        for n in range(turns):
            replies = await asyncio.gather(*(talk.say(f"Step {n}.", worker=four.workers[0].url) for talk in talks))
            assert {reply.status for reply in replies} == {200}
        await asyncio.sleep(0.3)
        scripts = (await redis.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert scripts - 2 * 64 * turns <= 0.2 * 64 * turns
