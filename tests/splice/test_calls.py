"""A result answers a position, and prompts carry the ids that belong there, whatever the harness did to them."""

from __future__ import annotations

import time
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splice.calls import Position, answered_calls, with_prompt_ids
from splice.types import Message, ToolCall
from tests.splice.conversations import (
    conversations,
    drop_call_ids,
    give_every_call_the_same_id,
    rename_call_ids,
)
from tests.splice.oracle_identity import answered


def asks(*ids: str) -> Message:
    return Message("assistant", tool_calls=tuple(ToolCall("f", "{}", call_id) for call_id in ids))


def result(call_id: str) -> Message:
    return Message("tool", "done", tool_call_id=call_id)


def positions(*messages: Message) -> list[Position]:
    return list(answered_calls(messages).values())


def test_a_known_id_names_its_call_in_any_order() -> None:
    assert positions(asks("a", "b"), result("b"), result("a")) == [(0, 1), (0, 0)]


def test_results_without_ids_answer_the_calls_in_order() -> None:
    assert positions(asks("a", "b"), result(""), result("")) == [(0, 0), (0, 1)]


def test_unknown_ids_answer_the_calls_in_order() -> None:
    assert positions(asks("a", "b"), result("x"), result("y")) == [(0, 0), (0, 1)]


def test_one_id_for_every_call_answers_them_in_order_turn_by_turn() -> None:
    assert positions(asks("x", "x"), result("x"), result("x"), asks("x"), result("x")) == [(0, 0), (0, 1), (3, 0)]


def test_an_id_used_again_names_the_latest_call_that_carries_it() -> None:
    assert positions(asks("call_0"), result("call_0"), asks("call_0"), result("call_0")) == [(0, 0), (2, 0)]


def test_a_late_result_still_names_the_older_call() -> None:
    assert positions(asks("a"), asks("b"), result("a")) == [(0, 0)]


def test_a_result_answered_twice_names_the_same_call_twice() -> None:
    assert positions(asks("a"), result("a"), result("a")) == [(0, 0), (0, 0)]


def test_a_user_message_between_results_changes_nothing() -> None:
    assert positions(asks("", ""), result(""), Message("user", "wait"), result("")) == [(0, 0), (0, 1)]


def test_a_result_that_nobody_asked_for_answers_no_assistant() -> None:
    assert positions(Message("user", "hi"), result("a")) == [(-1, 0)]


def test_many_parallel_calls_cost_linear_time() -> None:
    count = 20_000
    asked = asks(*(f"call_{n}" for n in range(count)))
    results = [result(f"call_{n}") for n in range(count)]
    same = [asks(*("x" for _ in range(count))), *(result("x") for _ in range(count))]
    started = time.process_time()
    assert positions(asked, *results)[-1] == (0, count - 1)
    assert positions(*same)[-1] == (0, count - 1)
    assert time.process_time() - started < 5  # quadratic takes minutes


@pytest.mark.parametrize("rewrite", [lambda m: m, rename_call_ids, drop_call_ids, give_every_call_the_same_id])
@given(messages=conversations())
def test_positions_are_those_that_a_reader_finds_by_hand(
    rewrite: Callable[[tuple[Message, ...]], tuple[Message, ...]], messages: tuple[Message, ...]
) -> None:
    rewritten = rewrite(messages)
    by_hand = {index: answered(rewritten, index) for index in range(len(messages))}
    assert answered_calls(rewritten) == {index: position for index, position in by_hand.items() if position}


@given(conversations())
def test_ids_never_move_a_position(messages: tuple[Message, ...]) -> None:
    for rewrite in (rename_call_ids, drop_call_ids, give_every_call_the_same_id):
        assert answered_calls(rewrite(messages)) == answered_calls(messages)


def test_a_prompt_carries_the_ids_that_the_model_wrote() -> None:
    asked, one, two = with_prompt_ids(
        [asks("call_t_0", "call_t_1"), result("call_t_1"), result("x")], {0: ("m0", "m1")}
    )
    assert [call.id for call in asked.tool_calls] == ["m0", "m1"]
    assert (one.tool_call_id, two.tool_call_id) == ("m1", "m1")  # x is unknown: the second result, the second call


def test_a_call_for_which_the_model_wrote_no_id_keeps_the_callers() -> None:
    asked, one, two, three = with_prompt_ids([asks("a", "b", "c"), *map(result, "abc")], {0: ("", "m1")})
    assert [call.id for call in asked.tool_calls] == ["a", "m1", "c"]
    assert [m.tool_call_id for m in (one, two, three)] == ["a", "m1", "c"]


def test_a_result_without_a_call_keeps_its_id() -> None:
    messages = (result("a"), asks(), result("b"))
    assert with_prompt_ids(messages, {}) == messages


@given(conversations(), st.data())
def test_each_result_carries_the_id_of_the_call_that_it_answers(
    messages: tuple[Message, ...], data: st.DataObject
) -> None:
    indices = [i for i, m in enumerate(messages) if m.role == "assistant"]
    written = {i: tuple(f"w{i}.{n}" for n in range(len(messages[i].tool_calls))) for i in indices}
    rewritten = data.draw(st.sampled_from([drop_call_ids, rename_call_ids, give_every_call_the_same_id]))(messages)
    prompt = with_prompt_ids(rewritten, written)
    for index, (assistant, call) in answered_calls(messages).items():
        assert prompt[index].tool_call_id == written[assistant][call] == prompt[assistant].tool_calls[call].id
    assert [m.content for m in prompt] == [m.content for m in messages]
