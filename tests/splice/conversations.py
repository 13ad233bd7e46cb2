"""Random conversations of the shape that harnesses send, and the ways in which they rewrite call ids."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import msgspec
from hypothesis import strategies as st

from splice.types import Message, ToolCall

_TEXTS = st.sampled_from(["", "a", "b", " a", "a\n", "é", "<tool_call>"])
_NUMBERS = st.one_of(
    st.integers(-3, 3),
    st.integers(2**53 - 2, 2**53 + 3),
    st.floats(allow_nan=False, allow_infinity=False),
    st.sampled_from([0.0, -0.0, 1.0, 1e20, 10**20, 1e-7, 0.1]),
)
json_values: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), _NUMBERS, st.text(max_size=3)),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=2), inner, max_size=3)),
    max_leaves=6,
)
_ARGUMENTS = st.one_of(
    st.sampled_from(["", "null", "{}", '{"a": 1}', '{"a":1.0}', '{"b": [1, 2]}']),
    st.dictionaries(st.sampled_from("ab"), json_values, max_size=2).map(json.dumps),
)


@st.composite
def conversations(draw: st.DrawFn) -> tuple[Message, ...]:
    """Rounds of user, assistant with calls, results in the order of the calls, some of them missing."""
    messages: list[Message] = []
    if draw(st.booleans()):
        messages.append(Message("system", draw(_TEXTS)))
    for turn in range(draw(st.integers(1, 4))):
        messages.append(Message("user", draw(_TEXTS)))
        calls = tuple(
            ToolCall(draw(st.sampled_from(["f", "g"])), draw(_ARGUMENTS), f"id_{turn}_{n}")
            for n in range(draw(st.integers(0, 3)))
        )
        messages.append(Message("assistant", draw(_TEXTS), draw(_TEXTS), calls))
        answered = draw(st.integers(0, len(calls)))
        messages += [Message("tool", draw(_TEXTS), tool_call_id=call.id) for call in calls[:answered]]
    return tuple(messages)


def rename_call_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """Every id another one, the same wherever it stood."""
    return _with_ids(messages, lambda old: f"renamed:{old[::-1]}")


def drop_call_ids(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """No ids at all."""
    return _with_ids(messages, lambda _: "")


def give_every_call_the_same_id(messages: tuple[Message, ...]) -> tuple[Message, ...]:
    """As some harnesses do."""
    return _with_ids(messages, lambda _: "call")


def _with_ids(messages: tuple[Message, ...], rename: Callable[[str], str]) -> tuple[Message, ...]:
    return tuple(
        msgspec.structs.replace(
            message,
            tool_calls=tuple(msgspec.structs.replace(call, id=rename(call.id)) for call in message.tool_calls),
            tool_call_id=rename(message.tool_call_id) if message.role == "tool" else "",
        )
        for message in messages
    )
