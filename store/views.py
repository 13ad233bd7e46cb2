"""What the store is asked and what it answers, as values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from splice.locate import Candidate
from splice.types import Lineage, Turn

SessionState = Literal["open", "finished", "deleted"]


@dataclass(frozen=True, slots=True)
class SessionKey:
    """A session is named within its tenant; tenants never see each other's sessions."""

    tenant: str
    session_id: str


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionOpening:
    """What a session is made with, by `POST /sessions` or by its first turn. Empty means not given."""

    run_id: str = ""
    group_id: str = ""
    group_size: int = 0
    metadata: Mapping[str, Any] = field(default_factory=dict)
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    ttl_s: int = 0  # 0: the store's default
    on_rendering_change: str = ""
    on_overflow: str = ""
    thinking: str = ""
    parent_session_id: str = ""
    unnamed: bool = False  # found by content lineage, not by a name


@dataclass(frozen=True, slots=True, kw_only=True)
class SessionView:
    """A session's main key, decoded."""

    key: SessionKey
    state: SessionState
    opening: SessionOpening
    created_at: float
    updated_at: float
    turns: int
    tokens: int  # prompt deltas and generations of every turn, each counted once
    sampled_tokens: int
    roots: Mapping[str, str]  # root turn id -> rendering signature
    model: str = ""
    last_turn_id: str = ""
    status: str = ""
    reward: float | None = None


# How a request says that it repeats one: not at all, by a retry count, by an Idempotency-Key; "asked" looks for an
# undelivered answer and leases nothing.
Mark = Literal["none", "retry", "key", "asked"]


@dataclass(frozen=True, slots=True)
class Lease:
    """What an attempt holds while it runs. Its id is the id of the turn that it will commit."""

    key: SessionKey
    attempt_id: str
    request_hash: bytes
    idempotency_key: str = ""


@dataclass(frozen=True, slots=True)
class FindQuery:
    """Everything `find` needs to know of a request.

    chain: the chain hash at each assistant message, in request order (shallowest first).
    hints: turn ids the client echoed, strongest first; `Found.unknown_hints` tells which the session lacks.
    attempt_id: who is to get the lease; empty, the verdict is told and nothing is written.
    """

    key: SessionKey
    chain: tuple[bytes, ...]
    rendering_signature: str
    request_hash: bytes
    hints: tuple[str, ...] = ()
    generation_digests: tuple[bytes, ...] = ()  # echoed token ids, for ties; any depth
    idempotency_key: str = ""
    attempt_id: str = ""
    mark: Mark = "none"

    @property
    def lease(self) -> Lease:
        """What the attempt gets when it is to generate."""
        return Lease(self.key, self.attempt_id, self.request_hash, self.idempotency_key)


@dataclass(frozen=True, slots=True)
class Generate:
    """Nothing answers this request: the attempt has the lease, unless the session is closed or nothing was asked."""


@dataclass(frozen=True, slots=True)
class Replay:
    """A committed turn answers it."""

    turn_id: str


@dataclass(frozen=True, slots=True)
class Join:
    """Another attempt, by `worker`, is about to answer it."""

    attempt_id: str
    worker: str


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The idempotency key belongs to another request."""


Verdict = Generate | Replay | Join | Mismatch
Outcome = Literal["running", "committed", "gone"]


@dataclass(frozen=True, slots=True)
class EarlierTurn:
    """A committed turn that answered an equal request."""

    turn_id: str
    extended: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One round trip's answer.

    `lineage` is that of the candidate the server expects to be chosen; `lineage_of` reads another.
    `idempotent` is the turn committed under the query's idempotency key, with its request hash.
    `suspects` are the workers on whose life the verdict depends.
    """

    session: SessionView | None
    candidates: tuple[Candidate, ...] = ()
    lineage: Lineage | None = None
    equal_requests: tuple[EarlierTurn, ...] = ()  # oldest first
    idempotent: tuple[str, bytes] | None = None
    unknown_hints: tuple[str, ...] = ()
    verdict: Verdict = Generate()
    suspects: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class Trace:
    """Where a tenant's unnamed conversation was seen: from the content index, to be verified by `find`."""

    depth: int  # which of the request's assistant messages (1-based)
    session_id: str
    turn_id: str
    generation_digest: bytes


@dataclass(frozen=True, slots=True)
class Page:
    """Sessions, most recently used first; `cursor` continues, "" at the end."""

    sessions: tuple[SessionView, ...]
    cursor: str


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """What the Redis server says of itself at start-up."""

    product: str  # redis or valkey
    version: str
    eviction_policy: str
    append_only: bool
    append_fsync: str
    replicas: int


@dataclass(frozen=True, slots=True)
class Reward:
    """What a turn was worth, and who says so."""

    value: float
    source: str = ""


@dataclass(frozen=True, slots=True)
class Forest:
    """A session and its turns in commit order: what inspection and samples are made from."""

    session: SessionView
    turns: tuple[Turn, ...]
    rewards: Mapping[str, Reward] = field(default_factory=dict)  # by turn id, where a turn has its own
    delivered: Mapping[str, bool | None] = field(default_factory=dict)  # by turn id; None: not known
