"""Equal and different, item by item as the design lists them, and by random conversations."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dialects import chat
from splice.errors import InvalidRequest
from splice.identity import (
    canonical_arguments,
    canonical_json,
    chain_hashes,
    extend_chain,
    ids_digest,
    rendering_digest,
    request_hash,
)
from splice.types import Message, Rendering, ToolCall
from tests.splice.conversations import (
    conversations,
    drop_call_ids,
    give_every_call_the_same_id,
    json_values,
    rename_call_ids,
)
from tests.splice.oracle_identity import same_conversation, same_json

replace = msgspec.structs.replace

CONVERSATION: list[dict[str, Any]] = [
    {"role": "system", "content": "You are terse."},
    {"role": "user", "content": "List the files and the time."},
    {
        "role": "assistant",
        "content": "Looking.",
        "reasoning_content": "Two tools.",
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "ls", "arguments": '{"path": "/", "depth": 1}'}},
            {"id": "b", "type": "function", "function": {"name": "date", "arguments": "{}"}},
        ],
    },
    {"role": "tool", "tool_call_id": "a", "content": "etc\nusr\n"},
    {"role": "tool", "tool_call_id": "b", "content": "noon"},
    {"role": "assistant", "content": "etc and usr, at noon."},
    {"role": "user", "content": "Thanks."},
]

Change = Callable[[list[dict[str, Any]]], object]


def wire_hashes(wire: Sequence[dict[str, Any]]) -> tuple[bytes, ...]:
    body = json.dumps({"messages": wire}).encode()
    return chat.decode(body).conversation.chain


def changed(change: Change) -> list[dict[str, Any]]:
    wire: list[dict[str, Any]] = json.loads(json.dumps(CONVERSATION))
    change(wire)
    return wire


def calls_of(wire: list[dict[str, Any]]) -> list[dict[str, Any]]:
    calls: list[dict[str, Any]] = wire[2]["tool_calls"]
    return calls


def with_ids(first: str | None, second: str | None) -> Change:
    def change(wire: list[dict[str, Any]]) -> None:
        for n, call_id in enumerate((first, second)):
            calls_of(wire)[n]["id"] = call_id
            wire[3 + n]["tool_call_id"] = call_id

    return change


def without_ids(wire: list[dict[str, Any]]) -> None:
    for n in range(2):
        del calls_of(wire)[n]["id"]
        del wire[3 + n]["tool_call_id"]


def swap(wire: list[dict[str, Any]], a: int, b: int) -> None:
    wire[a], wire[b] = wire[b], wire[a]


def swap_values(one: dict[str, Any], other: dict[str, Any], field: str) -> None:
    one[field], other[field] = other[field], one[field]


EQUAL: dict[str, Change] = {
    "text as one part": lambda w: w[1].update(content=[{"type": "text", "text": w[1]["content"]}]),
    "text as several parts": lambda w: w[1].update(
        content=[{"type": "text", "text": "List the files "}, {"type": "text", "text": "and the time."}]
    ),
    "assistant text as a part": lambda w: w[5].update(content=[{"type": "text", "text": w[5]["content"]}]),
    "white space around assistant text": lambda w: w[5].update(content="\n\n " + w[5]["content"] + " \n"),
    "arguments spaced otherwise": lambda w: calls_of(w)[0]["function"].update(arguments='{"path":"/","depth":1}'),
    "arguments ordered otherwise": lambda w: calls_of(w)[0]["function"].update(arguments='{"depth":1,"path":"/"}'),
    "arguments escaped otherwise": lambda w: calls_of(w)[0]["function"].update(
        arguments='{"path":"\\u002f","depth":1}'
    ),
    "a number spelled otherwise": lambda w: calls_of(w)[0]["function"].update(arguments='{"path":"/","depth":1.0e0}'),
    "arguments as an object": lambda w: calls_of(w)[0]["function"].update(arguments={"depth": 1, "path": "/"}),
    "no arguments as an empty string": lambda w: calls_of(w)[1]["function"].update(arguments=""),
    "no arguments as null": lambda w: calls_of(w)[1]["function"].update(arguments=None),
    "call ids rewritten": with_ids("call_0", "call_1"),
    "call ids swapped with one another": with_ids("b", "a"),
    "call ids all the same": with_ids("x", "x"),
    "call ids null": with_ids(None, None),
    "call ids empty": with_ids("", ""),
    "call ids missing": without_ids,
    "call ids rewritten in the assistant message only": lambda w: w[2].update(
        tool_calls=[{**call, "id": f"new_{n}"} for n, call in enumerate(calls_of(w))]
    ),
    "a tool message's name": lambda w: w[3].update(name="ls"),
    "reasoning dropped": lambda w: w[2].pop("reasoning_content"),
    "reasoning edited": lambda w: w[2].update(reasoning_content="Something else."),
    "reasoning under another name": lambda w: w[2].update(reasoning=w[2].pop("reasoning_content")),
    "reasoning moved to another message": lambda w: w[5].update(reasoning_content=w[2].pop("reasoning_content")),
    "tool_calls null": lambda w: w[5].update(tool_calls=None),
    "tool_calls an empty list": lambda w: w[5].update(tool_calls=[]),
    "fields that OpenAI adds to replies": lambda w: w[5].update(refusal=None, annotations=[], audio=None, index=0),
    "fields that nobody knows": lambda w: w[1].update(x_trace="abc", cache_control={"type": "ephemeral"}),
}

DIFFERENT: dict[str, Change] = {
    "a role": lambda w: w[0].update(role="user"),
    "developer for system": lambda w: w[0].update(role="developer"),
    "a user's text": lambda w: w[1].update(content="List the files."),
    "white space around a user's text": lambda w: w[1].update(content=w[1]["content"] + "\n"),
    "white space around a tool's text": lambda w: w[3].update(content="etc\nusr"),
    "white space inside assistant text": lambda w: w[5].update(content="etc  and usr, at noon."),
    "an assistant's text": lambda w: w[5].update(content="etc and usr."),
    "a tool's text": lambda w: w[3].update(content="etc\n"),
    "a call's name": lambda w: calls_of(w)[0]["function"].update(name="dir"),
    "an argument's value": lambda w: calls_of(w)[0]["function"].update(arguments='{"path": "/", "depth": 2}'),
    "an argument's type": lambda w: calls_of(w)[0]["function"].update(arguments='{"path": "/", "depth": "1"}'),
    "true for 1": lambda w: calls_of(w)[0]["function"].update(arguments='{"path": "/", "depth": true}'),
    "an argument more": lambda w: calls_of(w)[0]["function"].update(arguments='{"path": "/", "depth": 1, "all": null}'),
    "a call less": lambda w: calls_of(w).pop(),
    "the order of calls": lambda w: calls_of(w).reverse(),
    "the order of messages": lambda w: swap(w, 0, 1),
    "which call a result answers": lambda w: swap_values(w[3], w[4], "tool_call_id"),
    "a message less": lambda w: w.pop(0),
    "a message more": lambda w: w.insert(6, {"role": "user", "content": ""}),
    "content moved to its neighbour": lambda w: swap_values(w[0], w[1], "content"),
}


@pytest.mark.parametrize("change", EQUAL.values(), ids=EQUAL.keys())
def test_these_changes_leave_a_conversation_the_same(change: Change) -> None:
    assert wire_hashes(changed(change)) == wire_hashes(CONVERSATION)


@pytest.mark.parametrize("change", DIFFERENT.values(), ids=DIFFERENT.keys())
def test_these_changes_make_another_conversation(change: Change) -> None:
    assert wire_hashes(changed(change))[-1] != wire_hashes(CONVERSATION)[-1]


@pytest.mark.parametrize("nothing", [None, "", []])
@pytest.mark.parametrize("index", range(len(CONVERSATION)))
def test_null_and_empty_and_missing_content_are_the_same(index: int, nothing: object) -> None:
    missing = changed(lambda w: w[index].pop("content"))
    empty = changed(lambda w: w[index].update(content=nothing))
    assert wire_hashes(empty) == wire_hashes(missing)


def test_content_of_white_space_is_no_content_where_an_assistant_wrote_it() -> None:
    blank, none = Message("assistant", " \n"), Message("assistant")
    assert chain_hashes([blank]) == chain_hashes([none])


def test_a_change_leaves_the_hashes_before_it_alone() -> None:
    edited = wire_hashes(changed(lambda w: w[5].update(content="Edited.")))
    original = wire_hashes(CONVERSATION)
    assert edited[:5] == original[:5]
    assert not set(edited[5:]) & set(original[5:])


def test_arguments_that_are_no_json_are_compared_as_text() -> None:
    assert canonical_arguments(' {"a": ') == canonical_arguments('{"a":')
    assert canonical_arguments('{"a":') != canonical_arguments('{"a"')


def test_text_that_is_no_json_never_equals_json() -> None:
    assert canonical_arguments("{}}") != canonical_arguments("{}")
    assert canonical_arguments("\x00{}") != canonical_arguments("{}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ("1", "1.0"),
        ("1", "1e0"),
        ("0", "-0.0"),
        ("0.1", "1e-1"),
        ("100000000000000000000", "1e20"),
        ("9007199254740993", "9007199254740992"),
        ("9007199254740992", "9007199254740992.0"),
        ("1e308", "1" + "0" * 308),
    ],
)
def test_numbers_are_equal_when_they_are_the_same_double(one: str, other: str) -> None:
    assert canonical_arguments(f"[{one}]") == canonical_arguments(f"[{other}]")


@pytest.mark.parametrize(
    ("one", "other"), [("1", "2"), ("1", '"1"'), ("1", "true"), ("0", "null"), ("0.1", "0.1000000000000001")]
)
def test_other_doubles_and_other_types_are_different(one: str, other: str) -> None:
    assert canonical_arguments(f"[{one}]") != canonical_arguments(f"[{other}]")


def test_deeply_nested_arguments_stand_for_themselves() -> None:
    deep = '{"a":' * 50_000 + "1" + "}" * 50_000
    assert canonical_arguments(deep) == canonical_arguments(f" {deep}\n")


def test_deeply_nested_tools_are_the_callers_fault() -> None:
    value: Any = 1
    for _ in range(5_000):
        value = [value]
    with pytest.raises(InvalidRequest):
        canonical_json(value)


@given(json_values, json_values)
def test_canonical_json_is_equal_exactly_when_the_values_are(one: object, other: object) -> None:
    assert (canonical_json(one) == canonical_json(other)) == same_json(one, other)


@given(json_values, st.data())
def test_arguments_are_the_same_however_they_are_dumped(value: object, data: st.DataObject) -> None:
    def shuffled(node: object) -> object:
        if isinstance(node, dict):
            keys = data.draw(st.permutations(sorted(node)))
            return {key: shuffled(node[key]) for key in keys}
        return [shuffled(item) for item in node] if isinstance(node, list) else node

    plain = json.dumps(value)
    other = json.dumps(shuffled(value), indent=data.draw(st.sampled_from([None, 2])), ensure_ascii=False)
    assert canonical_json(json.loads(plain)) == canonical_json(json.loads(other))
    assert canonical_arguments(f"[{plain}]") == canonical_arguments(f"[{other}]")


@given(conversations())
def test_each_prefix_of_a_conversation_has_its_own_hash_and_keeps_it(messages: tuple[Message, ...]) -> None:
    whole = chain_hashes(messages)
    assert len(set(whole)) == len(messages)
    for end in range(len(messages) + 1):
        assert chain_hashes(messages[:end]) == whole[:end]


@given(messages=conversations(), content=st.sampled_from(["", " Done. "]), calls=st.booleans())
def test_a_reply_extends_the_chain_as_it_will_be_hashed_when_sent_back(
    *, messages: tuple[Message, ...], content: str, calls: bool
) -> None:
    reply = Message("assistant", content, "thought", (ToolCall("f", '{"a": 1}', "id"),) if calls else ())
    assert extend_chain(chain_hashes(messages), reply) == chain_hashes([*messages, reply])[-1]


@given(conversations(), st.sampled_from([rename_call_ids, drop_call_ids, give_every_call_the_same_id]))
def test_rewriting_call_ids_in_any_of_these_ways_changes_nothing(
    messages: tuple[Message, ...], rewrite: Callable[[tuple[Message, ...]], tuple[Message, ...]]
) -> None:
    assert chain_hashes(rewrite(messages)) == chain_hashes(messages)


@given(conversations(), conversations())
def test_two_conversations_hash_alike_exactly_when_the_slow_rule_says_so(
    one: tuple[Message, ...], other: tuple[Message, ...]
) -> None:
    hashes, others = chain_hashes(one), chain_hashes(other)
    for end in range(1, min(len(one), len(other)) + 1):
        assert (hashes[end - 1] == others[end - 1]) == same_conversation(one[:end], other[:end])


@given(conversations(), st.data())
def test_a_random_edit_is_seen_exactly_when_the_slow_rule_sees_it(
    messages: tuple[Message, ...], data: st.DataObject
) -> None:
    index = data.draw(st.integers(0, len(messages) - 1))
    message = messages[index]
    edits = [
        replace(message, content=message.content + data.draw(st.sampled_from(["", " ", "!"]))),
        replace(message, reasoning="other"),
        replace(message, name="other"),
        replace(message, tool_calls=message.tool_calls[:-1]),
        replace(message, tool_calls=message.tool_calls[::-1]),
    ]
    edited = (*messages[:index], data.draw(st.sampled_from(edits)), *messages[index + 1 :])
    assert (chain_hashes(edited) == chain_hashes(messages)) == same_conversation(edited, messages)


def test_tools_are_the_same_in_other_key_order_and_another_rendering_in_other_order() -> None:
    one = {"type": "function", "function": {"name": "a", "parameters": {"type": "object"}}}
    same = {"function": {"parameters": {"type": "object"}, "name": "a"}, "type": "function"}
    two = {"type": "function", "function": {"name": "b"}}
    signature = rendering_digest("model", Rendering((one, two)), {})
    assert rendering_digest("model", Rendering((same, two)), {}) == signature
    assert rendering_digest("model", Rendering((two, one)), {}) != signature
    assert rendering_digest("model", Rendering((one,)), {}) != signature


def test_another_tokenizer_or_template_argument_is_another_rendering() -> None:
    signature = rendering_digest("model", Rendering(), {})
    assert rendering_digest("other", Rendering(), {}) != signature
    assert rendering_digest("model", Rendering(), {"enable_thinking": False}) != signature


def test_only_the_arguments_handed_over_are_part_of_the_rendering() -> None:
    only_the_prompt = Rendering(kwargs={"opens_think_block": True})
    assert rendering_digest("model", only_the_prompt, {}) == rendering_digest("model", Rendering(), {})


def test_equal_requests_hash_alike_and_others_do_not() -> None:
    chain = chain_hashes([Message("user", "hi")])
    asked = request_hash(chain, "s", {"temperature": 1, "top_p": 0.5})
    assert request_hash(chain, "s", {"top_p": 0.5, "temperature": 1.0}) == asked
    assert request_hash(chain, "s", {"temperature": 0}) != asked
    assert request_hash(chain, "t", {"temperature": 1, "top_p": 0.5}) != asked
    assert request_hash(chain_hashes([Message("user", "ho")]), "s", {"temperature": 1, "top_p": 0.5}) != asked
    assert request_hash((), "s", {}) != asked


@given(st.lists(st.integers(0, 2**32 - 1)), st.lists(st.integers(0, 2**32 - 1)))
def test_sampled_ids_are_told_apart_whatever_array_holds_them(one: list[int], other: list[int]) -> None:
    digest = ids_digest(np.array(one, dtype=np.uint32))
    assert digest == ids_digest(np.array(one, dtype=">u4"))
    assert (digest == ids_digest(np.array(other, dtype=np.uint32))) == (one == other)
