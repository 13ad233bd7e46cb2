"""What the demo does to its own services: one worker and Redis are killed while turns are in flight."""

from __future__ import annotations

import asyncio

from api.demo.narration import Narrator
from api.demo.processes import Child
from api.demo.stage import Stage

_WATCH_S = 0.002


class Harm:
    """Kills a worker after a third of the turns and Redis after two thirds, each with turns in flight."""

    def __init__(self, services: Stage, narrator: Narrator, total: int) -> None:
        self._services = services
        self._narrator = narrator
        self._total = total
        self._answered = 0
        self.worker_kills = 0
        self.redis_kills = 0
        self._over = False

    def answered(self) -> None:
        """A player has had one more turn."""
        self._answered += 1
        self._narrator.advance()

    def end(self, _: object = None) -> None:
        """No player is left."""
        self._over = True

    async def inflict(self) -> None:
        """Do both, unless the players are done before; ends when worker and Redis are back."""
        await asyncio.gather(self._kill_worker(), self._kill_redis())

    async def _kill_worker(self) -> None:
        worker = await self._victim(self._total // 3)
        if worker is not None:
            self.worker_kills += 1
            in_hand = self._services.balancer.in_flight[worker.url]
            self._narrator.note(f"SIGKILL to {worker.name} with {in_hand} requests in hand, then started again")
            await self._services.restart(worker)

    async def _kill_redis(self) -> None:
        if await self._victim(self._total * 2 // 3) is not None:
            self.redis_kills += 1
            in_flight = sum(self._services.balancer.in_flight.values())
            self._narrator.note(f"SIGKILL to Redis with {in_flight} requests in flight, then started again")
            await self._services.restart_redis()

    async def _victim(self, turns: int) -> Child | None:
        """The busiest worker once `turns` are answered; None when the players are done first."""
        while not self._over:
            if self._answered >= turns and (worker := self._services.busiest) is not None:
                return worker
            await asyncio.sleep(_WATCH_S)
        return None
