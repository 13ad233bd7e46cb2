"""Conversations that go on committing while servers fail, and the account of what became of what was acknowledged."""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from itertools import pairwise

from store.errors import LeaseLost, ParentMissing, ReplicationUnknown, SessionMissing, StoreUnavailable
from store.redis import RedisStore
from store.replication import Replication
from store.views import SessionKey, SessionOpening
from tests.store.building import Conversation

OPENING = SessionOpening()
_PAUSE_S = 0.02  # before a repeat, as a client makes one


@dataclass
class Account:
    """What a load's clients were told, and when."""

    acknowledged: dict[SessionKey, Conversation] = field(default_factory=dict)
    at: list[float] = field(default_factory=list)
    when: dict[str, float] = field(default_factory=dict)  # turn id -> acknowledged
    unknown: int = 0
    unavailable: int = 0
    last: str = ""  # refusal
    orphans: int = 0  # conversations whose acknowledged parent was gone

    @property
    def turns(self) -> int:
        return len(self.at)

    def gap_s(self) -> float:
        """The longest time in which nobody was acknowledged anything."""
        return max(later - earlier for earlier, later in pairwise(self.at))

    def __str__(self) -> str:
        return (
            f"{self.turns} turns acknowledged, {self.unknown} answers 'replication unknown', "
            f"{self.unavailable} 'unavailable', nothing acknowledged for at most {self.gap_s():.2f} s"
        )


async def _converse(store: RedisStore, tenant: str, name: str, account: Account, stop: asyncio.Event) -> None:
    rng, part = random.Random(name), 0
    key, conversation = SessionKey(tenant, f"{name}-0"), Conversation()
    while not stop.is_set():
        longer = conversation.then(rng)
        try:
            await _insist(store, key, longer, account, stop)
        except ParentMissing:
            account.orphans += 1
            part += 1
            key, conversation = SessionKey(tenant, f"{name}-{part}"), Conversation()
            continue
        except LeaseLost:
            continue  # a commit that failed gave its lease up: it was not committed, and another turn takes its place
        except asyncio.CancelledError:
            return
        conversation = account.acknowledged[key] = longer
        account.at.append(time.monotonic())
        account.when[longer.head.turn_id] = account.at[-1]


async def _insist(
    store: RedisStore, key: SessionKey, conversation: Conversation, account: Account, stop: asyncio.Event
) -> None:
    while True:
        try:
            return await store.commit(key, conversation.head, OPENING)
        except ReplicationUnknown as error:
            account.unknown += 1
            account.last = str(error)
        except StoreUnavailable as error:
            account.unavailable += 1
            account.last = str(error)
        if stop.is_set():
            raise asyncio.CancelledError
        await asyncio.sleep(_PAUSE_S)


@asynccontextmanager
async def opened(url: str, replication: Replication | None = None) -> AsyncIterator[RedisStore]:
    """A worker's store."""
    store = await RedisStore.connect(url, default_ttl_s=3600, replication=replication)
    try:
        yield store
    finally:
        await store.close()


@asynccontextmanager
async def load(store: RedisStore, tenant: str, conversations: int = 16) -> AsyncIterator[Account]:
    """Conversations at work; they end what they are at when the block ends."""
    account, stop = Account(), asyncio.Event()
    tasks = [asyncio.create_task(_converse(store, tenant, f"talk{n}", account, stop)) for n in range(conversations)]
    try:
        yield account
    finally:
        stop.set()
        await asyncio.wait_for(asyncio.gather(*tasks), 30)


async def more(account: Account, turns: int, patience_s: float = 20.0) -> None:
    """Wait until so many more turns are acknowledged."""
    wanted, deadline = account.turns + turns, time.monotonic() + patience_s
    while account.turns < wanted:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{account.turns} of {wanted}: {account.unknown} unknown, {account.unavailable} away")
        await asyncio.sleep(0.01)


async def lost(store: RedisStore, account: Account) -> Sequence[str]:
    """Acknowledged turns that are not there; those that are there are checked whole."""
    missing: list[str] = []
    for key, conversation in account.acknowledged.items():
        try:
            stored = {turn.turn_id: turn for turn in (await store.turns(key)).turns}
        except SessionMissing:
            stored = {}
        for turn in conversation.turns:
            if turn.turn_id in stored:
                assert stored[turn.turn_id] == turn
            else:
                missing.append(turn.turn_id)
        unasked = stored.keys() - {turn.turn_id for turn in conversation.turns}
        assert len(unasked) <= 1  # the one that was under way when the load ended
    return missing
