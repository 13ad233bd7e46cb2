"""One soak from start to verdict: start, play while harm is done, settle, collect, check, expire."""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from statistics import median
from urllib.parse import urlsplit

import aiohttp
import psutil

from tests.faults.checker import Report, check
from tests.faults.network import Link
from tests.faults.records import Evidence
from tests.faults.soak.audit import Auditor, recorded
from tests.faults.soak.deployment import READY_S, Deployment, deployed
from tests.faults.soak.growth import Size, keys, measured
from tests.faults.soak.harm import Harm
from tests.faults.soak.load import Load, Pace
from tests.faults.soak.outcome import KEYS_LEFT, Expiry, Outcome
from tests.faults.soak.plan import Plan

Say = Callable[[str], None]

_LOOKS = 30  # at the sizes, over a run
_SETTLE_S = 2.0  # marks are written in batches after replies
_EXPIRY_TURNS = (2, 4)
_EXPIRY_GRACE_S = 30


async def soak(plan: Plan, model: Path, scratch: Path, say: Say) -> Outcome:
    """Run the plan. Logs and data go to `scratch`."""
    say(f"starting Redis ({plan.durability}), engine and {plan.workers} workers")
    async with deployed(plan, model, scratch) as deployment:
        harm = Harm(deployment, plan)
        sizes: list[Size] = []
        began, cpu = time.monotonic(), _cpu_s(deployment)
        async with _load(deployment.url, plan, plan.seconds) as load:
            watching = asyncio.create_task(_watch(deployment, load, plan, sizes, say))
            harming = asyncio.create_task(harm.inflict())
            try:
                await _played(load, plan, harming)
            finally:
                await _stopped(harming, watching)
            played_s = time.monotonic() - began
            spent = {name: seconds - cpu.get(name, 0.0) for name, seconds in _cpu_s(deployment).items()}
            say("settling")
            await harm.over()
            await asyncio.sleep(_SETTLE_S)
            sizes += [last] if (last := await measured(deployment, played_s, load.answered)) else []
            say("collecting what engine and store hold, and checking")
            began = time.monotonic()
            report = await _report(deployment, load)
        checked_s = time.monotonic() - began
        expiry = await _expiry(deployment, plan, say) if plan.expiring_sessions else None
    return Outcome(
        plan=plan,
        report=report,
        harm=dict(harm.done),
        attempts=dict(load.statuses.most_common()),
        played_s=played_s,
        checked_s=checked_s,
        sizes=tuple(sizes),
        cpu_s=spent,
        boot_s=median(deployment.boots_s or [0.0]),
        failed_starts=tuple(text.strip().splitlines()[-1] for text in deployment.failed_starts),
        expiry=expiry,
    )


@asynccontextmanager
async def _load(url: str, plan: Plan, seconds: float) -> AsyncIterator[Load]:
    connector = aiohttp.TCPConnector(limit=0)
    async with aiohttp.ClientSession(connector=connector, cookie_jar=aiohttp.DummyCookieJar()) as http:
        yield Load(
            base_url=url,
            http=http,
            run_id=f"soak-{uuid.uuid4().hex[:6]}",
            seed=plan.seed,
            pace=Pace(plan.rate),
            until=time.monotonic() + seconds,
            longest_pause_s=plan.longest_pause_s,
            hangs_up=plan.hangs_up,
        )


async def _played(load: Load, plan: Plan, harming: asyncio.Task[None]) -> None:
    """Harm ends with the time, then every rollout comes to its end. Harm that fails proves nothing: it is raised."""
    playing = asyncio.create_task(load.play(plan.sessions))
    try:
        await asyncio.wait({playing, harming}, timeout=plan.seconds, return_when=asyncio.FIRST_COMPLETED)
        await _stopped(harming)
        await playing
    finally:
        await _stopped(playing)


async def _stopped(*tasks: asyncio.Task[None]) -> None:
    for task in tasks:
        task.cancel()
    for task in tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await task


async def _watch(deployment: Deployment, load: Load, plan: Plan, sizes: list[Size], say: Say) -> None:
    began, pause_s = time.monotonic(), max(2.0, plan.seconds / _LOOKS)
    while True:
        size = await measured(deployment, time.monotonic() - began, load.answered)
        if size is not None:
            sizes.append(size)
            say(
                f"{size.at_s:5.0f} s  {size.turns} turns answered, {load.open} rollouts open, {len(load.rollouts)} "
                f"ended, {sum(bool(r.stuck) for r in load.rollouts)} stuck; {size.keys} keys, {size.redis_mib} MiB"
            )
        await asyncio.sleep(pause_s)


async def _report(deployment: Deployment, load: Load) -> Report:
    rollouts = tuple(load.rollouts)
    sessions = await Auditor(deployment.client, deployment.balancer.url).sessions(load.run_id, rollouts)
    return await asyncio.to_thread(
        lambda: check(Evidence(rollouts, tuple(recorded(deployment.record)), sessions)),
    )


async def _expiry(deployment: Deployment, plan: Plan, say: Say) -> Expiry:
    """Sessions that nobody closes must leave nothing behind: play some on a worker with a short TTL, and wait."""
    say(f"playing {plan.expiring_sessions} sessions that expire after {plan.expiry_ttl_s} s")
    before = await keys(deployment)
    async with Link(Path(urlsplit(deployment.redis.url).path)) as link:
        worker = deployment.worker("worker-short-ttl", link, "--session-ttl-s", str(plan.expiry_ttl_s))
        try:
            await worker.start()
            await worker.ready(deployment.client, READY_S)
            async with _load(worker.url, plan, 0.0) as load:
                load.until, load.turns = time.monotonic() + plan.expiry_ttl_s, _EXPIRY_TURNS
                await load.play_each(plan.expiring_sessions)
                full = await keys(deployment)
        finally:
            await worker.stop()
    after = full
    for _ in range(plan.expiry_ttl_s + _EXPIRY_GRACE_S):
        await asyncio.sleep(1.0)
        after = await keys(deployment)
        if after <= before + KEYS_LEFT:
            break
    listed = [name async for name in Auditor(deployment.client, deployment.balancer.url).listed(load.run_id)]
    return Expiry(
        listed_after=len(listed),
        sessions=len(load.rollouts),
        turns=load.answered,
        stuck=sum(bool(rollout.stuck) for rollout in load.rollouts),
        keys_before=before,
        keys_full=full,
        keys_after=after,
    )


def _cpu_s(deployment: Deployment) -> dict[str, float]:
    """CPU so far of what is never killed; Redis since its last start."""
    pids = {"worker": deployment.workers[0].pid, "engine": deployment.engine.pid, "driver": psutil.Process().pid}
    return {name: sum(psutil.Process(pid).cpu_times()[:2]) for name, pid in pids.items()}
