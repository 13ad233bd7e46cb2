"""Asks the witnesses that answer over HTTP: the engine for its record, the product for the turns it holds."""

from __future__ import annotations

import asyncio
from typing import TypeVar
from urllib.parse import quote, urlencode

import aiohttp
import msgspec

from api.demo.evidence import Generation, StoredTurn

_PAGE = 200
_ATTEMPTS = 5
_PAUSE_S = 0.3

Answer = TypeVar("Answer")


class WitnessSilent(Exception):
    """A witness would not answer, or not in the agreed shape: no verdict can be given."""


class _Record(msgspec.Struct, frozen=True):
    entries: tuple[Generation, ...]


class _Turns(msgspec.Struct, frozen=True):
    turns: tuple[StoredTurn, ...]


class _Session(msgspec.Struct, frozen=True):
    session_id: str


class _Sessions(msgspec.Struct, frozen=True):
    sessions: tuple[_Session, ...]
    cursor: str | None = None


class Witnesses:
    """Both, by their base URLs."""

    def __init__(self, client: aiohttp.ClientSession, *, engine_url: str, product_url: str) -> None:
        self._client = client
        self._engine_url = engine_url
        self._product_url = product_url

    async def record(self) -> tuple[Generation, ...]:
        """Every request that reached the engine, oldest first."""
        return (await self._ask(f"{self._engine_url}/sim/record", _Record)).entries

    async def stored(self, run_id: str, named: set[str]) -> dict[str, tuple[StoredTurn, ...]]:
        """Turns by session: of the sessions that players were told of, and of any other of this run."""
        sessions = sorted((named | await self._sessions(run_id)) - {""})
        urls = [f"{self._product_url}/sessions/{quote(session, safe='')}/turns" for session in sessions]
        answers = [await self._ask(url, _Turns) for url in urls]
        return {session: answer.turns for session, answer in zip(sessions, answers, strict=True)}

    async def _sessions(self, run_id: str) -> set[str]:
        found: set[str] = set()
        cursor = ""
        while True:
            query = {"run_id": run_id, "limit": _PAGE} | ({"cursor": cursor} if cursor else {})
            page = await self._ask(f"{self._product_url}/sessions?{urlencode(query)}", _Sessions)
            found.update(session.session_id for session in page.sessions)
            if not page.cursor:
                return found
            cursor = page.cursor

    async def _ask(self, url: str, kind: type[Answer]) -> Answer:
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                async with self._client.get(url) as answer:
                    body = await answer.read()
                if answer.status == 200:
                    return msgspec.json.decode(body, type=kind)
                problem = f"HTTP {answer.status}: {body[:300].decode(errors='replace')}"
            except (aiohttp.ClientError, msgspec.DecodeError) as error:
                problem = f"{type(error).__name__}: {error}"
            await asyncio.sleep(_PAUSE_S)
        raise WitnessSilent(f"GET {url}: {problem}")
