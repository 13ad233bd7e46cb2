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
    ParentMissing,
    RenderingDiffers,
    SessionClosed,
    SessionFinished,
    SessionMissing,
    TurnMissing,
)
from store.views import EarlierTurn, FindQuery, SessionKey, SessionOpening


@dataclass
class _Session:
    state: str = "open"
    opening: SessionOpening = field(default_factory=SessionOpening)
    turns: list[Turn] = field(default_factory=list)  # in commit order
    answers: dict[str, Turn] = field(default_factory=dict)  # by idempotency key


class Oracle:
    """Sessions of turns, with the store's names for what it does."""

    def __init__(self) -> None:
        self.sessions: dict[SessionKey, _Session] = {}

    def open_session(self, key: SessionKey, opening: SessionOpening) -> bool:
        made = key not in self.sessions
        session = self.sessions.setdefault(key, _Session(opening=opening))
        if session.state == "deleted":
            raise SessionClosed(key.session_id)
        return made

    def commit(self, key: SessionKey, turn: Turn, opening: SessionOpening, idempotency_key: str = "") -> None:
        session = self.sessions.get(key)
        if session and any(t.turn_id == turn.turn_id for t in session.turns):
            return
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
            raise AlreadyAnswered(key.session_id, session.answers[idempotency_key].turn_id)
        session = self.sessions.setdefault(key, _Session(opening=opening))
        session.turns.append(turn)
        if idempotency_key:
            session.answers[idempotency_key] = turn

    def delete(self, key: SessionKey) -> None:
        self._session(key)
        self.sessions[key] = _Session("deleted")

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
        session = self.sessions.get(query.key)
        return [
            EarlierTurn(turn.turn_id, self.extended(query.key, turn))
            for turn in (session.turns if session else ())
            if turn.request_hash == query.request_hash
        ]

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
