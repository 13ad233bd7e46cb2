"""Fixtures that more than one folder uses: a private Redis server and a store on it."""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings

from store.embedded import EmbeddedRedis, find_server
from store.errors import NoServer
from store.redis import RedisStore

# Property tests say the same every time, however slow the machine is.
settings.register_profile("repeatable", derandomize=True, deadline=None)
settings.load_profile("repeatable")


@dataclass(frozen=True)
class RedisServer:
    """A private server, on a Unix socket and on a loopback port."""

    embedded: EmbeddedRedis
    port: int

    @property
    def url(self) -> str:
        return self.embedded.url

    @property
    def tcp_url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"


def free_port() -> int:
    """A loopback port that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="session")
def redis_binary() -> str:
    """A Redis or Valkey binary; missing, it skips at home and fails in CI."""
    try:
        return find_server()
    except NoServer as error:
        if os.environ.get("CI"):
            pytest.fail(str(error))
        pytest.skip(str(error))


@pytest.fixture(scope="session")
def redis_server(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RedisServer]:
    """One server for the whole run; tests keep apart by `tenant`."""
    port = free_port()
    arguments = ("--bind", "127.0.0.1", "--port", str(port))
    with EmbeddedRedis(tmp_path_factory.mktemp("redis"), binary=redis_binary, arguments=arguments) as embedded:
        yield RedisServer(embedded, port)


@pytest.fixture(scope="session")
def redis_url(redis_server: RedisServer) -> str:
    return redis_server.url


@pytest.fixture
def tenant() -> str:
    """A tenant that no other test uses."""
    return f"tenant-{secrets.token_hex(6)}"


@pytest.fixture
async def store(redis_url: str) -> AsyncIterator[RedisStore]:
    """A worker's store."""
    opened = await RedisStore.connect(redis_url, default_ttl_s=3600, cache_bytes=64 * 1024 * 1024)
    yield opened
    await opened.close()


@pytest.fixture
async def other_store(redis_url: str) -> AsyncIterator[RedisStore]:
    """Another worker's store on the same server: nothing of the first one's memory."""
    opened = await RedisStore.connect(redis_url, default_ttl_s=3600, cache_bytes=64 * 1024 * 1024)
    yield opened
    await opened.close()
