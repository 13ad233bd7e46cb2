"""Fixtures that more than one folder uses: a private Redis server and a store on it.

Tests marked `topologies` run three times: on that server, on one that Sentinels watch, and on a cluster.
"""

from __future__ import annotations

import os
import secrets
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from dataclasses import dataclass

import pytest
from hypothesis import settings

from store.embedded import EmbeddedRedis, find_server
from store.errors import NoServer
from store.redis import RedisStore
from tests.servers import Shards, Watched, free_port

TOPOLOGIES = ("standalone", "sentinel", "cluster")

# A suite that a script runs in its background has SIGINT ignored, and so would have every server that it starts.
if threading.current_thread() is threading.main_thread():
    signal.signal(signal.SIGINT, signal.default_int_handler)

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


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "topologies: runs on a single server, behind Sentinels and on a cluster")


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    if metafunc.definition.get_closest_marker("topologies") and "redis_url" in metafunc.fixturenames:
        metafunc.parametrize("redis_url", TOPOLOGIES, indirect=True, scope="session")


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
def watched(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Watched]:
    """Three Sentinels, a primary and a replica, for tests that break nothing."""
    with Watched(redis_binary, tmp_path_factory.mktemp("watched"), down_after_ms=30_000) as servers:
        yield servers


@pytest.fixture(scope="session")
def shards(redis_binary: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shards]:
    """A cluster of three primaries with a replica each, for tests that break nothing."""
    with Shards(redis_binary, tmp_path_factory.mktemp("shards"), node_timeout_ms=30_000) as servers:
        yield servers


@pytest.fixture(scope="session")
def redis_url(request: pytest.FixtureRequest) -> str:
    """Where the store's tests work: the single server, unless a test is marked `topologies`."""
    named = {"standalone": "redis_server", "sentinel": "watched", "cluster": "shards"}
    servers = request.getfixturevalue(named[getattr(request, "param", "standalone")])
    assert isinstance(servers, RedisServer | Watched | Shards)
    return servers.url


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
