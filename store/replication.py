"""Writes that are answered once n replicas have them: those of one moment share one WAIT.

WAIT answers for what was written on its own connection, so writes and WAIT travel together: what arrives while one
round is under way goes with the next. A write that had been there before (a repeat) writes nothing, and on Valkey and
newer Redis a WAIT behind it would answer at once, whatever the replicas lack. So each round ends with a small write of
its own, the fence: replication is in order, and who has the fence has all that was written before it, by whomever.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any

from redis.asyncio import Redis
from redis.asyncio.cluster import ClusterNode

from store.cluster import ROUTING, Argument, Cluster
from store.connection import Client, translated
from store.errors import ReplicationUnknown

Command = tuple[Argument, ...]
Answers = list[Any]
_Send = Callable[[Sequence[Command]], Awaitable[Answers]]

MOST_WAIT_S = 4.0  # below the connection's own patience for one answer

_ROUNDS = 2  # under way at once to one node: while one waits for replicas, the next one writes
_WRITES = 128  # in one round
_FENCE_MS = 1


@dataclass(frozen=True, slots=True)
class Replication:
    """How many replicas must have a write before it is acknowledged, and how long that may take."""

    replicas: int
    timeout_s: float


@dataclass(frozen=True, slots=True)
class _Write:
    commands: Sequence[Command]
    key: str
    answer: asyncio.Future[tuple[Answers, int]]


class Replicated:
    """Carries writes to the primary that has their key, and waits for its replicas."""

    def __init__(self, client: Client, wanted: Replication) -> None:
        self._client = client
        self._wanted = wanted
        self._lanes: dict[str, _Lane] = {}

    async def run(self, commands: Sequence[Command], key: str) -> Answers:
        """The commands' answers, refusals among them, once enough replicas have what is written by now.

        Without commands it only waits: for what others wrote under this key. Raises ReplicationUnknown, StoreError.
        """
        async with translated():
            if isinstance(self._client, Cluster):
                answers, reached = await self._in_cluster(self._client, commands, key)
            else:
                answers, reached = await self._lane("", _sender(self._client)).carry(commands, key)
        if reached < self._wanted.replicas:
            raise ReplicationUnknown(reached, self._wanted.replicas)
        return answers

    async def _in_cluster(self, client: Cluster, commands: Sequence[Command], key: str) -> tuple[Answers, int]:
        reached = 0

        async def send(node: ClusterNode, asking: bool) -> Answers:  # noqa: FBT001
            nonlocal reached
            # Wherever one command of it must go elsewhere, all of it is sent anew: each is safe to repeat.
            lane = self._lane(node.name, _cluster_sender(client, node))
            ahead: list[Command] = [part for command in commands for part in (("ASKING",), command)]
            answers, reached = await lane.carry(ahead if asking else commands, key)
            return answers[1::2] if asking else answers

        answers = await client.routed(client.keyslot(key), send)
        return list(answers), reached

    def _lane(self, name: str, send: _Send) -> _Lane:
        if name not in self._lanes:
            wait = ("WAIT", self._wanted.replicas, round(self._wanted.timeout_s * 1000))
            self._lanes[name] = _Lane(send, wait)
        return self._lanes[name]


class _Lane:
    """The rounds to one node."""

    def __init__(self, send: _Send, wait: Command) -> None:
        self._send = send
        self._wait = wait
        self._queue: deque[_Write] = deque()
        self._going = 0
        self._rounds: set[asyncio.Task[None]] = set()  # held, or the loop might forget them

    async def carry(self, commands: Sequence[Command], key: str) -> tuple[Answers, int]:
        """The commands' answers, and how many replicas have all of it."""
        write = _Write(commands, key, asyncio.get_running_loop().create_future())
        self._queue.append(write)
        if self._going < _ROUNDS:
            self._going += 1
            task = asyncio.create_task(self._go())
            self._rounds.add(task)
            task.add_done_callback(self._rounds.discard)
        return await write.answer

    async def _go(self) -> None:
        try:
            while self._queue:
                taken = [self._queue.popleft() for _ in range(min(_WRITES, len(self._queue)))]
                await self._served([write for write in taken if not write.answer.done()])  # some callers may be gone
        finally:
            self._going -= 1  # here, not when the loop hears of it: a write that comes in between would lie there

    async def _served(self, writes: Sequence[_Write]) -> None:
        try:
            if writes:
                await self._round(writes)
        except Exception as error:  # noqa: BLE001
            for write in writes:
                if not write.answer.done():
                    write.answer.set_exception(error)
        finally:
            for write in writes:
                write.answer.cancel()  # the loop ends

    async def _round(self, writes: Sequence[_Write]) -> None:
        commands = [command for write in writes for command in write.commands]
        *answers, fence, reached = await self._send([*commands, _fence(writes[-1].key), self._wait])
        if isinstance(fence, ROUTING):
            raise fence
        # A full server refused the fence, so WAIT spoke of an older write; or the primary was deposed meanwhile.
        confirmed = 0 if isinstance(fence, Exception) or isinstance(reached, Exception) else int(reached)
        at = 0
        for write in writes:
            its, at = answers[at : at + len(write.commands)], at + len(write.commands)
            if not write.answer.done():
                write.answer.set_result((its, confirmed))


def _fence(key: str) -> Command:
    """In the slot of a key that is written, so that it is this node's. Gone at once."""
    return ("SET", f"{key[: key.index('}') + 1]}:fence", "", "PX", _FENCE_MS)


def _sender(client: Redis) -> _Send:
    async def send(commands: Sequence[Command]) -> Answers:
        async with translated():  # of its own: a round outlives those who wait for it
            pipeline = client.pipeline(transaction=False)
            for command in commands:
                pipeline.execute_command(*command)
            answers: Answers = await pipeline.execute(raise_on_error=False)
        return answers

    return send


def _cluster_sender(client: Cluster, node: ClusterNode) -> _Send:
    async def send(commands: Sequence[Command]) -> Answers:
        return await client.converse(node, [(command, {}) for command in commands])

    return send
