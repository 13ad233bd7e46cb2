"""Ending tasks that talk to Redis."""

from __future__ import annotations

import asyncio
from typing import Any

_AGAIN_S = 0.5


async def end(*tasks: asyncio.Task[Any]) -> None:
    """Cancel tasks and wait until they are over, whatever comes of them.

    Once is not enough: redis-py sends through `asyncio.wait_for`, which on Python 3.11 drops a cancellation that
    comes just as the command has been written.
    """
    left = {task for task in tasks if not task.done()}
    while left:
        for task in left:
            task.cancel()
        _, left = await asyncio.wait(left, timeout=_AGAIN_S)
    await asyncio.gather(*tasks, return_exceptions=True)
