"""A logical database of the shared server that only these tests use, empty at the start of each."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from redis.asyncio import Redis

_DATABASE = 9


@pytest.fixture
def database_url(redis_url: str) -> str:
    """The shared server, another database."""
    return f"{redis_url}{'&' if '?' in redis_url else '?'}db={_DATABASE}"


@pytest.fixture
async def database(database_url: str) -> AsyncIterator[Redis]:
    """A connection that answers in text."""
    connection = Redis.from_url(database_url, decode_responses=True)
    await connection.flushdb()
    yield connection
    await connection.aclose()
