"""The runner on a real server: once, twice, two at a time, failing half-way, losing its lock."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import datetime

import pytest
from redis.asyncio import Redis
from redis.crc import key_slot

from migrations import (
    STEPS,
    DatabaseTooNew,
    DatabaseUnavailable,
    LedgerGap,
    LockBusy,
    LockLost,
    Runner,
    Step,
    StepFailed,
)
from migrations.base import LEDGER, LOCK


def appending(number: int, *, seconds: float = 0.0) -> Step:
    """A step that tells that it ran."""

    async def apply(connection: Redis) -> None:
        await asyncio.sleep(seconds)
        await connection.rpush("ran", number)

    return Step(number, f"append{number}", apply)


def doing(number: int, apply: Callable[[Redis], Awaitable[None]]) -> Step:
    return Step(number, f"append{number}", apply)


async def breaks(connection: Redis) -> None:
    await connection.rpush("ran", "half")
    raise KeyError("missing piece")


async def test_steps_are_applied_in_order_and_recorded_one_by_one(database: Redis) -> None:
    seen: list[list[str]] = []

    async def look(connection: Redis) -> None:
        seen.append(sorted(await connection.hkeys(LEDGER)))

    steps = [doing(1, look), doing(2, look), doing(3, look)]
    assert await Runner(database, steps).run() == tuple(steps)
    assert seen == [[], ["0001_append1"], ["0001_append1", "0002_append2"]]


async def test_the_ledger_says_to_a_person_what_ran_and_when(database: Redis) -> None:
    await Runner(database, [appending(1)], now=lambda: "2030-01-02T03:04:05.000+00:00").run()
    assert await database.hgetall(LEDGER) == {"0001_append1": "2030-01-02T03:04:05.000+00:00"}


async def test_times_are_iso_8601_with_a_zone(database: Redis) -> None:
    await Runner(database, [appending(1)]).run()
    applied_at = await database.hget(LEDGER, "0001_append1")
    assert datetime.fromisoformat(applied_at).tzinfo is not None


async def test_running_twice_applies_once(database: Redis) -> None:
    steps = [appending(1), appending(2)]
    assert await Runner(database, steps).run() == tuple(steps)
    assert await Runner(database, steps).run() == ()
    assert await database.lrange("ran", 0, -1) == ["1", "2"]


async def test_a_later_release_applies_only_what_is_new(database: Redis) -> None:
    await Runner(database, [appending(1)]).run()
    steps = [appending(1), appending(2), appending(3)]
    assert await Runner(database, steps).run() == tuple(steps[1:])
    assert await database.lrange("ran", 0, -1) == ["1", "2", "3"]


async def test_a_dry_run_names_the_steps_and_writes_nothing(database: Redis) -> None:
    steps = [appending(1), appending(2)]
    assert await Runner(database, steps).pending() == tuple(steps)
    assert await database.keys() == []


async def test_two_runners_at_once_apply_each_step_once(database: Redis, database_url: str) -> None:
    other = Redis.from_url(database_url)
    steps = [appending(n, seconds=0.05) for n in (1, 2, 3)]
    try:
        results = await asyncio.gather(Runner(database, steps).run(), Runner(other, steps).run())
    finally:
        await other.aclose()
    assert await database.lrange("ran", 0, -1) == ["1", "2", "3"]
    assert sorted(map(len, results)) == [0, 3]


async def test_a_failing_step_leaves_earlier_ones_recorded_and_itself_pending(database: Redis) -> None:
    steps = [appending(1), doing(2, breaks), appending(3)]
    with pytest.raises(StepFailed, match="missing piece") as failed:
        await Runner(database, steps).run()
    assert failed.value.label == "0002_append2"
    assert isinstance(failed.value.__cause__, KeyError)
    assert await database.hkeys(LEDGER) == ["0001_append1"]
    assert await Runner(database, steps).pending() == tuple(steps[1:])


async def test_a_repaired_step_goes_on_where_it_failed(database: Redis) -> None:
    with pytest.raises(StepFailed):
        await Runner(database, [appending(1), doing(2, breaks), appending(3)]).run()
    await Runner(database, [appending(1), appending(2), appending(3)]).run()
    assert await database.lrange("ran", 0, -1) == ["1", "half", "2", "3"]


@pytest.mark.parametrize("step", [appending(1), doing(1, breaks)])
async def test_the_lock_is_given_back_whatever_happened(database: Redis, step: Step) -> None:
    await asyncio.gather(Runner(database, [step]).run(), return_exceptions=True)
    assert not await database.exists(LOCK)


async def test_a_newer_database_is_refused_and_left_alone(database: Redis) -> None:
    await database.hset(LEDGER, mapping={"0001_append1": "then", "0002_later": "then"})
    for attempt in (Runner(database, [appending(1)]).run, Runner(database, [appending(1)]).pending):
        with pytest.raises(DatabaseTooNew):
            await attempt()
    assert await database.keys() == [LEDGER]


async def test_a_database_with_a_gap_is_refused(database: Redis) -> None:
    await database.hset(LEDGER, "0002_append2", "then")
    with pytest.raises(LedgerGap):
        await Runner(database, [appending(1), appending(2)]).run()
    assert await database.keys() == [LEDGER]


async def test_a_runner_waits_for_another_only_so_long(database: Redis) -> None:
    await database.set(LOCK, "somebody", px=60_000)
    with pytest.raises(LockBusy):
        await Runner(database, [appending(1)], wait_s=0.15).run()
    assert await database.get(LOCK) == "somebody"
    assert not await database.exists("ran")


async def test_the_lock_of_a_dead_runner_runs_out(database: Redis) -> None:
    await database.set(LOCK, "dead", px=100)
    assert len(await Runner(database, [appending(1)], wait_s=10).run()) == 1


async def test_a_step_may_take_longer_than_the_lock_lives(database: Redis) -> None:
    step = appending(1, seconds=1.0)
    assert await Runner(database, [step], lock_life_s=0.3).run() == (step,)


async def test_a_runner_whose_lock_was_taken_stops_and_records_nothing(database: Redis) -> None:
    stopped = asyncio.Event()

    async def robbed(connection: Redis) -> None:
        await connection.set(LOCK, "another", px=60_000)
        try:
            await asyncio.sleep(60)
        finally:
            stopped.set()

    with pytest.raises(LockLost):
        await Runner(database, [doing(1, robbed)], lock_life_s=0.3).run()
    assert stopped.is_set()
    assert not await database.exists(LEDGER)
    assert await database.get(LOCK) == "another"


async def test_a_lock_lost_at_the_very_end_records_nothing(database: Redis) -> None:
    async def robbed(connection: Redis) -> None:
        await connection.set(LOCK, "another", px=60_000)

    with pytest.raises(LockLost):
        await Runner(database, [doing(1, robbed)]).run()
    assert not await database.exists(LEDGER)


async def test_a_lock_taken_by_an_answer_that_was_lost_is_our_own(database: Redis) -> None:
    runner = Runner(database, [appending(1)])
    assert await runner._took_lock("token")
    assert await runner._took_lock("token")
    assert not await runner._took_lock("another")


def test_lock_and_ledger_share_a_cluster_slot() -> None:
    assert key_slot(LOCK.encode()) == key_slot(LEDGER.encode())


async def test_a_server_that_is_away_is_said_to_be() -> None:
    nobody = Redis.from_url("unix:///nonexistent/redis.sock", retry=None)
    with pytest.raises(DatabaseUnavailable):
        await Runner(nobody, STEPS).run()
    await nobody.aclose()
