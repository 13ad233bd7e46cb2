"""Plays the load, one turn at a time, and collects what each costs.

One turn is in flight at any time, so that what the worker's clock gained belongs to it. Sessions take turns, and at
the end of each band the floor and whole renders are measured right away: what machines do to a run, they do to all.
"""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import orjson

from api.bench.deployment import Deployment
from api.bench.figures import BandMeasure, StoredSession, TurnSample
from api.bench.floor import ENGINE_BODY
from api.bench.probes import NO_COUNTERS, ProcessClock, RedisCounters, RedisProbe, StageTimes
from api.bench.scale import Scale
from api.bench.talk import Talk
from api.dialects import chat
from api.engine.sglang import request_body
from api.keys import OPEN_TENANT
from splice.boundary import Splicer
from splice.locate import Root
from splice.plan import plan_turn
from splice.types import IdArray

_TRAILING_S = 0.002  # what a worker does after its reply belongs to the turn


class TurnFailed(Exception):
    """A turn was not answered with 200, or was not spliced onto the one before it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one instant."""

    redis: RedisCounters
    stages: StageTimes


class Measurement:
    """One run's collecting. Holds nothing of a session once its repetition is over."""

    def __init__(self, scale: Scale, services: Deployment, probe: RedisProbe, splicer: Splicer) -> None:
        self.turns: list[TurnSample] = []
        self.bands = {context: BandMeasure(context, [], [], [], [], []) for context in scale.contexts}
        self._scale = scale
        self._services = services
        self._probe = probe
        self._splicer = splicer
        self._worker_clock = ProcessClock(services.worker.pid)
        self._floor_clock = ProcessClock(services.floor.pid)

    async def repetition(self, number: int, played: Callable[[], None]) -> None:
        """Grow fresh sessions from nothing to the longest context. `played` is called after each turn."""
        talks = [
            Talk(f"bench-{number}-{n}", encode=self._encode, seed=(number, n)) for n in range(self._scale.sessions)
        ]
        memory = self._probe.used_memory
        starts = {self._scale.band_start(context): context for context in self._scale.contexts}
        ends = {self._scale.band_end(context): context for context in self._scale.contexts}
        began: Snapshot | None = None
        for turn in range(1, self._scale.rounds + 1):
            if turn - 1 in starts:
                began = await self._snapshot()
            samples = [await self._turn(talk, turn, played) for talk in talks]
            if turn in ends and began is not None:
                band = self.bands[ends[turn]]
                self._count(band, began, await self._snapshot())
                await self._look(band, talks, memory)
                began = None
            in_band = next((c for c in self._scale.contexts if self._in_band(c, turn)), None)
            if in_band is not None:
                self.bands[in_band].turns += samples

    def _in_band(self, context: int, turn: int) -> bool:
        return self._scale.band_start(context) < turn <= self._scale.band_end(context)

    def _encode(self, text: str) -> IdArray:
        return self._splicer.renderer.encode(text)

    # Turns.

    async def _turn(self, talk: Talk, number: int, played: Callable[[], None]) -> TurnSample:
        body = talk.body()
        url, headers = f"{self._services.worker.url}/v1/chat/completions", {"x-session-id": talk.session}
        cost_ms, answer = await self._timed(self._worker_clock, url, body, headers)
        reply = orjson.loads(answer)
        talk.heard(reply["choices"][0]["message"])
        sample = TurnSample(number, reply["usage"]["prompt_tokens"], cost_ms, len(body), len(answer))
        self.turns.append(sample)
        played()
        return sample

    async def _timed(
        self, clock: ProcessClock, url: str, body: bytes, headers: dict[str, str]
    ) -> tuple[float, bytes]:
        """CPU milliseconds that one request cost the process behind the clock, and the answer."""
        told = {"content-type": "application/json", **headers}
        before = clock.ns()
        async with self._services.client.post(url, data=body, headers=told) as response:
            answer = await response.read()
        await asyncio.sleep(_TRAILING_S)
        cost_ms = (clock.ns() - before) / 1e6
        if response.status != 200:
            raise TurnFailed(f"{url} answered {response.status}: {answer[:500].decode(errors='replace')}")
        return cost_ms, answer

    # Between turns.

    async def _snapshot(self) -> Snapshot:
        async with self._services.client.get(f"{self._services.worker.url}/metrics") as response:
            stages = StageTimes.parse(await response.text())
        await asyncio.sleep(_TRAILING_S)
        return Snapshot(self._probe.counters(), stages)

    def _count(self, band: BandMeasure, began: Snapshot, ended: Snapshot) -> None:
        redis = self._probe.between(began.redis, ended.redis)
        band.redis_cpu_ms += redis.cpu_s * 1000
        band.redis_reads += redis.reads
        band.redis_bytes_in += redis.bytes_in
        band.redis_bytes_out += redis.bytes_out
        band.redis_commands = Counter(band.redis_commands) + Counter(redis.commands)
        spent = Counter({name: seconds * 1000 for name, seconds in ended.stages.seconds.items()})
        spent.subtract({name: seconds * 1000 for name, seconds in began.stages.seconds.items()})
        band.stages_ms = Counter(band.stages_ms) + spent

    async def _look(self, band: BandMeasure, talks: Sequence[Talk], memory_before: int) -> None:
        """Sizes in Redis, and what the same next turn costs rendered whole and passed through."""
        stored = [self._stored(talk) for talk in talks]
        band.stored += stored
        grown = self._probe.used_memory - memory_before
        band.memory_per_token.append(grown / sum(one.tokens for one in stored))
        for n, talk in enumerate(talks[: self._scale.whole_renders]):
            body = talk.body()
            cost_ms, prompt = await asyncio.to_thread(self._render_whole, body)
            band.whole_ms.append(cost_ms)
            if n == 0:
                band.floor_ms += await self._floor(band.context, body, prompt)

    def _stored(self, talk: Talk) -> StoredSession:
        sizes = self._probe.sizes(OPEN_TENANT, talk.session)
        ...
