"""Which call does a tool message answer?

Harnesses rewrite tool-call ids, so an id is only ever a way to find a *position*: call n of the assistant
message k messages back. Identity hashes the position; prompts carry the ids that the model wrote, mapped
back by it.
"""

from __future__ import annotations

import re
from collections import deque
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


def answered_calls(messages: Sequence[Message]) -> dict[int, Position]:
    """The position that each tool message answers, by the tool message's index.

    A known id names the latest call that carries it and is still unanswered (some harnesses give every call
    the same id); an unknown or missing id answers the last assistant's calls in order.
    """
    answers: dict[int, Position] = {}
    open_calls: dict[str, deque[Position]] = {}
    last_assistant, order = -1, 0
    for index, message in enumerate(messages):
        if message.role == "assistant":
            last_assistant, order = index, 0
            open_calls |= _by_id(index, message.tool_calls)
        elif message.role == "tool":
            named = open_calls.get(message.tool_call_id) if message.tool_call_id else None
            answers[index] = _next_open(named) if named else Position(last_assistant, order)
            order += 1
    return answers


def _by_id(assistant: int, calls: Sequence[ToolCall]) -> dict[str, deque[Position]]:
    positions: dict[str, deque[Position]] = {}
    for n, call in enumerate(calls):
        positions.setdefault(call.id, deque()).append(Position(assistant, n))
    return positions


def _next_open(named: deque[Position]) -> Position:
    return named.popleft() if len(named) > 1 else named[0]


def with_prompt_ids(messages: Sequence[Message], written: Mapping[int, Sequence[str]]) -> tuple[Message, ...]:
    """The messages with the call ids that belong in a prompt.

    written: assistant message index -> the ids the model itself wrote there, by position ("" for none).
    Another call keeps the caller's id unless we minted it: then its number in the conversation stands in, nine
    digits, a form that templates which check ids accept. Tool messages follow the call that they answer.
    """
    answers = answered_calls(messages)
    renamed: list[Message] = []
    count = 0
    for index, message in enumerate(messages):
        if message.role == "assistant" and message.tool_calls:
            renamed.append(_with_ids(message, written.get(index, ()), count))
            count += len(message.tool_calls)
        elif message.role == "tool":
            call_id = _answer_id(renamed, answers[index], message)
            renamed.append(msgspec.structs.replace(message, tool_call_id=call_id))
        else:
            renamed.append(message)
    return tuple(renamed)


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
    return calls[position.call].id if position.call < len(calls) else _not_ours(message.tool_call_id, "")
