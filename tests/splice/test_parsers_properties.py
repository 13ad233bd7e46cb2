"""However a reply is cut into pieces it is the same reply, and never more work than its length."""

from __future__ import annotations

import json
import re
import time
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splice.parsers import FORMATS, CallFormat, Event, Formats, ReplyGrammar, assemble, choose_formats
from splice.types import Finish
from tests.splice.parser_vocabulary import QWEN_MARKERS, Vocabulary, tool

TOOLS = (tool("f", a={"type": "integer"}, s={"type": "string"}, o={"type": "object"}), tool("g"))
REASONING = {"harmony": "harmony", "kimi_k3": "kimi_k3", "gemma4": "gemma4", "mistral": "mistral"}
CALLABLE = [name for name in FORMATS if name != "none"]
FILLED = {
    "ws": "\n",
    "line": "\n",
    "name": "f",
    "id": "functions.f:1",
    "key": "a",
    "type": "true",
    "index": "1",
}
WORDS = (
    *'{}[]":,\\;()<>= \n',
    *("text", "é", "🌸", "f", "g", "a", "s", "1", "<tool", "</", "assistant", " to=functions.f", "analysis", "final"),
    *('{"name": "f", "arguments": {"a": 1}}', '{"a": 1}', '{"s": "x', '"}', "[f(a=1)]", "```json\n", "\n```"),
)


def formats_named(name: str) -> Formats:
    return choose_formats("", tools=name, reasoning=REASONING.get(name, "think"))


def pieces_of(row: CallFormat, formats: Formats) -> list[str]:
    """The markers of a format, its templates filled in, and words that calls are made of."""
    templates = [
        text
        for field in ("heads", "empty", "parameters", "value_ends", "closes", "quote")
        for text in getattr(row, field, ())
    ]
    filled = [re.sub(r"\{(\w+)\}", lambda hole: FILLED.get(hole[1], ""), text) for text in templates]
    sections = [mark for section in row.sections for mark in section]
    reasoning = formats.reasoning
    marks = [*row.openers, *sections, *row.layout, reasoning.open, reasoning.close, *reasoning.closes]
    return [piece for piece in (*marks, *marks, *filled, *filled, *WORDS) if piece]


@st.composite
def replies(draw: st.DrawFn) -> dict[str, Any]:
    name = draw(st.sampled_from(CALLABLE))
    formats = formats_named(name)
    pieces = pieces_of(formats.tools, formats)
    text = "".join(draw(st.lists(st.sampled_from(pieces), max_size=30)))
    tokens = sorted(set(re.findall(r"<[^<>]+>|\[/?[A-Z_]+\]", " ".join(pieces))))
    vocabulary = Vocabulary(draw(st.sampled_from(((), tuple(tokens)))))
    return {
        "grammar": vocabulary.grammar(name, REASONING.get(name, "think")),
        "ids": vocabulary.encode(text),
        "finish": Finish(draw(st.sampled_from(("stop", "length")))),
        "how": {
            "tools": draw(st.sampled_from((TOOLS, ()))),
            "reasoning_open": draw(st.booleans()),
            "stop_strings": draw(st.sampled_from(((), ("text",), ("</", "é")))),
        },
    }


@settings(max_examples=400, deadline=None)
@given(replies(), st.data())
def test_any_cut_gives_the_same_reply(reply: dict[str, Any], data: st.DataObject) -> None:
    grammar: ReplyGrammar = reply["grammar"]
    ids, finish, how = reply["ids"], reply["finish"], reply["how"]
    whole = grammar.parse(ids, finish, **how)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(ids)), max_size=10)))
    for chunks in (
        [ids[start:end] for start, end in zip([0, *cuts], [*cuts, len(ids)], strict=True)],
        [[number] for number in ids],
    ):
        parser = grammar.parser(**how)
        events: list[Event] = [event for chunk in chunks for event in parser.feed(chunk)]
        assert assemble(events + parser.finish(finish)) == whole
    for call in whole.message.tool_calls:
        assert isinstance(json.loads(call.arguments), dict)
    (whole.message.content + whole.message.reasoning).encode()


@settings(max_examples=200, deadline=None)
@given(st.lists(st.integers(0, 255), max_size=60), st.data())
def test_any_cut_of_any_bytes_gives_the_same_text(ids: list[int], data: st.DataObject) -> None:
    grammar = ReplyGrammar(
        choose_formats("", tools="none", reasoning="none"),
        control_tokens={"<end>": 256},
        decode=lambda numbers: b"".join(b"<end>" if n == 256 else bytes([n]) for n in numbers).decode(errors="replace"),
    )
    cut = data.draw(st.integers(0, len(ids)))
    parser = grammar.parser()
    events = [*parser.feed(ids[:cut]), *parser.feed(ids[cut:]), *parser.finish(Finish("stop"))]
    assert assemble(events).message.content == bytes(ids).decode(errors="replace")


def slow_hermes(text: str) -> tuple[str, list[tuple[str, str]]]:
    """The obvious reader: at each opening marker, try every closing marker until a whole call lies between."""
    content, calls, at = "", [], 0
    while (start := text.find("<tool_call>", at)) >= 0:
        content += text[at:start]
        body = start + len("<tool_call>")
        ends = [end.start() for end in re.finditer("</tool_call>", text) if end.start() >= body]
        found = next((end for end in ends if slow_call(text[body:end]) is not None), None)
        if found is None:
            content, at = content + "<tool_call>", body
            continue
        calls.append(slow_call(text[body:found]) or ("", ""))
        at = found + len("</tool_call>")
    return content + text[at:], calls


def slow_call(body: str) -> tuple[str, str] | None:
    try:
        call = json.loads(body)
    except ValueError:
        return None
    if not isinstance(call, dict) or not isinstance(call.get("name"), str) or not call["name"]:
        return None
    arguments = call.get("arguments", {})
    return (call["name"], json.dumps(arguments, sort_keys=True)) if isinstance(arguments, dict) else None


@st.composite
def hermes_texts(draw: st.DrawFn) -> str:
    value = st.recursive(
        st.none() | st.booleans() | st.integers() | st.text('ab"\\{}<>/é\n') | st.sampled_from(QWEN_MARKERS[2:4]),
        lambda inner: st.lists(inner, max_size=2) | st.dictionaries(st.text("ab"), inner, max_size=2),
        max_leaves=4,
    )
    name = st.sampled_from(("f", "g", ""))
    call = st.fixed_dictionaries({"name": name}, optional={"arguments": st.dictionaries(st.text("ab"), value)})
    bodies = call.map(json.dumps) | call.map(lambda made: json.dumps(made, indent=1, ensure_ascii=False))
    blocks = bodies.map(lambda body: f"<tool_call>\n{body}\n</tool_call>")
    noise = st.sampled_from(("<tool_call>", "</tool_call>", "text", "{", '"', "}", "\n", '{"name": "f"}'))
    return "".join(draw(st.lists(blocks | noise, max_size=8))) + "."


@settings(max_examples=300, deadline=None)
@given(hermes_texts())
def test_hermes_reads_what_the_obvious_slow_reader_reads(text: str) -> None:
    vocabulary = Vocabulary(QWEN_MARKERS)
    message = vocabulary.grammar("hermes").parse(vocabulary.encode(text), Finish("stop"), tools=TOOLS).message
    content, calls = slow_hermes(text)
    assert [(call.name, json.dumps(json.loads(call.arguments), sort_keys=True)) for call in message.tool_calls] == calls
    assert message.content.strip() == content.strip()


LOOPS = {
    "prose": "The quick brown fox, and so on. ",
    "openers": "<tool_call>",
    "open strings": '<tool_call>{"a": "',
    "closers in a string": '</tool_call> \\"',
    "values": "<function=f><parameter=a>",
}


@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("name", ["hermes", "qwen3_coder"])
def test_a_looping_model_costs_no_more_than_its_length(name: str, loop: str) -> None:
    vocabulary = Vocabulary(QWEN_MARKERS)
    grammar = vocabulary.grammar(name)
    start = '<tool_call>{"name": "f", "arguments": {"s": "' if loop == "closers in a string" else ""

    def seconds(characters: int) -> float:
        ids = vocabulary.encode(start + LOOPS[loop] * (characters // len(LOOPS[loop])))
        parser = grammar.parser(tools=TOOLS)
        began = time.process_time()
        for number in ids:
            parser.feed([number])
        parser.finish(Finish("length"))
        return time.process_time() - began

    seconds(1_000)
    small, large = min(seconds(2_000) for _ in range(3)), seconds(32_000)
    assert large < 16 * 4 * small + 0.05
