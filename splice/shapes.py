"""Canonical messages in the shape that a chat template reads.

Templates disagree on details that carry no meaning: call arguments as an object or as JSON text, the content
of a message that only calls tools as empty, absent or null, whether a `developer` exists. A `Shape`, found by
probing, says which. Call ids in a prompt are the ones that the model wrote; where there is none, a position
spelled in nine digits stands in, a form that satisfies the templates which check ids.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from splice.calls import answered_calls
from splice.reasoning import ThinkMarkers, split_reasoning
from splice.types import Message, ToolCall

Fields = dict[str, Any]  # one message as the template sees it


class Shape(msgspec.Struct, frozen=True):
    """How the template wants what has no single form.

    `first_developer` and `late_developer` are the roles under which a developer message is written at the
    head of the conversation and further on. `think` are the markers around reasoning, empty where the
    template knows none; `reasoning_field` tells whether it reads reasoning from a field of its own.
    """

    arguments: Literal["mapping", "string"] = "mapping"
    silent: Literal["empty", "absent", "null"] = "empty"
    nine_digit_ids: bool = False
    parts: bool = False  # content as a list of parts, for templates that walk over it
    first_developer: Literal["developer", "system"] = "developer"
    late_developer: Literal["developer", "system"] = "developer"
    think: ThinkMarkers = ThinkMarkers()
    reasoning_field: bool = False


def template_messages(messages: Sequence[Message], shape: Shape, *, first_call: int = 0) -> list[Fields]:
    """The messages as the template reads them. first_call: how many calls stand before them, for made-up ids."""
    ids = _call_ids(messages, shape, first_call)
    answers = answered_calls(messages)
    written: list[Fields] = []
    for index, message in enumerate(messages):
        if message.role == "assistant":
            written.append(_assistant(message, shape, ids[index]))
        elif message.role == "tool":
            place = answers[index]
            known = ids.get(place.assistant, ())
            call_id = known[place.call] if place.call < len(known) else _fit(message.tool_call_id, shape, index)
            written.append(_tool(message, call_id, _called_name(messages, place.assistant, place.call)))
        else:
            written.append(_spoken(message, shape, first=index == 0))
    return [_in_parts(fields) for fields in written] if shape.parts else written


def _in_parts(fields: Fields) -> Fields:
    text = fields.get("content")
    return fields if text is None else {**fields, "content": [{"type": "text", "text": text}]}


def _call_ids(messages: Sequence[Message], shape: Shape, first_call: int) -> dict[int, tuple[str, ...]]:
    """The ids of each assistant message's calls, by the message's index."""
    ids: dict[int, tuple[str, ...]] = {}
    count = first_call
    for index, message in enumerate(messages):
        if message.role == "assistant":
            ids[index] = tuple(_fit(call.id, shape, count + n) for n, call in enumerate(message.tool_calls))
            count += len(message.tool_calls)
    return ids


def _fit(call_id: str, shape: Shape, number: int) -> str:
    fits = len(call_id) == 9 and call_id.isalnum()
    return call_id if call_id and (fits or not shape.nine_digit_ids) else f"{number:09d}"


def _called_name(messages: Sequence[Message], assistant: int, call: int) -> str:
    calls = messages[assistant].tool_calls if assistant >= 0 else ()
    return calls[call].name if call < len(calls) else ""


def _spoken(message: Message, shape: Shape, *, first: bool) -> Fields:
    role: str = message.role
    if role == "developer":
        role = shape.first_developer if first else shape.late_developer
    fields: Fields = {"role": role, "content": message.content}
    if message.name:
        fields["name"] = message.name
    return fields


def _tool(message: Message, call_id: str, called: str) -> Fields:
    fields: Fields = {"role": "tool", "content": message.content, "tool_call_id": call_id}
    if name := message.name or called:
        fields["name"] = name
    return fields


def _assistant(message: Message, shape: Shape, ids: Sequence[str]) -> Fields:
    # Before control tokens are made text: where the template knows no such markers, they are ordinary text.
    parted = split_reasoning(message, shape.think)
    reasoning, content = parted.reasoning, parted.content
    fields: Fields = {"role": "assistant", "content": content}
    if message.tool_calls and not content and shape.silent != "empty":
        fields["content"] = None
        if shape.silent == "absent":
            del fields["content"]
    if reasoning:
        fields["reasoning_content"] = reasoning
    if message.tool_calls:
        fields["tool_calls"] = [_call(c, i, shape) for c, i in zip(message.tool_calls, ids, strict=True)]
    return fields


def _call(call: ToolCall, call_id: str, shape: Shape) -> Fields:
    arguments: Any = call.arguments
    if shape.arguments == "mapping":
        arguments = _mapping(call.arguments)
    return {"id": call_id, "type": "function", "function": {"name": call.name, "arguments": arguments}}


def _mapping(arguments: str) -> Mapping[str, Any] | str:
    """The arguments as an object, its keys in their order; what is no JSON object stays text."""
    try:
        value = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        return arguments
    return value if isinstance(value, dict) else arguments
