"""What happens to turns when connections, callers, scripts and servers fail under them."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import numpy as np
import pytest
from redis import exceptions as theirs

from store import connection
from store.embedded import EmbeddedRedis
from store.errors import EvictionEnabled, StoreCorrupt, StoreError, StoreFull, StoreMisconfigured, StoreUnavailable
from store.redis import RedisStore
from store.views import SessionKey, SessionOpening
from tests.store.building import Conversation, grown
from tests.store.proxy import Proxy

OPENING = SessionOpening()


def all_subclasses(of: type) -> set[type]:
    return {of, *(below for kind in of.__subclasses__() for below in all_subclasses(kind))}


@pytest.mark.parametrize("lost", ["cut_after", "cut_before"])
async def test_a_commit_whose_connection_was_cut_lands_exactly_once(redis_server, tenant, lost):
    rng, key = random.Random(3), SessionKey(tenant, "s")
    async with Proxy(redis_server.port) as proxy:
        store = await RedisStore.connect(proxy.url)
        conversation = Conversation()
        for n in range(24):
            conversation = conversation.then(rng)
            setattr(proxy, lost, int(n % 3 == 0))
            await store.commit(key, conversation.head, OPENING, idempotency_key=f"k{n}")
        forest = await store.turns(key)
        found = await store.find(conversation.query(key))
        await store.close()
    assert proxy.cuts == 8
    assert forest.turns == conversation.turns
    assert (forest.session.turns, forest.session.tokens) == (24, len(conversation.tokens))
    assert len(found.candidates) == 1
    assert np.array_equal(found.lineage.tokens, conversation.tokens)


async def test_opening_a_session_whose_reply_was_lost_still_tells_that_it_was_made(redis_server, tenant):
    async with Proxy(redis_server.port) as proxy:
        store = await RedisStore.connect(proxy.url)
        _, created = await store.open_session(SessionKey(tenant, "s"), SessionOpening(metadata={"is": "committed"}))
        proxy.cut_after = 1
        _, created = await store.open_session(SessionKey(tenant, "t"), SessionOpening(metadata={"is": "committed"}))
        await store.close()
    assert (proxy.cuts, created) == (1, True)


async def test_a_commit_goes_through_though_its_caller_is_cancelled(store, other_store, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 1)
    task = asyncio.create_task(store.commit(key, conversation.head, OPENING))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    for _ in range(200):
        if (await other_store.find(conversation.query(key))).candidates:
            return
        await asyncio.sleep(0.01)
    pytest.fail("the commit was given up")


async def test_a_server_that_forgot_the_scripts_is_given_them_again(store, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 2)
    for turn in conversation.turns:
        await store._client.script_flush()
        await store.commit(key, turn, OPENING)
    await store._client.script_flush()
    assert (await store.find(conversation.query(key))).lineage is not None


async def test_everything_is_there_after_a_kill_between_commit_and_find(redis_binary, tmp_path: Path):
    key, conversation = SessionKey("t", "s"), grown(random.Random(1), 3)
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary) as server:
        store = await RedisStore.connect(server.url)
        for turn in conversation.turns:
            await store.commit(key, turn, OPENING)
            server.kill()
            restart = asyncio.create_task(asyncio.to_thread(server.start))
            found = await store.find(Conversation(messages=conversation.messages).query(key))
            await restart
        assert np.array_equal(found.lineage.tokens, conversation.tokens)
        assert (await store.turns(key)).turns == conversation.turns
        await store.close()


async def test_a_worker_whose_server_lost_its_data_does_not_trust_its_own_memory(redis_binary, tmp_path: Path):
    key, conversation = SessionKey("t", "s"), grown(random.Random(1), 3)
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary) as server:
        store = await RedisStore.connect(server.url)
        for turn in conversation.turns:
            await store.commit(key, turn, OPENING)
        await store._client.flushall()
        found = await store.find(conversation.query(key))
        await store.close()
    assert (found.session, found.lineage) == (None, None)


async def test_a_full_server_refuses_turns_and_still_answers_and_deletes(redis_binary, tmp_path: Path):
    key, rng = SessionKey("t", "s"), random.Random(1)
    conversation = grown(rng, 2)
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary) as server:
        store = await RedisStore.connect(server.url)
        for turn in conversation.turns:
            await store.commit(key, turn, OPENING)
        await store._client.config_set("maxmemory", 1)
        more = conversation.then(rng)
        with pytest.raises(StoreFull):
            await store.commit(key, more.head, OPENING)
        assert (await store.find(more.query(key))).session.turns == 2
        await store._client.config_set("maxmemory", 0)
        await store.commit(key, more.head, OPENING)
        await store._client.config_set("maxmemory", 1)
        await store.delete(key)
        await store.close()


@pytest.mark.parametrize("policy", ["allkeys-lru", "volatile-ttl"])
async def test_a_server_that_may_evict_sessions_is_refused_with_the_remedy(redis_binary, tmp_path: Path, policy):
    arguments = ("--maxmemory-policy", policy)
    with (
        EmbeddedRedis(tmp_path / "redis", binary=redis_binary, arguments=arguments) as server,
        pytest.raises(EvictionEnabled, match=f"{policy}.*CONFIG SET maxmemory-policy noeviction"),
    ):
        await RedisStore.connect(server.url)


async def test_a_server_that_is_not_there_is_said_to_be_unavailable(tmp_path: Path):
    with pytest.raises(StoreUnavailable):
        await RedisStore.connect(f"unix://{tmp_path}/nobody.sock")


async def test_a_read_only_replica_is_unavailable_for_turns(redis_server, redis_binary, tmp_path: Path):
    arguments = ("--replicaof", "127.0.0.1", str(redis_server.port))
    with EmbeddedRedis(tmp_path / "redis", binary=redis_binary, arguments=arguments) as server:
        store = await RedisStore.connect(server.url)
        with pytest.raises(StoreUnavailable):
            await store.commit(SessionKey("t", "s"), grown(random.Random(1), 1).head, OPENING)
        await store.close()


_MEANINGS: dict[type[StoreError] | None, set[str]] = {
    StoreFull: {"OutOfMemoryError"},
    StoreMisconfigured: {
        *("AuthenticationError", "AuthenticationWrongNumberOfArgsError", "AuthorizationError"),
        *("ExternalAuthProviderError", "NoPermissionError", "ModuleError"),
    },
    StoreUnavailable: {
        *("ConnectionError", "TimeoutError", "BusyLoadingError", "MaxConnectionsError", "ReadOnlyError"),
        *("ClusterError", "ClusterDownError", "MasterDownError", "TryAgainError", "ClusterCrossSlotError"),
        *("AskError", "MovedError", "NoScriptError", "ExecAbortError", "InvalidResponse", "ResponseError"),
        *("RedisClusterException", "SlotNotCoveredError", "CrossSlotTransactionError", "InvalidPipelineStack"),
        "NoSuchFieldsetError",
    },
    None: {"RedisError", "DataError", "PubSubError", "WatchError", "LockError", "LockNotOwnedError"},  # our own faults
}


def test_every_error_of_the_client_library_has_a_meaning_here():
    kinds = {
        kind
        for root in (theirs.RedisError, theirs.RedisClusterException)
        for kind in all_subclasses(root)
        if kind.__module__ == theirs.__name__
    }
    for kind in kinds:
        error = kind.__new__(kind)
        Exception.__init__(error, "words")
        meaning = connection.ours(error)
        expected = [ours for ours, names in _MEANINGS.items() if kind.__name__ in names]
        assert expected == [type(meaning) if meaning else None], kind
    assert isinstance(connection.ours(theirs.ResponseError("OOM full")), StoreFull)
    assert isinstance(connection.ours(theirs.ResponseError("WRONGTYPE no")), StoreCorrupt)
