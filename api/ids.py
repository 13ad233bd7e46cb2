"""Ids that tokensplice mints, and how they are found again in what a client echoes.

A turn id is minted before the engine is called: 10 characters of milliseconds since the epoch, then 10 of
randomness, in Crockford's base 32, so ids sort by time and have one length. It is in all that a client
echoes: `chatcmpl-<turn>`, `call_<turn>_<n>`.
"""

from __future__ import annotations

import re
import secrets
import time

from splice.calls import MINTED_CALL

_ALPHABET = "0123456789abcdefghjkmnpqrstvwxyz"
_TURN = f"[{_ALPHABET}]{{20}}"
_RESPONSE_ID = re.compile(rf"^(?:chatcmpl-|resp_|msg_)({_TURN})$")


def new_turn_id() -> str:
    """A fresh turn id, 20 characters."""
    return _base32(time.time_ns() // 1_000_000, 10) + _base32(secrets.randbits(50), 10)


def call_id(turn_id: str, n: int) -> str:
    """The id of a turn's n-th tool call, as the client is sent it."""
    return f"call_{turn_id}_{n}"


def turn_of_call(identifier: str) -> str:
    """The turn a call id was minted for; "" when the id is none of ours."""
    match = MINTED_CALL.match(identifier)
    return match[1] if match else ""


def turn_of_response(identifier: str) -> str:
    """The turn a response id was minted for; "" when the id is none of ours."""
    match = _RESPONSE_ID.match(identifier)
    return match[1] if match else ""


def new_session_id() -> str:
    """An id for a session that its client did not name."""
    return "s-" + new_turn_id()


def _base32(number: int, width: int) -> str:
    digits = []
    for _ in range(width):
        number, digit = divmod(number, 32)
        digits.append(_ALPHABET[digit])
    return "".join(reversed(digits))
