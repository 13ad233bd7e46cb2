"""Redis deployments of several processes, on loopback ports: what Sentinels watch, and a cluster.

Each stops everything it started, however the test ends.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Self

import redis
from redis.exceptions import RedisError

SLOTS = 16384
SERVICE = "rollouts"


def free_port() -> int:
    """A loopback port that nobody listens on now, and whose cluster bus port exists."""
    while True:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = int(probe.getsockname()[1])
        if port < 55000:
            return port


def until(holds: Callable[[], Any], what: str, patience_s: float = 20.0) -> Any:
    """What `holds` answers once it is true."""
    deadline = time.monotonic() + patience_s
    while True:
        with suppress(RedisError, OSError, IndexError):
            if value := holds():
                return value
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {patience_s:.0f} s: {what}")
        time.sleep(0.02)


class Node:
    """One server process with its data in a folder of its own."""

    def __init__(self, binary: str, folder: Path, *arguments: str, port: int = 0, mode: Sequence[str] = ()) -> None:
        self.port = port or free_port()
        self._folder = folder
        self._command = [binary, *mode, "--port", str(self.port), "--bind", "127.0.0.1", "--dir", str(folder)]
        self._command += ["--logfile", str(folder / "log"), *arguments]
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}"

    @property
    def alive(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def start(self, *arguments: str) -> Self:
        self._process = subprocess.Popen(
            [*self._command, *arguments], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        until(lambda: self.ask("PING"), f"{self._command} answers; see {self._folder}/log")
        return self

    def signal(self, number: signal.Signals) -> None:
        """STOP freezes it as a lost network would, CONT brings it back, KILL is a crash."""
        assert self._process is not None
        os.kill(self._process.pid, number)
        if number == signal.SIGKILL:
            self._process.wait(10)

    def stop(self) -> None:
        if self.alive:
            assert self._process is not None
            self._process.kill()  # also when it is frozen; nobody needs its data any more
            self._process.wait(10)

    def ask(self, *command: str | int) -> Any:
        with redis.Redis(port=self.port, socket_timeout=2, decode_responses=True, retry=None) as client:
            return client.execute_command(*command)

    def says(self, section: str, field: str) -> Any:
        return self.ask("INFO", section).get(field)


def acknowledging(primary: Node, replicas: int) -> bool:
    """So many replicas confirm a write: one that was just filled begins to do so up to a second later."""
    with redis.Redis(port=primary.port, socket_timeout=2) as client:
        pipeline = client.pipeline(transaction=False)
        pipeline.execute_command("FUNCTION FLUSH")  # a write without a key: any node of a cluster takes it
        pipeline.execute_command("WAIT", replicas, 100)
        return int(pipeline.execute()[-1]) >= replicas


def leave_behind(replica: Node, primary: Node) -> None:
    """From here on the replica gets nothing. Frozen alone it would find the rest in its socket when it wakes."""
    replica.signal(signal.SIGSTOP)
    primary.ask("CLIENT KILL", "TYPE", "replica")


_DATA = ("--appendonly", "yes", "--save", "", "--maxmemory-policy", "noeviction", "--repl-diskless-sync-delay", "0")


class _Deployment:
    """Processes that belong together."""

    nodes: list[Node]

    def start(self) -> None:
        """Start all of them and wait until they serve."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        for node in self.nodes:
            node.stop()


class Pair(_Deployment):
    """A primary and its replicas; nobody watches them."""

    def __init__(self, binary: str, folder: Path, *arguments: str, replicas: int = 1) -> None:
        self.primary = Node(binary, folder / "primary", *_DATA, *arguments)
        following = (*_DATA, *arguments, "--replicaof", "127.0.0.1", str(self.primary.port))
        self.replicas = [Node(binary, folder / f"replica{n}", *following) for n in range(replicas)]
        self.nodes = [self.primary, *self.replicas]

    @property
    def url(self) -> str:
        return self.primary.url

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        until(lambda: acknowledging(self.primary, len(self.replicas)), "the replicas are in step")


class Watched(Pair):
    """A primary and one replica, watched by three Sentinels."""

    def __init__(self, binary: str, folder: Path, *arguments: str, down_after_ms: int = 500) -> None:
        super().__init__(binary, folder, *arguments)
        self._down_after_ms = down_after_ms
        self.sentinels: list[Node] = []
        for n in range(3):
            home = folder / f"sentinel{n}"
            home.mkdir(parents=True)
            (home / "conf").write_text(
                f"sentinel monitor {SERVICE} 127.0.0.1 {self.primary.port} 2\n"
                f"sentinel down-after-milliseconds {SERVICE} {down_after_ms}\n"
                f"sentinel failover-timeout {SERVICE} 3000\n"
            )
            self.sentinels.append(Node(binary, home, mode=[str(home / "conf"), "--sentinel"]))
        self.nodes += self.sentinels

    @property
    def url(self) -> str:
        return f"redis+sentinel://{','.join(f'127.0.0.1:{s.port}' for s in self.sentinels)}/{SERVICE}/0"

    def start(self) -> None:
        for node in [self.primary, *self.replicas]:
            node.start()
        until(lambda: acknowledging(self.primary, 1), "the replica is in step")
        for sentinel in self.sentinels:
            sentinel.start()
        for sentinel in self.sentinels:
            until(lambda s=sentinel: self._knows_all(s), "each Sentinel knows the others and the replica")

    @staticmethod
    def _knows_all(sentinel: Node) -> bool:
        seen = dict(sentinel.ask("INFO", "sentinel"))["master0"]
        return (int(seen["sentinels"]), int(seen["slaves"]), seen["status"]) == (3, 1, "ok")

    def wait_for_failover(self, to: Node) -> None:
        until(lambda: to.says("replication", "role") == "master", "the replica was promoted")


class Shards(_Deployment):
    """A cluster of three primaries with a replica each. `primaries[n]` is followed by `replicas[n]`."""

    def __init__(self, binary: str, folder: Path, *arguments: str, node_timeout_ms: int = 1500) -> None:
        self.nodes = [
            Node(
                *(binary, folder / f"node{n}", *_DATA, *arguments, "--cluster-enabled", "yes"),
                *("--cluster-node-timeout", str(node_timeout_ms), "--cluster-allow-replica-migration", "no"),
                *("--cluster-replica-validity-factor", "0"),
            )
            for n in range(6)
        ]
        self.primaries, self.replicas = self.nodes[:3], self.nodes[3:]

    @property
    def url(self) -> str:
        return f"redis+cluster://{','.join(f'127.0.0.1:{node.port}' for node in self.primaries)}"

    def start(self) -> None:
        for node in self.nodes:
            node.start()
        for n, node in enumerate(self.nodes):
            node.ask("CLUSTER SET-CONFIG-EPOCH", n + 1)
            if n:
                node.ask("CLUSTER MEET", "127.0.0.1", self.nodes[0].port)
        bounds = [SLOTS * n // 3 for n in range(4)]
        for node, low, high in zip(self.primaries, bounds, bounds[1:], strict=False):
            node.ask("CLUSTER ADDSLOTSRANGE", low, high - 1)
        for node in self.nodes:
            until(lambda n=node: self._state(n)["cluster_known_nodes"] == "6", "the nodes know each other")
        for primary, replica in zip(self.primaries, self.replicas, strict=True):
            until(lambda p=primary, r=replica: r.ask("CLUSTER REPLICATE", self.name(p)), "a replica follows")
        self.wait_until_well()

    def wait_until_well(self) -> None:
        """All slots served, every live replica in step."""
        for node in self.nodes:
            if node.alive:
                until(lambda n=node: self._state(n)["cluster_state"] == "ok", "the cluster is well")
                until(lambda n=node: self._in_step(n), "the replicas are in step")

    @staticmethod
    def _state(node: Node) -> dict[str, str]:
        return dict(node.ask("CLUSTER INFO"))

    @staticmethod
    def _in_step(node: Node) -> bool:
        said = dict(node.ask("INFO", "replication"))
        if said["role"] == "master":
            return acknowledging(node, int(said["connected_slaves"]))
        return bool(said["master_link_status"] == "up")

    @staticmethod
    def name(node: Node) -> str:
        """The cluster's own name of a node."""
        return str(node.ask("CLUSTER MYID"))

    def owner(self, slot: int) -> Node:
        """The primary that has a slot now."""
        ranges = next(node for node in self.nodes if node.alive).ask("CLUSTER SLOTS")
        port = next(primary[1] for low, high, primary, *_ in ranges if low <= slot <= high)
        return next(node for node in self.nodes if node.port == port)

    def move(self, slot: int, to: Node, *, pause_s: float = 0.0) -> None:
        """Reshard one slot as `redis-cli --cluster reshard` does, key by key."""
        source = self.owner(slot)
        to.ask("CLUSTER SETSLOT", slot, "IMPORTING", self.name(source))
        source.ask("CLUSTER SETSLOT", slot, "MIGRATING", self.name(to))
        while names := source.ask("CLUSTER GETKEYSINSLOT", slot, 3):
            source.ask("MIGRATE", "127.0.0.1", to.port, "", 0, 5000, "KEYS", *names)
            time.sleep(pause_s)
        for node in (to, source, *(n for n in self.primaries if n not in {to, source})):
            if node.alive:
                node.ask("CLUSTER SETSLOT", slot, "NODE", self.name(to))
