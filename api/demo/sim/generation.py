"""Requests in flight: waiting, running, aborted, paused, and how far each has come.

One generation's life is `admit` (slots and queue), `steps` (tokens becoming visible over time), and leaving the
table. Time comes from the event loop's clock; with no latency configured nothing here waits.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Literal

from api.demo.sim.config import SimConfig
from api.demo.sim.requests import value_error

Phase = Literal["arrived", "queued", "running"]


@dataclass
class Generation:
    """One request between arrival and reply."""

    rid: str
    versions: list[tuple[int, str]]
    arrived: float
    phase: Phase = "arrived"
    made: int = 0
    total: int = 0
    started: float = 0.0
    lasts_s: float = 0.0
    stopped: asyncio.Event = field(default_factory=asyncio.Event)

    def begin(self, total: int, lasts_s: float, now: float) -> None:
        """Start sampling `total` tokens."""
        self.total, self.lasts_s, self.started = total, lasts_s, now

    def made_by(self, now: float) -> int:
        """Tokens sampled until `now`: they come at an even pace."""
        if self.lasts_s <= 0 or now >= self.started + self.lasts_s:
            return self.total
        return int(self.total * (now - self.started) / self.lasts_s)


class Batch:
    """Everything that the engine has in hand."""

    def __init__(self, config: SimConfig) -> None:
        self._config = config
        self._flying: dict[str, Generation] = {}
        self._slots = asyncio.Semaphore(config.max_running) if config.max_running is not None else None
        self._resumed = asyncio.Event()
        self._resumed.set()
        self._landed = asyncio.Event()  # set for an instant whenever a request leaves
        self.weight_version = config.weight_version

    @property
    def paused(self) -> bool:
        """Whether /pause_generation is in force."""
        return not self._resumed.is_set()

    def count(self, *phases: Phase) -> int:
        """How many requests are in one of these phases."""
        return sum(generation.phase in phases for generation in self._flying.values())

    @contextlib.contextmanager
    def flight(self, rid: str) -> Iterator[Generation]:
        """Hold `rid` in the table. Raises Refusal when it is there already."""
        if rid in self._flying:
            raise value_error(f"Duplicate request ID detected: {rid}")
        generation = Generation(rid, [(0, self.weight_version)], asyncio.get_running_loop().time())
        self._flying[rid] = generation
        try:
            yield generation
        finally:
            del self._flying[rid]
            self._landed.set()
            self._landed.clear()

    async def resumed(self) -> None:
        """New requests hang here while generation is paused; aborts do not reach them."""
        await self._resumed.wait()

    @property
    def full(self) -> bool:
        """Neither a slot nor a place in the queue is free."""
        limit = self._config.max_running
        return limit is not None and self.count("queued", "running") >= limit + self._config.max_queued

    @contextlib.asynccontextmanager
    async def slot(self, generation: Generation) -> AsyncIterator[bool]:
        """A place in the running batch; False when aborted before it came."""
        generation.phase = "queued"
        held = await self._acquire(generation)
        generation.phase = "running"
        generation.versions[:] = [(0, self.weight_version)]
        try:
            yield held
        finally:
            if held and self._slots is not None:
                self._slots.release()

    async def _acquire(self, generation: Generation) -> bool:
        if self._slots is None:
            return True
        place = asyncio.ensure_future(self._slots.acquire())
        stop = asyncio.ensure_future(generation.stopped.wait())
        try:
            await asyncio.wait((place, stop), return_when=asyncio.FIRST_COMPLETED)
        finally:
            stop.cancel()
            if not place.done():
                place.cancel()
        if place.done() and generation.stopped.is_set():
            self._slots.release()
        return not generation.stopped.is_set()

    async def steps(self, generation: Generation, ends: Sequence[int], lasts_s: float) -> AsyncIterator[int]:
        """Yield how many tokens are out: at each of `ends`, or fewer and for the last time when aborted."""
        loop = asyncio.get_running_loop()
        total = ends[-1]
        generation.begin(total, lasts_s, loop.time())
        for end in ends:
            due = generation.started + lasts_s * (end / total if total else 1.0)
            await self._until(due, generation)
            if generation.stopped.is_set():
                generation.made = max(generation.made, generation.made_by(loop.time()))
                yield generation.made
                return
            generation.made = end
            yield end

    async def _until(self, due: float, generation: Generation) -> None:
        wait_s = due - asyncio.get_running_loop().time()
        if wait_s > 0:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(generation.stopped.wait(), wait_s)
        # Paused in place or retracted: running requests go on afterwards, maybe under other weights.
        if self.paused and not generation.stopped.is_set():
            await self._resumed.wait()

    def abort(self, prefix: str, *, everything: bool = False) -> None:
        """Stop every request whose id starts with `prefix`, as the scheduler matches."""
        for rid, generation in self._flying.items():
            if generation.phase != "arrived" and (everything or (prefix and rid.startswith(prefix))):
                generation.stopped.set()

    async def pause(self, mode: str) -> None:
        """Hold new requests back; "abort" also ends those in hand, and waits for it."""
        self._resumed.clear()
        if mode == "abort":
            self.abort("", everything=True)
            while self.count("queued", "running"):
                await self._landed.wait()

    def resume(self) -> None:
        """Let held requests go on."""
        self._resumed.set()

    def set_weight_version(self, version: str) -> None:
        """From the next token of every running request on."""
        now = asyncio.get_running_loop().time()
        self.weight_version = version
        for generation in self._flying.values():
            if generation.phase == "running":
                generation.versions.append((generation.made_by(now), version))
