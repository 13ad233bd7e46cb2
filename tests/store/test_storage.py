"""What is in Redis: how much, for how long, and readable by whom."""

from __future__ import annotations

import json
import random
import re
from dataclasses import replace

import msgpack
import pytest
from redis.asyncio import Redis

from splice.types import Message, ToolCall
from store import codec
from store.errors import SchemaTooNew, StoreCorrupt
from store.redis import RedisStore
from store.views import SessionKey, SessionOpening
from tests.store.building import Conversation, grown

TURN = 256


async def bytes_by_part(client: Redis, key: SessionKey) -> dict[str, int]:
    """MEMORY USAGE of each of a session's keys, exact."""
    prefix = f"ts1:{{{key.tenant}:{key.session_id}}}:"
    names = [name.decode() async for name in client.scan_iter(match=prefix.replace("[", "\\[") + "*", count=1000)]
    return {name.removeprefix(prefix): await client.memory_usage(name, samples=0) for name in names}


async def long_session(store: RedisStore, key: SessionKey, tokens: int, *, unnamed: bool = False) -> Conversation:
    rng = random.Random(5)
    conversation = Conversation()
    for _ in range(tokens // (2 * TURN)):
        conversation = conversation.then(rng, sizes=(TURN, TURN))
        await store.commit(key, conversation.head, SessionOpening(), unnamed=unnamed)
    return conversation


async def test_stored_bytes_a_token_stay_within_budget_and_do_not_grow_with_the_session(store, tenant):
    per_token = {}
    for tokens in (8_192, 65_536):
        key = SessionKey(tenant, f"s{tokens}")
        await long_session(store, key, tokens)
        parts = await bytes_by_part(store._client, key)
        per_token[tokens] = sum(size for part, size in parts.items() if part != "text") / tokens
    assert max(per_token.values()) <= (10 + 6) / 2
    assert per_token[65_536] <= per_token[8_192] * 1.02


ORDINARY = [
    (
        Message(
            "user",
            "The deployment of the billing service failed again last night. The on-call engineer says that the "
            "database migration ran into a lock timeout, but the dashboard shows no long transactions at that time. "
            "Please look at the logs from 02:00 to 03:00 UTC, find out which statement was waiting, what it was "
            "waiting for, and whether we can make the migration safe to run while traffic is flowing. If you need "
            "to, check the settings of the connection pool as well; we changed the maximum size two weeks ago.",
        ),
        Message(
            "assistant",
            "I will begin with the logs of the migration job and then compare them with what the database "
            "recorded about locks during the same hour. If the waiting statement was the ALTER TABLE, the usual "
            "cause is an idle transaction that still holds a share lock on the table, which would not show up as "
            "a long running query on the dashboard. Let me search for the first error and the messages before it.",
            tool_calls=(ToolCall("search_logs", '{"service":"billing","from":"02:00","to":"03:00","query":"lock"}'),),
        ),
    ),
    (
        Message(
            "tool",
            "\n".join(
                f"2026-03-14T02:{10 + n:02d}:07.{417 + 13 * n}Z billing-migrate-6f9c {level} {text}"
                for n, (level, text) in enumerate(
                    [
                        ("INFO", "connecting to postgres at billing-db.internal:5432 as role migrator"),
                        ("INFO", "applying migration 0042_add_invoice_currency"),
                        ("INFO", "ALTER TABLE invoices ADD COLUMN currency text NOT NULL DEFAULT 'EUR'"),
                        ("WARN", "still waiting for AccessExclusiveLock on relation 16734 after 1000.123 ms"),
                        ("DETAIL", "process 8123 holds the lock; wait queue: 9017, 9018, 9020"),
                        ("WARN", "connection pool exhausted, 20 of 20 connections in use, 14 requests waiting"),
                        ("ERROR", "canceling statement due to lock timeout"),
                        ("ERROR", "migration 0042_add_invoice_currency failed, rolling back"),
                        ("INFO", "rollback complete, exiting with status 1"),
                        ("INFO", "retrying in 60 seconds, attempt 2 of 5"),
                        ("WARN", "still waiting for AccessExclusiveLock on relation 16734 after 1000.098 ms"),
                        ("ERROR", "canceling statement due to lock timeout"),
                    ]
                )
            ),
            tool_call_id="call_01m8m5b2hzznb997wjeb_0",
        ),
        Message(
            "assistant",
            "The statement that waited is the ALTER TABLE on invoices, and process 8123 held the lock that it "
            "needed. I want to see what that process was doing when the migration began, so I ask the database "
            "for the activity that it recorded, and for locks on the relation 16734.",
            tool_calls=(
                ToolCall("run_sql", '{"sql":"select pid, state, query from activity where pid = 8123"}'),
                ToolCall("run_sql", '{"sql":"select mode, granted from locks where relation = 16734"}'),
            ),
        ),
    ),
    (
        Message(
            "tool",
            json.dumps(
                {
                    "columns": ["pid", "state", "query_start", "wait_event", "query"],
                    "rows": [
                        [8123, "idle in transaction", "01:12:44", "ClientRead", "select id from invoices where id = 1"],
                        [9017, "active", "02:13:02", "Lock", "alter table invoices add column currency text"],
                        [9018, "active", "02:13:04", "Lock", "select total from invoices where customer_id = 7"],
                        [9020, "active", "02:13:05", "Lock", "select total from invoices where customer_id = 12"],
                    ],
                    "row_count": 4,
                    "elapsed_ms": 12.4,
                }
            ),
            tool_call_id="call_01m8m5b2hzznb997wjec_0",
        ),
        Message(
            "assistant",
            "That explains it. Process 8123 opened a transaction at 01:12, read one invoice and then stayed idle "
            "without committing, so its share lock was never released. The migration queued behind it, and every "
            "later read of the table queued behind the migration, which is why the pool ran out of connections. "
            "Two changes make this safe: set idle_in_transaction_session_timeout to a minute for the role that "
            "opened it, and let the migration take its lock with a timeout of two seconds and try again, so that "
            "traffic is never blocked for longer than that. Shall I write both changes as a pull request?",
        ),
    ),
]


def test_ordinary_text_is_stored_in_at_most_half_its_utf8_size():
    plain = packed = 0
    for message, reply in ORDINARY:
        texts = [m.content + "".join(c.name + c.arguments for c in m.tool_calls) for m in (message, reply)]
        plain += sum(len(text.encode()) for text in texts)
        packed += len(codec.pack_text((message,), reply))
    assert 900 <= plain / len(ORDINARY) <= 1500  # longer turns compress better
    assert packed <= plain / 2


async def test_a_person_reads_what_a_session_is_with_redis_cli_alone(store, tenant):
    key = SessionKey(tenant, "task-17")
    conversation = grown(random.Random(1), 3, signature="5f" * 16)
    for turn in conversation.turns:
        await store.commit(key, turn, SessionOpening(run_id="run-9", metadata={"task": "sort"}))
    main = await store._client.hgetall(f"ts1:{{{tenant}:task-17}}:session:task-17")
    told = {name.decode(): value.decode() for name, value in main.items()}
    root = conversation.turns[0].turn_id
    assert told["id"] == "task-17"
    assert (told["model"], told["turns"], told["tokens"], told["state"]) == ("Qwen/Qwen3-4B", "3", "63", "open")
    assert told[f"root:{root}"].split()[0] == "5f" * 16
    assert re.fullmatch(r"20\d\d-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", told["updated"])
    assert (told["run"], told["metadata"], told["last_turn"]) == (
        "run-9",
        '{"task": "sort"}',
        conversation.head.turn_id,
    )
    line = await store._client.hget(f"ts1:{{{tenant}:task-17}}:links", conversation.head.turn_id)
    assert line.decode().split()[:4] == ["0", "3", conversation.turns[1].turn_id, root]


async def test_a_record_begins_with_its_schema_for_any_reader_of_messagepack(store, tenant):
    conversation = grown(random.Random(1), 1)
    await store.commit(SessionKey(tenant, "s"), conversation.head, SessionOpening())
    raw = await store._client.hget(f"ts1:{{{tenant}:s}}:turns", conversation.head.turn_id)
    assert list(msgpack.unpackb(raw).items())[:2] == [("schema", 1), ("min_reader", 1)]


async def rewrite(store: RedisStore, tenant: str, turn_id: str, **changed: object) -> None:
    name = f"ts1:{{{tenant}:s}}:turns"
    record = msgpack.unpackb(await store._client.hget(name, turn_id))
    await store._client.hset(name, turn_id, msgpack.packb({**record, **changed}))


async def test_a_newer_record_is_read_when_it_allows_us_and_refused_when_not(store, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 1)
    turn = conversation.head
    await store.commit(key, turn, SessionOpening())
    await rewrite(store, tenant, turn.turn_id, schema=2, invented={"by": "a later release"})
    assert await store.turn(key, turn.turn_id) == turn
    await rewrite(store, tenant, turn.turn_id, schema=3, min_reader=2, created="now a text")
    for read in (store.turn(key, turn.turn_id), store.turns(key), store.find(conversation.query(key))):
        with pytest.raises(SchemaTooNew) as refused:
            await read
        assert (refused.value.schema, refused.value.min_reader, refused.value.ours) == (3, 2, 1)


async def test_records_are_upgraded_on_read(redis_url, store, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 1)
    await store.commit(key, conversation.head, SessionOpening())
    await rewrite(store, tenant, conversation.head.turn_id, told="old word")

    def upgrade(record: bytes) -> bytes:
        return msgpack.packb({**msgpack.unpackb(record), "told": "new word"})

    upgrading = await RedisStore.connect(redis_url, upgrade=upgrade)
    assert (await upgrading.turn(key, conversation.head.turn_id)).finish_reason == "new word"
    await upgrading.close()


async def test_damage_is_refused_and_never_spliced(store, other_store, tenant):
    key, conversation = SessionKey(tenant, "s"), grown(random.Random(1), 3)
    for turn in conversation.turns:
        await store.commit(key, turn, SessionOpening())
    tokens = f"ts1:{{{tenant}:s}}:tokens"
    whole = await store._client.hget(tokens, conversation.turns[1].turn_id)
    for damaged in (whole[:-1], whole[:-3], b""):
        await store._client.hset(tokens, conversation.turns[1].turn_id, damaged)
        with pytest.raises(StoreCorrupt):
            await other_store.find(conversation.query(key))
    await store._client.hset(tokens, conversation.turns[1].turn_id, whole)
    await store._client.hdel(f"ts1:{{{tenant}:s}}:links", conversation.turns[0].turn_id)
    with pytest.raises(StoreCorrupt):
        await other_store.find(conversation.query(key))


async def test_use_keeps_every_key_of_a_session_alive_as_long_as_its_main_key(store, tenant):
    key, rng = SessionKey(tenant, "s"), random.Random(1)
    conversation = grown(rng, 1)
    await store.commit(key, conversation.head, SessionOpening(ttl_s=1000))
    await store.set_reward(key, 1.0, conversation.head.turn_id)
    names = [f"ts1:{{{tenant}:s}}:{part}" for part in await bytes_by_part(store._client, key)]
    assert len(names) == 10  # all but `delivered` and `attempts`, which are made anew by each turn
    for age_ms, refreshed in ((10_000, False), (100_000, True)):
        for name in names:
            await store._client.pexpire(name, 1_000_000 - age_ms)
        conversation = conversation.then(rng)
        await store.commit(key, conversation.head, SessionOpening())
        left = [await store._client.pttl(name) for name in names]
        assert max(left) - min(left) <= 50
        assert (min(left) > 999_000) is refreshed


async def test_without_a_ttl_sessions_stay(redis_url, tenant):
    store = await RedisStore.connect(redis_url, default_ttl_s=0)
    key = SessionKey(tenant, "s")
    await store.commit(key, grown(random.Random(1), 1).head, SessionOpening())
    for part in await bytes_by_part(store._client, key):
        assert await store._client.pttl(f"ts1:{{{tenant}:s}}:{part}") == -1
    await store.close()


async def test_tools_are_stored_once_for_all_roots(store, tenant):
    key, rng = SessionKey(tenant, "s"), random.Random(1)
    for _ in range(4):
        await store.commit(key, Conversation().then(rng).head, SessionOpening())
    assert await store._client.hlen(f"ts1:{{{tenant}:s}}:shared") == 2


async def test_a_session_of_many_roots_is_found_without_reading_them_all(store, tenant):
    key, rng = SessionKey(tenant, "s"), random.Random(1)
    main = grown(rng, 1)
    await store.commit(key, main.head, SessionOpening())
    for _ in range(20):
        await store.commit(key, Conversation().then(rng).head, SessionOpening())
    found = await store.find(main.query(key))
    assert found.session == replace(await store.session(key), roots={main.head.turn_id: main.head.rendering_signature})
