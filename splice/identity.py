"""When are two messages, two conversations or two requests the same?

Equal: `null`, missing, `""` and `[]`; outer white space of assistant text; tool arguments as equal JSON
values however spaced or ordered (numbers as IEEE doubles, RFC 8785); rewritten tool-call ids; a tool
message's `name`; reasoning kept, dropped or moved. Different: role, content, call names, argument values,
order. Signatures are chained, `H(i) = hash(H(i-1), message i)`, from a constant, so one hash names a whole
conversation.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from hashlib import blake2b
from typing import Any

import msgspec

from splice.calls import OpenCalls, Position
from splice.errors import InvalidRequest
from splice.types import IdArray, Message, Rendering

_DIGEST_SIZE = 16
_CHAIN_START = blake2b(b"tokensplice conversation 1", digest_size=_DIGEST_SIZE).digest()
_EXACT_INTEGER = 2**53  # beyond it a double, and so JavaScript, cannot tell neighbours apart

_encode = msgspec.msgpack.Encoder(order="deterministic").encode


class Conversation:
    """Messages with the conversation's hash after each of them, made once and extended at the end.

    A harness sends its whole history every turn, so a worker that has read a conversation keeps it and reads
    only what is new: `followed_by` costs what is added.
    """

    __slots__ = ("_calls", "answers", "chain", "messages", "replies")

    def __init__(
        self,
        messages: tuple[Message, ...],
        chain: tuple[bytes, ...],
        replies: tuple[bytes, ...],
        answers: Mapping[int, Position],
        calls: OpenCalls,
    ) -> None:
        self.messages = messages
        self.chain = chain  # 16 bytes a message
        self.replies = replies  # the chain at each assistant message
        self.answers = answers  # which call each tool message answers, by the message's index
        self._calls = calls

    def followed_by(self, more: Iterable[Message]) -> Conversation:
        """The conversation once `more` messages follow."""
        calls, answers = self._calls.copy(), dict(self.answers)
        messages, chain, replies = list(self.messages), list(self.chain), list(self.replies)
        current = chain[-1] if chain else _CHAIN_START
        for index, message in enumerate(more, start=len(messages)):
            position = calls.follow(index, message)
            if position is not None:
                answers[index] = position
            current = _link(current, _canonical(message, index, position))
            messages.append(message)
            chain.append(current)
            if message.role == "assistant":
                replies.append(current)
        return Conversation(tuple(messages), tuple(chain), tuple(replies), answers, calls)


NOTHING_SAID = Conversation((), (), (), {}, OpenCalls())


def chain_hashes(messages: Sequence[Message]) -> tuple[bytes, ...]:
    """The conversation's hash after each message; one per message, 16 bytes each."""
    return NOTHING_SAID.followed_by(messages).chain


def extend_chain(chain: Sequence[bytes], reply: Message) -> bytes:
    """The conversation's hash once `reply`, an assistant message, follows the messages hashed so far."""
    return _link(chain[-1] if chain else _CHAIN_START, _canonical(reply, 0, None))


def ids_digest(ids: IdArray) -> bytes:
    """8 bytes that tell sampled ids apart: chooses among turns whose text is equal."""
    return blake2b(ids.astype("<u4", copy=False).tobytes(), digest_size=8).digest()


def request_hash(chain: Sequence[bytes], rendering_signature: str, sampling: Mapping[str, Any]) -> bytes:
    """Equal requests get equal hashes: messages, tools and template arguments, and sampling parameters."""
    last = chain[-1] if chain else _CHAIN_START
    return _digest((last, len(chain), rendering_signature, canonical_json(sampling)))


def rendering_digest(identity: str, rendering: Rendering, kwargs: Mapping[str, Any]) -> str:
    """Hex digest of what a prompt's head is rendered from.

    Tools are compared as canonical JSON with their order kept; `kwargs` are those template arguments that
    can change more than the generation prompt.
    """
    return _digest((identity, canonical_json(list(rendering.tools)), canonical_json(kwargs))).hex()


def canonical_json(value: object) -> str:
    """JSON text that is equal for equal JSON values: keys sorted, numbers as doubles. Raises InvalidRequest."""
    try:
        return json.dumps(_canonical_value(value), sort_keys=True, separators=(",", ":"))
    except RecursionError:
        raise InvalidRequest("body", "tools, template arguments or sampling parameters are nested too deeply") from None


def canonical_arguments(arguments: str) -> str:
    """Canonical JSON of a call's arguments; text that is no JSON stands for itself."""
    return (_remembered if len(arguments) <= _SHORT else _canonical_arguments)(arguments)


def _canonical_arguments(arguments: str) -> str:
    if arguments.strip() in {"", "null"}:
        return "{}"
    try:
        return canonical_json(json.loads(arguments))
    except (ValueError, RecursionError, InvalidRequest):
        return "\x00" + arguments.strip()


_SHORT = 1024  # characters: what is longer costs memory to keep and little, in proportion, to read again
_remembered = lru_cache(maxsize=8192)(_canonical_arguments)  # every call of a history comes back each turn


def _canonical_value(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(k): _canonical_value(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_canonical_value(v) for v in value]
    if isinstance(value, int | float) and not isinstance(value, bool):
        return _canonical_number(value)
    return value


def _canonical_number(value: float) -> float:
    try:
        number = float(value)
    except OverflowError:
        return value
    if number.is_integer() and abs(number) < _EXACT_INTEGER:
        return int(number)
    return number


def _canonical(message: Message, index: int, answers: Position | None) -> tuple[object, ...]:
    if message.role == "assistant":
        calls = [(call.name, canonical_arguments(call.arguments)) for call in message.tool_calls]
        return ("assistant", message.content.strip(), calls)
    if message.role == "tool" and answers is not None:
        # Relative, so that the same tail after different heads stays comparable.
        return ("tool", message.content, index - answers.assistant if answers.assistant >= 0 else 0, answers.call)
    return (message.role, message.content)


def _link(previous: bytes, message: tuple[object, ...]) -> bytes:
    return blake2b(_encode(message), digest_size=_DIGEST_SIZE, key=previous).digest()


def _digest(parts: Iterable[object]) -> bytes:
    return blake2b(_encode(tuple(parts)), digest_size=_DIGEST_SIZE).digest()
