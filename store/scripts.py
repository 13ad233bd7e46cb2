"""The server-side scripts, called by digest. A server that lacks one (restart, failover) is given it."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha1
from importlib.resources import files
from typing import Any

from redis.asyncio import Redis
from redis.exceptions import NoScriptError

from store.connection import translated

Argument = str | bytes | int | float
Command = tuple[Argument, ...]

_NAMES = ("find", "turn", "commit", "open", "delete", "finish", "reward")


class Scripts:
    """Every script of `store/lua`, bound to a client."""

    def __init__(self, client: Redis) -> None:
        self._client = client
        folder = files("store") / "lua"
        self._texts = {name: (folder / f"{name}.lua").read_bytes() for name in _NAMES}
        # The digest is the name the protocol gives a script, not a safeguard.
        self._digests = {name: sha1(text, usedforsecurity=False).hexdigest() for name, text in self._texts.items()}

    async def run(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        """One script, one round trip. Raises StoreError."""
        async with translated():
            try:
                return await self._call(name, keys, args)
            except NoScriptError:
                await self._client.script_load(self._texts[name])
                return await self._call(name, keys, args)

    async def run_after(
        self, ahead: Sequence[Command], name: str, keys: Sequence[str], args: Sequence[Argument]
    ) -> Any:
        """The script, with plain commands sent ahead of it in the same round trip. Raises StoreError."""
        async with translated():
            pipeline = self._client.pipeline(transaction=False)
            for command in ahead:
                pipeline.execute_command(*command)
            pipeline.evalsha(self._digests[name], len(keys), *keys, *args)
            *answers, answer = await pipeline.execute(raise_on_error=False)
            for refused in answers:
                if isinstance(refused, Exception):
                    raise refused
            if isinstance(answer, NoScriptError):
                await self._client.script_load(self._texts[name])
                return await self._call(name, keys, args)
            if isinstance(answer, Exception):
                raise answer
            return answer

    async def _call(self, name: str, keys: Sequence[str], args: Sequence[Argument]) -> Any:
        return await self._client.evalsha(self._digests[name], len(keys), *keys, *args)
