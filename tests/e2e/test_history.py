"""History and retries: what harnesses do to a conversation, and that its tokens stay contiguous."""

from __future__ import annotations

import asyncio
import copy
from collections.abc import Callable
from typing import Any

import pytest

from tests.e2e.rewrites import EQUAL
from tests.e2e.stack import CALL, TOOLS, Stack, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

RETRY = {"x-stainless-retry-count": "1"}


async def _tool_talk(stack: Stack, **options: Any) -> Talk:
    """A talk whose first reply made one tool call."""
    talk = Talk(stack, tools=TOOLS, **options)
    await stack.script({"text": CALL})
    reply = await talk.say("List the files.")
    assert reply.finish_reason == "tool_calls"
    return talk


async def test_every_turn_extends_the_one_before_whichever_worker_serves_it(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    await talk.answer_tools("a.txt\nb.txt\n")
    for n in range(4):
        await talk.say(f"And then, step {n}?")
    await talk.assert_all_contiguous()
    assert [r.splice for r in talk.replies] == ["fresh; reason=first_turn"] + ["spliced"] * 5
    assert [r.parent for r in talk.replies[1:]] == [r.turn_id for r in talk.replies[:-1]]


async def test_a_marked_retry_of_a_committed_turn_gets_the_stored_reply_from_any_worker(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    second = await talk.answer_tools("a.txt")
    asked = talk.messages[:-1]
    for worker in stack.workers:
        again = await stack.chat(asked, session=talk.session, headers=RETRY, tools=TOOLS, worker=worker.url)
        assert again.replayed
        assert again.body["id"] == second.body["id"]
        assert again.message == second.message
    assert len(await stack.turns(talk.session or "")) == 2


async def test_an_idempotency_key_replays_and_refuses_another_body(stack: Stack) -> None:
    talk = Talk(stack)
    key = {"Idempotency-Key": f"key-{talk.session}"}
    first = await talk.say("Hello.", headers=key)
    again = await stack.chat(talk.messages[:-1], session=talk.session, headers=key)
    assert again.replayed
    assert again.turn_id == first.turn_id
    other = await stack.chat([{"role": "user", "content": "Other."}], session=talk.session, headers=key)
    assert (other.status, other.code) == (409, "idempotency_mismatch")


async def test_an_idempotency_key_finds_a_first_turn_that_named_no_session(stack: Stack) -> None:
    talk = Talk(stack, named=False)
    key = {"Idempotency-Key": f"unnamed-{id(talk)}"}
    first = await talk.say("Hello.", headers=key)
    again = await stack.chat(talk.messages[:-1], headers=key)
    assert again.replayed
    assert (again.turn_id, again.session) == (first.turn_id, first.session)


async def test_the_same_request_twice_at_once_unmarked_is_two_siblings(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    call = talk.messages[-1]["tool_calls"][0]["id"]
    asked = [*talk.messages, {"role": "tool", "tool_call_id": call, "content": "a.txt"}]
    pair = await asyncio.gather(*(stack.chat(asked, session=talk.session, tools=TOOLS) for _ in range(2)))
    assert pair[0].turn_id != pair[1].turn_id
    assert {r.parent for r in pair} == {talk.replies[0].turn_id}
    for reply in pair:
        await stack.assert_contiguous(reply.turn_id, talk.replies[0].turn_id)


async def test_a_failing_engine_changes_nothing_and_a_retry_goes_on(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    await stack.script({"fault": "busy"})
    talk.messages.append({"role": "user", "content": "Go on."})
    failed = await talk.turn()
    assert (failed.status, failed.code) == (429, "overloaded")
    assert "retry-after" in {k.lower() for k in failed.headers}
    assert len(await stack.turns(talk.session or "")) == 1
    await talk.turn(headers=RETRY)
    await talk.assert_all_contiguous()


async def test_a_side_call_gets_its_own_root_and_leaves_the_main_line_alone(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    side = await stack.chat(
        [{"role": "user", "content": "Name this conversation in three words."}], session=talk.session
    )
    assert side.splice == "fresh; reason=first_turn"
    assert side.parent is None
    await talk.answer_tools("a.txt")
    await talk.say("Thanks.")
    await talk.assert_all_contiguous()


async def test_four_parallel_branches_are_four_contiguous_leaves(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    branches = []
    for n in range(4):
        branch = copy.copy(talk)
        branch.messages, branch.replies = list(talk.messages), list(talk.replies)
        branches.append(branch)
        await branch.answer_tools(f"result {n}")
    await asyncio.gather(*(branch.say("Next.") for branch in branches))
    for branch in branches:
        await branch.assert_all_contiguous()
    trajectory = (await stack.call("GET", f"/sessions/{talk.session}/trajectory")).body
    assert len(trajectory["samples"]) == 4
    trained = [t["turn_id"] for s in trajectory["samples"] for t in s["turns"] if t["trains"]]
    assert len(trained) == len(set(trained)) == 9


async def test_a_compacted_history_is_a_new_root_that_says_so(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    await talk.answer_tools("a.txt")
    compacted = [
        {"role": "system", "content": "You are an agent."},
        {"role": "user", "content": "Summary so far: files were listed."},
        {"role": "assistant", "content": "Understood."},
        {"role": "user", "content": "Go on."},
    ]
    reply = await stack.chat(compacted, session=talk.session, tools=TOOLS)
    assert reply.splice == "fresh; reason=history_diverged"


async def test_an_assistant_message_in_an_empty_session_is_unknown_history(stack: Stack) -> None:
    messages = [
        {"role": "user", "content": "2+2?"},
        {"role": "assistant", "content": "4"},
        {"role": "user", "content": "3+3?"},
    ]
    reply = await stack.chat(messages, session=f"few-shot-{id(messages)}")
    assert reply.splice == "fresh; reason=unknown_history"
    turns = await stack.turns(reply.session)
    assert [m["role"] for m in turns[0]["messages"]] == ["user", "assistant", "user", "assistant"]


async def test_an_edited_assistant_message_is_context_on_the_deepest_unedited_turn(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    await talk.answer_tools("a.txt")
    edited = [*talk.messages[:-1], {"role": "assistant", "content": "I will not say that."}]
    reply = await stack.chat([*edited, {"role": "user", "content": "Go on."}], session=talk.session, tools=TOOLS)
    assert reply.splice == "spliced; reason=history_edited"
    assert reply.parent == talk.replies[0].turn_id
    await stack.assert_contiguous(reply.turn_id, talk.replies[0].turn_id)
    text = await stack.rendered(reply.turn_id)
    assert "I will not say that.<|im_end|>" in text
    sample = (await stack.call("GET", f"/sessions/{talk.session}/trajectory")).body["samples"][-1]
    sampled = sum(len(t["generation_token_ids"]) for t in await stack.turns(talk.session or ""))
    assert sum(sample["loss_mask"]) < sampled


async def test_a_truncated_tool_result_attaches_to_the_deepest_common_turn(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    await talk.answer_tools("a very long listing\n" * 20)
    await talk.say("Go on.")
    cut = copy.deepcopy(talk.messages)
    cut[3]["content"] = "[truncated]"
    reply = await stack.chat([*cut, {"role": "user", "content": "And?"}], session=talk.session, tools=TOOLS)
    assert reply.splice == "spliced; reason=history_edited"
    assert reply.parent == talk.replies[0].turn_id
    await stack.assert_contiguous(reply.turn_id, talk.replies[0].turn_id)


@pytest.mark.parametrize("rewrite", EQUAL)
async def test_a_rewrite_that_changes_nothing_is_the_same_turn(
    stack: Stack, rewrite: Callable[[dict[str, Any]], None]
) -> None:
    talk = Talk(stack, tools=TOOLS)
    await stack.script({"text": CALL}, {"text": "<think>\nhm\n</think>\n\nTwo files. "})
    await talk.say("List the files.")
    await talk.answer_tools("a.txt\nb.txt")
    for message in talk.messages:
        rewrite(message)
    third = await talk.say("Thanks.")
    assert third.splice == "spliced"
    assert third.parent == talk.replies[1].turn_id
    await talk.assert_all_contiguous()


async def test_changed_tools_are_refused_or_fork_as_the_session_says(stack: Stack) -> None:
    more = [*TOOLS, {"type": "function", "function": {"name": "read", "parameters": {"type": "object"}}}]
    talk = await _tool_talk(stack)
    call = talk.messages[-1]["tool_calls"][0]["id"]
    asked = [*talk.messages, {"role": "tool", "tool_call_id": call, "content": "a.txt"}]
    refused = await stack.chat(asked, session=talk.session, tools=more)
    assert (refused.status, refused.code) == (409, "rendering_changed")
    assert len(await stack.turns(talk.session or "")) == 1

    opened = await stack.call(
        "POST", "/sessions", json={"session_id": f"{talk.session}-fork", "on_rendering_change": "fork"}
    )
    assert opened.status == 201
    forking = await _tool_talk_in(stack, f"{talk.session}-fork")
    forking.body["tools"] = more
    reply = await forking.answer_tools("a.txt")
    assert reply.splice == "fresh; reason=rendering_changed"
    assert "read" in await stack.rendered(reply.turn_id)


async def _tool_talk_in(stack: Stack, session: str) -> Talk:
    talk = Talk(stack, tools=TOOLS)
    talk.session = session
    await stack.script({"text": CALL})
    await talk.say("List the files.")
    return talk


async def test_tools_with_another_key_order_are_the_same_tools(stack: Stack) -> None:
    talk = await _tool_talk(stack)
    function = TOOLS[0]["function"]
    assert isinstance(function, dict)
    talk.body["tools"] = [{"function": dict(reversed(function.items())), "type": "function"}]
    reply = await talk.answer_tools("a.txt")
    assert reply.splice == "spliced"
    await talk.assert_all_contiguous()


@pytest.mark.parametrize(
    "extra",
    [
        [{"role": "system", "content": "Reminder: be brief."}],
        [{"role": "user", "content": "Also look at b."}],
        [{"role": "user", "content": "One."}, {"role": "user", "content": "Two."}],
        [{"role": "developer", "content": "Stay in the folder."}],
    ],
    ids=["system", "user", "two users", "developer"],
)
async def test_a_reminder_after_a_tool_result_is_contiguous(stack: Stack, extra: list[dict[str, Any]]) -> None:
    talk = await _tool_talk(stack)
    call = talk.messages[-1]["tool_calls"][0]["id"]
    talk.messages += [{"role": "tool", "tool_call_id": call, "content": "a.txt"}, *extra]
    reply = await talk.turn()
    assert reply.splice == "spliced"
    await talk.assert_all_contiguous()
    text = await stack.rendered(reply.turn_id)
    assert all(message["content"] in text for message in extra)


async def test_an_assistant_message_of_the_clients_own_is_context(stack: Stack) -> None:
    talk = Talk(stack)
    await talk.say("Hello.")
    talk.messages += [
        {"role": "user", "content": "What is the capital of France?"},
        {"role": "assistant", "content": "Paris."},
        {"role": "user", "content": "And of Spain?"},
    ]
    reply = await talk.turn()
    assert reply.splice == "spliced; reason=history_edited"
    await talk.assert_all_contiguous()
    turn = (await stack.turns(talk.session or ""))[-1]
    record = (await stack.record())[reply.turn_id]
    assert turn["generation_token_ids"] == record["output_ids"]
    assert [m["content"] for m in turn["messages"][:-1]] == [m["content"] for m in talk.messages[-4:-1]]


async def test_a_turn_ended_by_length_goes_on_contiguously_and_trains(stack: Stack) -> None:
    talk = Talk(stack)
    first = await talk.say("Tell me a long story.", max_tokens=12)
    assert first.finish_reason == "length"
    second = await talk.say("Go on.")
    assert second.splice == "spliced"
    await talk.assert_all_contiguous()
    record = await stack.record()
    after = record[second.turn_id]["input_ids"][len(record[first.turn_id]["input_ids"]) + 12 :]
    assert after[0] in {151645, 151668, 198, 271}  # the terminator, or first a newline and the end of a think block
    sample = (await stack.call("GET", f"/sessions/{talk.session}/trajectory")).body["samples"][0]
    assert [t["trains"] for t in sample["turns"]] == [True, True]
    generated = [t["generation_end"] - t["generation_start"] for t in sample["turns"]]
    assert sum(sample["loss_mask"]) == sum(generated)
    assert generated[0] == 12


async def test_a_conversation_goes_on_after_an_empty_generation(stack: Stack) -> None:
    talk = Talk(stack)
    await stack.script({"ids": [], "log_probs": [], "eos": False})
    first = await talk.say("Say nothing.")
    assert first.message["content"] in {"", None}
    await talk.say("Now speak.")
    await talk.assert_all_contiguous()
    turns = await stack.turns(talk.session or "")
    assert (turns[0]["generation_token_ids"], turns[0]["generation_log_probs"]) == ([], [])


async def test_deleting_a_session_ends_its_running_turn_and_refuses_later_ones(stack: Stack) -> None:
    talk = Talk(stack)
    await talk.say("Hello.")
    await stack.script({"text": "slow", "delay_s": 30})
    talk.messages.append({"role": "user", "content": "Take your time."})
    running = asyncio.create_task(talk.turn(worker=stack.workers[0].url))
    await asyncio.sleep(0.5)
    deleted = await stack.call("DELETE", f"/sessions/{talk.session}", worker=stack.workers[1].url)
    assert deleted.status == 204
    ended = await asyncio.wait_for(running, 10)
    assert (ended.status, ended.code) == (410, "session_closed")
    later = await talk.turn()
    assert (later.status, later.code) == (410, "session_closed")
    await stack.assert_last_aborted()


async def test_a_client_that_leaves_takes_its_generation_with_it(stack: Stack) -> None:
    talk = Talk(stack)
    await stack.script({"text": "slow", "delay_s": 30})
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(talk.say("Hello."), 0.7)
    await stack.assert_last_aborted()


async def test_sixteen_equal_prompts_with_echoed_ids_are_sixteen_unambiguous_sessions(stack: Stack) -> None:
    talks = [Talk(stack, named=False, system="Sixteen, echoed.", return_token_ids=True) for _ in range(16)]
    for n in range(6):
        await asyncio.gather(*(talk.say(f"Step {n}.") for talk in talks))
    assert len({talk.replies[0].session for talk in talks}) == 16
    for talk in talks:
        assert len({reply.session for reply in talk.replies}) == 1
        await talk.assert_all_contiguous()
        turns = await stack.turns(talk.replies[0].session)
        assert not any(turn["origin"]["ambiguous_parent"] for turn in turns)


async def test_equal_texts_without_echoed_ids_are_counted_as_ambiguous_and_stay_contiguous(stack: Stack) -> None:
    talks = [Talk(stack, named=False, system="Sixteen, not echoed.") for _ in range(4)]
    await stack.script(*({"text": "The very same words."} for _ in talks))
    await asyncio.gather(*(talk.say("Start.") for talk in talks))
    for talk in talks:
        await talk.say("Go on.")
    record = await stack.record()
    starts = [record[t.replies[0].turn_id]["input_ids"] + record[t.replies[0].turn_id]["output_ids"] for t in talks]
    parents = [talk.replies[1].parent for talk in talks]
    assert sorted(p or "" for p in parents) == sorted(talk.replies[0].turn_id for talk in talks)
    for talk in talks:
        prompt = record[talk.replies[1].turn_id]["input_ids"]
        assert any(prompt[: len(start)] == start for start in starts)
        turns = await stack.turns(talk.replies[1].session)
        assert turns[-1]["origin"]["ambiguous_parent"] or talk is talks[-1]
