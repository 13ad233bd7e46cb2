"""Plays the load, one turn at a time, and collects what each costs.

One turn is in flight at any time, so that what the worker's clock gained belongs to it. Sessions take turns, and at
the end of each band the floor and whole renders are measured right away: what machines do to a run, they do to all.
"""

from __future__ import annotations

import asyncio
import io
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import orjson

from api.bench.deployment import Deployment
from api.bench.figures import BandMeasure, StoredSession, TurnSample
from api.bench.floor import ENGINE_BODY
from api.bench.probes import ProcessClock, RedisCounters, RedisProbe, stage_seconds
from api.bench.scale import MOST_CONTEXT, Scale
from api.bench.talk import Talk
from api.dialects import chat
from api.engine.sglang import request_body
from api.keys import OPEN_TENANT
from splice.boundary import Splicer
from splice.locate import Root
from splice.plan import plan_turn
from splice.types import IdArray

_WARM_UP_PASSES = 3
_TRAILING_S = 0.002  # what a worker does after its reply belongs to the turn


class TurnFailed(Exception):
    """A turn was not answered with 200, or was not spliced onto the one before it."""


@dataclass(frozen=True, slots=True)
class Snapshot:
    """Counters at one instant."""

    redis: RedisCounters
    stages_s: Mapping[str, float]


class Measurement:
    """One run's collecting. Holds nothing of a session once its repetition is over."""

    def __init__(self, scale: Scale, services: Deployment, probe: RedisProbe, splicer: Splicer) -> None:
        self.turns: list[TurnSample] = []
        self.bands = {context: BandMeasure(context) for context in scale.contexts}
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
        url = f"{self._services.worker.url}/v1/chat/completions"
        cost_ms, answer, headers = await self._timed(self._worker_clock, url, body, {"x-session-id": talk.session})
        origin = headers["x-tokensplice-splice"]
        if origin != ("spliced" if number > 1 else "fresh; reason=first_turn"):
            raise TurnFailed(f"turn {number} of {talk.session} was served as {origin}")
        reply = orjson.loads(answer)
        talk.heard(reply)
        sample = TurnSample(number, reply["usage"]["prompt_tokens"], cost_ms, len(body), len(answer))
        self.turns.append(sample)
        played()
        return sample

    async def _timed(
        self, clock: ProcessClock, url: str, body: bytes, headers: Mapping[str, str]
    ) -> tuple[float, bytes, Mapping[str, str]]:
        """CPU milliseconds that one request cost the process behind the clock, the answer and its headers."""
        told = {"content-type": "application/json", **headers}
        before = clock.ns()
        async with self._services.client.post(url, data=io.BytesIO(body), headers=told) as response:
            answer = await response.read()
        await asyncio.sleep(_TRAILING_S)
        cost_ms = (clock.ns() - before) / 1e6
        if response.status != 200:
            raise TurnFailed(f"{url} answered {response.status}: {answer[:500].decode(errors='replace')}")
        return cost_ms, answer, response.headers

    # Between turns.

    async def _snapshot(self) -> Snapshot:
        async with self._services.client.get(f"{self._services.worker.url}/metrics") as response:
            stages_s = stage_seconds(await response.text())
        await asyncio.sleep(_TRAILING_S)
        return Snapshot(self._probe.counters(), stages_s)

    def _count(self, band: BandMeasure, began: Snapshot, ended: Snapshot) -> None:
        redis = self._probe.between(began.redis, ended.redis)
        band.redis_cpu_ms += redis.cpu_s * 1000
        band.redis_reads += redis.reads
        band.redis_bytes_in += redis.bytes_in
        band.redis_bytes_out += redis.bytes_out
        band.redis_commands.update(redis.commands)
        for name, seconds in ended.stages_s.items():
            spent_ms = (seconds - began.stages_s.get(name, 0.0)) * 1000
            band.stages_ms[name] = band.stages_ms.get(name, 0.0) + spent_ms

    async def _look(self, band: BandMeasure, talks: Sequence[Talk], memory_before: int) -> None:
        """Sizes in Redis, and what the same next turn costs rendered whole and passed through."""
        stored = [self._stored(talk) for talk in talks]
        band.stored += stored
        grown = self._probe.used_memory - memory_before
        band.memory_per_token.append(grown / sum(one.tokens for one in stored))
        body = talks[0].body()
        _, prompt = await asyncio.to_thread(self._render_whole, body)
        for talk in talks[: self._scale.whole_renders]:
            cost_ms, _ = await asyncio.to_thread(self._render_whole, talk.body())
            band.whole_ms.append(cost_ms)
        band.floor_ms += await self._floor(band.context, body, prompt)

    def _stored(self, talk: Talk) -> StoredSession:
        sizes = self._probe.sizes(OPEN_TENANT, talk.session)
        text, ids, log_probs = (sizes.pop(name) for name in ("text", "tokens", "logprobs"))
        return StoredSession(
            tokens=talk.tokens,
            sampled_tokens=talk.sampled_tokens,
            text_utf8_bytes=talk.text_bytes,
            text_bytes=text,
            ids_bytes=ids,
            log_probs_bytes=log_probs,
            other_bytes=sum(sizes.values()),
        )

    def _render_whole(self, body: bytes) -> tuple[float, IdArray]:
        """CPU milliseconds of rendering and tokenising a request's conversation, and its prompt."""
        request = chat.decode(body)
        began = time.process_time_ns()
        plan = plan_turn(
            Root("unknown_history"),
            None,
            request.conversation,
            request.rendering,
            splicer=self._splicer,
            clock=0.0,
        )
        return (time.process_time_ns() - began) / 1e6, plan.prompt

    async def _floor(self, context: int, body: bytes, prompt: IdArray) -> list[float]:
        """CPU milliseconds of each of several passes of the same request through the floor."""
        name = f"{context}-{len(self.bands[context].floor_ms)}"
        sent = request_body(prompt, {"temperature": 1.0}, max_tokens=MOST_CONTEXT, rid="floor")
        (self._services.bodies / name).write_bytes(sent)
        costs = []
        for _ in range(_WARM_UP_PASSES + self._scale.floor_turns):
            cost_ms, *_ = await self._timed(self._floor_clock, self._services.floor.url, body, {ENGINE_BODY: name})
            costs.append(cost_ms)
        return costs[_WARM_UP_PASSES:]
