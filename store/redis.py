"""The one store: sessions as forests of immutable turns in Redis.

*Atomicity.* A turn is appended by one script in one hash slot, so it is there whole or not at all; all checks
precede the first write. Finding is one script too: candidates, their root signatures and the lineage are of one
instant, and the lease to generate is taken, or the reason not to found, in that same instant.

*Leases.* An attempt's id is the id of the turn that it will commit, and its fence: whoever takes over a worker that
shows no sign of life leaves that behind, and the commit of the old attempt is refused. A lease ends with its commit,
refused or not, or is given up by `release`; one that Redis merely lost stops nobody.

*Repeats.* redis-py re-sends what it got no reply to, and callers repeat what failed. Every command may be repeated: a
commit knows its turn id, an opening its mark; the rest sets what it says.

*Errors.* `StoreUnavailable`: not known whether it ran, a repeat tells. `StoreFull`: nothing was written. Everything
else is a fact about the session. No error of redis-py leaves this package.

*Crashes.* A worker holds nothing that matters: a cache of lineages, whose every use is confirmed by the round trip
that finds, a second's worth of last-use times and a tenth of a second's worth of deliveries. A commit that has been
started is not given up when its caller is cancelled: whether a client was still there must not leave a turn half known.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Self

from splice.identity import ids_digest
from splice.types import IdArray, Lineage, Turn
from store import codec, keys, replies
from store.append import commit_args, find_args, lineage_args, refuse, refuse_session
from store.attempts import Attempts
from store.cache import LineageCache
from store.connection import Client, open_client, translated
from store.directory import Directory
from store.errors import SessionClosed, SessionMissing, StoreError, TurnMissing
from store.liveness import Liveness
from store.readable import iso, session_fields, session_view
from store.replication import Replication
from store.scripts import Command, Scripts
from store.server import server_facts
from store.views import (
    FindQuery,
    Forest,
    Found,
    Lease,
    Outcome,
    Page,
    ServerFacts,
    SessionKey,
    SessionOpening,
    SessionView,
    Trace,
)

_CACHED_SENT = 8  # cached turns that `find` is told of, deepest first
_LONG_TEXT = 50_000  # characters: compressing more than this leaves the event loop


def _unchanged(record: bytes) -> bytes:
    return record


class RedisStore:
    """Sessions and turns. One per worker; belongs to one event loop."""

    def __init__(
        self,
        client: Client,
        *,
        default_ttl_s: int,
        cache_bytes: int,
        upgrade: replies.Upgrade = _unchanged,
        replication: Replication | None = None,
    ) -> None:
        """`upgrade` brings a record of an older schema up to ours; 0 as TTL means that sessions stay.

        With `replication`, what is written is answered once enough replicas have it, or with ReplicationUnknown.
        """
        self._client = client
        self._ttl_ms = default_ttl_s * 1000
        self._upgrade = upgrade
        self._scripts = Scripts(client, replication)
        self._cache = LineageCache(cache_bytes)
        self._directory = Directory(client)
        self._attempts = Attempts(client, self._scripts, self._ttl_ms)
        self._liveness = Liveness(client)
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        default_ttl_s: int = 0,
        cache_bytes: int = 256 * 1024 * 1024,
        upgrade: replies.Upgrade = _unchanged,
        replication: Replication | None = None,
    ) -> Self:
        """A store on what `url` names (`store.address` has the forms). Raises StoreError, ValueError."""
        store = cls(
            open_client(url),
            default_ttl_s=default_ttl_s,
            cache_bytes=cache_bytes,
            upgrade=upgrade,
            replication=replication,
        )
        try:
            await store.check_server()
        except StoreError:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Finish what runs, write what is pending, let the connections go."""
        try:
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._attempts.close()
            await self._directory.close()
            await self._liveness.close()
        finally:
            await self._client.aclose()

    async def check_server(self) -> ServerFacts:
        """Ask the server what it is. Raises EvictionEnabled, ServerTooOld, StoreError."""
        return await server_facts(self._client)

    async def ping(self) -> None:
        """One round trip. Raises StoreError."""
        async with translated():
            await self._client.ping()

    # A turn's path.

    async def find(self, query: FindQuery) -> Found:
        """What the store knows of a request, and the lease to generate it where nothing answers it: one round trip.

        More only where the verdict depends on whether another worker lives. `Found.candidates` are the hits from the
        deepest conversation up to the first that has a turn of the query's rendering signature: what `locate` can
        choose from. `Found.session.roots` are their roots. Raises StoreError.
        """
        if query.attempt_id:
            await self._liveness.announce()
        gone: frozenset[str] = frozenset()
        try:
            while True:
                found = await self._find(query, gone)
                lapsed = await self._liveness.gone(found.suspects - gone)
                if not lapsed:
                    return found
                gone |= lapsed
        except BaseException:
            # The lease may have been taken, or may yet be by a command that is on its way.
            if query.attempt_id:
                self._attempts.release_soon(query.lease, fence=True)
            raise

    async def _find(self, query: FindQuery, gone: frozenset[str]) -> Found:
        tree = _tree(query.key)
        held = self._cache.held(tree.tag, query.chain, _CACHED_SENT)
        reply = await self._scripts.run(
            "find",
            _find_keys(tree, query.key.session_id),
            find_args(query, self._liveness.worker_id, self._attempts.ttl_ms, cached=list(held), gone=list(gone)),
        )
        read = replies.found_lineage(reply[5], held, self._upgrade)
        found = replies.found(query, reply, read.lineage if read else None)
        if read:
            depth = next(c.depth for c in found.candidates if c.turn_id == read.lineage.head.turn_id)
            self._keep(tree, read, query.chain[depth - 1])
        return found

    def _keep(self, tree: keys.Tree, read: replies.FoundLineage, chain_hash: bytes) -> None:
        if read.base == read.turn:
            return
        if not read.base or self._cache.extend(tree.tag, read.base, read.turn, chain_hash, [read.new]) is None:
            self._cache.put(tree.tag, read.turn, chain_hash, read.lineage.tokens)

    async def lineage_of(self, key: SessionKey, turn_id: str) -> Lineage:
        """A turn's lineage, itself included. Raises TurnMissing, StoreError."""
        tree, turn = _tree(key), keys.quote(turn_id)
        tokens = self._cache.get(tree.tag, turn)
        held = {} if tokens is None else {turn: tokens}
        reply = await self._scripts.run("find", _find_keys(tree, key.session_id), lineage_args(turn, list(held)))
        read = replies.found_lineage(reply[5], held, self._upgrade)
        if read is None:
            raise TurnMissing(key.session_id, turn_id)
        return read.lineage

    async def trace(self, tenant: str, chain: Sequence[bytes], hints: Sequence[str] = ()) -> tuple[Trace, ...]:
        """Which unnamed sessions hold this conversation: deepest first, hinted before the newest. Raises StoreError.

        What it tells is to be verified by `find`.
        """
        return await self._directory.trace(tenant, chain, hints)

    async def commit(
        self, key: SessionKey, turn: Turn, opening: SessionOpening, *, idempotency_key: str = "", unnamed: bool = False
    ) -> None:
        """Append a turn; a root turn makes its session when there is none. Repeating it changes nothing.

        It ends the turn's lease, whatever comes of it. A caller that is cancelled meanwhile delivers nothing.
        Raises SessionClosed, SessionFinished, ParentMissing, RenderingDiffers, AlreadyAnswered, LeaseLost, StoreFull,
        StoreUnavailable.
        """
        task = self._uncancelled(self._commit(key, turn, opening, idempotency_key, unnamed=unnamed))
        try:
            await asyncio.shield(task)
        except asyncio.CancelledError:
            task.add_done_callback(lambda _: self.mark(key, turn.turn_id, delivered=False))
            raise

    async def _commit(
        self, key: SessionKey, turn: Turn, opening: SessionOpening, idempotency_key: str, *, unnamed: bool
    ) -> None:
        if sum(len(message.content) for message in turn.messages) + len(turn.reply.content) > _LONG_TEXT:
            text = await asyncio.to_thread(codec.pack_text, turn.messages, turn.reply)
        else:
            text = codec.pack_text(turn.messages, turn.reply)
        now = time.time()
        tree = _tree(key)
        try:
            answer, *detail = await self._scripts.run_after(
                self._ahead(key, turn, opening, int(now * 1000), unnamed=unnamed),
                "commit",
                tree.all(key.session_id),
                commit_args(
                    key,
                    turn,
                    opening,
                    text,
                    idempotency_key,
                    worker=self._liveness.worker_id,
                    now=iso(now),
                    ttl_ms=self._ttl_ms,
                ),
            )
        except StoreError:
            # It may be on its way still; once its lease is given up it must not arrive beside another's.
            lease = Lease(key, turn.turn_id, turn.request_hash, idempotency_key)
            self._attempts.release_soon(lease, fence=True)
            raise
        refuse(answer, detail, key, turn)
        self._learn(tree, turn)
        self._directory.touch(key, detail[0].decode(errors="surrogatepass"), int(now * 1000))

    def _ahead(
        self, key: SessionKey, turn: Turn, opening: SessionOpening, now_ms: int, *, unnamed: bool
    ) -> list[Command]:
        """What must be there before the turn is: its session's listing, and where to find an unnamed one."""
        commands: list[Command] = []
        if not turn.parent_id:
            commands += self._directory.announce(key, opening.run_id, now_ms)
        if unnamed:
            digest, ttl_ms = ids_digest(turn.generation.ids), opening.ttl_s * 1000 or self._ttl_ms
            commands += self._directory.remember(
                key, turn.chain_hash, turn.turn_id, digest, now_ms=now_ms, ttl_ms=ttl_ms
            )
            if not turn.parent_id:
                commands += self._attempts.remember(key, turn.request_hash, turn.turn_id, now_ms=now_ms, ttl_ms=ttl_ms)
        return commands

    def _learn(self, tree: keys.Tree, turn: Turn) -> None:
        """The next turn of this conversation most likely comes here."""
        runs: list[IdArray] = [turn.delta.ids, turn.generation.ids]
        name, parent = keys.quote(turn.turn_id), keys.quote(turn.parent_id)
        if turn.parent_id:
            self._cache.extend(tree.tag, parent, name, turn.chain_hash, runs)
        else:
            self._cache.put(tree.tag, name, turn.chain_hash, codec.joined(runs))

    def _uncancelled(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """A task that runs to the end whatever becomes of the caller."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._settled)
        return task

    def _settled(self, task: asyncio.Task[None]) -> None:
        """A failure that nobody waits for any more is the client's to find out by its repeat."""
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

    # Attempts and deliveries.

    async def outcome(self, key: SessionKey, attempt_id: str, worker: str, request_hash: bytes) -> Outcome:
        """What became of another's attempt; asking keeps it running. Raises SessionClosed, StoreError."""
        outcome = await self._attempts.outcome(key, attempt_id, request_hash)
        if outcome == "running" and await self._liveness.gone([worker]):
            return "gone"
        return outcome

    async def waits(self, lease: Lease) -> int:
        """Grows while others wait for the attempt's outcome. Raises StoreError."""
        return await self._attempts.waits(lease)

    async def release(self, lease: Lease) -> None:
        """Give up a lease, so that who waits for it may generate; goes through though the caller is cancelled."""
        await asyncio.shield(self._uncancelled(self._attempts.release(lease)))

    def mark(self, key: SessionKey, turn_id: str, *, delivered: bool) -> None:
        """Note whether a turn's reply was delivered; it is written with others, soon. Delivered is final."""
        self._attempts.mark(key, turn_id, delivered=delivered)

    async def asked(self, tenant: str, request_hash: bytes, most: int) -> tuple[str, ...]:
        """Unnamed sessions whose first turn answered this request, newest first; to be verified by `find`."""
        return await self._attempts.asked(tenant, request_hash, most)

    async def settled(self, key: SessionKey) -> None:
        """What the session holds has reached as many replicas as commits wait for: before a turn is replayed.

        Raises ReplicationUnknown, StoreError.
        """
        await self._scripts.settled(_tree(key).session(key.session_id))

    # Sessions.

    async def open_session(self, key: SessionKey, opening: SessionOpening) -> tuple[SessionView, bool]:
        """Make a session unless it is there; tells whether this call made it. Raises SessionClosed, StoreError."""
        now = time.time()
        answer, fields = await self._scripts.run_after(
            self._directory.announce(key, opening.run_id, int(now * 1000)),
            "open",
            [_tree(key).session(key.session_id)],
            [secrets.token_hex(8), self._ttl_ms, *session_fields(key, opening, iso(now))],
        )
        view = session_view(key, replies.pairs(fields))
        if view.state == "deleted":
            raise SessionClosed(key.session_id)
        return view, answer == b"created"

    async def session(self, key: SessionKey) -> SessionView:
        """A session's main key. Raises SessionMissing, StoreError; a deleted session has `state` deleted."""
        async with translated():
            fields: Any = await self._client.hgetall(_tree(key).session(key.session_id))
        if not fields:
            raise SessionMissing(key.session_id)
        return session_view(key, fields)

    async def closed(self, sessions: Iterable[SessionKey]) -> tuple[SessionKey, ...]:
        """Those of the sessions that were deleted, in one round trip. Raises StoreError."""
        asked = tuple(sessions)
        async with translated():
            pipeline = self._client.pipeline(transaction=False)
            for key in asked:
                pipeline.hget(_tree(key).session(key.session_id), "state")
            states = await pipeline.execute() if asked else []
        return tuple(key for key, state in zip(asked, states, strict=True) if state == b"deleted")

    async def sessions(self, tenant: str, run_id: str = "", *, limit: int = 100, cursor: str = "") -> Page:
        """A tenant's sessions, or those of one run, most recently used first. Raises ValueError on a bad cursor."""
        return await self._directory.sessions(tenant, run_id, limit, cursor)

    async def delete(self, key: SessionKey) -> None:
        """Delete a session: what it held is freed, and later turns on it are told. Raises SessionMissing."""
        answer, *run = await self._scripts.run(
            "delete",
            _tree(key).all(key.session_id),
            [iso(time.time()), self._ttl_ms, keys.TOMBSTONE_TTL_MS],
        )
        if answer == b"missing":
            raise SessionMissing(key.session_id)
        await self._directory.forget(key, run[0].decode(errors="surrogatepass"))

    async def finish(self, key: SessionKey, status: str = "", reward: float | None = None) -> SessionView:
        """Seal a session. Raises SessionMissing, SessionClosed."""
        answer, *fields = await self._scripts.run(
            "finish",
            [_tree(key).session(key.session_id)],
            [iso(time.time()), status, "" if reward is None else repr(reward)],
        )
        refuse_session(answer, key)
        return session_view(key, replies.pairs(fields[0]))

    async def set_reward(self, key: SessionKey, reward: float, turn_id: str = "", source: str = "") -> None:
        """Set the session's reward, or one turn's. Raises SessionMissing, SessionClosed, TurnMissing."""
        tree, sid = _tree(key), key.session_id
        session, links, *_, rewards, _, delivered = tree.all(sid)
        entry = json.dumps({"reward": reward, "source": source, "at": iso(time.time())})
        answer, *_ = await self._scripts.run(
            "reward", [session, links, rewards, delivered], [keys.quote(turn_id), repr(reward), source, entry]
        )
        refuse_session(answer, key)
        if answer == b"no_turn":
            raise TurnMissing(sid, turn_id)

    # Reading back.

    async def turns(self, key: SessionKey) -> Forest:
        """A session and all its turns, in commit order. Raises SessionMissing, SessionClosed, StoreError."""
        *hashes, _, _, rewards, _, delivered = _tree(key).all(key.session_id)
        async with translated():
            pipeline = self._client.pipeline(transaction=True)
            for name in (*hashes, rewards, delivered):
                pipeline.hgetall(name)
            read = await pipeline.execute()
        if not read[0]:
            raise SessionMissing(key.session_id)
        if read[0].get(b"state") == b"deleted":
            raise SessionClosed(key.session_id)
        return await asyncio.to_thread(replies.forest, key, read, self._upgrade)

    async def turn(self, key: SessionKey, turn_id: str) -> Turn:
        """One turn, whole. Raises SessionMissing, SessionClosed, TurnMissing, StoreError."""
        name = keys.quote(turn_id)
        reply = await self._scripts.run("turn", _tree(key).all(key.session_id)[:7], [name])
        if len(reply) == 1:
            refuse_session(b"missing" if reply[0] is None else reply[0], key)
            raise TurnMissing(key.session_id, turn_id)
        return replies.stored_turn(name, reply).decode(self._upgrade)

    async def delivery(self, key: SessionKey, turn_id: str) -> bool | None:
        """Whether a turn was delivered; None: not known. Raises StoreError."""
        async with translated():
            entry: Any = await self._client.hget(_tree(key).delivered, keys.quote(turn_id))
        return replies.delivery(entry)


def _tree(key: SessionKey) -> keys.Tree:
    """The tree a session lives in. Until there are forks, each is its own."""
    return keys.Tree(key.tenant, key.session_id)


def _find_keys(tree: keys.Tree, session_id: str) -> tuple[str, ...]:
    session, links, turns, tokens, _, _, _, index, requests, _, attempts, delivered = tree.all(session_id)
    return (session, links, turns, tokens, index, requests, attempts, delivered)
