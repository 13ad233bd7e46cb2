"""Which sessions there are, and where an unnamed conversation was seen: the keys beside the trees.

They are hints: written before what they point at, refreshed in batches after replies, verified and pruned by readers.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from store import keys
from store.connection import Client, translated
from store.errors import StoreCorrupt, StoreError
from store.readable import hash_field, session_view, unhash_field
from store.scripts import Command
from store.views import Page, SessionKey, SessionView, Trace

_log = logging.getLogger(__name__)

_FLUSH_S = 1.0
_FLUSHES_A_SWEEP = 30
_SWEPT = 256  # members looked at in one sweep of one listing
_YOUNG_MS = 60_000  # a listing is written before its session: leave the new ones alone
_PENDING_MOST = 100_000  # last uses remembered while Redis is away
_FIRST_WINDOW = 4


class _Place(NamedTuple):
    tenant: str
    run_id: str

    @property
    def key(self) -> str:
        return keys.listing(self.tenant, self.run_id)


class Directory:
    """Listings by last use and the content index. Owns one background task, which runs while there is work."""

    def __init__(self, client: Client) -> None:
        self._client = client
        self._pending: dict[_Place, dict[str, int]] = {}
        self._swept: dict[_Place, int] = {}  # rank that the next sweep begins at
        self._flushes = 0
        self._task: asyncio.Task[None] | None = None

    def announce(self, key: SessionKey, run_id: str, now_ms: int) -> list[Command]:
        """Commands that list a session before it is made; a newer last use stays."""
        return [("ZADD", place.key, "GT", now_ms, keys.quote(key.session_id)) for place in _places(key.tenant, run_id)]

    def touch(self, key: SessionKey, run_id: str, now_ms: int) -> None:
        """Note a session's use; it is written with others, soon."""
        for place in _places(key.tenant, run_id):
            self._pending.setdefault(place, {})[keys.quote(key.session_id)] = now_ms
        if self._task is None or self._task.done():
            self._task = asyncio.create_task(self._flush_later())

    async def close(self) -> None:
        """Write what is pending."""
        if self._task is not None:
            self._task.cancel()
            await asyncio.gather(self._task, return_exceptions=True)
        try:
            await self._flush()
        except StoreError as error:
            _log.warning("last uses of sessions were not written: %s", error)

    async def _flush_later(self) -> None:
        while self._pending:
            await asyncio.sleep(_FLUSH_S)
            try:
                await self._flush()
            except StoreError as error:
                _log.warning("last uses of sessions are written later: %s", error)

    async def _flush(self) -> None:
        taken = {place: uses for place, uses in self._pending.items() if uses}
        self._pending = {}
        if not taken:
            return
        try:
            async with translated():
                pipeline = self._client.pipeline(transaction=False)
                for place, uses in taken.items():
                    pipeline.zadd(place.key, uses, gt=True)
                await pipeline.execute()
        except StoreError:
            self._put_back(taken)
            raise
        self._flushes += 1
        if self._flushes % _FLUSHES_A_SWEEP == 0:
            for place in taken:
                await self._sweep(place)

    def _put_back(self, taken: Mapping[_Place, Mapping[str, int]]) -> None:
        if sum(len(uses) for uses in taken.values()) > _PENDING_MOST:
            return
        for place, uses in taken.items():
            self._pending[place] = {**uses, **self._pending.get(place, {})}

    async def _sweep(self, place: _Place) -> None:
        """Drop members whose session is gone; pinned old ones are stepped over, so each sweep gets further."""
        start = self._swept.get(place, 0)
        async with translated():
            oldest: Any = await self._client.zrange(place.key, start, start + _SWEPT - 1)
        gone = await self._gone(place, oldest)
        self._swept[place] = start + len(oldest) - len(gone) if len(oldest) == _SWEPT else 0

    async def _gone(self, place: _Place, members: Sequence[bytes]) -> list[bytes]:
        sessions = [keys.unquote(member.decode()) for member in members]
        async with translated():
            pipeline = self._client.pipeline(transaction=False)
            for session in sessions:
                pipeline.exists(keys.Tree(place.tenant, session).session(session))
            there = await pipeline.execute() if sessions else []
        gone = [member for member, exists in zip(members, there, strict=True) if not exists]
        await self.drop(place.tenant, place.run_id, gone)
        return gone

    async def drop(self, tenant: str, run_id: str, members: Iterable[bytes | str]) -> None:
        """Take sessions (quoted ids) out of a listing, unless one was listed just now."""
        place, young = _Place(tenant, run_id), time.time() * 1000 - _YOUNG_MS
        async with translated():
            for member in members:
                score = await self._client.zscore(place.key, member)
                if score is not None and score < young:
                    await self._client.zrem(place.key, member)

    async def forget(self, key: SessionKey, run_id: str) -> None:
        """Take a deleted session out of its listings."""
        member = keys.quote(key.session_id)
        for place in _places(key.tenant, run_id):
            self._pending.get(place, {}).pop(member, None)
            async with translated():
                await self._client.zrem(place.key, member)

    async def sessions(self, tenant: str, run_id: str, limit: int, cursor: str) -> Page:
        """A page of sessions, most recently used first. Raises ValueError on a cursor that is not ours."""
        place = _Place(tenant, run_id)
        score, after = _parse_cursor(cursor)
        views: list[SessionView] = []
        while len(views) < limit:
            members = await self._before(place, score, after, limit - len(views))
            if not members:
                return Page(tuple(views), "")
            views += await self._views(place, [member for member, _ in members])
            after, score = members[-1][0].decode(), int(members[-1][1])
        return Page(tuple(views), f"{score}:{after}")

    async def _before(self, place: _Place, score: int | None, after: str, count: int) -> list[tuple[bytes, float]]:
        """Members that follow the cursor: smaller scores, and at the same score smaller names."""
        skip = 0
        while True:
            async with translated():
                answer: Any = await self._client.zrange(
                    place.key,
                    "+inf" if score is None else score,
                    "-inf",
                    desc=True,
                    byscore=True,
                    offset=skip,
                    num=count,
                    withscores=True,
                )
            members = [(member, float(at)) for member, at in answer]
            new = [m for m in members if score is None or m[1] < score or m[0].decode() < after]
            if new or len(members) < count:
                return new
            skip += count  # all of them were on earlier pages, at the very same millisecond

    async def _views(self, place: _Place, members: Sequence[bytes]) -> list[SessionView]:
        sessions = [SessionKey(place.tenant, keys.unquote(member.decode())) for member in members]
        async with translated():
            pipeline = self._client.pipeline(transaction=False)
            for key in sessions:
                pipeline.hgetall(keys.Tree(key.tenant, key.session_id).session(key.session_id))
            found = await pipeline.execute()
        views = {
            member: session_view(key, fields)
            for member, key, fields in zip(members, sessions, found, strict=True)
            if fields
        }
        # A listing is written ahead, on the word of a request: the session itself says which run it is of.
        listed = {m: v for m, v in views.items() if not place.run_id or v.opening.run_id == place.run_id}
        await self.drop(place.tenant, place.run_id, [m for m in members if m not in listed])
        return [view for view in listed.values() if view.state != "deleted"]

    def remember(
        self, key: SessionKey, chain_hash: bytes, turn_id: str, digest: bytes, *, now_ms: int, ttl_ms: int
    ) -> list[Command]:
        """Commands that put an unnamed session's turn into the content index, ahead of its commit."""
        where = keys.seen(key.tenant, hash_field(chain_hash))
        member = f"{keys.quote(turn_id)} {keys.quote(key.session_id)} {hash_field(digest)}"
        return [
            ("ZADD", where, now_ms, member),
            ("ZREMRANGEBYRANK", where, 0, -1 - keys.SEEN_KEPT),
            ("PEXPIRE", where, ttl_ms or keys.SEEN_TTL_MS),
        ]

    async def trace(self, tenant: str, chain: Sequence[bytes], hints: Sequence[str]) -> tuple[Trace, ...]:
        """Where unnamed sessions hold this conversation: deepest first, then hinted turns, then the newest."""
        depths = range(len(chain), 0, -1)
        for window in (depths[:_FIRST_WINDOW], depths[_FIRST_WINDOW:]):
            found = await self._seen(tenant, chain, window) if window else []
            if found:
                return tuple(sorted(found, key=lambda t: (-t.depth, t.turn_id not in hints)))
        return ()

    async def _seen(self, tenant: str, chain: Sequence[bytes], depths: Sequence[int]) -> list[Trace]:
        async with translated():
            pipeline = self._client.pipeline(transaction=False)
            for depth in depths:
                pipeline.zrange(keys.seen(tenant, hash_field(chain[depth - 1])), 0, -1, desc=True)
            answers = await pipeline.execute()
        return [_trace(depth, m) for depth, members in zip(depths, answers, strict=True) for m in members]


def _places(tenant: str, run_id: str) -> list[_Place]:
    return [_Place(tenant, ""), _Place(tenant, run_id)] if run_id else [_Place(tenant, "")]


def _parse_cursor(cursor: str) -> tuple[int | None, str]:
    if not cursor:
        return None, ""
    score, _, after = cursor.partition(":")
    return int(score), after


def _trace(depth: int, member: bytes) -> Trace:
    try:
        turn, session, digest = member.decode().split(" ")[:3]
        return Trace(depth, keys.unquote(session), keys.unquote(turn), unhash_field(digest))
    except ValueError as error:
        raise StoreCorrupt("seen", f"{member!r}: {error}") from error
