"""What the simulated engine samples: agent-like text, spelled as no tokenizer would, reproducibly."""

from __future__ import annotations

import math
import random
import re
from typing import Any

import numpy as np
import orjson
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from api.demo.sim.policy import Scene, Tool, dump_call, read_scene, read_tools, write_turn
from tests.api.simulated import TOOLS, chat, engine, vocabulary

CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)


async def test_equal_prompts_are_answered_differently_but_a_run_repeats_itself() -> None:
    prompt = chat("What is in the build folder?", TOOLS)

    async def play() -> list[Any]:
        async with engine(seed=7) as client:
            return [(await client.generate(prompt, rid=f"r{n}"))["output_ids"] for n in range(4)]

    first, second = await play(), await play()
    assert first == second
    assert len({tuple(ids) for ids in first}) == 4


async def test_another_seed_gives_another_run() -> None:
    prompt = chat("Hello there")
    async with engine(seed=1) as one, engine(seed=2) as other:
        assert (await one.generate(prompt))["output_ids"] != (await other.generate(prompt))["output_ids"]


async def test_hardly_any_generation_survives_being_decoded_and_encoded_again() -> None:
    vocab = vocabulary()
    async with engine() as client:
        survived = 0
        for n in range(60):
            reply = await client.generate(chat(f"Question {n}", TOOLS if n % 2 else ()))
            ids = reply["output_ids"]
            text = vocab.decode(ids)
            assert vocab.decode(vocab.encode(text)) == text
            survived += vocab.encode(text) == ids
    assert survived <= 3


async def test_without_splitting_every_generation_survives() -> None:
    vocab = vocabulary()
    async with engine(split_rate=0.0) as client:
        for n in range(30):
            ids = (await client.generate(chat(f"Question {n}", TOOLS)))["output_ids"]
            assert vocab.encode(vocab.decode(ids)) == ids


@settings(max_examples=60, deadline=None)
@given(text=st.text(max_size=80), rate=st.floats(0, 1), seed=st.integers(0, 1 << 32))
def test_another_spelling_decodes_to_the_same_text(text: str, rate: float, seed: int) -> None:
    vocab = vocabulary()
    canonical = vocab.encode(text)
    spelled = vocab.split(canonical, rate, random.Random(seed))
    assert vocab.decode(spelled) == vocab.decode(canonical)
    assert b"".join(map(vocab.spell, spelled)) == b"".join(map(vocab.spell, canonical))


async def test_log_probs_are_float32_finite_not_positive_and_name_the_ids_again() -> None:
    async with engine() as client:
        reply = await client.generate(chat("Count to ten"))
    triples = reply["meta_info"]["output_token_logprobs"]
    assert [token for _, token, _ in triples] == reply["output_ids"]
    assert all(text is None for *_, text in triples)
    values = [value for value, *_ in triples]
    assert all(math.isfinite(value) and value <= 0 and float(np.float32(value)) == value for value in values)
    assert reply["meta_info"]["completion_tokens"] == len(triples) == len(reply["output_ids"])


async def test_a_turn_ends_with_eos_and_control_tokens_are_single_ids() -> None:
    vocab = vocabulary()
    open_call, eos = vocab.encode("<tool_call>"), vocab.encode("<|im_end|>")
    assert len(open_call) == len(eos) == 1
    async with engine() as client:
        replies = [await client.generate(chat(f"Task {n}", TOOLS)) for n in range(20)]
    for reply in replies:
        assert reply["output_ids"][-1:] == eos
        assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": eos[0]}
        assert "<|im_end|>" not in reply["text"]
        assert reply["output_ids"].count(open_call[0]) == reply["text"].count("<tool_call>")


async def test_with_tools_turns_call_them_in_parseable_json_unlike_any_templates() -> None:
    names = {"bash", "stat"}
    plain, calls, two, lines = 0, [], 0, 0
    async with engine() as client:
        for n in range(60):
            text = (await client.generate(chat(f"Task {n}", TOOLS)))["text"]
            found = CALL.findall(text)
            plain += not found
            two += len(found) == 2
            calls += found
    parsed = [orjson.loads(call) for call in calls]
    lines = sum("\n" in str(call["arguments"].get("command")) for call in parsed)
    assert {call["name"] for call in parsed} == names
    assert plain >= 3
    assert two >= 3
    assert lines >= 10
    assert sum(orjson.dumps(call).decode() != raw for call, raw in zip(parsed, calls, strict=True)) > len(calls) / 2


async def test_without_tools_turns_are_plain_text() -> None:
    async with engine() as client:
        texts = [(await client.generate(chat(f"Task {n}")))["text"] for n in range(30)]
    assert not any("<tool_call>" in text for text in texts)
    assert any("```" in text for text in texts)
    assert any(text != text.rstrip() for text in texts)
    assert any(not text.isascii() for text in texts)
    assert any("<think>" in text for text in texts)


async def test_a_reply_shows_the_nonce_that_finds_its_record_entry() -> None:
    async with engine() as client:
        for n in range(40):
            prompt = chat(f"Task {n % 3}", TOOLS if n % 2 else ())
            reply = await client.generate(prompt)
            entry = (await client.record(since=n))[0]
            shown = set(re.findall(r"n-[0-9a-f]{6}\b", reply["text"].rpartition("</think>")[2]))
            assert shown == {entry["nonce"]}
            assert (entry["input_ids"], entry["output_ids"]) == (prompt, reply["output_ids"])
        nonces = [entry["nonce"] for entry in await client.record()]
    assert len(set(nonces)) == len(nonces) == 40


async def test_reasoning_follows_what_the_prompt_opened_or_closed() -> None:
    async with engine() as client:
        opened = [(await client.generate(chat(f"Task {n}", ending="<think>\n")))["text"] for n in range(10)]
        closed = [
            (await client.generate(chat(f"Task {n}", ending="<think>\n\n</think>\n\n")))["text"] for n in range(10)
        ]
    assert all("</think>" in text and "<think>" not in text for text in opened)
    assert not any("think>" in text for text in closed)


def test_tools_are_read_from_any_template_that_prints_them_as_json() -> None:
    listed = ", ".join(orjson.dumps(tool["function"]).decode() for tool in TOOLS)
    assert [tool.name for tool in read_tools(f"You may call: [{listed}]. Be brief.")] == ["bash", "stat"]
    assert read_tools('Reply as {"name": <function-name>, "arguments": {}}') == ()


def test_a_tools_result_is_told_from_a_users_words() -> None:
    after_tool = ["user\n<tool_response>\nok fine\n</tool_response>", "\n", "assistant\n"]
    assert read_scene("", after_tool, thinks=True, calls=True).after_tool
    assert not read_scene("", ["user\nHow are you", "\n", "assistant\n"], thinks=True, calls=True).after_tool


@settings(max_examples=100, deadline=None)
@given(seed=st.integers(0, 1 << 32), words=st.text(max_size=40))
def test_every_turn_shows_its_nonce_after_its_reasoning(seed: int, words: str) -> None:
    tools = (Tool("f", {"a": {"type": "array", "items": {"type": "string"}}, "b": {"enum": [1]}}, frozenset("a")),)
    for scene in (Scene(tools, words, "free"), Scene((), words, "open"), Scene((), words, "absent")):
        text = write_turn(scene, "n-00ff00", random.Random(seed))
        assert "n-00ff00" in text.rpartition("</think>")[2]


@pytest.mark.parametrize("seed", range(40))
def test_a_calls_json_means_the_same_however_it_is_written(seed: int) -> None:
    arguments = {"x": 'a\n\t"b" é 🙂', "y": [1, 2.5, None, True], "z": {}}
    written = dump_call("näme", arguments, random.Random(seed))
    assert orjson.loads(written) == {"name": "näme", "arguments": arguments}
