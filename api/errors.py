"""One table: what went wrong -> status, stable code and the OpenAI error body.

RequestRefused              ours to say no, by the contract
 ├─ Unauthorized / Forbidden
 ├─ RenderingChangedError   tools or template arguments changed in mid-conversation
 ├─ IdempotencyMismatch     one Idempotency-Key, two different bodies
 ├─ TurnInProgress          a retry waited too long for the attempt that it joined
 ├─ Overflow                the prompt fills the window and the session asked for an error
 ├─ Overloaded              this worker runs as many turns as it may
 ├─ NotReady                a check failed that would make wrong tokens
 ├─ SessionExists           opened before, with other settings
 └─ Draining                this worker was told to stop
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, NamedTuple

from api.engine.base import (
    EngineAborted,
    EngineContract,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    UnsupportedParameter,
)
from api.engine.parameters import InvalidParameter
from api.request import BadRequest
from splice.errors import GenerationInvalid, InvalidRequest, TemplateRejected
from store.errors import (
    ParentMissing,
    ReplicationUnknown,
    SchemaTooNew,
    SessionClosed,
    SessionFinished,
    SessionMissing,
    StoreError,
    StoreFull,
    StoreUnavailable,
    TurnMissing,
)


class RequestRefused(Exception):
    """Root of our own refusals."""


class Unauthorized(RequestRefused):
    """No key, or one that is not known."""


class Forbidden(RequestRefused):
    """The key is known, but not for this session."""


class RenderingChangedError(RequestRefused):
    """The conversation continues a turn that was rendered with other tools or template arguments."""

    def __init__(self, turn_id: str) -> None:
        super().__init__(
            f"tools or template arguments differ from those that turn {turn_id} was rendered with; send the same "
            "ones, or open the session with on_rendering_change=fork to start a new root"
        )
        self.turn_id = turn_id


class IdempotencyMismatch(RequestRefused):
    """The Idempotency-Key was used for another request."""

    def __init__(self, key: str) -> None:
        super().__init__(f"Idempotency-Key {key!r} was used with another body; use a new key for a new request")
        self.key = key


class TurnInProgress(RequestRefused):
    """The attempt that this retry joined is still running."""

    def __init__(self, waited_s: float) -> None:
        super().__init__(
            f"an earlier attempt of this request is still running after {waited_s:.0f} s; repeat the request to wait on"
        )


class Overflow(RequestRefused):
    """The prompt fills the context window."""

    def __init__(self, prompt_length: int, context_length: int) -> None:
        super().__init__(
            f"the prompt has {prompt_length} tokens and the model's context length is {context_length}; "
            "shorten the conversation"
        )


class Overloaded(RequestRefused):
    """Too many turns at once; nothing was started."""


class Draining(RequestRefused):
    """The worker is being stopped; another one serves."""


class NotReady(RequestRefused):
    """This worker's tokenizer or template is not known to be the engine's."""


class SessionExists(RequestRefused):
    """The session was opened before with other settings; they stand."""


class BodyTooLarge(RequestRefused):
    """The request body is above the limit."""

    def __init__(self, limit: int) -> None:
        super().__init__(f"the body is larger than {limit} bytes; raise TOKENSPLICE_MAX_BODY_BYTES if it is meant")


class Problem(NamedTuple):
    """An error as it leaves: `param` names the field, `retry_after_s` goes into Retry-After."""

    status: int
    code: str
    message: str
    param: str | None = None
    retry_after_s: int | None = None


_RETRY_S = 1

# First match wins: subclasses stand above their parents.
_TABLE: tuple[tuple[type[Exception], int, str], ...] = (
    (UnsupportedParameter, 400, "unsupported_parameter"),
    (InvalidParameter, 400, "invalid_request"),
    (InvalidRequest, 400, "invalid_request"),
    (Overflow, 400, "context_length_exceeded"),
    (EngineRejected, 400, "invalid_request"),
    (Unauthorized, 401, "unauthorized"),
    (Forbidden, 403, "forbidden"),
    (SessionMissing, 404, "not_found"),
    (TurnMissing, 404, "not_found"),
    (SessionClosed, 410, "session_closed"),
    (RenderingChangedError, 409, "rendering_changed"),
    (IdempotencyMismatch, 409, "idempotency_mismatch"),
    (SessionFinished, 409, "session_finished"),
    (TurnInProgress, 409, "turn_in_progress"),
    (BodyTooLarge, 413, "body_too_large"),
    (TemplateRejected, 422, "template_rejected"),
    (Overloaded, 429, "overloaded"),
    (GenerationInvalid, 502, "engine_contract"),
    (EngineContract, 502, "engine_contract"),
    (EngineAborted, 502, "engine_aborted"),
    (EngineTimeout, 504, "engine_timeout"),
    (EngineError, 502, "engine_error"),
    (Draining, 503, "draining"),
    (NotReady, 503, "not_ready"),
    (SessionExists, 409, "session_exists"),
    (ReplicationUnknown, 503, "replication_unknown"),
    (ParentMissing, 503, "store_unavailable"),
    (StoreFull, 503, "store_full"),
    (SchemaTooNew, 503, "store_unavailable"),
    (StoreError, 503, "store_unavailable"),
)


def problem_of(error: Exception) -> Problem | None:
    """Translate an error of ours; None for one that nobody planned."""
    if isinstance(error, BadRequest):
        return Problem(400, error.code, str(error), ", ".join(error.problems))
    if isinstance(error, EngineUnavailable) and error.overloaded:
        return Problem(429, "overloaded", f"engine: {_outside(error)}", None, int(error.retry_after_s or _RETRY_S))
    for kind, status, code in _TABLE:
        if isinstance(error, kind):
            retry = _RETRY_S if status in {429, 503} else None
            return Problem(status, code, _outside(error), _param(error), retry)
    return None


_ADDRESS = re.compile(r"(?:https?|rediss?(?:\+\w+)?|unix)://[^\s,;)]+|/\S+\.sock\b")


def _outside(error: Exception) -> str:
    """An error's words without addresses: those are for the log, not for an agent's sandbox."""
    if isinstance(error, StoreUnavailable):
        return "the session store cannot be reached just now; nothing is half done, try again"
    return _ADDRESS.sub("the engine", str(error))


def _param(error: Exception) -> str | None:
    if isinstance(error, UnsupportedParameter):
        return ", ".join(error.names)
    if isinstance(error, InvalidParameter):
        return ", ".join(name for name, _ in error.problems)
    field = getattr(error, "field", None) or getattr(error, "name", None)
    return str(field) if field else None


def openai_body(problem: Problem) -> Mapping[str, Any]:
    """OpenAI's error body."""
    kind = "invalid_request_error" if problem.status < 500 else "server_error"
    return {"error": {"message": problem.message, "type": kind, "param": problem.param, "code": problem.code}}
