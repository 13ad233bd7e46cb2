"""Collects what engine and store have to say, for the checker: the record file, and the public API."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlencode

import aiohttp
import orjson
from yarl import URL

from tests.faults.records import Generation, Rollout, Sample, StoredSession, StoredTurn, pack
from tests.faults.soak import wire

_PAGE = 200
_AT_ONCE = 6
_ATTEMPTS = 5
_GONE = frozenset({404, 410})


class AuditFailed(Exception):
    """The store would not answer: no verdict can be given."""


def recorded(path: Path) -> Iterator[Generation]:
    """The engine's record, oldest first. The engine makes the file with its first entry."""
    path.touch()
    with path.open("rb") as lines:
        for line in lines:
            entry = orjson.loads(line)
            yield Generation(
                rid=entry["rid"],
                prompt=pack(entry["input_ids"]),
                output=pack(entry["output_ids"]),
                outcome=entry["outcome"],
                nonce=entry["nonce"],
                word=wire.last_word(entry["prompt_tail"]),
            )


class Auditor:
    """Asks one product for all that it holds of one run."""

    def __init__(self, client: aiohttp.ClientSession, base_url: str) -> None:
        self._client = client
        self._base_url = base_url
        self._places = asyncio.Semaphore(_AT_ONCE)

    async def sessions(self, run_id: str, rollouts: Iterable[Rollout]) -> tuple[StoredSession, ...]:
        """Every session that is listed, and every one that a client was told of."""
        named = {a.session_id for r in rollouts for ask in r.asks for a in ask.attempts if a.session_id}
        names = sorted(named | {name async for name in self.listed(run_id)})
        found = await asyncio.gather(*(self._session(name) for name in names))
        return tuple(session for session in found if session is not None)

    async def listed(self, run_id: str) -> AsyncIterator[str]:
        """The run's sessions, by their listing."""
        cursor = ""
        while True:
            query = {"run_id": run_id, "limit": str(_PAGE)} | ({"cursor": cursor} if cursor else {})
            page = await self._ask(f"/sessions?{urlencode(query)}")
            for session in (page or {}).get("sessions", ()):
                yield session["session_id"]
            cursor = (page or {}).get("cursor") or ""
            if not cursor:
                return

    async def _session(self, session_id: str) -> StoredSession | None:
        path = f"/sessions/{quote(session_id, safe='')}"
        async with self._places:
            summary = await self._ask(path)
            turns, trajectory = await self._ask(f"{path}/turns"), await self._ask(f"{path}/trajectory")
        if summary is None or turns is None or trajectory is None:
            return None
        return StoredSession(
            session_id=session_id,
            state=summary["state"],
            turns=tuple(_turn(turn) for turn in turns["turns"]),
            samples=tuple(_sample(sample) for sample in trajectory["samples"]),
        )

    async def _ask(self, path: str) -> Any:
        """The answer's JSON; None for what is gone."""
        problem = ""
        for _ in range(_ATTEMPTS):
            try:
                async with self._client.get(URL(self._base_url + path, encoded=True)) as answer:
                    body = await answer.read()
            except aiohttp.ClientError as error:
                problem = f"{type(error).__name__}: {error}"
            else:
                if answer.status == 200:
                    return orjson.loads(body)
                if answer.status in _GONE:
                    return None
                problem = f"HTTP {answer.status} {body[:200].decode(errors='replace')}"
            await asyncio.sleep(0.3)
        raise AuditFailed(f"GET {path}: {problem}")


def _turn(turn: Mapping[str, Any]) -> StoredTurn:
    *new, reply = turn["messages"]
    return StoredTurn(
        turn_id=turn["turn_id"],
        parent_id=turn["parent_turn_id"] or "",
        word=wire.last_word(new[-1]["content"] or "") if new else "",
        prompt_length=turn["prompt_token_ids_length"],
        delta=pack(turn["delta_token_ids"]),
        generation=pack(turn["generation_token_ids"]),
        delivered=turn["delivered"],
        reply=wire.spelled(reply),
        nonces=wire.nonces(reply),
    )


def _sample(sample: Mapping[str, Any]) -> Sample:
    return Sample(tuple(turn["turn_id"] for turn in sample["turns"]), pack(sample["token_ids"]))
