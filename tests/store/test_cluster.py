"""A cluster whose nodes fail and whose slots move, under load."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from redis.cluster import key_slot

from api.migrate import migrate, missing
from store import connection, keys
from store.errors import StoreUnavailable
from store.replication import Replication
from store.views import SessionKey
from tests.servers import Shards, leave_behind, until
from tests.store.building import grown
from tests.store.load import OPENING, Account, load, lost, more, opened

FIRST = range(5461)  # the slots of the first primary
BY_ONE = Replication(replicas=1, timeout_s=0.3)


@pytest.fixture
def servers(redis_binary: str, tmp_path: Path):
    """A cluster that a test may break."""
    with Shards(redis_binary, tmp_path / "shards") as running:
        yield running


async def _fail_over(servers: Shards) -> None:
    """A primary is killed, its replica promoted, and the dead one comes back as a replica of it."""
    promoted = servers.replicas[0]
    servers.primaries[0].signal(signal.SIGKILL)
    promoted.signal(signal.SIGCONT)
    await asyncio.to_thread(until, lambda: promoted.says("replication", "role") == "master", "the replica was promoted")
    await asyncio.to_thread(servers.primaries[0].start)


async def _soon(holds: Callable[[], object], account: Account) -> None:
    for _ in range(500):
        if holds():
            return
        await asyncio.sleep(0.02)
    pytest.fail(f"not within ten seconds: {account}; last refusal: {account.last}")


def _on(node_slots: range, account: Account) -> list[SessionKey]:
    """The sessions of a load whose tree is in these slots."""
    return [key for key in account.acknowledged if slot_of(key) in node_slots]


def slot_of(key: SessionKey) -> int:
    return int(key_slot(keys.Tree(key.tenant, key.session_id).session(key.session_id).encode()))


def gap_s(account: Account, sessions: list[SessionKey]) -> float:
    """The longest time in which none of these sessions was acknowledged anything."""
    at = sorted(account.when[t.turn_id] for key in sessions for t in account.acknowledged[key].turns)
    return max(later - earlier for earlier, later in pairwise(at))


@pytest.mark.parametrize("lagging", [False, True], ids=["in step", "lagging"])
async def test_a_failover_loses_nothing_that_a_replica_had_to_confirm(servers, tenant, capsys, lagging):
    async with opened(servers.url, BY_ONE) as store:
        async with load(store, tenant) as account:
            await more(account, 200)
            if lagging:
                leave_behind(servers.replicas[0], servers.primaries[0])
                await asyncio.sleep(0.7)
            await _fail_over(servers)
            await asyncio.to_thread(servers.wait_until_well)
            held = {key: len(account.acknowledged[key].turns) for key in _on(FIRST, account)}
            await _soon(lambda: all(len(account.acknowledged[key].turns) > n for key, n in held.items()), account)
        missing = await lost(store, account)
    its = _on(FIRST, account)
    with capsys.disabled():
        state = "lagging" if lagging else "in step"
        print(
            f"\ncluster, replicated, replica {state}: {len(missing)} lost; {account}; {gap_s(account, its):.2f} s there"
        )
    assert held
    assert all(len(account.acknowledged[key].turns) > n for key, n in held.items())
    assert not missing
    assert not account.orphans
    assert bool(account.unknown) or not lagging


async def test_a_failover_to_a_lagging_replica_loses_what_only_the_primary_had(servers, tenant, capsys):
    async with opened(servers.url) as store:
        async with load(store, tenant) as account:
            await more(account, 200)
            leave_behind(servers.replicas[0], servers.primaries[0])
            frozen = time.monotonic()
            await more(account, 300)
            await _fail_over(servers)
            await _soon(lambda: account.orphans, account)
        missing = await lost(store, account)
    with capsys.disabled():
        print(f"\ncluster, aof, replica lagging: {len(missing)} lost, {account.orphans} conversations; {account}")
    assert missing
    assert account.orphans
    assert all(account.when[turn] > frozen - 0.2 for turn in missing)


@pytest.mark.parametrize("replication", [None, BY_ONE], ids=["aof", "replicated"])
async def test_slots_that_move_under_load_are_not_noticed(shards, tenant, capsys, replication):
    async with opened(shards.url, replication) as store:
        async with load(store, tenant, conversations=8) as account:
            await more(account, 100)
            for session in sorted(account.acknowledged, key=slot_of)[:4]:
                slot = slot_of(session)
                away = next(node for node in shards.primaries if node is not shards.owner(slot))
                await asyncio.to_thread(shards.move, slot, away, pause_s=0.1)
            await more(account, 200)
        missing = await lost(store, account)
    with capsys.disabled():
        print(f"\ncluster, four slots moved: {len(missing)} lost; {account}")
    assert not missing
    assert not account.orphans
    assert not account.unavailable
    assert not account.unknown


async def test_a_slot_half_moved_is_waited_for(shards, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 3)
    to = next(node for node in shards.primaries if node is not shards.owner(slot_of(key)))
    async with opened(shards.url) as store:
        await store.commit(key, conversation.turns[0], OPENING)
        moving = asyncio.create_task(asyncio.to_thread(shards.move, slot_of(key), to, pause_s=0.3))
        await asyncio.sleep(0.4)
        read = asyncio.create_task(store.turns(key))  # a transaction
        await store.commit(key, conversation.turns[1], OPENING)
        assert len((await read).turns) >= 1
        await moving
        await store.commit(key, conversation.turns[2], OPENING)
        assert (await store.turns(key)).turns == conversation.turns


async def test_a_node_without_the_script_is_sent_it(shards, tenant):
    async with opened(shards.url) as store:
        for n in range(12):
            key, conversation = SessionKey(tenant, f"s{n}"), grown(random.Random(n), 2)
            await store.commit(key, conversation.turns[0], OPENING)
            shards.owner(slot_of(key)).ask("SCRIPT FLUSH")
            await store.commit(key, conversation.turns[1], OPENING)
            assert (await store.find(conversation.query(key))).lineage is not None


async def test_migrations_run_on_a_cluster(shards):
    await migrate(shards.url)
    assert await missing(shards.url) == ()


async def test_a_shard_that_is_gone_is_unavailable_within_the_bound_and_the_others_serve(servers, tenant, monkeypatch):
    monkeypatch.setattr(connection, "_PATIENCE_S", 3.0)
    # New sessions of a tenant also need the shard that lists them.
    tenants = (f"{tenant}{n}" for n in range(40))
    tenant = next(name for name in tenants if key_slot(keys.listing(name).encode()) not in FIRST)
    rng, sessions = random.Random(1), [SessionKey(tenant, f"s{n}") for n in range(40)]
    gone, kept = (next(key for key in sessions if (slot_of(key) < FIRST.stop) is first) for first in (True, False))
    for node in servers.nodes:
        node.ask("CONFIG SET", "cluster-require-full-coverage", "no")
    async with opened(servers.url) as store:
        for node in (servers.replicas[0], servers.primaries[0]):
            node.stop()
        began = time.monotonic()
        await store.commit(kept, grown(rng, 1).head, OPENING)
        with pytest.raises(StoreUnavailable):
            await store.commit(gone, grown(rng, 1).head, OPENING)
        assert time.monotonic() - began < 5
