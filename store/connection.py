"""The way to the server: how a client is made of a URL, and what its errors become.

redis-py re-sends a command whose reply it did not get, so every command of the store is safe to repeat. Everything is
bounded: connections, the wait for one, each answer, and a call with all its repeats.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import asynccontextmanager
from typing import Any

from redis import exceptions as theirs
from redis.asyncio import BlockingConnectionPool, Redis
from redis.asyncio.retry import Retry
from redis.asyncio.sentinel import (
    Sentinel,
    SentinelConnectionPool,
    SentinelManagedConnection,
    SentinelManagedSSLConnection,
)
from redis.backoff import ExponentialWithJitterBackoff, NoBackoff

from store.address import Address, parse_address
from store.cluster import Cluster
from store.errors import (
    StoreCorrupt,
    StoreError,
    StoreFull,
    StoreMisconfigured,
    StoreUnavailable,
)

Client = Redis | Cluster

_CONNECTIONS = 64  # a worker; more turns than this wait for one
_ANSWER_S = 5.0
_CONNECT_S = 2.0
_PATIENCE_S = 10.0  # for one call with all its repeats: a server that restarts is ridden out
_REPEATS = 10  # with the waits below 2 s or so where the server is not there at all
_WATCHED_REPEATS = 60  # a failover by Sentinels is ridden out: as often as patience allows
_SENTINEL_S = 0.5  # for one of several: the next one is asked soon

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


def open_client(url: str) -> Client:
    """A client of a server, of what Sentinels watch, or of a cluster; `store.address` has the forms.

    Connects on first use. Raises ValueError on other URLs.
    """
    address = parse_address(url)
    if address.kind == "cluster":
        return Cluster(
            address.hosts,
            connections=_CONNECTIONS,
            patience_s=_PATIENCE_S,
            retry=_repeated(),
            **_bounds(),
            **(address.options or {}),
        )
    if address.kind == "sentinel":
        return Redis.from_pool(_sentinel_pool(address))
    pool = BlockingConnectionPool.from_url(
        url, max_connections=_CONNECTIONS, timeout=_ANSWER_S, retry=_repeated(), **_bounds()
    )
    return Redis.from_pool(pool)


def _bounds() -> dict[str, Any]:
    return {"socket_timeout": _ANSWER_S, "socket_connect_timeout": _CONNECT_S, "health_check_interval": 15}


def _repeated(times: int = _REPEATS) -> Retry:
    return Retry(ExponentialWithJitterBackoff(base=0.02, cap=0.5), times)


class _AtPrimary:
    """Asks the Sentinels at every connect: redis-py 8.1 does so at the first, then goes on to where the primary was."""

    async def _connect(self: Any) -> None:
        self.host, self.port = await self.connection_pool.get_master_address()
        await super()._connect()  # type: ignore[misc]

    async def _connect_retry(self: Any) -> None:
        await self.connect_check_health(retry_socket_connect=False)


class _Watched(_AtPrimary, SentinelManagedConnection):
    """A connection to the primary of the moment."""


class _WatchedTls(_AtPrimary, SentinelManagedSSLConnection):
    """The same, encrypted."""


class _WatchedPool(SentinelConnectionPool, BlockingConnectionPool):
    """Connections to the primary of the moment: bounded, where redis-py's own would refuse the one too many."""

    async def aclose(self) -> None:
        """The Sentinels' connections are this pool's affair too."""
        await super().aclose()
        await self.sentinel_manager.aclose()


def _sentinel_pool(address: Address) -> _WatchedPool:
    options = dict(address.options or {})
    connection = _WatchedTls if options.pop("ssl", False) else _Watched
    asked = {
        "socket_timeout": _SENTINEL_S,
        "socket_connect_timeout": _SENTINEL_S,
        "retry": Retry(NoBackoff(), 0),
        **(address.sentinel_options or {}),
    }
    return _WatchedPool(  # type: ignore[no-untyped-call]
        address.service,
        Sentinel(address.hosts, sentinel_kwargs=asked),  # type: ignore[no-untyped-call]
        max_connections=_CONNECTIONS,
        timeout=_ANSWER_S,
        retry=_repeated(_WATCHED_REPEATS),
        connection_class=connection,
        **_bounds(),
        **options,
    )


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
