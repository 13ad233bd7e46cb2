"""The demo's child processes: started with a log file each, killed whole, stopped without orphans."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import DEVNULL

import aiohttp

_STOP_S = 10.0
_POLL_S = 0.05
_TAIL_BYTES = 2000


class ChildFailed(Exception):
    """A child process ended or never became ready; the end of its log is in the message."""


def free_port() -> int:
    """A loopback port that nobody listens on."""
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        return int(held.getsockname()[1])


def module(name: str, *arguments: str) -> list[str]:
    """A module of this very installation. `-P`: a folder named `api` where the user stands is not ours."""
    return [sys.executable, "-P", "-m", name, *arguments]


class Child:
    """One child process in a group of its own, so that a kill takes its workers with it."""

    def __init__(self, name: str, command: Sequence[str], *, url: str, ready_path: str, log: Path) -> None:
        self.name = name
        self.url = url
        self._command = command
        self._ready_path = ready_path
        self._log = log
        self._process: asyncio.subprocess.Process | None = None

    @property
    def pid(self) -> int:
        """The process itself; 0 before its first start."""
        return self._process.pid if self._process is not None else 0

    async def start(self) -> None:
        """Start; `ready` waits until it serves. A second start appends to the same log."""
        with self._log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self._command,
                stdin=DEVNULL,
                stdout=log,
                stderr=log,
                env=_environment(),
                start_new_session=True,
            )

    async def ready(self, client: aiohttp.ClientSession, timeout_s: float) -> None:
        """Wait until `GET ready_path` is a 200. Raises ChildFailed."""
        deadline = time.monotonic() + timeout_s
        while not await self._answers(client):
            if self._process is None or self._process.returncode is not None:
                raise ChildFailed(f"{self.name} ended before it was ready\n{self._tail()}")
            if time.monotonic() > deadline:
                raise ChildFailed(f"{self.name} was not ready within {timeout_s:.0f} s\n{self._tail()}")
            await asyncio.sleep(_POLL_S)

    async def _answers(self, client: aiohttp.ClientSession) -> bool:
        try:
            async with client.get(self.url + self._ready_path, timeout=aiohttp.ClientTimeout(total=2.0)) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def kill(self) -> None:
        """SIGKILL, no warning."""
        self._signal(signal.SIGKILL)
        if self._process is not None:
            await self._process.wait()

    async def stop(self) -> None:
        """SIGTERM, then SIGKILL to whatever is left of the group."""
        if self._process is None:
            return
        self._signal(signal.SIGTERM)
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._process.wait(), _STOP_S)
        await self.kill()

    def _signal(self, number: signal.Signals) -> None:
        if self._process is not None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._process.pid, number)

    def _tail(self) -> str:
        return self._log.read_bytes()[-_TAIL_BYTES:].decode(errors="replace")


def _environment() -> dict[str, str]:
    """Ours, without settings of the user's own server: the demo is to be the same everywhere."""
    return {name: value for name, value in os.environ.items() if not name.startswith("TOKENSPLICE_")}
