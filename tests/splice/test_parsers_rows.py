"""Formats that no published fixture covers: one good call each, one that is cut, and what is not one."""

from __future__ import annotations

import pytest

from splice.parsers import choose_formats
from splice.types import Finish, Message, ToolCall
from tests.splice.parser_vocabulary import Vocabulary, tool

TOOLS = (tool("f", a={"type": "integer"}), tool("g"))
STOP, LENGTH = Finish("stop"), Finish("length")
BOTH = (ToolCall("f", '{"a": 1}'), ToolCall("g", "{}"))
JSON = '[{"name": "f", "arguments": {"a": 1}}, {"name": "g", "arguments": {}}]'
FORMATS = {
    "nemotron_v2": ((), f"<TOOLCALL>{JSON}</TOOLCALL>", "<TOOLCALL>"),
    "granite3": (("<|tool_call|>",), f"<|tool_call|>{JSON}", "<|tool_call|>"),
    "lfm2": (
        ("<|tool_call_start|>", "<|tool_call_end|>"),
        "<|tool_call_start|>[f(a=1), g()]<|tool_call_end|>",
        "<|tool_call_start|>",
    ),
}


def read(name: str, text: str, finish: Finish = STOP) -> Message:
    vocabulary = Vocabulary(FORMATS[name][0])
    return vocabulary.grammar(name).parse(vocabulary.encode(text), finish, tools=TOOLS).message


@pytest.mark.parametrize("name", FORMATS)
def test_calls_are_read_and_the_text_before_them_kept(name: str) -> None:
    message = read(name, "Let me look. " + FORMATS[name][1])
    assert (message.content, message.tool_calls) == ("Let me look.", BOTH)


@pytest.mark.parametrize("name", FORMATS)
def test_a_broken_call_stays_visible(name: str) -> None:
    broken = FORMATS[name][2] + '[{"name": "f", "arg'
    message = read(name, broken, LENGTH)
    assert message.tool_calls == ()
    assert '[{"name": "f", "arg' in message.content


@pytest.mark.parametrize(
    ("name", "template"),
    [
        ("nemotron_v2", "<TOOLCALL>"),
        ("granite3", "<|start_of_role|> <|tool_call|>"),
        ("lfm2", "<|im_start|> <|tool_call_start|>"),
    ],
)
def test_the_template_asks_for_it(name: str, template: str) -> None:
    assert choose_formats(template).tools.name == name
