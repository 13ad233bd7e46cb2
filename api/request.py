"""A turn's request and reply in canonical form: what every dialect decodes to and encodes from."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from splice.identity import Conversation
from splice.locate import Echo
from splice.types import Rendering, Turn
from store.views import SessionKey


class BadRequest(Exception):
    """A request body that cannot be used; `problems` maps each bad field to what is wrong with it."""

    def __init__(self, problems: Mapping[str, str], *, code: str = "invalid_request") -> None:
        super().__init__("; ".join(f"{name}: {problem}" for name, problem in problems.items()))
        self.problems = dict(problems)
        self.code = code


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnRequest:
    """What a client asks of one turn, whichever dialect it spoke.

    sampling: the caller's sampling parameters by their own names, `max_tokens` apart. echoes: what the client
    sent back of our ids, by assistant message. parse_calls: False when the client forbade tool calls.
    """

    conversation: Conversation
    rendering: Rendering
    sampling: Mapping[str, Any]
    max_tokens: int | None = None
    echoes: tuple[Echo, ...] = ()
    model: str = ""
    stream: bool = False
    stream_usage: bool = False
    token_ids: bool = False
    log_probs: bool = False
    tokens_as_ids: bool = False
    parse_calls: bool = True
    metadata: Mapping[str, str] = field(default_factory=dict)
    conversation_id: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """Who asks, and how the turn is to be found again.

    session_id is "" when the client named none. retry_count is the SDK's own mark of a repeat.
    """

    tenant: str
    session_id: str = ""
    run_id: str = ""
    group_id: str = ""
    parent_session_id: str = ""
    retry_count: int = 0
    idempotency_key: str = ""
    native_harness: bool = False  # a header of a harness that is known to grow its tool list


@dataclass(frozen=True, slots=True, kw_only=True)
class TurnReply:
    """One committed turn, or a replay of it. prompt_ids is the whole prompt, packed, where it was asked for."""

    turn: Turn
    key: SessionKey
    replayed: bool
    prompt_ids: Any = None  # IdArray; absent unless the client wants ids
    token_texts: tuple[str, ...] = ()

    @property
    def session_id(self) -> str:
        """The session as its client knows it."""
        return self.key.session_id
