"""Where a request belongs: which session, which parent, and whether it is generated, joined or replayed.

The table of retries itself is in `find.lua`, where it holds in one instant for all workers; here is which sessions are
asked, how a request is marked, and the waiting for another's attempt.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from hashlib import blake2b
from typing import Any

from api.errors import TurnInProgress
from api.ids import new_session_id
from api.request import Caller, TurnRequest
from splice.locate import Candidate, Located, RenderingChanged, Root, locate
from store.redis import RedisStore
from store.views import FindQuery, Found, Join, Lease, Mark, Replay, SessionKey

_MOST_SESSIONS = 32  # unnamed conversations of equal text that are told apart in one request
_MOST_ASKED = 64  # unnamed sessions looked at for an undelivered answer to a first turn
_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 1.0


@dataclass(frozen=True, slots=True)
class Reading:
    """A request as the rules see it. chain: the conversation's hash at each assistant message."""

    request: TurnRequest
    signature: str
    chain: tuple[bytes, ...]
    sampling: Mapping[str, Any]
    request_hash: bytes

    @property
    def hints(self) -> tuple[str, ...]:
        """Turn ids the client echoed, deepest message first."""
        return tuple(dict.fromkeys(e.turn_id for e in reversed(self.request.echoes) if e.turn_id))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs: its session, what the store knows, and the parent or the reason for none."""

    key: SessionKey
    found: Found
    located: Located
    lease: Lease
    unnamed: bool


def mark_of(reading: Reading, caller: Caller) -> Mark:
    """How the request says that it repeats an earlier one.

    A retry count counts only where the session is certain. Elsewhere it could be any of n equal rollouts: then only
    an answer that nobody received is given again.
    """
    if caller.idempotency_key:
        return "key"
    return "retry" if caller.retry_count and (caller.session_id or reading.hints) else "none"


class Places:
    """Finds a request's place. Holds the store only."""

    def __init__(self, store: RedisStore, *, join_timeout_s: float) -> None:
        self._store = store
        self._join_timeout_s = join_timeout_s

    async def find(self, reading: Reading, caller: Caller, attempt_id: str, mark: Mark) -> Place:
        """The request's place, once no other attempt is about to answer it. Raises TurnInProgress, SessionClosed."""
        deadline = time.monotonic() + self._join_timeout_s
        while True:
            place = await self._find(reading, caller, attempt_id, mark)
            if not isinstance(place.found.verdict, Join):
                return place
            if await self._committed(place, place.found.verdict, deadline):
                answer = Replay(place.found.verdict.attempt_id)
                return replace(place, found=replace(place.found, verdict=answer))

    async def _committed(self, place: Place, joined: Join, deadline: float) -> bool:
        """Wait for another's attempt; False when it is gone, uncommitted."""
        pause = _FIRST_PAUSE_S
        while True:
            left = deadline - time.monotonic()
            if left <= 0:
                raise TurnInProgress(self._join_timeout_s)
            await asyncio.sleep(min(pause * random.uniform(0.5, 1.0), left))  # noqa: S311 - spreads joiners, no secret
            outcome = await self._store.outcome(place.key, joined.attempt_id, joined.worker, place.lease.request_hash)
            if outcome != "running":
                return outcome == "committed"
            pause = min(pause * 1.5, _LONGEST_PAUSE_S)

    async def _find(self, reading: Reading, caller: Caller, attempt_id: str, mark: Mark) -> Place:
        named = [SessionKey(caller.tenant, caller.session_id)] if caller.session_id else []
        keys = named or await self._unnamed_sessions(reading, caller)
        if not keys:
            return await self._new_session(reading, caller, attempt_id, mark)
        queries = [_query(key, reading, caller, attempt_id if len(keys) == 1 else "", mark) for key in keys]
        founds = await self._asked(queries)
        candidates = [(c, n) for n, f in enumerate(founds) if named or _open(f) for c in f.candidates]
        located = locate(
            [c for c, _ in candidates],
            reading.request.echoes,
            rendering_signature=reading.signature,
            depth=len(reading.chain),
            session_has_turns=any(f.session is not None and f.session.turns for f in founds),
            unknown=frozenset.intersection(*(frozenset(f.unknown_hints) for f in founds)),
        )
        if isinstance(located, RenderingChanged) and not named and not _echoed(located.candidate, reading):
            # Equal words in another conversation: this one was never ours to continue.
            located = Root("unknown_history")
        chosen = _chosen(located)
        home = next((n for c, n in candidates if c == chosen), None)
        if mark != "none" or len(keys) == 1:
            # Of equal conversations, the one that knows the retried request is meant.
            home = next((n for n, f in enumerate(founds) if isinstance(f.verdict, Replay | Join)), home)
        if home is None and not named and any(f.session is not None for f in founds):
            # A trace may outlive its session; what cannot be continued opens a new one.
            await self._give_up(queries[0])
            return await self._new_session(reading, caller, attempt_id, mark, located)
        query, found = queries[home or 0], founds[home or 0]
        if not query.attempt_id:
            query = replace(query, attempt_id=attempt_id)
            found = await self._store.find(query)
        return Place(query.key, found, located, query.lease, unnamed=not named)

    async def _asked(self, queries: Sequence[FindQuery]) -> list[Found]:
        """One query may take a lease, so it is awaited here: a task of its own could outlive a cancellation."""
        if len(queries) == 1:
            return [await self._store.find(queries[0])]
        return await asyncio.gather(*(self._store.find(query) for query in queries))

    async def _give_up(self, query: FindQuery) -> None:
        if query.attempt_id:
            await self._store.release(query.lease)

    async def _new_session(
        self, reading: Reading, caller: Caller, attempt_id: str, mark: Mark, located: Located | None = None
    ) -> Place:
        """A session for a client that named none. An idempotency key names it, so that a repeat finds it."""
        if located is None:
            located = locate(
                [],
                reading.request.echoes,
                rendering_signature=reading.signature,
                depth=len(reading.chain),
                session_has_turns=False,
                unknown=frozenset(reading.hints),
            )
        if caller.idempotency_key:
            digest = blake2b(caller.idempotency_key.encode(), digest_size=15).hexdigest()
            query = _query(SessionKey(caller.tenant, f"s-{digest}"), reading, caller, attempt_id, mark)
            return Place(query.key, await self._store.find(query), located, query.lease, unnamed=True)
        if caller.retry_count and not reading.chain:
            undelivered = await self._undelivered(reading, caller, attempt_id, located)
            if undelivered:
                return undelivered
        # Nobody can know this session yet: there is nothing to find in it and nobody to join its turn.
        key = SessionKey(caller.tenant, new_session_id())
        return Place(key, Found(session=None), located, Lease(key, attempt_id, reading.request_hash), unnamed=True)

    async def _undelivered(self, reading: Reading, caller: Caller, attempt_id: str, located: Located) -> Place | None:
        """The newest answer to an equal first turn that its client did not receive."""
        for session in await self._store.asked(caller.tenant, reading.request_hash, _MOST_ASKED):
            query = _query(SessionKey(caller.tenant, session), reading, caller, attempt_id, "asked")
            found = await self._store.find(query)
            if isinstance(found.verdict, Replay):
                return Place(query.key, found, located, query.lease, unnamed=True)
        return None

    async def _unnamed_sessions(self, reading: Reading, caller: Caller) -> Sequence[SessionKey]:
        """Sessions whose conversation this unnamed request may continue, likeliest first."""
        traces = await self._store.trace(caller.tenant, reading.chain, reading.hints) if reading.chain else ()
        deepest = max((t.depth for t in traces), default=0)
        equal = [t for t in traces if t.depth == deepest]
        digests = {e.generation_digest for e in reading.request.echoes if e.depth == deepest and e.generation_digest}
        for known in (
            [t for t in equal if t.generation_digest in digests],
            [t for t in equal if t.turn_id in reading.hints],
        ):
            equal = known or equal
        sessions = list(dict.fromkeys(t.session_id for t in equal))[:_MOST_SESSIONS]
        return [SessionKey(caller.tenant, session) for session in sessions]


def _query(key: SessionKey, reading: Reading, caller: Caller, attempt_id: str, mark: Mark) -> FindQuery:
    return FindQuery(
        key,
        reading.chain,
        reading.signature,
        reading.request_hash,
        hints=reading.hints,
        generation_digests=tuple(e.generation_digest for e in reading.request.echoes if e.generation_digest),
        idempotency_key=caller.idempotency_key,
        attempt_id=attempt_id,
        mark=mark,
    )


def _open(found: Found) -> bool:
    return found.session is None or found.session.state == "open"


def _echoed(candidate: Candidate, reading: Reading) -> bool:
    """Whether the client echoed something that only this turn's own client was sent."""
    digests = {echo.generation_digest for echo in reading.request.echoes if echo.depth == candidate.depth}
    return candidate.turn_id in reading.hints or candidate.generation_digest in digests


def _chosen(located: Located) -> Candidate | None:
    return None if isinstance(located, Root) else located.candidate
