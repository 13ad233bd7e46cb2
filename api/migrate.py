"""`tokensplice migrate`, and what embedded mode does at its start: bring the database up to this release."""

from __future__ import annotations

from migrations import STEPS, Runner
from store.connection import open_client


async def migrate(redis_url: str, *, dry_run: bool = False) -> tuple[str, ...]:
    """The steps that were applied; in a dry run, those that would be. Raises MigrationError."""
    client = open_client(redis_url)
    try:
        runner = Runner(client, STEPS)
        steps = await (runner.pending() if dry_run else runner.run())
    finally:
        await client.aclose()
    return tuple(step.label for step in steps)
