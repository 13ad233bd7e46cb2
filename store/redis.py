"""The one store: sessions as forests of immutable turns in Redis.

*Atomicity.* A turn is appended by one script in one hash slot, so it is there whole or not at all; all checks
precede the first write. Finding is one script too: candidates, their root signatures and the lineage are of one
instant.

*Repeats.* redis-py re-sends what it got no reply to, and callers repeat what failed. Every command may be repeated: a
commit knows its turn id, an opening its mark; the rest sets what it says.

*Errors.* `StoreUnavailable`: not known whether it ran, a repeat tells. `StoreFull`: nothing was written. Everything
else is a fact about the session. No error of redis-py leaves this package.

*Crashes.* A worker holds nothing that matters: a cache of lineages, whose every use is confirmed by the round trip
that finds, and a second's worth of last-use times. A commit that has been started is not given up when its caller is
cancelled: whether a client was still there must not leave a turn half known.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import time
from collections.abc import Coroutine, Iterable, Sequence
from typing import Any, Self

from redis.asyncio import Redis

from splice.identity import ids_digest
from splice.types import IdArray, Lineage, Turn
from store import codec, keys, replies
from store.append import commit_args, idempotency_field, refuse, refuse_session
from store.cache import LineageCache
from store.connection import open_client, server_facts, translated
from store.directory import Directory
from store.errors import SessionClosed, SessionMissing, StoreError, TurnMissing
from store.readable import hash_field, hash_fields, iso, session_fields, session_view
from store.scripts import Command, Scripts
from store.views import FindQuery, Forest, Found, Page, ServerFacts, SessionKey, SessionOpening, SessionView, Trace

_CACHED_SENT = 8  # cached turns that `find` is told of, deepest first
_LONG_TEXT = 50_000  # characters: compressing more than this leaves the event loop


def _unchanged(record: bytes) -> bytes:
    return record


class RedisStore:
    """Sessions and turns. One per worker; belongs to one event loop."""

    def __init__(
        self, client: Redis, *, default_ttl_s: int, cache_bytes: int, upgrade: replies.Upgrade = _unchanged
    ) -> None:
        """`upgrade` brings a record of an older schema up to ours; 0 as TTL means that sessions stay."""
        self._client = client
        self._ttl_ms = default_ttl_s * 1000
        self._upgrade = upgrade
        self._scripts = Scripts(client)
        self._cache = LineageCache(cache_bytes)
        self._directory = Directory(client)
        self._running: set[asyncio.Task[Any]] = set()

    @classmethod
    async def connect(
        cls,
        url: str,
        *,
        default_ttl_s: int = 0,
        cache_bytes: int = 256 * 1024 * 1024,
        upgrade: replies.Upgrade = _unchanged,
    ) -> Self:
        """A store on the server at `url` (`redis://`, `rediss://`, `unix://`). Raises StoreError, ValueError."""
        store = cls(open_client(url), default_ttl_s=default_ttl_s, cache_bytes=cache_bytes, upgrade=upgrade)
        try:
            await store.check_server()
        except StoreError:
            await store.close()
            raise
        return store

    async def close(self) -> None:
        """Finish what runs, write pending last uses, let the connections go."""
        try:
            await asyncio.gather(*self._running, return_exceptions=True)
            await self._directory.close()
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
        """What the store knows of a request, in one round trip.

        `Found.candidates` are the hits from the deepest conversation up to the first that has a turn of the
        query's rendering signature: what `locate` can choose from. `Found.session.roots` are their roots.
        Raises StoreError.
        """
        tree = _tree(query.key)
        held = self._cache.held(tree.tag, query.chain, _CACHED_SENT)
        lists: tuple[Sequence[str], ...] = (
            [keys.quote(hint) for hint in query.hints],
            [hash_field(digest) for digest in query.generation_digests],
            list(held),
        )
        reply = await self._scripts.run(
            "find",
            _find_keys(tree, query.key.session_id),
            [
                keys.quote(query.rendering_signature),
                hash_field(query.request_hash),
                idempotency_field(query.idempotency_key),
                "",
                hash_fields(query.chain),
                *(len(one) for one in lists),
                *(item for one in lists for item in one),
            ],
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
        reply = await self._scripts.run(
            "find", _find_keys(tree, key.session_id), ["", "", "", turn, "", 0, 0, len(held), *held]
        )
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

        Raises SessionClosed, SessionFinished, ParentMissing, RenderingDiffers, AlreadyAnswered, StoreFull,
        StoreUnavailable.
        """
        await self._uncancelled(self._commit(key, turn, opening, idempotency_key, unnamed=unnamed))

    async def _commit(
        self, key: SessionKey, turn: Turn, opening: SessionOpening, idempotency_key: str, *, unnamed: bool
    ) -> None:
        if sum(len(message.content) for message in turn.messages) + len(turn.reply.content) > _LONG_TEXT:
            text = await asyncio.to_thread(codec.pack_text, turn.messages, turn.reply)
        else:
            text = codec.pack_text(turn.messages, turn.reply)
        now = time.time()
        tree = _tree(key)
        answer, *detail = await self._scripts.run_after(
            self._ahead(key, turn, opening, int(now * 1000), unnamed=unnamed),
            "commit",
            tree.all(key.session_id),
            commit_args(key, turn, opening, text, idempotency_key, iso(now), self._ttl_ms),
        )
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
        return commands

    def _learn(self, tree: keys.Tree, turn: Turn) -> None:
        """The next turn of this conversation most likely comes here."""
        runs: list[IdArray] = [turn.delta.ids, turn.generation.ids]
        name, parent = keys.quote(turn.turn_id), keys.quote(turn.parent_id)
        if turn.parent_id:
            self._cache.extend(tree.tag, parent, name, turn.chain_hash, runs)
        else:
            self._cache.put(tree.tag, name, turn.chain_hash, codec.joined(runs))

    async def _uncancelled(self, work: Coroutine[Any, Any, None]) -> None:
        """Run to the end whatever becomes of the caller."""
        task = asyncio.create_task(work)
        self._running.add(task)
        task.add_done_callback(self._settled)
        await asyncio.shield(task)

    def _settled(self, task: asyncio.Task[None]) -> None:
        """A failure that nobody waits for any more is the client's to find out by its repeat."""
        self._running.discard(task)
        if not task.cancelled():
            task.exception()

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
        session, links, *_, rewards = tree.all(sid)
        entry = json.dumps({"reward": reward, "source": source, "at": iso(time.time())})
        answer, *_ = await self._scripts.run(
            "reward", [session, links, rewards], [keys.quote(turn_id), repr(reward), source, entry]
        )
        refuse_session(answer, key)
        if answer == b"no_turn":
            raise TurnMissing(sid, turn_id)

    # Reading back.

    async def turns(self, key: SessionKey) -> Forest:
        """A session and all its turns, in commit order. Raises SessionMissing, SessionClosed, StoreError."""
        *hashes, _, _, rewards = _tree(key).all(key.session_id)
        async with translated():
            pipeline = self._client.pipeline(transaction=True)
            for name in (*hashes, rewards):
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


def _tree(key: SessionKey) -> keys.Tree:
    """The tree a session lives in. Until there are forks, each is its own."""
    return keys.Tree(key.tenant, key.session_id)


def _find_keys(tree: keys.Tree, session_id: str) -> tuple[str, ...]:
    session, links, turns, tokens, _, _, _, index, requests, _ = tree.all(session_id)
    return (session, links, turns, tokens, index, requests)
