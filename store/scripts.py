"""The server-side scripts, called by digest. A server that lacks one (restart, failover) is sent the text."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.exceptions import NoScriptError

from store.cluster import Argument, Cluster
from store.connection import Client, translated
from store.replication import Command, Replicated, Replication

__all__ = ["Argument", "Command", "Scripts"]

_NAMES = ("find", "turn", "commit", "open", "delete", "finish", "reward", "join", "release", "mark")
# Nobody is told that what these write will last, so nobody waits for replicas.
_UNWAITED = frozenset({"find", "turn", "join", "release", "mark"})


class Scripts:
    """Every script of `store/lua`, bound to a client; the keys of one call are in one slot."""

    def __init__(self, client: Client, replication: Replication | None = None) -> None:
        """With `replication`, writes are answered once enough replicas have them."""
        self._client = client
        self._replicated = Replicated(client, replication) if replication else None
        folder = files("store") / "lua"
        self._texts = {
            file.name.removesuffix(".lua"): file.read_bytes() for file in folder.iterdir() if file.name.endswith(".lua")
        }
        # The digest is the name the protocol gives a script, not a safeguard.
        self._digests = {name: sha1(text, usedforsecurity=False).hexdigest() for name, text in self._texts.items()}

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """One script, one round trip. Raises StoreError."""
        return await self.run_after((), name, keys, args)

    async def run_after(
        self, ahead: Sequence[Command], name: str, keys: Sequence[str], args: Sequence[Argument]
    ) -> Any:
        """The script, with plain commands that take effect before it: in the same round trip, but for a cluster.

        Raises StoreError.
        """
        async with translated():
            if ahead and isinstance(self._client, Cluster):
                await self._sent(ahead)
                ahead = ()
            rest = (len(keys), *keys, *args)
            try:
                return await self._last(name, ahead, ("EVALSHA", self._digests[name], *rest))
            except NoScriptError:
                # By its text and not by SCRIPT LOAD, which would have to reach every primary.
                return await self._last(name, (), ("EVAL", self._texts[name], *rest))

    async def settled(self, key: str) -> None:
        """What is stored under the key has reached as many replicas as writes wait for. Raises StoreError."""
        if self._replicated:
            await self._replicated.run((), key)

    async def _last(self, name: str, ahead: Sequence[Command], script: Command) -> Any:
        commands = [*ahead, script]
        if self._replicated and name not in _UNWAITED:
            return _last_of(await self._replicated.run(commands, str(script[3])))
        return await self._sent(commands)

    async def _sent(self, commands: Sequence[Command]) -> Any:
        if len(commands) == 1:
            return await self._client.execute_command(*commands[0])  # type: ignore[no-untyped-call]
        pipeline = self._client.pipeline(transaction=False)
        for command in commands:
            pipeline.execute_command(*command)
        return _last_of(await pipeline.execute(raise_on_error=False))


def _last_of(answers: Sequence[Any]) -> Any:
    for answer in answers:
        if isinstance(answer, Exception):
            raise answer
    return answers[-1]
