"""Redis Cluster: the way a command takes to the node that has its key, while slots move and nodes fail.

redis-py's cluster client knows the topology, keeps each node's connections and gives commands their shape. How a
command with a key is sent is ours, because of four things in redis-py 8.1: it sends ASKING on another connection than
the command it is meant for, gives up on TRYAGAIN after 0.4 s, closes every connection (those in use too) on some of
the redirections, and runs a transaction by a blocking thread with an event loop of its own.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from typing import Any, Self, TypeVar

from redis import exceptions as theirs
from redis.asyncio.cluster import ClusterNode, ClusterPipeline, RedisCluster

from store.address import Host

Argument = str | bytes | int | float
Answered = TypeVar("Answered")
Call = tuple[Sequence[Argument], Mapping[str, Any]]  # a command, and what redis-py needs to read its answer

_PAUSE_S = 0.02
_LONGEST_PAUSE_S = 0.4
_REFRESH_S = 0.1  # between two questions for the topology, whoever asks

# What a wait can heal: a node is away, a failover or a migration is under way.
_PASSING = (
    theirs.ConnectionError,
    theirs.TimeoutError,
    theirs.ClusterDownError,
    theirs.ReadOnlyError,
    theirs.TryAgainError,
    theirs.RedisClusterException,
    OSError,
)
_LASTING = (
    theirs.AuthenticationError,
    theirs.AuthenticationWrongNumberOfArgsError,
    theirs.AuthorizationError,
    theirs.ExternalAuthProviderError,
)
_AS_IT_COMES = {"raw": True}
# Answers that only say that, or where else, to ask again.
ROUTING = (theirs.AskError, theirs.TryAgainError, theirs.ClusterDownError, theirs.ReadOnlyError)


class Cluster(RedisCluster):
    """A client of a cluster. At most `connections` at once; a command is tried for `patience_s`."""

    def __init__(self, hosts: Sequence[Host], *, connections: int, patience_s: float, **options: Any) -> None:
        """`options` are those of redis-py's RedisCluster."""
        # Room for what redis-py sends by itself, beside our own bound below.
        super().__init__(
            startup_nodes=[ClusterNode(host, port) for host, port in hosts], max_connections=2 * connections, **options
        )
        self._room = asyncio.Semaphore(connections)
        self._patience_s = patience_s
        self._refreshed_at = -_REFRESH_S

    async def execute_command(self, *args: Any, **options: Any) -> Any:
        """One command: to the node that has its key, or where redis-py sends commands that have none."""
        if options.get("target_nodes") or args[0] in self.command_flags:
            async with self._room:
                return await super().execute_command(*args, **options)
        slot = await self.slot_of(args)
        [answer] = await self.routed(slot, lambda node, asking: self.converse(node, [(args, options)], asking=asking))
        if isinstance(answer, Exception):
            raise answer
        return answer

    def pipeline(self, transaction: Any = None, shard_hint: Any = None) -> Batch:
        """Commands that go together: a transaction (one slot), or to each node its own in one round trip."""
        if shard_hint:
            raise theirs.RedisClusterException("a cluster has no shard hints")
        return Batch(self, transaction=bool(transaction))  # type: ignore[abstract]

    async def slot_of(self, args: Sequence[Any]) -> int:
        """The slot of a command's keys."""
        if self._initialize and args[0] not in {"EVAL", "EVALSHA"}:
            await self.initialize()
        return await self._determine_slot(*args)

    async def routed(
        self, slot: int, send: Callable[[ClusterNode, bool], Awaitable[Sequence[Answered]]]
    ) -> Sequence[Answered]:
        """What `send(node, asking)` brings from the slot's node, wherever the slot moves meanwhile.

        `send` may run several times, and is told when ASKING must come first. Answers that only say where to ask
        (an exception among them) lead to the next try; other errors are for the caller.
        """
        deadline = asyncio.get_running_loop().time() + self._patience_s
        pauses, asking = _pauses(), False
        target: ClusterNode | None = None
        node: ClusterNode | None = None
        error: Exception
        while True:
            try:
                node = target or await self._owner(slot)
                answers = await send(node, asking)
                for answer in answers:
                    if isinstance(answer, ROUTING):
                        raise answer
            except theirs.MovedError as moved:
                await self.nodes_manager.move_slot(moved)
                target, asking, error = None, False, moved
                pause = next(pauses)
            except theirs.AskError as ask:
                target, asking, error, pause = self._asked(ask), True, ask, 0.0
            except _PASSING as passing:
                error, pause = passing, next(pauses)
                await self._after(passing, node)
                if not isinstance(passing, theirs.TryAgainError):
                    target, asking = None, False
            else:
                return answers
            if asyncio.get_running_loop().time() + pause > deadline:
                raise error
            await asyncio.sleep(pause)

    async def _owner(self, slot: int) -> ClusterNode:
        if self._initialize:
            await self.initialize()
        return self.nodes_manager.get_node_from_slot(slot)

    def _asked(self, ask: theirs.AskError) -> ClusterNode:
        known = self.nodes_manager.get_node(host=ask.host, port=ask.port)
        if known is None:
            known = ClusterNode(ask.host, ask.port, "primary", **self.nodes_manager.connection_kwargs)
            self.nodes_manager.nodes_cache[known.name] = known
        return known

    async def _after(self, error: Exception, node: ClusterNode | None) -> None:
        """Learn the topology anew, unless somebody just did. Raises what waiting does not heal."""
        for one in (error, error.__cause__):
            if isinstance(one, _LASTING):
                raise one
        now = asyncio.get_running_loop().time()
        if isinstance(error, theirs.TryAgainError) or now - self._refreshed_at < _REFRESH_S:
            return
        self._refreshed_at = now
        failed = node.name if node is not None else None
        try:
            await self.nodes_manager.initialize(last_failed_node_name=failed)
        except theirs.RedisClusterException:
            return  # nobody answers, or slots are without a node: the next try asks again

    async def converse(self, node: ClusterNode, calls: Sequence[Call], *, asking: bool = False) -> list[Any]:
        """Commands on one connection in one round trip; refusals stand among the answers. Raises what cut it short."""
        if asking:
            calls = [(("ASKING",), {}), *calls]
        async with self._room:
            connection = node.acquire_connection()
            try:
                await node.disconnect_if_needed(connection)
                await connection.send_packed_command(connection.pack_commands(args for args, _ in calls))
                answers = [await _answer(node, connection, args, options) for args, options in calls]
            except BaseException:
                await connection.disconnect(nowait=True)  # what is still to come belongs to nobody
                raise
            finally:
                node.release(connection)
        return answers[1:] if asking else answers


class Batch(ClusterPipeline):
    """Collects commands as redis-py's pipelines do; `execute` sends them."""

    def __init__(self, client: Cluster, *, transaction: bool) -> None:
        """Made by `Cluster.pipeline`."""
        super().__init__(client)
        self._cluster = client
        self._whole = transaction
        self._calls: list[Call] = []

    def __len__(self) -> int:
        return len(self._calls)

    def execute_command(self, *args: Any, **options: Any) -> Self:
        """Add a command."""
        self._calls.append((args, options))
        return self

    async def reset(self) -> None:  # type: ignore[override]
        """Forget what was added."""
        self._calls = []

    async def execute(self, raise_on_error: bool = True, allow_redirections: bool = True) -> list[Any]:  # noqa: ARG002, FBT001, FBT002
        """Every command's answer in order; errors among them when they are not to be raised."""
        calls, self._calls = self._calls, []
        if not calls:
            return []
        answers = await (self._transaction_of(calls) if self._whole else self._each(calls))
        if raise_on_error:
            for answer in answers:
                if isinstance(answer, Exception):
                    raise answer
        return answers

    async def _transaction_of(self, calls: Sequence[Call]) -> list[Any]:
        slots = {await self._cluster.slot_of(args) for args, _ in calls}
        if len(slots) > 1:
            raise theirs.RedisClusterException("the keys of a transaction must be in one slot")
        whole: list[Call] = [(args, _AS_IT_COMES) for args in (("MULTI",), *(args for args, _ in calls), ("EXEC",))]
        answers = await self._cluster.routed(
            slots.pop(), lambda node, asking: self._cluster.converse(node, whole, asking=asking)
        )
        if isinstance(answers[-1], Exception):
            raise next(answer for answer in answers if isinstance(answer, Exception))
        return [self._shaped(*call, value) for call, value in zip(calls, answers[-1], strict=True)]

    def _shaped(self, args: Sequence[Any], options: Mapping[str, Any], value: Any) -> Any:
        shape = self._cluster.response_callbacks.get(args[0])
        if shape is None or isinstance(value, Exception):
            return value
        return shape(value, **{name: option for name, option in options.items() if name != "keys"})

    async def _each(self, calls: Sequence[Call]) -> list[Any]:
        """To each node its own in one round trip; what that did not bring goes the long way, one by one."""
        answers: list[Any] = [None] * len(calls)
        shares: dict[ClusterNode, list[int]] = {}
        for at, (args, _) in enumerate(calls):
            slot = await self._cluster.slot_of(args)
            shares.setdefault(await self._owner_or_any(slot), []).append(at)
        await asyncio.gather(*(self._share(node, calls, its, answers) for node, its in shares.items()))
        return answers

    async def _owner_or_any(self, slot: int) -> ClusterNode:
        [node] = await self._cluster.routed(slot, _itself)
        return node

    async def _share(self, node: ClusterNode, calls: Sequence[Call], its: Sequence[int], answers: list[Any]) -> None:
        try:
            found = await self._cluster.converse(node, [calls[at] for at in its])
        except _PASSING as error:
            found = [error] * len(its)
        for at, answer in zip(its, found, strict=True):
            if isinstance(answer, (*_PASSING, *ROUTING)):
                answers[at] = await self._alone(*calls[at])
            else:
                answers[at] = answer

    async def _alone(self, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
        try:
            return await self._cluster.execute_command(*args, **options)
        except (theirs.RedisError, theirs.RedisClusterException, OSError) as error:
            return error


async def _itself(node: ClusterNode, _asking: bool) -> Sequence[ClusterNode]:  # noqa: FBT001
    return [node]


async def _answer(node: ClusterNode, connection: Any, args: Sequence[Any], options: Mapping[str, Any]) -> Any:
    """One answer, as redis-py shapes it; `raw` leaves it as it came."""
    try:
        if options.get("raw"):
            return await connection.read_response()
        return await node.parse_response(connection, args[0], **options)
    except theirs.ResponseError as refusal:
        return refusal


def _pauses() -> Iterator[float]:
    """None at first, then growing, and different for each caller: all of them were thrown out at once."""
    yield 0.0
    longest = _PAUSE_S
    while True:
        yield longest * (0.5 + random.random() / 2)  # noqa: S311
        longest = min(longest * 1.6, _LONGEST_PAUSE_S)
