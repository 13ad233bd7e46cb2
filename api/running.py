"""Turns this worker runs right now: how many, and whether their sessions were deleted meanwhile.

One background task asks Redis about all running sessions in one round trip, so that deleting a session ends
its generations on every worker.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager

from store.errors import SessionClosed, StoreError
from store.redis import RedisStore
from store.views import SessionKey

_POLL_S = 1.0


class RunningTurns:
    """Generations in flight, by session."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._tasks: dict[SessionKey, set[asyncio.Task[object]]] = {}
        self._closed: Counter[int] = Counter()
        self._poller: asyncio.Task[None] | None = None

    @contextmanager
    def watch(self, key: SessionKey) -> Iterator[None]:
        """Cancel the body when the session is deleted; raises SessionClosed then."""
        task = asyncio.current_task()
        assert task is not None
        self._tasks.setdefault(key, set()).add(task)
        if self._poller is None or self._poller.done():
            self._poller = asyncio.create_task(self._poll())
        try:
            yield
        except asyncio.CancelledError:
            if self._closed.pop(id(task), 0):
                task.uncancel()
                raise SessionClosed(key.session_id) from None
            raise
        finally:
            self._tasks[key].discard(task)
            if not self._tasks[key]:
                del self._tasks[key]

    async def _poll(self) -> None:
        """Runs while anything runs."""
        while self._tasks:
            await asyncio.sleep(_POLL_S)
            try:
                closed = await self._store.closed(tuple(self._tasks))
            except StoreError:
                continue  # the commit will tell; a store that is away for a second ends no generation
            for key in closed:
                for task in tuple(self._tasks.get(key, ())):
                    self._closed[id(task)] += 1
                    task.cancel()

    async def close(self) -> None:
        """Stop watching."""
        if self._poller is not None:
            self._poller.cancel()
            await asyncio.gather(self._poller, return_exceptions=True)
