"""Which call does a tool message answer?

Harnesses rewrite tool-call ids, so an id is only ever a way to find a *position*: call n of the assistant
message k messages back. Identity hashes the position; prompts carry the ids that the model wrote, mapped
back by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import msgspec

from splice.types import Message, ToolCall

# The call ids that tokensplice mints for its clients: the turn's id, and the call's number in it.
MINTED_CALL = re.compile(r"^call_([0-9a-hjkmnp-tv-z]{20})_(\d+)$")


class Position(NamedTuple):
    """Call `call` of the assistant message at index `assistant`; -1 when no assistant message precedes."""

    assistant: int
    call: int


class OpenCalls:
    """The calls that later tool messages may answer, as far as a conversation has been followed."""

    __slots__ = ("_by_id", "_last", "_order")

    def __init__(self) -> None:
        self._by_id: dict[str, tuple[Position, ...]] = {}
        self._last = -1
        self._order = 0

    def copy(self) -> OpenCalls:
        """The same state, to be followed further without touching this one."""
        twin = OpenCalls()
        twin._by_id, twin._last, twin._order = dict(self._by_id), self._last, self._order
        return twin

    def follow(self, index: int, message: Message) -> Position | None:
        """Take in the next message; the position that it answers, for a tool message.

        A known id names the latest call that carries it and is still unanswered (some harnesses give every call
        the same id); an unknown or missing id answers the last assistant's calls in order.
        """
        if message.role == "assistant":
            self._last, self._order = index, 0
            self._by_id |= _by_id(index, message.tool_calls)
            return None
        if message.role != "tool":
            return None
        order, self._order = self._order, self._order + 1
        named = self._by_id.get(message.tool_call_id, ()) if message.tool_call_id else ()
        if not named:
            return Position(self._last, order)
        if len(named) > 1:
            self._by_id[message.tool_call_id] = named[1:]
        return named[0]


def answered_calls(messages: Sequence[Message]) -> dict[int, Position]:
    """The position that each tool message answers, by the tool message's index."""
    calls = OpenCalls()
    answers = ((index, calls.follow(index, message)) for index, message in enumerate(messages))
    return {index: position for index, position in answers if position is not None}


def _by_id(assistant: int, calls: Sequence[ToolCall]) -> dict[str, tuple[Position, ...]]:
    positions: dict[str, list[Position]] = {}
    for n, call in enumerate(calls):
        positions.setdefault(call.id, []).append(Position(assistant, n))
    return {call_id: tuple(places) for call_id, places in positions.items()}


def with_prompt_ids(
    messages: Sequence[Message],
    written: Mapping[int, Sequence[str]],
    *,
    start: int = 0,
    answers: Mapping[int, Position] | None = None,
) -> tuple[Message, ...]:
    """The messages from `start` on with the call ids that belong in a prompt.

    written: assistant message index -> the ids the model itself wrote there, by position ("" for none).
    answers: `answered_calls(messages)`, where it is known.
    Another call keeps the caller's id unless we minted it: then its number in the conversation stands in, nine
    digits, a form that templates which check ids accept. Tool messages follow the call that they answer.
    """
    answers = answered_calls(messages) if answers is None else answers
    count = sum(len(message.tool_calls) for message in messages[:start])
    renamed = list(messages)
    for index in range(start, len(messages)):
        message = messages[index]
        if message.tool_calls:
            renamed[index] = _with_ids(message, written.get(index, ()), count)
            count += len(message.tool_calls)
        elif message.role == "tool":
            call_id = _answer_id(renamed, answers[index], message)
            renamed[index] = msgspec.structs.replace(message, tool_call_id=call_id)
    return tuple(renamed[start:])


def _with_ids(message: Message, written: Sequence[str], count: int) -> Message:
    ids = (*written, *[""] * (len(message.tool_calls) - len(written)))
    calls = tuple(
        msgspec.structs.replace(call, id=ids[n] or _not_ours(call.id, f"{count + n:09d}"))
        for n, call in enumerate(message.tool_calls)
    )
    return msgspec.structs.replace(message, tool_calls=calls)


def _not_ours(call_id: str, stand_in: str) -> str:
    return stand_in if MINTED_CALL.match(call_id) else call_id


def _answer_id(earlier: Sequence[Message], position: Position, message: Message) -> str:
    calls = earlier[position.assistant].tool_calls if position.assistant >= 0 else ()
    return _not_ours(calls[position.call].id if position.call < len(calls) else message.tool_call_id, "")
