"""The demo's children are told ready from started, are killed whole, and leave nothing behind."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import aiohttp
import psutil
import pytest

from api.demo.processes import Child, ChildFailed, free_port, module

# A server with a process of its own below it, as `serve --workers` has.
SERVER = """
import http.server, subprocess, sys
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
http.server.test(HandlerClass=http.server.SimpleHTTPRequestHandler, port=int(sys.argv[1]), bind="127.0.0.1")
"""


def child(tmp_path: Path, program: str) -> Child:
    port = free_port()
    command = [*module("this")[:2], "-c", program, str(port)]
    return Child("server", command, url=f"http://127.0.0.1:{port}", ready_path="/", log=tmp_path / "log")


def family_of(server: Child) -> list[psutil.Process]:
    assert server.pid is not None
    own = psutil.Process(server.pid)
    return [own, *own.children(recursive=True)]


def gone(family: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(family, timeout=5)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


async def test_a_child_is_ready_when_it_answers_and_gone_when_stopped(tmp_path: Path) -> None:
    server = child(tmp_path, SERVER)
    async with aiohttp.ClientSession() as client:
        await server.start()
        await server.ready(client, 20)
        family = family_of(server)
        assert len(family) == 2
        await server.stop()
        assert gone(family)
        with pytest.raises(aiohttp.ClientConnectorError):
            await client.get(server.url)


async def test_a_killed_child_takes_its_own_children_along_and_starts_again(tmp_path: Path) -> None:
    server = child(tmp_path, SERVER)
    async with aiohttp.ClientSession() as client:
        await server.start()
        await server.ready(client, 20)
        family = family_of(server)
        await server.kill()
        assert gone(family)
        await server.start()
        await server.ready(client, 20)
        await server.stop()


async def test_a_child_that_ends_early_is_told_with_the_end_of_its_log(tmp_path: Path) -> None:
    server = child(tmp_path, "print('no such setting', flush=True); raise SystemExit(3)")
    async with aiohttp.ClientSession() as client:
        await server.start()
        with pytest.raises(ChildFailed, match="no such setting"):
            await server.ready(client, 20)
        await server.stop()


async def test_a_child_that_never_answers_is_told_too(tmp_path: Path) -> None:
    server = child(tmp_path, "import time; time.sleep(60)")
    async with aiohttp.ClientSession() as client:
        await server.start()
        with pytest.raises(ChildFailed, match="not ready within"):
            await server.ready(client, 0.3)
        await server.stop()


async def test_a_child_that_ignores_sigterm_is_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("api.demo.processes._STOP_S", 0.2)
    program = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(60)"
    )
    server = child(tmp_path, program)
    await server.start()
    while not (tmp_path / "log").read_bytes():  # noqa: ASYNC110 - another process writes it
        await asyncio.sleep(0.02)
    family = family_of(server)
    await server.stop()
    assert gone(family)


async def test_settings_of_the_users_own_server_do_not_reach_a_child(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(os.environ, "TOKENSPLICE_REDIS_URL", "redis://production")
    server = child(tmp_path, "import os; print(sorted(os.environ)); raise SystemExit(1)")
    async with aiohttp.ClientSession() as client:
        await server.start()
        with pytest.raises(ChildFailed):
            await server.ready(client, 20)
    assert "TOKENSPLICE" not in (tmp_path / "log").read_text()
