"""What the three witnesses of a fault run say, as plain values: clients, engine, store. The checker reads nothing else.

Ids travel as bytes (u32, little-endian): a prompt extends another when it starts with it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import msgspec
import numpy as np

Ids = bytes
# answered   the reply was taken, the rollout went on from it
# discarded  the reply came whole and was thrown away: the client asks again
# left       the client hung up
# failed     an error status, or a connection that broke
Outcome = Literal["answered", "discarded", "left", "failed"]


def pack(ids: Iterable[int]) -> Ids:
    """Ids as they are compared."""
    return np.asarray(list(ids) if not isinstance(ids, list) else ids, np.dtype("<u4")).tobytes()


class Attempt(msgspec.Struct, frozen=True, kw_only=True):
    """One request that a client sent, and what it was told. `reply` is the message in the checker's one spelling."""

    outcome: Outcome
    status: int = 0
    words: str = ""
    session_id: str = ""
    turn_id: str = ""
    splice: str = ""
    replayed: bool = False
    reply: bytes = b""
    nonces: tuple[str, ...] = ()
    generation: Ids | None = None  # where the client asked for ids

    @property
    def acknowledged(self) -> bool:
        """The client held a whole reply in its hands."""
        return self.outcome in ("answered", "discarded")


class Ask(msgspec.Struct, frozen=True, kw_only=True):
    """One turn that a rollout wanted, with all its attempts. `word` stands in its last message and nowhere else.

    once: by its marks, all its attempts are one request. key: its Idempotency-Key.
    """

    word: str
    once: bool
    attempts: tuple[Attempt, ...]
    key: str = ""

    @property
    def answer(self) -> Attempt | None:
        """What the rollout went on from."""
        return next((one for one in reversed(self.attempts) if one.outcome == "answered"), None)


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One conversation. finished: sealed through the API; otherwise it was left for its TTL on purpose."""

    tag: str
    asks: tuple[Ask, ...]
    finished: bool
    stuck: str = ""  # why it could not go on


class Generation(msgspec.Struct, frozen=True, kw_only=True):
    """One request by the engine's own record. word: the ask's, read from the prompt's end."""

    rid: str
    prompt: Ids
    output: Ids
    outcome: str  # answered, aborted or failed
    nonce: str
    word: str


class StoredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as `GET /sessions/{id}/turns` shows it. word: the ask's, from its last message."""

    turn_id: str
    parent_id: str
    word: str
    prompt_length: int
    delta: Ids
    generation: Ids
    delivered: bool | None
    reply: bytes
    nonces: tuple[str, ...]


class Sample(msgspec.Struct, frozen=True):
    """One exported sample; `turn_ids` from its root to its leaf."""

    turn_ids: tuple[str, ...]
    tokens: Ids


class StoredSession(msgspec.Struct, frozen=True, kw_only=True):
    """One session, its turns in commit order and what it exports."""

    session_id: str
    state: str
    turns: tuple[StoredTurn, ...]
    samples: tuple[Sample, ...]


class Evidence(msgspec.Struct, frozen=True):
    """All three records of one run."""

    rollouts: tuple[Rollout, ...]
    generations: tuple[Generation, ...]
    sessions: tuple[StoredSession, ...]
