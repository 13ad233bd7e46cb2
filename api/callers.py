"""Who calls, and which session is meant.

A session key *is* its session: whoever holds one, an agent's sandbox say, reaches no other. With another key, the
first that is present: URL, `x-session-id`, a harness's own header, `conversation_params.conversation_id`; else none,
and content lineage finds it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from api.errors import Forbidden
from api.keys import KeyRing
from api.request import BadRequest, Caller

LONGEST_ID = 256

# Header -> whether its harness is known to grow its tool list in mid-session. Order is precedence.
_SESSION_HEADERS: Mapping[str, bool] = {
    "x-session-id": False,
    "proxy-x-session-id": False,
    "x-claude-code-session-id": True,
    "thread-id": True,
    "session-id": True,
    "x-session-affinity": True,
    "x-deepseek-harness-session-id": False,
    "x-dynamo-session-id": False,
}
_PARENT_HEADERS = (
    "x-parent-session-id",
    "x-claude-code-parent-agent-id",
    "x-codex-parent-thread-id",
    "x-deepseek-harness-parent-session-id",
    "x-dynamo-parent-session-id",
)
_NATIVE = tuple(name for name, grows in _SESSION_HEADERS.items() if grows)


def identify(headers: Mapping[str, str], keys: KeyRing, *, url_session: str = "") -> Caller:
    """Read a request's identity from URL, headers and key. Raises Unauthorized, Forbidden, BadRequest."""
    identity = keys.identify_request(headers)
    if identity.session_id and url_session not in {"", identity.session_id}:
        raise Forbidden(f"this key is session {identity.session_id!r} and opens no other")
    return Caller(
        tenant=identity.tenant,
        session_id=_short(identity.session_id or url_session or _header(headers, _SESSION_HEADERS), "session_id"),
        run_id=_header(headers, ("x-tokensplice-run",)),
        group_id=_header(headers, ("x-tokensplice-group",)),
        parent_session_id=_header(headers, _PARENT_HEADERS),
        retry_count=_count(headers.get("x-stainless-retry-count", "")),
        idempotency_key=_short(_header(headers, ("idempotency-key",)), "Idempotency-Key"),
        native_harness=any(headers.get(h) for h in _NATIVE),
    )


def in_conversation(caller: Caller, conversation_id: str) -> Caller:
    """The caller, in the session that the body names where nothing before it did. Raises BadRequest."""
    if caller.session_id or not conversation_id:
        return caller
    return replace(caller, session_id=_short(conversation_id, "conversation_params.conversation_id"))


def _header(headers: Mapping[str, str], names: Iterable[str]) -> str:
    """The first of these headers that is there. Servers read them as Latin-1; ids beyond ASCII are sent as UTF-8."""
    value = next((headers[name] for name in names if headers.get(name)), "")
    try:
        return value.encode("latin-1").decode()
    except UnicodeError:
        return value


def _short(value: str, name: str) -> str:
    if len(value) > LONGEST_ID:
        raise BadRequest({name: f"is longer than {LONGEST_ID} characters"})
    return value


def _count(value: str) -> int:
    return int(value) if value.isdecimal() and len(value) < 6 else 0
