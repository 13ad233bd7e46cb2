"""What attempts leave behind while they run and afterwards: who waits for them, leases given up, what was delivered.

Deliveries are written in batches soon after the reply. A lease that could not be given up at once is written with
them, again and again: a lease that stood though nobody generates would keep retries waiting.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator, Mapping
from typing import Any

from redis.crc import key_slot

from store import keys
from store.append import idempotency_field
from store.cluster import Cluster
from store.connection import Client, translated
from store.errors import SessionClosed, StoreCorrupt, StoreError
from store.readable import hash_field
from store.scripts import Command, Scripts
from store.tasks import end
from store.views import Lease, Outcome, SessionKey

_log = logging.getLogger(__name__)

_FLUSH_S = 0.1
_AGAIN_S = 1.0  # after a flush that failed
_MARKS_A_CALL = 1000
_PENDING_MOST = 100_000  # kept while Redis is away
_LEASES_MOST = 10_000
_LEASES_AT_ONCE = 32

_OUTCOMES: Mapping[bytes, Outcome] = {b"running": "running", b"committed": "committed", b"gone": "gone"}

Marks = dict[tuple[str, str], bool]  # (tree's key, quoted turn id) -> delivered


class Attempts:
    """Leases and deliveries, beside find and commit. Owns one background task, which runs while there is work."""

    def __init__(self, client: Client, scripts: Scripts, ttl_ms: int) -> None:
        self._client = client
        self._scripts = scripts
        self.ttl_ms = ttl_ms or keys.ATTEMPTS_TTL_MS
        self._marks: Marks = {}
        self._leases: dict[Lease, bool] = {}  # to be given up; True: fenced
        self._task: asyncio.Task[None] | None = None

    async def outcome(self, key: SessionKey, attempt_id: str, request_hash: bytes) -> Outcome:
        """What became of an attempt; asking keeps it running. Raises SessionClosed, StoreError."""
        tree = keys.Tree(key.tenant, key.session_id)
        session, links, *_ = tree.all(key.session_id)
        answer = await self._scripts.run(
            "join",
            [session, links, tree.attempts(key.session_id)],
            [keys.quote(attempt_id), hash_field(request_hash)],
        )
        if answer == b"deleted":
            raise SessionClosed(key.session_id)
        if answer not in _OUTCOMES:
            raise StoreCorrupt("join", f"the script answered {answer!r}")
        return _OUTCOMES[answer]

    async def waits(self, lease: Lease) -> int:
        """How often others asked for the attempt's outcome: grows while somebody waits. Raises StoreError."""
        key = lease.key
        name = keys.Tree(key.tenant, key.session_id).attempts(key.session_id)
        async with translated():
            asked = await self._client.hget(name, f"waits:{keys.quote(lease.attempt_id)}")
        return int(asked or 0)

    async def release(self, lease: Lease, *, fence: bool = False) -> None:
        """Give up a lease: now, or as soon as Redis answers again."""
        try:
            await self._release(lease, fence=fence)
        except StoreError as error:
            _log.info("lease of %s is given up later: %s", lease.attempt_id, error)
            self.release_soon(lease, fence=fence)

    def release_soon(self, lease: Lease, *, fence: bool) -> None:
        """Give up a lease with the next batch."""
        self._leases[lease] = fence or self._leases.get(lease, False)
        if len(self._leases) > _LEASES_MOST:  # Redis is away: the oldest were most likely never taken
            del self._leases[next(iter(self._leases))]
        self._wake()

    def mark(self, key: SessionKey, turn_id: str, *, delivered: bool) -> None:
        """Note whether a turn was delivered; it is written with others, soon. Delivered is final."""
        at = (keys.Tree(key.tenant, key.session_id).delivered, keys.quote(turn_id))
        self._marks[at] = delivered or self._marks.get(at, False)
        self._wake()

    async def close(self) -> None:
        """Write what is pending."""
        if self._task is not None:
            await end(self._task)
        try:
            await self._flush()
        except StoreError as error:
            _log.warning("deliveries of turns were not written: %s", error)

    def _wake(self) -> None:
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_later())

    async def _flush_later(self) -> None:
        pause = _FLUSH_S
        while self._marks or self._leases:
            await asyncio.sleep(pause)
            try:
                await self._flush()
                pause = _FLUSH_S
            except StoreError as error:
                _log.warning("deliveries of turns are written later: %s", error)
                pause = _AGAIN_S

    async def _flush(self) -> None:
        marks, self._marks = self._marks, {}
        leases, self._leases = self._leases, {}
        try:
            await asyncio.gather(*(self._write(batch, marks) for batch in self._batches(marks)))
            waiting = list(leases.items())
            for start in range(0, len(waiting), _LEASES_AT_ONCE):
                batch = waiting[start : start + _LEASES_AT_ONCE]
                await asyncio.gather(*(self._release(lease, fence=fence) for lease, fence in batch))
        except BaseException:
            self._put_back(marks, leases)
            raise

    def _put_back(self, marks: Marks, leases: Mapping[Lease, bool]) -> None:
        for lease, fence in leases.items():
            self._leases[lease] = fence or self._leases.get(lease, False)
        if len(marks) + len(self._marks) <= _PENDING_MOST:
            for at, delivered in marks.items():
                self._marks[at] = delivered or self._marks.get(at, False)

    def _batches(self, marks: Marks) -> Iterator[list[tuple[str, str]]]:
        """What one call may carry: on a cluster, what is in one slot."""
        slots: dict[int, list[tuple[str, str]]] = {}
        for at in marks:
            slots.setdefault(key_slot(at[0].encode()) if isinstance(self._client, Cluster) else 0, []).append(at)
        for one in slots.values():
            for start in range(0, len(one), _MARKS_A_CALL):
                yield one[start : start + _MARKS_A_CALL]

    async def _write(self, batch: list[tuple[str, str]], marks: Marks) -> None:
        words = [word for at in batch for word in (at[1], "1" if marks[at] else "0")]
        await self._scripts.run("mark", [tree for tree, _ in batch], words)

    async def _release(self, lease: Lease, *, fence: bool) -> None:
        key = lease.key
        await self._scripts.run(
            "release",
            [keys.Tree(key.tenant, key.session_id).attempts(key.session_id)],
            [
                keys.quote(lease.attempt_id),
                hash_field(lease.request_hash),
                idempotency_field(lease.idempotency_key),
                "1" if fence else "",
                self.ttl_ms,
            ],
        )

    # First turns of unnamed sessions, by their request.

    def remember(
        self, key: SessionKey, request_hash: bytes, turn_id: str, *, now_ms: int, ttl_ms: int
    ) -> list[Command]:
        """Commands that make a first turn known by its request, ahead of its commit."""
        where = keys.asked(key.tenant, hash_field(request_hash))
        return [
            ("ZADD", where, now_ms, f"{keys.quote(turn_id)} {keys.quote(key.session_id)}"),
            ("ZREMRANGEBYRANK", where, 0, -1 - keys.SEEN_KEPT),
            ("PEXPIRE", where, ttl_ms or keys.SEEN_TTL_MS),
        ]

    async def asked(self, tenant: str, request_hash: bytes, most: int) -> tuple[str, ...]:
        """Unnamed sessions whose first turn answered this request, newest first; to be verified by `find`."""
        where = keys.asked(tenant, hash_field(request_hash))
        async with translated():
            members: Any = await self._client.zrange(where, 0, most - 1, desc=True)
        return tuple(keys.unquote(member.decode().split(" ")[1]) for member in members)
