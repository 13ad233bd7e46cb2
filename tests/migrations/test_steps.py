"""The shipped steps on an empty database and on one that the first release filled; each runs twice."""

from __future__ import annotations

import pytest
from click.testing import CliRunner
from redis import Redis as BlockingRedis
from redis.asyncio import Redis

from api.cli import main
from migrations import STEPS, Runner, Step
from store import keys


@pytest.mark.parametrize("step", STEPS, ids=lambda step: step.label)
async def test_each_step_may_run_twice(database: Redis, step: Step) -> None:
    await step.apply(database)
    once = {key: await database.dump(key) for key in await database.keys()}
    await step.apply(database)
    assert {key: await database.dump(key) for key in await database.keys()} == once


async def test_the_first_step_notes_the_layout_that_the_store_writes(database: Redis) -> None:
    await Runner(database, STEPS).run()
    assert await database.hgetall("ts1:schema") == {"layout": str(keys.SCHEMA_VERSION)}


async def test_sessions_that_are_there_already_stay_as_they_are(database: Redis) -> None:
    session = keys.Tree("tenant", "s").session("s")
    await database.hset(session, mapping={"id": "s", "state": "open"})
    await Runner(database, STEPS).run()
    assert await database.hgetall(session) == {"id": "s", "state": "open"}


async def test_a_layout_noted_before_is_never_overwritten(database: Redis) -> None:
    await database.hset("ts1:schema", "layout", "2")
    await STEPS[0].apply(database)
    assert await database.hget("ts1:schema", "layout") == "2"


@pytest.fixture
def clean_url(database_url: str) -> str:
    with BlockingRedis.from_url(database_url) as connection:
        connection.flushdb()
    return database_url


def test_the_command_shows_applies_and_then_has_nothing_to_do(clean_url: str) -> None:
    def said(*arguments: str) -> str:
        result = CliRunner().invoke(main, ["migrate", "--redis-url", clean_url, *arguments])
        assert result.exit_code == 0, result.output
        return str(result.output)

    assert said("--dry-run") == "pending 0001_schema\n"
    assert said("--dry-run") == "pending 0001_schema\n"
    assert said() == "applied 0001_schema\n"
    assert said() == said("--dry-run") == "nothing to do: the database is up to date\n"


def test_the_command_refuses_a_newer_database_in_words(clean_url: str) -> None:
    with BlockingRedis.from_url(clean_url) as connection:
        connection.hset("ts1:migrations", "0099_future", "then")
    result = CliRunner().invoke(main, ["migrate"], env={"TOKENSPLICE_REDIS_URL": clean_url})
    assert result.exit_code == 2
    assert "0099_future" in result.stderr
    assert "upgrade this one" in result.stderr


def test_the_command_names_a_bad_setting() -> None:
    result = CliRunner().invoke(main, ["migrate", "--redis-url", "http://nowhere"])
    assert result.exit_code == 2
    assert "TOKENSPLICE_REDIS_URL" in result.stderr
