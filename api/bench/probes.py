"""Counters read from outside the processes that they count: CPU clocks, Redis, /metrics, the machine.

Linux only: another process's CPU clock is read through the clock id that the kernel makes of its process id. It has
the nanoseconds of `/proc/<pid>/task/*/schedstat`, of all threads, those that have ended included.
"""

from __future__ import annotations

import os
import platform
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families
from redis import Redis

from api.bench.figures import Machine
from store.keys import Tree

_SCHEDULER_CLOCK = 2  # CPUCLOCK_SCHED in the low bits of a process's clock id, its id inverted above them
_STAGES = "tokensplice_turn_stage_seconds"


class ProcessClock:
    """CPU time of another process, all its threads."""

    def __init__(self, pid: int) -> None:
        self._clock = (~pid << 3) | _SCHEDULER_CLOCK

    def ns(self) -> int:
        """Nanoseconds since it began. Raises OSError when the process is gone."""
        return time.clock_gettime_ns(self._clock)


@dataclass(frozen=True, slots=True)
class RedisCounters:
    """What a server did up to an instant, or between two. reads: how often it read from a client's connection."""

    cpu_s: float
    reads: int
    bytes_in: int
    bytes_out: int
    commands: Mapping[str, int]

    def __sub__(self, other: RedisCounters) -> RedisCounters:
        left = Counter(self.commands)
        left.subtract(other.commands)
        return RedisCounters(
            self.cpu_s - other.cpu_s,
            self.reads - other.reads,
            self.bytes_in - other.bytes_in,
            self.bytes_out - other.bytes_out,
            {name: count for name, count in left.items() if count},
        )


NO_COUNTERS = RedisCounters(0.0, 0, 0, 0, {})


class RedisProbe:
    """A Redis server's own counters and sizes."""

    def __init__(self, url: str) -> None:
        self._client = Redis.from_url(url)
        self._own = NO_COUNTERS
        before = self.counters()
        self._own = self.counters() - before

    def close(self) -> None:
        """Let the connection go."""
        self._client.close()

    @property
    def version(self) -> str:
        """Name and version."""
        told: Any = self._client.info("server")
        name = told.get("server_name", "redis")
        return f"{name} {told.get(f'{name}_version', told['redis_version'])}"

    @property
    def used_memory(self) -> int:
        """Bytes that the server has allocated, connections' and its file's buffers left out."""
        told: Any = self._client.info("memory")
        return int(told["used_memory"] - told["mem_clients_normal"] - told["mem_aof_buffer"])

    def counters(self) -> RedisCounters:
        """Now. Between two readings lies the cost of one, see `between`."""
        told: Any = self._client.info("everything")
        prefix = "cmdstat_"
        return RedisCounters(
            cpu_s=told["used_cpu_user"] + told["used_cpu_sys"],
            reads=told["total_reads_processed"],
            bytes_in=told["total_net_input_bytes"],
            bytes_out=told["total_net_output_bytes"],
            commands={
                name.removeprefix(prefix): stat["calls"] for name, stat in told.items() if name.startswith(prefix)
            },
        )

    def between(self, before: RedisCounters, after: RedisCounters) -> RedisCounters:
        """What others had done between two readings."""
        return after - before - self._own

    def sizes(self, tenant: str, session_id: str) -> dict[str, int]:
        """Bytes of each key of a session, the server's own overheads included, by what the key holds."""
        sizes: Counter[str] = Counter()
        tag = Tree(tenant, session_id).tag
        for key in self._client.scan_iter(match=f"{tag}:*", count=1000):
            kind = key.decode().removeprefix(f"{tag}:").partition(":")[0]
            sizes[kind] += int(self._client.memory_usage(key, samples=0) or 0)
        return dict(sizes)


def stage_seconds(exposition: str) -> dict[str, float]:
    """Seconds spent in each stage of turns so far, from the text that `/metrics` answers."""
    families = text_string_to_metric_families(exposition)
    samples = (sample for family in families if family.name == _STAGES for sample in family.samples)
    return {sample.labels["stage"]: sample.value for sample in samples if sample.name == f"{_STAGES}_sum"}


def machine(redis_version: str) -> Machine:
    """This one."""
    return Machine(
        cores=len(os.sched_getaffinity(0)),
        cpu=_cpu_model(),
        kernel=f"{platform.system()} {platform.release()}",
        python=f"{platform.python_implementation()} {platform.python_version()}",
        redis=redis_version,
        load=os.getloadavg()[0],
    )


def _cpu_model() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text().splitlines() if path.exists() else []
    named = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(named, platform.processor() or platform.machine())
