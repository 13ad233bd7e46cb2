"""The way to the server: how a client is made of a URL, what its errors become, what the server says of itself.

redis-py re-sends a command whose reply it did not get, so every command of the store is safe to repeat.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from redis import exceptions as theirs
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.backoff import ExponentialWithJitterBackoff

from store.errors import (
    EvictionEnabled,
    ServerTooOld,
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)
from store.views import ServerFacts

_CONNECTIONS = 64  # a worker; more turns than this wait for one
_ANSWER_S = 5.0
_CONNECT_S = 2.0
_PATIENCE_S = 10.0  # for one call with all its repeats: a server that restarts is ridden out
_REPEATS = 10  # with the waits below 2 s or so where the server is not there at all

_OLDEST = (7, 0)  # script flags

# First match wins: subclasses stand above their parents.
_TABLE: tuple[tuple[type[Exception], type[StoreError]], ...] = (
    (theirs.OutOfMemoryError, StoreFull),
    # Wrong credentials do not come right by waiting, though redis-py counts them among connection errors.
    (theirs.AuthenticationError, StoreMisconfigured),
    (theirs.AuthenticationWrongNumberOfArgsError, StoreMisconfigured),
    (theirs.AuthorizationError, StoreMisconfigured),
    (theirs.ExternalAuthProviderError, StoreMisconfigured),
    (theirs.NoPermissionError, StoreMisconfigured),
    (theirs.ModuleError, StoreMisconfigured),
    # Down, loading, out of connections, failing over, moving slots.
    (theirs.ConnectionError, StoreUnavailable),
    (theirs.TimeoutError, StoreUnavailable),
    (theirs.ReadOnlyError, StoreUnavailable),
    (theirs.ClusterError, StoreUnavailable),
    (theirs.RedisClusterException, StoreUnavailable),
    (theirs.AskError, StoreUnavailable),
    (theirs.TryAgainError, StoreUnavailable),
    (theirs.NoScriptError, StoreUnavailable),
    (theirs.ExecAbortError, StoreUnavailable),
    (theirs.InvalidResponse, StoreUnavailable),
)
# Answers that redis-py has no class for, by the protocol's own code word.
_WORDS: Mapping[str, type[StoreError]] = {
    "OOM": StoreFull,
    "MISCONF": StoreUnavailable,  # its disk is full
    "NOREPLICAS": StoreUnavailable,
    "BUSY": StoreUnavailable,
    "MASTERDOWN": StoreUnavailable,
    "WRONGTYPE": StoreCorrupt,
}


def open_client(url: str) -> Redis:
    """A client of `redis://`, `rediss://` or `unix://`. Connects on first use; raises ValueError on other URLs."""
    pool = BlockingConnectionPool.from_url(
        url,
        max_connections=_CONNECTIONS,
        timeout=_ANSWER_S,
        socket_timeout=_ANSWER_S,
        socket_connect_timeout=_CONNECT_S,
        health_check_interval=15,
        retry=Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), _REPEATS),
    )
    return Redis.from_pool(pool)


def ours(error: Exception) -> StoreError | None:
    """What an error of redis-py means to a caller of the store; None when it is a fault of our own code."""
    for kind, meaning in _TABLE:
        if isinstance(error, kind):
            return meaning(str(error))
    if isinstance(error, theirs.ResponseError):
        meaning = _WORDS.get(str(error).split(" ", 1)[0], StoreUnavailable)
        return StoreCorrupt("redis", str(error)) if meaning is StoreCorrupt else meaning(str(error))
    return None


@asynccontextmanager
async def translated() -> AsyncIterator[None]:
    """Bounds what happens inside, and turns redis-py's errors into the store's."""
    try:
        async with asyncio.timeout(_PATIENCE_S):
            yield
    except TimeoutError as error:
        raise StoreUnavailable(f"no answer within {_PATIENCE_S:.0f} s") from error
    except (theirs.RedisError, theirs.RedisClusterException, OSError) as error:
        meaning = ours(error) if not isinstance(error, OSError) else StoreUnavailable(str(error))
        if meaning is None:
            raise
        raise meaning from error


async def server_facts(client: Redis) -> ServerFacts:
    """What the server says of itself. Raises ServerTooOld, EvictionEnabled, StoreError."""
    async with translated():
        said: Mapping[str, Any] = await client.info("everything")
        fsync = await _append_fsync(client)
    facts = ServerFacts(
        product="valkey" if "valkey_version" in said else "redis",
        version=str(said.get("valkey_version") or said["redis_version"]),
        eviction_policy=str(said["maxmemory_policy"]),
        append_only=bool(said.get("aof_enabled")),
        append_fsync=fsync,
        replicas=int(said.get("connected_slaves", 0)),
    )
    spoken = str(said["redis_version"])  # Valkey tells here which Redis it speaks as
    if tuple(int(part) for part in spoken.split(".")[:2]) < _OLDEST:
        raise ServerTooOld(spoken)
    # A server without a limit is refused too: the limit may be set later, the policy then takes effect at once.
    if facts.eviction_policy != "noeviction":
        raise EvictionEnabled(facts.eviction_policy)
    return facts


async def _append_fsync(client: Redis) -> str:
    """Managed servers forbid CONFIG: then it is not known."""
    try:
        said: Mapping[Any, Any] = await client.config_get("appendfsync")
    except theirs.ResponseError:
        return ""
    return str(said.get("appendfsync", ""))
