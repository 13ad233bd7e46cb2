"""What the servers say of themselves: every primary, and the replicas that may take its place."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

from redis import exceptions as theirs
from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode
from redis.asyncio.connection import SSLConnection
from redis.asyncio.sentinel import SentinelConnectionPool

from store.cluster import Cluster
from store.connection import Client, translated
from store.durability import FSYNCS, PAUSED
from store.errors import EvictionEnabled, ServerTooOld, StoreUnavailable
from store.views import ServerFacts

_OLDEST = (7, 0)  # script flags
_REPLICA_S = 2.0  # for one that may be away; the primary is waited for

_Ask = Callable[..., Awaitable[Any]]
_AWAY = (theirs.RedisError, theirs.RedisClusterException, OSError, TimeoutError)


async def server_facts(client: Client) -> ServerFacts:
    """What all of them give: the weakest of each. Raises ServerTooOld, EvictionEnabled, StoreError."""
    async with translated():
        if isinstance(client, Cluster):
            await client.initialize()
            primaries = [_of_node(client, node) for node in client.get_primaries()]
            replicas = [_of_node(client, node) for node in client.get_replicas()]
        else:
            primaries, replicas = [client.execute_command], []
        leading = await asyncio.gather(*(_facts(ask) for ask in primaries))
        following = [*await _reached(replicas), *await _watched_replicas(client)]
    return _weakest(leading, following)


def _of_node(client: Cluster, node: ClusterNode) -> _Ask:
    async def ask(*command: str) -> Any:
        [answer] = await client.converse(node, [(command, {})])
        if isinstance(answer, Exception):
            raise answer
        return answer

    return ask


async def _reached(replicas: Sequence[_Ask]) -> list[ServerFacts]:
    """Of those that answer: one that is away now does not keep a worker from serving."""
    found = await asyncio.gather(
        *(asyncio.wait_for(_facts(ask), _REPLICA_S) for ask in replicas), return_exceptions=True
    )
    for outcome in found:
        if isinstance(outcome, BaseException) and not isinstance(outcome, _AWAY):
            raise outcome
    return [outcome for outcome in found if isinstance(outcome, ServerFacts)]


async def _watched_replicas(client: Client) -> list[ServerFacts]:
    """Of those that Sentinels may promote."""
    pool = None if isinstance(client, Cluster) else client.connection_pool
    if not isinstance(pool, SentinelConnectionPool):
        return []
    options = {
        name: value
        for name, value in pool.connection_kwargs.items()
        if name in {"username", "password", "db"} or name.startswith("ssl_")
    }
    hosts = await pool.sentinel_manager.discover_slaves(pool.service_name)
    ssl = issubclass(pool.connection_class, SSLConnection)
    links = [Redis(host=str(host), port=int(port), ssl=ssl, **options) for host, port in hosts]
    try:
        return await _reached([link.execute_command for link in links])
    finally:
        await asyncio.gather(*(link.aclose() for link in links), return_exceptions=True)


async def _facts(ask: _Ask) -> ServerFacts:
    """Of one server."""
    said: Mapping[str, Any] = await ask("INFO", "everything")
    spoken = str(said["redis_version"])  # Valkey tells here which Redis it speaks as
    if tuple(int(part) for part in spoken.split(".")[:2]) < _OLDEST:
        raise ServerTooOld(spoken)
    if int(said.get("loading", 0)):
        raise StoreUnavailable("the server is loading its data")  # and says until then that it keeps no file
    policy = str(said.get("maxmemory_policy", "unknown"))
    # A server without a limit is refused too: the limit may be set later, the policy then takes effect at once.
    if policy != "noeviction":
        raise EvictionEnabled(policy)
    return ServerFacts(
        product="valkey" if "valkey_version" in said else "redis",
        version=str(said.get("valkey_version") or spoken),
        eviction_policy=policy,
        append_only=bool(said.get("aof_enabled")),
        append_fsync=await _append_fsync(ask),
        replicas=_online(said),
    )


def _online(said: Mapping[str, Any]) -> int:
    """Connected is not enough: a replica that is still being filled acknowledges nothing."""
    listed = [said.get(f"slave{n}") for n in range(int(said.get("connected_slaves", 0)))]
    return sum(isinstance(one, Mapping) and one.get("state") == "online" for one in listed)


async def _append_fsync(ask: _Ask) -> str:
    """Managed servers forbid CONFIG: then it is not known."""
    try:
        said: Mapping[Any, Any] = await ask("CONFIG GET", "appendfsync", "no-appendfsync-on-rewrite")
    except theirs.ResponseError:
        return ""
    words = {_text(name): _text(value) for name, value in said.items()}
    fsync = words.get("appendfsync", "")
    return PAUSED if (fsync, words.get("no-appendfsync-on-rewrite")) == ("always", "yes") else fsync


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)


def _weakest(primaries: Sequence[ServerFacts], replicas: Sequence[ServerFacts]) -> ServerFacts:
    every = (*primaries, *replicas)
    return replace(
        primaries[0],
        append_only=all(one.append_only for one in every),
        append_fsync=min((one.append_fsync for one in every), key=FSYNCS.index),
        replicas=min(one.replicas for one in primaries),
    )
