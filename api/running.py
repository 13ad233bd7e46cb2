"""Turns this worker runs right now: who still waits for each, and whether its session was deleted meanwhile.

A generation ends when the last client that waits for it leaves, joiners on other workers included; they are seen by
what they leave at the lease. One background task asks Redis about all running sessions in one round trip, so that
deleting a session ends its generations on every worker.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, TypeVar

from store.errors import SessionClosed, StoreError
from store.redis import RedisStore
from store.tasks import end
from store.views import Lease, SessionKey

Result = TypeVar("Result")

_POLL_S = 1.0
_ORPHAN_POLL_S = 0.5
_SILENCE_S = 3.0  # joiners ask at least once a second


class ClientGone(Exception):
    """The client closed its connection; nobody reads the answer."""


class RunningTurns:
    """Generations in flight."""

    def __init__(self, store: RedisStore) -> None:
        self._store = store
        self._tasks: dict[SessionKey, set[asyncio.Task[object]]] = {}
        self._leases: dict[asyncio.Task[object], Lease] = {}
        self._orphans: set[asyncio.Task[None]] = set()
        self._closed: Counter[int] = Counter()
        self._poller: asyncio.Task[None] | None = None

    async def serve(
        self, work: Coroutine[Any, Any, Result], gone: Awaitable[None], unread: Callable[[Result], None]
    ) -> Result:
        """Run `work` for a client until it is `gone`; raises ClientGone then.

        While others wait for the same turn, the work goes on without the client; `unread` gets its result.
        """
        task = asyncio.create_task(work)
        leaving = asyncio.ensure_future(gone)
        try:
            await asyncio.wait({task, leaving}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise ClientGone
        finally:
            leaving.cancel()
            if not task.done():
                orphan = asyncio.create_task(self._outlive(task, unread))
                self._orphans.add(orphan)
                orphan.add_done_callback(self._orphans.discard)

    async def _outlive(self, task: asyncio.Task[Result], unread: Callable[[Result], None]) -> None:
        try:
            while not task.done() and await self._waited_for(task):
                pass
        finally:
            await end(task)
            if not task.cancelled() and task.exception() is None:
                unread(task.result())

    async def _waited_for(self, task: asyncio.Task[Any]) -> bool:
        """Whether the task is to go on; returns after a while, or when nobody has asked for it for too long."""
        lease = self._leases.get(task)
        if lease is None:
            return False
        asked, since = await self._asked(lease), time.monotonic()
        while asked and time.monotonic() - since < _SILENCE_S:
            await asyncio.wait({task}, timeout=_ORPHAN_POLL_S)
            if task.done() or await self._asked(lease) != asked:
                return True
        return False

    async def _asked(self, lease: Lease) -> int:
        try:
            return await self._store.waits(lease)
        except StoreError:
            return -1  # not known: a store that is away for a moment ends no generation

    @asynccontextmanager
    async def hold(self, lease: Lease) -> AsyncIterator[None]:
        """The body generates under the lease; a body that fails or is cancelled gives it up, so that others may."""
        task = asyncio.current_task()
        assert task is not None
        self._leases[task] = lease
        try:
            yield
        except BaseException:
            await self._store.release(lease)
            raise
        finally:
            del self._leases[task]

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
        """Stop watching, and end what nobody here waits for."""
        await end(*self._orphans, *([self._poller] if self._poller is not None else []))
