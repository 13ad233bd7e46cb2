"""A failover by Sentinels under load: what is lost of what was acknowledged, and for how long nothing is."""

from __future__ import annotations

import asyncio
import random
import signal
import time
from pathlib import Path

import pytest

from store import connection
from store.errors import StoreUnavailable
from store.redis import RedisStore
from store.replication import Replication
from store.views import SessionKey
from tests.servers import Watched, leave_behind
from tests.store.building import grown
from tests.store.load import OPENING, load, lost, more, opened

BY_ONE = Replication(replicas=1, timeout_s=0.3)


@pytest.fixture
def servers(redis_binary: str, tmp_path: Path):
    """Deployments that a test may break."""
    with Watched(redis_binary, tmp_path / "watched") as running:
        yield running


async def _fail_over(servers: Watched) -> None:
    """The primary is killed, the replica promoted, and the dead one comes back as a replica of it."""
    promoted = servers.replicas[0]
    servers.primary.signal(signal.SIGKILL)
    promoted.signal(signal.SIGCONT)
    await asyncio.to_thread(servers.wait_for_failover, promoted)
    await asyncio.to_thread(servers.primary.start, "--replicaof", "127.0.0.1", str(promoted.port))


@pytest.mark.parametrize("lagging", [False, True], ids=["in step", "lagging"])
async def test_a_failover_loses_nothing_that_a_replica_had_to_confirm(servers, tenant, capsys, lagging):
    async with opened(servers.url, BY_ONE) as store:
        async with load(store, tenant) as account:
            await more(account, 200)
            if lagging:
                leave_behind(servers.replicas[0], servers.primary)
                await asyncio.sleep(0.7)
            before = account.turns
            await _fail_over(servers)
            await more(account, 200)
        missing = await lost(store, account)
    with capsys.disabled():
        print(f"\nSentinel, replicated, replica {'lagging' if lagging else 'in step'}: {len(missing)} lost; {account}")
    assert not missing
    assert not account.orphans
    assert bool(account.unknown) or not lagging
    assert account.turns > before


async def test_a_failover_to_a_lagging_replica_loses_what_only_the_primary_had(servers, tenant, capsys):
    """Without waiting for replicas: reported, and met as a missing parent, never spliced over."""
    async with opened(servers.url) as store:
        async with load(store, tenant) as account:
            await more(account, 200)
            leave_behind(servers.replicas[0], servers.primary)
            frozen = time.monotonic()
            await more(account, 200)
            await _fail_over(servers)
            await more(account, 50)
        missing = await lost(store, account)
    with capsys.disabled():
        print(f"\nSentinel, aof, replica lagging: {len(missing)} lost, {account.orphans} conversations; {account}")
    assert missing
    assert account.orphans
    assert all(account.when[turn] > frozen - 0.2 for turn in missing)


async def test_a_worker_starts_and_goes_on_with_two_of_three_sentinels(servers, tenant):
    servers.sentinels[0].stop()
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 2)
    async with opened(servers.url) as store:
        for turn in conversation.turns:
            await store.commit(key, turn, OPENING)
        servers.sentinels[1].stop()
        assert (await store.turns(key)).turns == conversation.turns


async def test_an_unknown_service_is_unavailable_within_the_bound(watched, monkeypatch):
    monkeypatch.setattr(connection, "_PATIENCE_S", 1.0)
    for url in (watched.url.replace("rollouts", "others"), "redis+sentinel://127.0.0.1:1/rollouts"):
        began = time.monotonic()
        with pytest.raises(StoreUnavailable):
            await RedisStore.connect(url)
        assert time.monotonic() - began < 3
