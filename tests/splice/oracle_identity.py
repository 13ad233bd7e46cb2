"""The slow, obvious rules of sameness: no hash, no chain, no canonical text."""

from __future__ import annotations

import json
from collections.abc import Sequence

from splice.types import Message, ToolCall


def same_json(one: object, other: object) -> bool:
    """Equal as JSON values, numbers compared as IEEE doubles."""
    if isinstance(one, bool) or isinstance(other, bool):
        return one is other
    if isinstance(one, int | float) and isinstance(other, int | float):
        return float(one) == float(other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(same_json(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(same_json, one, other))
    return type(one) is type(other) and one == other


def same_conversation(one: Sequence[Message], other: Sequence[Message]) -> bool:
    """Equal message by message, tool messages by what they answer."""
    return len(one) == len(other) and all(
        _same_message(one, other, index) and answered(one, index) == answered(other, index) for index in range(len(one))
    )


def answered(messages: Sequence[Message], index: int) -> tuple[int, int] | None:
    """(assistant message, call) that the tool message at `index` answers, found by reading backwards.

    Only for conversations in which every assistant message's results follow it before the next one.
    """
    if messages[index].role != "tool":
        return None
    before = range(index - 1, -1, -1)
    assistant = next((i for i in before if messages[i].role == "assistant"), -1)
    call_id = messages[index].tool_call_id
    earlier = [m for m in messages[assistant + 1 : index] if m.role == "tool"]
    if assistant < 0:
        return (-1, len(earlier))
    named = [n for n, call in enumerate(messages[assistant].tool_calls) if call_id and call.id == call_id]
    if not named:
        return (assistant, len(earlier))
    taken = sum(m.tool_call_id == call_id for m in earlier)
    return (assistant, named[min(taken, len(named) - 1)])


def _same_message(one: Sequence[Message], other: Sequence[Message], index: int) -> bool:
    a, b = one[index], other[index]
    if a.role != b.role:
        return False
    if a.role != "assistant":
        return a.content == b.content
    return (
        a.content.strip() == b.content.strip()
        and len(a.tool_calls) == len(b.tool_calls)
        and all(map(_same_call, a.tool_calls, b.tool_calls))
    )


def _same_call(one: ToolCall, other: ToolCall) -> bool:
    return one.name == other.name and same_json(_arguments(one), _arguments(other))


def _arguments(call: ToolCall) -> object:
    value: object = json.loads(call.arguments or "{}")
    return {} if value is None else value
