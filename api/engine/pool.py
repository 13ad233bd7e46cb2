"""Which replica serves a session, and what is done when it cannot be reached.

Rendezvous hashing: every replica is ranked for a session by a hash of the two, and the first one serves it. So all
workers agree without talking, and the loss of one replica moves only that replica's sessions. SHA-256, because
Python's `hash` of a string differs per process.

Only a request that was never sent moves on to the next replica: anything else may have been sampled, unseen.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar
from urllib.parse import quote

import msgspec

from api.engine.base import EngineContract, EngineError, EngineFacts, EngineTimeout, EngineUnavailable
from api.engine.http import NeverSent

_FIRST_REST_S = 1.0
_LONGEST_REST_S = 30.0

T = TypeVar("T")


def rendezvous(urls: Sequence[str], affinity: str) -> list[str]:
    """`urls`, best first, for the session `affinity`."""
    return sorted(urls, key=lambda url: hashlib.sha256(f"{url}\n{affinity}".encode()).digest(), reverse=True)


def routing_headers(affinity: str) -> dict[str, str]:
    """What the routers that may stand before the engines key on, quoted: a session id may hold any character."""
    if not affinity:
        return {}
    key = quote(affinity, safe="-._~:/@+=,")
    return {"X-SMG-Routing-Key": key, "X-Session-ID": key, "X-Dynamo-Session-ID": key}


@dataclass(slots=True)
class _Rest:
    """A replica that could not be reached: how often in a row, and until when it is left alone."""

    failures: int = 0
    until: float = 0.0


class Replicas:
    """The replicas of one engine, with what this worker knows of their health."""

    def __init__(self, urls: Sequence[str], *, clock: Callable[[], float] = time.monotonic) -> None:
        self.urls = tuple(dict.fromkeys(urls))
        self._clock = clock
        self._rests: dict[str, _Rest] = {}

    def candidates(self, affinity: str) -> list[str]:
        """Every replica in the order to try them: the resting ones last, since one of those is better than none."""
        now = self._clock()
        return sorted(rendezvous(self.urls, affinity), key=lambda url: self._resting(url, now))

    def _resting(self, url: str, now: float) -> bool:
        rest = self._rests.get(url)
        return rest is not None and now < rest.until

    async def ask(self, affinity: str, send: Callable[[str], Awaitable[T]]) -> T:
        """`send` to the session's replica, or to the next one where no connection could be made."""
        unreachable: list[str] = []
        for url in self.candidates(affinity):
            try:
                answer = await send(url)
            except NeverSent as error:
                self._rest(url)
                unreachable.append(str(error))
            except EngineError:
                self._rests.pop(url, None)  # it answers, however badly
                raise
            else:
                self._rests.pop(url, None)
                return answer
        raise NeverSent("no replica of the engine can be reached: " + "; ".join(unreachable))

    def _rest(self, url: str) -> None:
        now = self._clock()
        rest = self._rests.setdefault(url, _Rest())
        if now < rest.until:
            return  # many requests fail on one outage together: it counts once
        rest.until = now + min(_FIRST_REST_S * 2**rest.failures, _LONGEST_REST_S)
        rest.failures += 1

    async def agreed_facts(self, facts_of: Callable[[str], Awaitable[EngineFacts]]) -> EngineFacts:
        """The facts that hold for every replica that answers; the tightest limits of them all.

        Raises EngineContract where replicas differ in what no session could survive moving between.
        """
        told = await asyncio.gather(*(facts_of(url) for url in self.urls), return_exceptions=True)
        for answer in told:
            if isinstance(answer, BaseException) and not isinstance(answer, EngineUnavailable | EngineTimeout):
                raise answer
        facts = [answer for answer in told if isinstance(answer, EngineFacts)]
        if not facts:
            raise next(answer for answer in told if isinstance(answer, BaseException))
        sizes = {each.vocab_size for each in facts}
        if len(sizes) > 1:
            raise EngineContract("vocab_size", f"the replicas serve different vocabularies: {sizes}")
        return msgspec.structs.replace(
            facts[0],
            context_length=min(each.context_length for each in facts),
            max_prompt_length=min(each.max_prompt_length for each in facts),
        )
