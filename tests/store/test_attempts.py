"""Leases, joins, takeovers and deliveries: the table of retries where it is decided, on a real server."""

from __future__ import annotations

import asyncio
import json
import random
from dataclasses import replace

import pytest

from api.ids import new_turn_id
from store import attempts, keys
from store.embedded import EmbeddedRedis
from store.errors import AlreadyAnswered, LeaseLost, SessionClosed, StoreFull
from store.redis import RedisStore
from store.tasks import end
from store.views import FindQuery, Generate, Join, Mark, Mismatch, Replay, SessionKey, SessionOpening, Verdict
from tests.store.building import Conversation
from tests.store.proxy import Proxy

OPENING = SessionOpening()


@pytest.fixture
def key(tenant: str) -> SessionKey:
    return SessionKey(tenant, "rollout-1")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attempts, "_FLUSH_S", 0.01)


class Attempt:
    """One client's request on one worker: the same question, an id of its own."""

    def __init__(self, store: RedisStore, key: SessionKey, mark: Mark = "none", **query: object) -> None:
        self.store, self.key = store, key
        self.conversation = Conversation().then(random.Random(0), said="same", turn_id=new_turn_id())
        turn_id = self.conversation.head.turn_id
        self.conversation = replace(
            self.conversation, turns=(replace(self.conversation.head, root_id=turn_id, turn_id=turn_id),)
        )
        self.turn = self.conversation.head
        self.query: FindQuery = replace(
            self.conversation.same_query(key), attempt_id=self.turn.turn_id, mark=mark, **query
        )

    async def find(self) -> Verdict:
        return (await self.store.find(self.query)).verdict

    async def commit(self) -> None:
        await self.store.commit(self.key, self.turn, OPENING, idempotency_key=self.query.idempotency_key)

    async def delivered(self, *, was: bool) -> None:
        self.store.mark(self.key, self.turn.turn_id, delivered=was)
        await flushed(self.store)

    @property
    def replay(self) -> Replay:
        return Replay(self.turn.turn_id)

    @property
    def join(self) -> Join:
        return Join(self.turn.turn_id, self.store._liveness.worker_id)


async def flushed(store: RedisStore) -> None:
    await store._attempts._task


async def die(store: RedisStore) -> None:
    """Its sign of life is gone, as after a SIGKILL; the object is then the paused worker that wakes up later."""
    store._liveness._task.cancel()
    await store._client.delete(keys.alive(store._liveness.worker_id))


async def answered(store: RedisStore, key: SessionKey, *, delivered: bool | None = None, **query: object) -> Attempt:
    """An earlier attempt, committed."""
    first = Attempt(store, key, "key" if query else "none", **query)
    assert await first.find() == Generate()
    await first.commit()
    if delivered is not None:
        await first.delivered(was=delivered)
    return first


async def extend(first: Attempt) -> None:
    await first.store.commit(first.key, first.conversation.then(random.Random(1)).head, OPENING)


# The table, row by row: running, committed but not delivered, delivered without child, delivered and extended.


async def test_the_same_key_joins_then_replays_for_ever(store, other_store, key):
    first = Attempt(store, key, "key", idempotency_key="k 1")
    assert await first.find() == Generate()
    again = Attempt(other_store, key, "key", idempotency_key="k 1")
    assert await again.find() == first.join
    await first.commit()
    assert await again.find() == first.replay
    for was in (False, True):
        await first.delivered(was=was)
        assert await again.find() == first.replay
    await extend(first)
    assert await again.find() == first.replay


async def test_another_body_under_a_key_is_a_mismatch_while_it_runs_and_afterwards(store, other_store, key):
    first = Attempt(store, key, "key", idempotency_key="k")
    other = Attempt(other_store, key, "key", idempotency_key="k", request_hash=bytes(16))
    assert await first.find() == Generate()
    assert await other.find() == Mismatch()
    await first.commit()
    assert await other.find() == Mismatch()


async def test_a_new_key_is_a_new_operation_though_an_equal_answer_lies_undelivered(store, other_store, key):
    await answered(store, key, delivered=False)
    assert await Attempt(other_store, key, "key", idempotency_key="new").find() == Generate()


async def test_a_marked_retry_joins_then_replays_until_the_conversation_goes_on(store, other_store, key):
    first, again = Attempt(store, key), Attempt(other_store, key, "retry")
    assert await first.find() == Generate()
    assert await again.find() == first.join
    await first.commit()
    assert await again.find() == first.replay
    for was in (False, True):
        await first.delivered(was=was)
        assert await again.find() == first.replay
    await extend(first)
    assert await again.find() == Generate()


async def test_a_marked_retry_without_its_key_joins_the_attempt_that_has_one(store, other_store, key):
    first = Attempt(store, key, "key", idempotency_key="k")
    assert await first.find() == Generate()
    assert await Attempt(other_store, key, "retry").find() == first.join


async def test_an_unmarked_repeat_is_a_sibling_unless_the_answer_was_seen_undelivered(store, other_store, key):
    first, again = Attempt(store, key), [Attempt(other_store, key) for _ in range(6)]
    assert await first.find() == Generate()
    assert await again[0].find() == Generate()
    await first.commit()
    assert await again[1].find() == Generate()  # not marked yet, its worker lives: as good as running
    await first.delivered(was=False)
    assert await again[2].find() == first.replay
    assert await again[3].find() == Generate()  # the one before is delivering it
    await first.delivered(was=True)
    assert await again[4].find() == Generate()
    await extend(first)
    assert await again[5].find() == Generate()


async def test_an_answer_whose_worker_died_before_it_was_marked_is_replayed_once_to_an_unmarked_repeat(
    store, other_store, key
):
    first = await answered(store, key)
    await die(store)
    one, two = (Attempt(other_store, key) for _ in range(2))
    assert await one.find() == first.replay
    assert await two.find() == Generate()


async def test_only_an_undelivered_answer_is_found_by_a_first_turn_that_may_be_any_of_many(store, other_store, key):
    first = await answered(store, key)
    again = Attempt(other_store, key, "asked")
    assert await again.find() == Generate()
    assert await store._client.exists(keys.Tree(key.tenant, key.session_id).attempts(key.session_id)) == 0
    await first.delivered(was=False)
    assert await again.find() == first.replay


async def test_an_undelivered_answer_goes_before_a_running_one_and_that_before_a_delivered_one(store, other_store, key):
    old = await answered(store, key, delivered=True)
    lost, runs = Attempt(store, key), Attempt(store, key)
    assert await lost.find() == await runs.find() == Generate()
    await lost.commit()
    await lost.delivered(was=False)
    again = Attempt(other_store, key, "retry")
    assert await again.find() == lost.replay
    await lost.delivered(was=True)
    assert await again.find() == runs.join
    await store.release(runs.query.lease)
    assert (await again.find()) in (old.replay, lost.replay)


# Leases.


async def test_who_waits_sees_what_becomes_of_the_attempt(store, other_store, key):
    first = Attempt(store, key)
    worker = store._liveness.worker_id
    assert await first.find() == Generate()

    async def outcome() -> str:
        return await other_store.outcome(key, first.turn.turn_id, worker, first.turn.request_hash)

    assert await store.waits(first.query.lease) == 0
    assert await outcome() == await outcome() == "running"
    assert await store.waits(first.query.lease) == 2
    await first.commit()
    assert await outcome() == "committed"
    second = Attempt(store, key)
    await second.find()
    await store.release(second.query.lease)
    assert await other_store.outcome(key, second.turn.turn_id, worker, second.turn.request_hash) == "gone"
    await store.delete(key)
    with pytest.raises(SessionClosed):
        await outcome()


async def test_a_lease_given_up_lets_one_of_many_retries_generate_and_the_others_join_it(store, other_store, key):
    first = Attempt(store, key)
    assert await first.find() == Generate()
    await store.release(first.query.lease)
    retries = [Attempt((store, other_store)[n % 2], key, "retry") for n in range(16)]
    verdicts = await asyncio.gather(*(retry.find() for retry in retries))
    winners = [retry for retry, verdict in zip(retries, verdicts, strict=True) if verdict == Generate()]
    assert len(winners) == 1
    assert verdicts.count(winners[0].join) == 15


async def test_an_attempt_whose_worker_is_gone_is_taken_over_by_one_and_its_commit_is_refused(
    redis_url, store, other_store, key
):
    dead = await RedisStore.connect(redis_url)
    first = Attempt(dead, key)
    assert await first.find() == Generate()
    await die(dead)
    retries = [Attempt((store, other_store)[n % 2], key, "retry") for n in range(8)]
    verdicts = await asyncio.gather(*(retry.find() for retry in retries))
    winner = retries[verdicts.index(Generate())]
    assert verdicts.count(winner.join) == 7
    for _ in range(2):
        with pytest.raises(LeaseLost):
            await first.commit()
    await winner.commit()
    assert [t.turn_id for t in (await store.turns(key)).turns] == [winner.turn.turn_id]
    await dead.close()


@pytest.mark.parametrize("mark", ["key", "retry"])
async def test_a_key_whose_worker_is_gone_is_taken_over_and_the_late_commit_gets_no_second_answer(
    redis_url, other_store, key, mark
):
    dead = await RedisStore.connect(redis_url)
    first = Attempt(dead, key, "key", idempotency_key="k")
    await first.find()
    await die(dead)
    winner = Attempt(other_store, key, mark, idempotency_key="k" if mark == "key" else "")
    assert await winner.find() == Generate()
    with pytest.raises(LeaseLost):
        await first.commit()
    again = Attempt(dead, key, "key", idempotency_key="k")
    assert await again.find() == (winner.join if mark == "key" else Generate())
    await winner.commit()
    if mark == "key":
        assert await again.find() == winner.replay
        with pytest.raises(AlreadyAnswered):
            await again.commit()
    await dead.close()


async def test_a_commit_whose_lease_merely_vanished_is_kept(store, key):
    first = Attempt(store, key, "key", idempotency_key="k")
    await first.find()
    await store._client.delete(keys.Tree(key.tenant, key.session_id).attempts(key.session_id))
    await first.commit()
    assert await Attempt(store, key, "key", idempotency_key="k").find() == first.replay


async def test_nothing_is_left_of_leases_once_turns_are_committed_and_delivered(store, key):
    for n in range(4):
        first = Attempt(store, key, "key" if n % 2 else "none", idempotency_key=f"k{n}" if n % 2 else "")
        await first.find()
        await store.outcome(key, first.turn.turn_id, store._liveness.worker_id, first.turn.request_hash)
        await first.commit()
        await first.delivered(was=True)
    tree = keys.Tree(key.tenant, key.session_id)
    assert await store._client.exists(tree.attempts(key.session_id), tree.delivered) == 0


async def test_leases_of_a_session_that_does_not_exist_yet_expire(store, redis_url, tenant):
    forever = await RedisStore.connect(redis_url, default_ttl_s=0)
    for each, most in ((store, 3_600_000), (forever, keys.ATTEMPTS_TTL_MS)):
        key = SessionKey(tenant, f"s{most}")
        await Attempt(each, key).find()
        left = await store._client.pttl(keys.Tree(tenant, key.session_id).attempts(key.session_id))
        assert most - 60_000 < left <= most
    await forever.close()


async def test_a_find_whose_answer_was_lost_holds_one_lease(redis_server, store, tenant):
    key = SessionKey(tenant, "committed")  # the proxy cuts at this word in a reply
    await store.open_session(key, OPENING)
    async with Proxy(redis_server.port) as proxy:
        cut = await RedisStore.connect(proxy.url)
        first = Attempt(cut, key)
        proxy.cut_after = 1
        assert await first.find() == Generate()
        assert proxy.cuts == 1
        held = await store._client.hgetall(keys.Tree(tenant, key.session_id).attempts(key.session_id))
        assert [value.split()[0].decode() for value in held.values()] == [first.turn.turn_id]
        await cut.close()


async def test_a_find_that_is_cancelled_leaves_no_lease_behind(store, other_store, key):
    first = Attempt(store, key)
    await store._liveness.announce()
    await other_store._client.client_pause(200)
    task = asyncio.create_task(first.find())
    await asyncio.sleep(0.05)
    await end(task)
    await flushed(store)
    assert await Attempt(other_store, key, "retry").find() == Generate()
    with pytest.raises(LeaseLost):  # a command of its own may still have been on its way
        await first.commit()


async def test_a_finished_session_replays_and_leases_nothing(store, other_store, key):
    first = await answered(store, key, delivered=False)
    await store.finish(key)
    assert await Attempt(other_store, key, "retry").find() == first.replay
    other = Attempt(other_store, key, "retry", request_hash=bytes(16))
    found = await other_store.find(other.query)
    assert (found.verdict, found.session.state) == (Generate(), "finished")
    assert await store._client.exists(keys.Tree(key.tenant, key.session_id).attempts(key.session_id)) == 0


async def test_a_full_server_refuses_the_lease_before_anything_is_generated_and_still_replays(redis_binary, tmp_path):
    key = SessionKey("t", "s")
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary) as server:
        store = await RedisStore.connect(server.url)
        first = await answered(store, key, delivered=False)
        await store._client.config_set("maxmemory", 1)
        with pytest.raises(StoreFull):
            await Attempt(store, key, "key", idempotency_key="k").find()
        assert await Attempt(store, key, "retry").find() == first.replay
        assert await Attempt(store, key).find() == first.replay
        await store.close()


# Deliveries.


async def test_deliveries_of_many_sessions_are_written_in_one_call(store, tenant):
    firsts = [await answered(store, SessionKey(tenant, f"s{n}")) for n in range(64)]
    before = (await store._client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    for n, first in enumerate(firsts):
        store.mark(first.key, first.turn.turn_id, delivered=n % 2 == 0)
    await firsts[0].delivered(was=True)
    after = (await store._client.info("commandstats"))["cmdstat_evalsha"]["calls"]
    assert after - before == 1
    told = [(await store.turns(first.key)).delivered[first.turn.turn_id] for first in firsts]
    assert told == [n % 2 == 0 for n in range(64)]


async def test_delivered_is_final_and_an_extension_or_a_reward_says_it_too(store, other_store, key, rng):
    first = await answered(store, key)
    assert await other_store.delivery(key, first.turn.turn_id) is None
    await first.delivered(was=False)
    assert await other_store.delivery(key, first.turn.turn_id) is False
    await extend(first)
    assert await other_store.delivery(key, first.turn.turn_id) is True
    await first.delivered(was=False)
    assert await other_store.delivery(key, first.turn.turn_id) is True
    second = await answered(store, key, delivered=False)
    await store.set_reward(key, 1.0, second.turn.turn_id)
    assert await other_store.delivery(key, second.turn.turn_id) is True


async def test_marks_and_leases_that_could_not_be_written_are_written_when_the_server_is_back(
    redis_binary, tmp_path, monkeypatch
):
    monkeypatch.setattr(attempts, "_AGAIN_S", 0.05)
    key = SessionKey("t", "s")
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary) as server:
        store = await RedisStore.connect(server.url)
        first, second = await answered(store, key), Attempt(store, key)
        await second.find()
        server.kill()
        store.mark(key, first.turn.turn_id, delivered=False)
        store._attempts.release_soon(second.query.lease, fence=False)
        await asyncio.sleep(0.05)
        server.start()
        await flushed(store)
        assert await store.delivery(key, first.turn.turn_id) is False
        assert await store._client.exists(keys.Tree("t", "s").attempts("s")) == 0
        await store.close()


async def test_a_commit_whose_caller_left_is_noted_as_undelivered(store, other_store, key):
    first = Attempt(store, key)
    await first.find()
    task = asyncio.create_task(first.commit())
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    for _ in range(200):
        if await other_store.delivery(key, first.turn.turn_id) is False:
            return
        await asyncio.sleep(0.01)
    pytest.fail("nobody was told")


async def test_first_turns_of_unnamed_sessions_are_known_by_their_request_newest_first(store, tenant):
    request_hash = b""
    for n in range(3):
        first = Attempt(store, SessionKey(tenant, f"s-{n}"))
        await store.commit(first.key, first.turn, SessionOpening(unnamed=True), unnamed=True)
        request_hash = first.turn.request_hash
        await asyncio.sleep(0.002)
    assert await store.asked(tenant, request_hash, 2) == ("s-2", "s-1")
    assert await store.asked(tenant + "x", request_hash, 2) == ()


async def test_a_workers_sign_of_life_says_who_it_is_and_goes_with_it(redis_url, store):
    worker = await RedisStore.connect(redis_url)
    await worker.find(Attempt(worker, SessionKey("t", "s")).query)
    name = keys.alive(worker._liveness.worker_id)
    assert set(json.loads(await store._client.get(name))) == {"host", "pid", "started"}
    assert 0 < await store._client.pttl(name) <= 10_000
    await worker.close()
    assert await store._client.exists(name) == 0
