"""Applies the steps that a database lacks: one runner at a time, each step recorded as soon as it is done.

The lock is a key with a token and a short life that the runner renews while it works. Recording a step is one script
that compares the token first, so a runner that was away too long records nothing. A step that was applied but not
recorded (a crash between the two) runs again: every step is safe to run twice.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager, suppress
from datetime import UTC, datetime
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import RedisError

from migrations.base import LEDGER, LOCK, Step
from migrations.errors import DatabaseUnavailable, LockBusy, LockLost, StepFailed
from migrations.plan import plan

_POLL_S = 0.1

# Each compares the lock's token before it acts, and may be repeated by a client that lost the answer.
_RECORD = """#!lua
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
redis.call('HSETNX', KEYS[2], ARGV[2], ARGV[3])
return 1
"""
_RENEW = """#!lua
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('PEXPIRE', KEYS[1], ARGV[2])
"""
_RELEASE = """#!lua
if redis.call('GET', KEYS[1]) ~= ARGV[1] then return 0 end
return redis.call('DEL', KEYS[1])
"""


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


class Runner:
    """Plans and applies `steps` on the database behind `connection`."""

    def __init__(
        self,
        connection: Redis,
        steps: Sequence[Step],
        *,
        lock_life_s: float = 30.0,
        wait_s: float = 300.0,
        now: Callable[[], str] = _now,
    ) -> None:
        self._connection = connection
        self._steps = tuple(steps)
        self._lock_life_s = lock_life_s
        self._wait_s = wait_s
        self._now = now

    async def pending(self) -> tuple[Step, ...]:
        """The steps that are not applied; writes nothing. Raises MigrationError."""
        with _translated():
            fields: list[bytes | str] = await _answer(self._connection.hkeys(LEDGER))
        return plan((f.decode() if isinstance(f, bytes) else f for f in fields), self._steps)

    async def run(self) -> tuple[Step, ...]:
        """Apply what is pending; the steps that this call applied. Raises MigrationError."""
        applied: list[Step] = []
        if not await self.pending():
            return ()
        async with self._locked() as token:
            for step in await self.pending():  # anew: another runner may have been first
                await self._apply(step, token)
                applied.append(step)
        return tuple(applied)

    async def _apply(self, step: Step, token: str) -> None:
        work = asyncio.ensure_future(step.apply(self._connection))
        renewal = asyncio.create_task(self._keep_lock(token))
        try:
            await asyncio.wait({work, renewal}, return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                await renewal  # it only ends by raising
            await work
        except (LockLost, DatabaseUnavailable):
            raise
        except Exception as error:
            raise StepFailed(step.label, str(error) or type(error).__name__) from error
        finally:
            await _cancelled(work, renewal)
        if not await self._script(_RECORD, (LOCK, LEDGER), token, step.label, self._now()):
            raise LockLost

    @asynccontextmanager
    async def _locked(self) -> AsyncIterator[str]:
        token = secrets.token_hex(16)
        deadline = asyncio.get_running_loop().time() + self._wait_s
        while not await self._took_lock(token):
            if asyncio.get_running_loop().time() >= deadline:
                raise LockBusy(self._wait_s)
            await asyncio.sleep(_POLL_S)
        try:
            yield token
        finally:
            with suppress(DatabaseUnavailable):  # the lock dies by itself; what went wrong before is what to tell
                await self._script(_RELEASE, (LOCK,), token)

    async def _took_lock(self, token: str) -> bool:
        with _translated():
            if await self._connection.set(LOCK, token, nx=True, px=self._lock_life_ms):
                return True
            # The client repeats a command whose answer was lost: the holder may be this very call.
            holder = await self._connection.get(LOCK)
        return holder in {token, token.encode()}

    async def _keep_lock(self, token: str) -> None:
        while True:
            await asyncio.sleep(self._lock_life_s / 3)
            if not await self._script(_RENEW, (LOCK,), token, self._lock_life_ms):
                raise LockLost

    @property
    def _lock_life_ms(self) -> int:
        return max(1, round(self._lock_life_s * 1000))

    async def _script(self, script: str, keys: Sequence[str], *arguments: str | int) -> bool:
        with _translated():
            return bool(await _answer(self._connection.eval(script, len(keys), *keys, *arguments)))


@contextmanager
def _translated() -> Iterator[None]:
    try:
        yield
    except (RedisError, OSError) as error:
        raise DatabaseUnavailable(str(error) or type(error).__name__) from error


async def _answer(command: Awaitable[Any] | Any) -> Any:
    """What the command answers; the client types its commands for its blocking form too."""
    return await command


async def _cancelled(*tasks: asyncio.Future[None]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
