"""Listings and the content index: hints that are verified."""

from __future__ import annotations

import asyncio
import random
import time

import pytest

from store import directory, keys
from store.redis import RedisStore
from store.views import SessionKey, SessionOpening
from tests.store.building import Conversation, digest_of, grown

pytestmark = pytest.mark.topologies


async def listed(store: RedisStore, tenant: str, run: str = "", limit: int = 100) -> list[str]:
    """Every listed session, page by page."""
    names, cursor = [], ""
    while True:
        page = await store.sessions(tenant, run, limit=limit, cursor=cursor)
        names += [view.key.session_id for view in page.sessions]
        cursor = page.cursor
        if not cursor:
            return names


async def test_sessions_are_listed_from_their_first_turn_on_most_recently_used_first(store, tenant, monkeypatch):
    monkeypatch.setattr(directory, "_FLUSH_S", 0.01)
    rng = random.Random(1)
    conversations = {}
    for name in ("a", "b", "c"):
        conversations[name] = grown(rng, 1)
        await store.commit(SessionKey(tenant, name), conversations[name].head, SessionOpening(run_id=f"run {name}"))
        await asyncio.sleep(0.002)
    assert await listed(store, tenant) == ["c", "b", "a"]
    assert await listed(store, tenant, "run b") == ["b"]
    await store.commit(SessionKey(tenant, "a"), conversations["a"].then(rng).head, SessionOpening())
    await asyncio.sleep(0.1)
    assert await listed(store, tenant) == ["a", "c", "b"]


@pytest.mark.parametrize("limit", [1, 3, 100])
async def test_pages_hold_every_session_once_even_those_of_the_same_millisecond(store, tenant, limit):
    names = [f"s{n}" for n in range(10)]
    for name in names:
        await store.open_session(SessionKey(tenant, name), SessionOpening())
    await store._client.zadd(keys.listing(tenant), dict.fromkeys(names[:7], 5))
    found = await listed(store, tenant, limit=limit)
    assert sorted(found) == names
    assert set(found[3:]) == set(names[:7])


async def test_deleted_expired_and_wrongly_listed_sessions_are_not_listed(store, tenant):
    for name in ("kept", "deleted", "expired"):
        await store.open_session(SessionKey(tenant, name), SessionOpening(run_id="r"))
    await store.delete(SessionKey(tenant, "deleted"))
    await store._client.delete(keys.Tree(tenant, "expired").session("expired"))
    other = grown(random.Random(1), 1)
    await store.open_session(SessionKey(tenant, "of another run"), SessionOpening(run_id="q"))
    await store.commit(SessionKey(tenant, "of another run"), other.head, SessionOpening(run_id="r"))
    assert await listed(store, tenant, "r") == ["kept"]
    assert set(await listed(store, tenant)) == {"kept", "of another run"}


async def test_the_listing_of_expired_sessions_is_swept_while_others_work(store, tenant, monkeypatch):
    monkeypatch.setattr(directory, "_FLUSH_S", 0.001)
    monkeypatch.setattr(directory, "_FLUSHES_A_SWEEP", 1)
    monkeypatch.setattr(directory, "_SWEPT", 8)
    key, conversation, rng = SessionKey(tenant, "alive"), Conversation(), random.Random(1)
    stale = {f"gone{n}": int(time.time() * 1000) - 10_000_000 for n in range(20)}
    await store._client.zadd(keys.listing(tenant), stale)
    for _ in range(6):
        conversation = conversation.then(rng)
        await store.commit(key, conversation.head, SessionOpening())
        await asyncio.sleep(0.02)
    assert await store._client.zcard(keys.listing(tenant)) == 1


async def test_an_unnamed_conversation_is_traced_to_its_sessions_deepest_then_newest_first(store, tenant):
    rng = random.Random(2)
    opening = SessionOpening(unnamed=True)
    long = grown(rng, 8)
    for turn in long.turns:
        await store.commit(SessionKey(tenant, "s-long"), turn, opening, unnamed=True)
    traces = await store.trace(tenant, long.chain())
    assert [(t.depth, t.session_id, t.turn_id) for t in traces][:1] == [(8, "s-long", long.head.turn_id)]
    assert traces[0].generation_digest == digest_of(long.head)
    edited = (*long.chain()[:2], *(bytes([n]) * 16 for n in range(6)))
    assert [t.depth for t in await store.trace(tenant, edited)] == [2, 1]
    assert await store.trace(tenant + "x", long.chain()) == ()
    assert await store.trace(tenant, ()) == ()


async def test_equal_unnamed_conversations_are_told_apart_by_what_was_sampled(store, tenant):
    rng = random.Random(2)
    twins = []
    for n in range(16):
        reply = twins[0].head.reply if twins else None
        twin = Conversation().then(rng, said="same", reply=reply)
        twins.append(twin)
        await store.commit(SessionKey(tenant, f"s-{n}"), twin.head, SessionOpening(unnamed=True), unnamed=True)
        await asyncio.sleep(0.002)
    traces = await store.trace(tenant, twins[0].chain(), (twins[3].head.turn_id,))
    assert {t.session_id: t.generation_digest for t in traces} == {
        f"s-{n}": digest_of(twin.head) for n, twin in enumerate(twins)
    }
    assert [t.session_id for t in traces[:2]] == ["s-3", "s-15"]


async def test_named_sessions_leave_no_trace(store, tenant):
    conversation = grown(random.Random(1), 1)
    await store.commit(SessionKey(tenant, "named"), conversation.head, SessionOpening())
    assert await store.trace(tenant, conversation.chain()) == ()


async def test_a_cursor_that_is_not_ours_is_refused(store, tenant):
    with pytest.raises(ValueError, match="invalid literal"):
        await store.sessions(tenant, cursor="x")
