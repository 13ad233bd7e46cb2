"""What is done to the services while they serve: SIGKILLs, cut connections, a slow and a failing engine."""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from collections.abc import Awaitable, Callable
from random import Random

import aiohttp

from tests.faults.soak.deployment import Deployment
from tests.faults.soak.plan import Plan

_REFUSED_S = 0.3
_EDGE_SHARE = 0.1
# What the engine does to the next generations, some of it each time.
_SLOW = {"delay_s": 2.0, "times": 10}
_FAILURES = (
    {"fault": "crash", "times": 2},
    {"fault": "busy", "times": 2},
    {"fault": "drop_before", "times": 2},
    {"fault": "drop_midway", "times": 2},
    {"fault": "abort", "times": 2},
    {"fault": "garbage", "times": 2},
)


class Harm:
    """Hurts a deployment by plan until it is stopped, and counts."""

    def __init__(self, deployment: Deployment, plan: Plan) -> None:
        self._deployment = deployment
        self._plan = plan
        self._random = Random(f"harm {plan.seed}")
        self._boots: set[asyncio.Task[None]] = set()
        self.done: Counter[str] = Counter()

    async def inflict(self) -> None:
        """Everything at its own pace; ends only by cancellation."""
        plan = self._plan
        async with asyncio.TaskGroup() as group:
            group.create_task(_every(plan.worker_every_s, self._kill_worker))
            group.create_task(_every(plan.redis_every_s, self._kill_redis))
            group.create_task(_every(plan.cut_every_s, self._cut))
            group.create_task(_every(plan.engine_every_s, self._trouble_engine))

    async def over(self) -> None:
        """Wait for what is still starting."""
        await asyncio.gather(*self._boots)
        await self._deployment.settled()

    async def _kill_worker(self) -> None:
        deployment = self._deployment
        mortal = [worker for worker in deployment.workers[1:] if worker not in deployment.booting]
        if not mortal:
            self.done["kills put off: all still starting"] += 1
            return
        victim = self._random.choice(mortal)
        self.done["workers killed"] += 1
        self.done["requests in their hands"] += deployment.balancer.in_flight[victim.url]
        boot = asyncio.create_task(deployment.restart(victim))
        self._boots.add(boot)
        boot.add_done_callback(self._boots.discard)

    async def _kill_redis(self) -> None:
        self.done["Redis killed"] += 1
        # Shielded: whoever stops the harm must find Redis running.
        restart = asyncio.create_task(self._deployment.restart_redis(self._plan.redis_down_s))
        self._boots.add(restart)
        restart.add_done_callback(self._boots.discard)
        await asyncio.shield(restart)

    async def _cut(self) -> None:
        """In turn: between a worker and Redis, for a moment for good; and between clients and the balancer."""
        standing = [one for one in self._deployment.links if one.open]
        link = self._random.choice(standing or self._deployment.links)
        self.done["connections to Redis cut"] += link.cut()
        if self._random.random() < 0.5:
            link.refuses = True
            try:
                await asyncio.sleep(_REFUSED_S)
            finally:
                link.refuses = False
        self.done["client connections cut"] += self._deployment.edge.cut(_EDGE_SHARE, self._random)

    async def _trouble_engine(self) -> None:
        directives = [_SLOW, *self._random.sample(_FAILURES, 3)]
        self.done["generations slowed or failed"] += sum(int(str(one["times"])) for one in directives)
        with contextlib.suppress(aiohttp.ClientError):
            await self._deployment.client.post(f"{self._deployment.engine.url}/sim/script", json=directives)


async def _every(pause_s: float, act: Callable[[], Awaitable[None]]) -> None:
    if not pause_s:
        return
    while True:
        await asyncio.sleep(pause_s)
        await act()
