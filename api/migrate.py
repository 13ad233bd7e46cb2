"""`tokensplice migrate`, and what embedded mode does at its start: bring the database up to this release."""

from __future__ import annotations

from typing import cast

from redis.asyncio import Redis

from migrations import STEPS, Runner, Step
from store.connection import open_client


def _client(url: str) -> Redis:
    """A cluster's client has the same commands, though redis-py gives it no common type."""
    return cast("Redis", open_client(url))


async def missing(redis_url: str) -> tuple[Step, ...]:
    """The steps that this database lacks. Raises MigrationError; DatabaseTooNew when a newer release wrote it."""
    client = _client(redis_url)
    try:
        return await Runner(client, STEPS).pending()
    finally:
        await client.aclose()


async def migrate(redis_url: str, *, dry_run: bool = False) -> tuple[str, ...]:
    """The steps that were applied; in a dry run, those that would be. Raises MigrationError."""
    if dry_run:
        return tuple(step.label for step in await missing(redis_url))
    client = _client(redis_url)
    try:
        steps = await Runner(client, STEPS).run()
    finally:
        await client.aclose()
    return tuple(step.label for step in steps)
