"""What must not grow without bound: keys and memory in Redis; memory, files and connections of a worker."""

from __future__ import annotations

from typing import Any

import msgspec
import psutil
from redis.asyncio import Redis

from tests.faults.soak.deployment import Deployment

_MIB = 1 << 20


class Size(msgspec.Struct, frozen=True, kw_only=True):
    """One look. The worker is the one that is never killed."""

    at_s: float
    turns: int
    keys: int
    redis_mib: float
    redis_clients: int
    worker_mib: float
    worker_files: int
    client_connections: int
    driver_mib: float


async def keys(deployment: Deployment) -> int:
    """How many keys there are. Counted, which removes what has expired: the server itself takes its time over that."""
    async with Redis.from_url(deployment.redis.url, socket_timeout=5) as client:
        return sum([1 async for _ in client.scan_iter(count=1000)])


async def measured(deployment: Deployment, at_s: float, turns: int) -> Size | None:
    """Look now; None while Redis is away."""
    client: Any = Redis.from_url(deployment.redis.url, socket_timeout=5)
    try:
        info = await client.info("everything")
        keys = await client.dbsize()
    except Exception as error:  # noqa: BLE001 - killed on purpose: the next look will do
        del error
        return None
    finally:
        await client.aclose()
    worker = psutil.Process(deployment.workers[0].pid)
    return Size(
        at_s=round(at_s, 1),
        turns=turns,
        keys=keys,
        redis_mib=round(info["used_memory"] / _MIB, 1),
        redis_clients=info["connected_clients"] - 1,
        worker_mib=round(worker.memory_info().rss / _MIB, 1),
        worker_files=worker.num_fds(),
        client_connections=deployment.edge.open,
        driver_mib=round(psutil.Process().memory_info().rss / _MIB, 1),
    )
