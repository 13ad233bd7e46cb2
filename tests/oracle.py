"""The store as one would write it without Redis: dictionaries and loops, obviously right, and slow.

Stateful tests do the same to this and to the real store and compare. No time passes here: nothing expires.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from splice.identity import ids_digest
from splice.locate import Candidate
from splice.types import IdArray, Turn
from store.errors import (
    AlreadyAnswered,
    LeaseLost,
    ParentMissing,
    RenderingDiffers,
    SessionClosed,
    SessionFinished,
    SessionMissing,
    TurnMissing,
)
from store.views import (
    EarlierTurn,
    FindQuery,
    Generate,
    Join,
    Lease,
    Mismatch,
    Outcome,
    Replay,
    SessionKey,
    SessionOpening,
    Verdict,
)


@dataclass
class _Session:
    state: str = "open"
    opening: SessionOpening = field(default_factory=SessionOpening)
    turns: list[Turn] = field(default_factory=list)  # in commit order
    answers: dict[str, Turn] = field(default_factory=dict)  # by idempotency key
    delivering: dict[str, tuple[str, str]] = field(default_factory=dict)  # turn -> worker and attempt; "0": not


@dataclass
class _Running:
    """An attempt and its lease."""

    attempt: str
    worker: str
    request_hash: bytes
    idempotency_key: str


class Oracle:
    """Sessions of turns, with the store's names for what it does."""

    def __init__(self) -> None:
        self.sessions: dict[SessionKey, _Session] = {}
        self.running: dict[SessionKey, list[_Running]] = {}  # oldest first
        self.fenced: dict[SessionKey, set[str]] = {}  # attempts that were taken over

    def open_session(self, key: SessionKey, opening: SessionOpening) -> bool:
        made = key not in self.sessions
        session = self.sessions.setdefault(key, _Session(opening=opening))
        if session.state == "deleted":
            raise SessionClosed(key.session_id)
        return made

    def commit(
        self, key: SessionKey, turn: Turn, opening: SessionOpening, idempotency_key: str = "", worker: str = ""
    ) -> None:
        session = self.sessions.get(key)
        if session and any(t.turn_id == turn.turn_id for t in session.turns):
            return
        if turn.turn_id in self.fenced.get(key, ()):
            raise LeaseLost(key.session_id, turn.turn_id)
        self.release(Lease(key, turn.turn_id, turn.request_hash, idempotency_key))
        if session and session.state == "deleted":
            raise SessionClosed(key.session_id)
        if session and session.state == "finished":
            raise SessionFinished(key.session_id)
        if turn.parent_id:
            known = {t.turn_id: t for t in session.turns} if session else {}
            if turn.parent_id not in known:
                raise ParentMissing(key.session_id, turn.parent_id)
            if known[turn.root_id].rendering_signature != turn.rendering_signature:
                raise RenderingDiffers(key.session_id, turn.turn_id)
        if session and idempotency_key in session.answers:
            answer = session.answers[idempotency_key]
            raise AlreadyAnswered(key.session_id, answer.turn_id, answer.request_hash)
        session = self.sessions.setdefault(key, _Session(opening=opening))
        session.turns.append(turn)
        session.delivering.pop(turn.parent_id, None)
        session.delivering[turn.turn_id] = (worker, "")
        if idempotency_key:
            session.answers[idempotency_key] = turn

    def delete(self, key: SessionKey) -> None:
        self._session(key)
        self.sessions[key] = _Session("deleted")
        self.running.pop(key, None)
        self.fenced.pop(key, None)

    def finish(self, key: SessionKey) -> None:
        session = self._session(key)
        if session.state == "deleted":
            raise SessionClosed(key.session_id)
        session.state = "finished"

    def _session(self, key: SessionKey) -> _Session:
        if key not in self.sessions:
            raise SessionMissing(key.session_id)
        return self.sessions[key]

    def turns(self, key: SessionKey) -> tuple[Turn, ...]:
        session = self._session(key)
        if session.state == "deleted":
            raise SessionClosed(key.session_id)
        return tuple(session.turns)

    def extended(self, key: SessionKey, turn: Turn) -> bool:
        return any(t.parent_id == turn.turn_id for t in self.sessions[key].turns)

    def candidates(self, query: FindQuery) -> list[Candidate]:
        """Every hit of the query's chain hashes, in commit order within a depth, deepest first."""
        session = self.sessions.get(query.key)
        return [
            Candidate(
                turn_id=turn.turn_id,
                root_id=turn.root_id,
                rendering_signature=turn.rendering_signature,
                depth=depth,
                extended=self.extended(query.key, turn),
                generation_digest=ids_digest(turn.generation.ids),
                order=order,
            )
            for depth in range(len(query.chain), 0, -1)
            for order, turn in enumerate(session.turns if session else (), 1)
            if turn.chain_hash == query.chain[depth - 1]
        ]

    def equal_requests(self, query: FindQuery) -> list[EarlierTurn]:
        return [EarlierTurn(turn.turn_id, self.extended(query.key, turn)) for turn in self._answers(query)]

    def _answers(self, query: FindQuery) -> list[Turn]:
        """Turns that answered this request: whole ones, and those after the parent that it would have."""
        session = self.sessions.get(query.key, _Session())
        fitting = {"", self._parent(query)}
        return [t for t in session.turns if t.request_hash == query.request_hash and t.parent_id in fitting]

    def _parent(self, query: FindQuery) -> str:
        """The turn that is expected to be gone on from."""
        hits = [c for c in self.candidates(query) if c.rendering_signature == query.rendering_signature]
        equal = [c for c in hits if c.depth == max(hit.depth for hit in hits)]
        equal = [c for c in equal if c.generation_digest in query.generation_digests] or equal
        for hint in query.hints:
            if hint in {c.turn_id for c in equal}:
                return hint
        untouched = [c for c in equal if not c.extended] or equal
        return max(untouched, key=lambda c: c.order).turn_id if untouched else ""

    def delivered(self, key: SessionKey) -> dict[str, bool | None]:
        session = self.sessions[key]
        meaning = {None: True, "0": False}
        workers = {t.turn_id: session.delivering.get(t.turn_id, (None, ""))[0] for t in session.turns}
        return {turn_id: meaning.get(worker) for turn_id, worker in workers.items()}

    def mark(self, key: SessionKey, turn_id: str, *, delivered: bool) -> None:
        session = self.sessions.get(key, _Session())
        if delivered:
            session.delivering.pop(turn_id, None)
        elif turn_id in session.delivering:
            session.delivering[turn_id] = ("0", "")

    # The table of retries. `gone`: workers that show no sign of life.

    def verdict(self, query: FindQuery, worker: str, gone: set[str]) -> Verdict:
        """What a request with an attempt gets; a lease is taken, a lost one taken over, a replay claimed."""
        if query.mark == "key":
            return self._by_key(query, worker, gone)
        session = self.sessions.get(query.key, _Session())
        equal = [t.turn_id for t in self._answers(query)]
        delivering = {t: session.delivering[t] for t in equal if t in session.delivering}
        undelivered = [t for t, (by, claim) in delivering.items() if by == "0" or claim == query.attempt_id]
        if query.mark != "retry" and not undelivered:
            undelivered = [t for t, (by, _) in delivering.items() if by in gone]
        if undelivered:
            session.delivering[undelivered[-1]] = (worker, query.attempt_id)
            return Replay(undelivered[-1])
        if query.mark == "retry":
            if delivering:
                return Replay(list(delivering)[-1])
            return self._retried(query, session, worker, gone)
        return self._generate(query, worker)

    def _retried(self, query: FindQuery, session: _Session, worker: str, gone: set[str]) -> Verdict:
        """A marked retry, where nothing that was committed lacks its delivery."""
        others = [r for r in self._equal(query) if r.attempt != query.attempt_id]
        live, lost = ([r for r in others if (r.worker in gone) is was] for was in (False, True))
        if live:
            return Join(live[-1].attempt, live[-1].worker)
        if lost:
            self._take_over(query.key, lost[-1])
            return self._generate(query, worker)
        parents = {t.parent_id for t in session.turns}
        equal = [t for t in self._answers(query) if t.turn_id not in parents]
        return Replay(equal[-1].turn_id) if equal else self._generate(query, worker)

    def _by_key(self, query: FindQuery, worker: str, gone: set[str]) -> Verdict:
        answers = self.sessions.get(query.key, _Session()).answers
        if query.idempotency_key in answers:
            turn = answers[query.idempotency_key]
            return Replay(turn.turn_id) if turn.request_hash == query.request_hash else Mismatch()
        for held in tuple(self.running.get(query.key, ())):
            if held.idempotency_key == query.idempotency_key and held.attempt != query.attempt_id:
                if held.worker not in gone:
                    same = held.request_hash == query.request_hash
                    return Join(held.attempt, held.worker) if same else Mismatch()
                self._take_over(query.key, held)
        return self._generate(query, worker)

    def _equal(self, query: FindQuery) -> list[_Running]:
        return [r for r in self.running.get(query.key, ()) if r.request_hash == query.request_hash]

    def _generate(self, query: FindQuery, worker: str) -> Verdict:
        session = self.sessions.get(query.key, _Session())
        fenced = query.attempt_id in self.fenced.get(query.key, ())
        if session.state != "open" or fenced or query.mark == "asked":
            return Generate()
        for held in self._equal(query):
            if held.attempt == query.attempt_id:
                held.idempotency_key = query.idempotency_key
                return Generate()
        lease = _Running(query.attempt_id, worker, query.request_hash, query.idempotency_key)
        self.running.setdefault(query.key, []).append(lease)
        return Generate()

    def _take_over(self, key: SessionKey, lost: _Running) -> None:
        self.running[key].remove(lost)
        self.fenced.setdefault(key, set()).add(lost.attempt)

    def release(self, lease: Lease) -> None:
        held = self.running.get(lease.key, [])
        held[:] = [r for r in held if (r.attempt, r.request_hash) != (lease.attempt_id, lease.request_hash)]

    def outcome(self, key: SessionKey, attempt: str, worker: str, request_hash: bytes, gone: set[str]) -> Outcome:
        session = self.sessions.get(key, _Session())
        if session.state == "deleted":
            raise SessionClosed(key.session_id)
        if any(t.turn_id == attempt for t in session.turns):
            return "committed"
        leased = any((r.attempt, r.request_hash) == (attempt, request_hash) for r in self.running.get(key, ()))
        return "running" if leased and worker not in gone else "gone"

    def lineage(self, key: SessionKey, turn_id: str) -> IdArray:
        """Every token from the root to the end of a turn."""
        known = {turn.turn_id: turn for turn in self.turns(key)}
        if turn_id not in known:
            raise TurnMissing(key.session_id, turn_id)
        runs: list[Sequence[int]] = []
        while turn_id:
            turn = known[turn_id]
            runs = [turn.delta.ids, turn.generation.ids, *runs]
            turn_id = turn.parent_id
        return np.concatenate(runs).astype(np.uint32)
