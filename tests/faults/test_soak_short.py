"""A short run of the soak: the same load, harm and checker as `make soak`, in little more than half a minute."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.faults.soak.plan import Plan
from tests.faults.soak.run import soak

PLAN = Plan(
    seconds=10,
    sessions=60,
    rate=30,
    workers=3,
    durability="sync",
    redis_every_s=4,
    cut_every_s=2,
    engine_every_s=4,
    longest_pause_s=2,
    expiry_ttl_s=3,
    expiring_sessions=12,
)


@pytest.mark.timeout(300)  # it starts nine processes and more, on whatever machine
async def test_nothing_is_lost_doubled_broken_orphaned_or_stuck_while_workers_redis_and_connections_die(
    qwen3: Path, tmp_path: Path
) -> None:
    began = time.monotonic()
    outcome = await soak(PLAN, qwen3, tmp_path, lambda words: print(f"{time.monotonic() - began:5.1f} {words}"))
    print("\n".join(outcome.lines()))
    assert outcome.complaints == ()
    assert outcome.harm["workers killed"] >= 2
    assert outcome.harm["Redis killed"] >= 2
    assert outcome.harm["connections to Redis cut"] >= 1
    assert outcome.report.extensions >= 50
    assert outcome.expiry is not None
    assert outcome.expiry.keys_full > outcome.expiry.keys_before
