"""Which workers live: one key each with a short TTL, rewritten while the worker runs.

A worker that is paused or cut off for longer is taken for dead; what it held may be taken over, and it is told when it
commits. So the worst that a wrong guess costs is a second generation.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Collection

from store import keys
from store.connection import Client, translated
from store.errors import StoreError
from store.tasks import end

_log = logging.getLogger(__name__)

TTL_S = 6.0
REFRESH_S = 2.0
_AGAIN_S = 0.3  # after a refresh that failed


class Liveness:
    """This worker's sign of life, and a look at the others'. Owns one background task, from the first lease on."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self.worker_id = secrets.token_hex(8)
        self._task: asyncio.Task[None] | None = None
        self._facts = json.dumps({"host": socket.gethostname(), "pid": os.getpid(), "started": round(time.time(), 3)})

    async def announce(self) -> None:
        """Be known to live before anything is held. Raises StoreError."""
        if self._task is None:
            await self._refresh()
        if self._task is None:
            self._task = asyncio.create_task(self._stay())

    async def gone(self, workers: Collection[str]) -> frozenset[str]:
        """Those that show no sign of life. Raises StoreError."""
        others = [worker for worker in workers if worker != self.worker_id]
        async with translated():
            alive = await asyncio.gather(*(self._client.exists(keys.alive(worker)) for worker in others))
        return frozenset(worker for worker, there in zip(others, alive, strict=True) if not there)

    async def close(self) -> None:
        """Let others know at once."""
        if self._task is None:
            return
        await end(self._task)
        try:
            async with translated():
                await self._client.delete(keys.alive(self.worker_id))
        except StoreError as error:
            _log.info("the worker's key is left to lapse: %s", error)

    async def _stay(self) -> None:
        pause = REFRESH_S
        while True:
            await asyncio.sleep(pause)
            try:
                await self._refresh()
                pause = REFRESH_S
            except StoreError:
                pause = _AGAIN_S

    async def _refresh(self) -> None:
        async with translated():
            await self._client.set(keys.alive(self.worker_id), self._facts, px=int(TTL_S * 1000))
