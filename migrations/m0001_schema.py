"""0001: the database says in which layout its keys are.

Layout 1 is the one that the first release writes: keys begin with `ts1:`; those of a session tree are
`ts1:{<tenant>:<root session>}:` and session:<id>, links, turns, tokens, logprobs, text, shared, index:<id>,
requests:<id>, rewards:<id>; listings are `ts1:{<tenant>}:sessions` and `ts1:{<tenant>}:run:<run>`. Sessions stored
before this step ran are in it already, so nothing but the note is written.
"""

from __future__ import annotations

from redis.asyncio import Redis

from migrations.base import Step

_SCHEMA = "ts1:schema"  # HASH layout -> its number
_LAYOUT = "1"


async def _apply(connection: Redis) -> None:
    await connection.hsetnx(_SCHEMA, "layout", _LAYOUT)


STEP = Step(1, "schema", _apply)
