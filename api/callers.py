"""Who calls, and which session is meant.

The first that is present: URL, `x-session-id`, a harness's own header, `conversation_params.conversation_id`, a
session key; else none, and content lineage finds it.
"""

from __future__ import annotations

from collections.abc import Mapping

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


def identify(headers: Mapping[str, str], keys: KeyRing, *, url_session: str = "", conversation_id: str = "") -> Caller:
    """Read a request's identity. Raises Unauthorized, BadRequest."""
    identity = keys.identify_request(headers)
    named = url_session or next((headers[h] for h in _SESSION_HEADERS if headers.get(h)), "")
    session_id = named or conversation_id or identity.session_id
    if len(session_id) > LONGEST_ID:
        raise BadRequest({"session_id": f"is longer than {LONGEST_ID} characters"})
    return Caller(
        tenant=identity.tenant,
        session_id=session_id,
        run_id=headers.get("x-tokensplice-run", ""),
        group_id=headers.get("x-tokensplice-group", ""),
        parent_session_id=next((headers[h] for h in _PARENT_HEADERS if headers.get(h)), ""),
        retry_count=_count(headers.get("x-stainless-retry-count", "")),
        idempotency_key=headers.get("idempotency-key", "")[:LONGEST_ID],
        native_harness=any(headers.get(h) for h in _NATIVE),
    )


def _count(value: str) -> int:
    return int(value) if value.isdecimal() else 0
