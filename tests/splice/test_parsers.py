"""What a client is sent for what a model sampled, case by case."""

from __future__ import annotations

import json

import pytest

from splice.parsers import (
    FORMATS,
    CallMade,
    ContentText,
    ParsedReply,
    ReasoningText,
    ReplyGrammar,
    choose_formats,
)
from splice.types import Finish, Message, ToolCall, id_array
from tests.splice.parser_vocabulary import QWEN_MARKERS, Vocabulary, tool

STOP = Finish("stop")
LENGTH = Finish("length")
TOOLS = (tool("get_weather", city={"type": "string"}), tool("echo", text={"type": "string"}))
QWEN = Vocabulary(QWEN_MARKERS)
HERMES = QWEN.grammar("hermes", stop_tokens=("<|im_end|>",))
CODER = QWEN.grammar("qwen3_coder", stop_tokens=("<|im_end|>",))
PARIS = '{"name": "get_weather", "arguments": {"city": "Paris"}}'
PARIS_CALL = f"<tool_call>\n{PARIS}\n</tool_call>"


def read(text: str, finish: Finish = STOP, grammar: ReplyGrammar = HERMES, *, thinking: bool = False) -> Message:
    return grammar.parse(QWEN.encode(text), finish, tools=TOOLS, reasoning_open=thinking).message


def made(message: Message) -> list[tuple[str, object]]:
    return [(call.name, json.loads(call.arguments)) for call in message.tool_calls]


PARIS_MADE = [("get_weather", {"city": "Paris"})]


def test_reasoning_content_and_call_come_apart_without_the_layout_around_them() -> None:
    message = read(f"<think>\nI need it.\n</think>\n\nLet me look.\n{PARIS_CALL}<|im_end|>")
    assert message.reasoning == "I need it."
    assert message.content == "Let me look."
    assert made(message) == PARIS_MADE


def test_text_without_markers_keeps_its_white_space() -> None:
    assert read("  indented\n\n").content == "  indented\n\n"


def test_white_space_next_to_a_marker_at_the_edge_is_layout_and_inside_is_text() -> None:
    assert read(f"before {PARIS_CALL} after").content == "before  after"
    assert read(f" \n{PARIS_CALL}\n").content == ""


def test_arguments_keep_the_spelling_of_the_model() -> None:
    spelled = '{"b":1e2,  "a": [1,2.50],\n "u": "\\u00e9é"}'
    message = read(f'<tool_call>{{"name": "echo", "arguments": {spelled}}}</tool_call>')
    assert message.tool_calls == (ToolCall("echo", spelled),)


def test_arguments_over_several_lines_are_read() -> None:
    message = read('<tool_call>\n{\n  "name": "echo",\n  "arguments": {\n    "text": "a\\nb"\n  }\n}\n</tool_call>')
    assert made(message) == [("echo", {"text": "a\nb"})]


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("{}", "{}"),
        ("null", "{}"),
        ('"{\\"text\\": 1}"', '{"text": 1}'),
    ],
    ids=["none", "null", "an object spelled as a string"],
)
def test_odd_but_clear_arguments_become_an_object(arguments: str, expected: str) -> None:
    message = read(f'<tool_call>{{"name": "echo", "arguments": {arguments}}}</tool_call>')
    assert message.tool_calls == (ToolCall("echo", expected),)


def test_a_call_without_arguments_has_none() -> None:
    assert read('<tool_call>{"name": "echo"}</tool_call>').tool_calls == (ToolCall("echo", "{}"),)


@pytest.mark.parametrize(
    "body",
    [
        "not json",
        '{"name": "echo", "arguments": {"text": "a}',
        '{"name": "echo", "arguments": {"text": "a" "b"}}',
        '{"name": "echo", "arguments": [1]}',
        '{"name": "echo", "arguments": "text"}',
        '{"name": "echo", "arguments": {"x": NaN}}',
        '{"name": "echo", "arguments": {"x": 1, "x": 2}}',
        '{"name": "echo", "arguments": {"text": "\\ud800"}, "name": 3}',
        '{"name": "\\ud800", "arguments": {}}',
        '{"name": 7, "arguments": {}}',
        '{"arguments": {}}',
        '{"name": "echo", "arguments": {}} and more',
        '[{"name": "echo"}]'[:-1],
        "[]",
        "",
    ],
)
def test_a_malformed_call_stays_in_the_content_as_it_was_sampled(body: str) -> None:
    text = f"See: <tool_call>\n{body}\n</tool_call> done"
    message = read(text)
    assert message.tool_calls == ()
    assert message.content == text


def test_a_malformed_call_does_not_take_the_next_one_with_it() -> None:
    broken = '<tool_call>\n{"name": "echo", "arguments": {"text": "open}\n</tool_call>'
    message = read(f"{broken}\n{PARIS_CALL}")
    assert message.content == broken
    assert made(message) == PARIS_MADE


def test_markers_inside_a_json_string_are_text() -> None:
    said = "Use <tool_call> and </tool_call>, not <think> or </think>."
    message = read(f'<tool_call>{{"name": "echo", "arguments": {{"text": "{said}"}}}}</tool_call>')
    assert made(message) == [("echo", {"text": said})]
    assert message.content == ""


def test_text_that_only_looks_like_a_marker_is_text() -> None:
    ids = QWEN.spell(f"<think>no</think>{PARIS_CALL}")
    message = HERMES.parse(ids, STOP, tools=TOOLS).message
    assert message == Message(role="assistant", content=f"<think>no</think>{PARIS_CALL}")


def test_where_the_vocabulary_has_no_such_tokens_markers_are_matched_as_text() -> None:
    plain = Vocabulary()
    ids = plain.encode(f"<think>yes</think>{PARIS_CALL}")
    message = plain.grammar("hermes").parse(ids, STOP, tools=TOOLS).message
    assert message.reasoning == "yes"
    assert made(message) == PARIS_MADE


def test_a_name_that_no_offered_tool_has_is_still_a_call() -> None:
    assert made(read('<tool_call>{"name": "unheard_of", "arguments": {}}</tool_call>')) == [("unheard_of", {})]


def test_without_tools_calls_are_left_to_the_client() -> None:
    message = HERMES.parse(QWEN.encode(f"<think>a</think>{PARIS_CALL}"), STOP).message
    assert (message.reasoning, message.content, message.tool_calls) == ("a", PARIS_CALL, ())


class TestReasoning:
    def test_open_from_the_prompt_it_ends_at_its_marker(self) -> None:
        message = read("hm\n</think>\n\nYes.", thinking=True)
        assert (message.reasoning, message.content) == ("hm", "Yes.")

    def test_never_closed_it_is_all_reasoning(self) -> None:
        assert read("<think>\nand then", LENGTH) == Message(role="assistant", reasoning="and then")

    def test_a_call_in_reasoning_that_is_never_closed_counts(self) -> None:
        message = read(f"I look it up.\n{PARIS_CALL}", thinking=True)
        assert (message.reasoning, message.content) == ("I look it up.", "")
        assert made(message) == PARIS_MADE

    def test_a_call_in_reasoning_that_is_closed_later_was_a_draft(self) -> None:
        message = read(f"Maybe {PARIS_CALL} or not.</think>No.", thinking=True)
        assert message.reasoning == f"Maybe {PARIS_CALL} or not."
        assert (message.content, message.tool_calls) == ("No.", ())

    def test_a_draft_is_no_call_that_would_hide_a_block_cut_off_later(self) -> None:
        message = read(f'Maybe {PARIS_CALL}.</think>\n\n<tool_call>{{"name": "ec', LENGTH, thinking=True)
        assert message.content == '<tool_call>{"name": "ec'

    def test_a_marker_in_reasoning_that_begins_no_call_is_reasoning(self) -> None:
        message = read(f"Calls begin with <tool_call> here.</think>{PARIS_CALL}", thinking=True)
        assert message.reasoning == "Calls begin with <tool_call> here."
        assert made(message) == PARIS_MADE

    def test_a_call_in_unclosed_reasoning_may_spell_the_closing_marker(self) -> None:
        message = read('a <tool_call>{"name": "echo", "arguments": {"text": "</think>"}}</tool_call>', thinking=True)
        assert message.reasoning == "a"
        assert made(message) == [("echo", {"text": "</think>"})]

    def test_a_marker_behind_the_answer_is_text(self) -> None:
        assert read("Write <think> and </think>.").content == "Write <think> and </think>."

    def test_a_prompt_that_ends_inside_it_is_recognised(self) -> None:
        assert HERMES.reasoning_open(QWEN.encode("<|im_start|>assistant\n<think>\n"))
        assert HERMES.reasoning_open(id_array(QWEN.encode("<|im_start|>assistant\n<think>")))
        assert not HERMES.reasoning_open(QWEN.encode("<|im_start|>assistant\n<think>\n\n</think>\n\n"))
        assert not HERMES.reasoning_open(QWEN.encode("<|im_start|>assistant\n"))
        assert not HERMES.reasoning_open(QWEN.spell("<think>\n"))
        assert not QWEN.grammar("hermes", "none").reasoning_open(QWEN.encode("<think>\n"))


class TestCutOff:
    def test_behind_a_whole_call_the_rest_of_one_more_is_left_out(self) -> None:
        message = read(f'{PARIS_CALL}\n<tool_call>\n{{"name": "echo", "argu', LENGTH)
        assert message.content == ""
        assert made(message) == PARIS_MADE

    def test_alone_it_stays_in_the_content(self) -> None:
        text = 'Now: <tool_call>\n{"name": "echo", "argu'
        assert read(text, LENGTH) == Message(role="assistant", content=text)

    def test_a_bare_marker_says_nothing(self) -> None:
        assert read("Now:\n<tool_call>\n", LENGTH).content == "Now:"

    def test_the_model_may_leave_out_the_closing_marker_but_not_the_end_of_the_json(self) -> None:
        assert made(read(f"<tool_call>\n{PARIS}<|im_end|>")) == PARIS_MADE
        assert read(f"<tool_call>\n{PARIS}", LENGTH).tool_calls == ()
        assert read(f"<tool_call>\n{PARIS[:-1]}").tool_calls == ()

    def test_an_empty_generation_is_an_empty_message(self) -> None:
        assert read("") == Message(role="assistant")
        assert read("<|im_end|>") == Message(role="assistant")


class TestTagged:
    def test_values_take_the_type_of_the_schema(self) -> None:
        tools = (
            tool(
                "f",
                n={"type": "integer"},
                x={"type": "number"},
                b={"type": "boolean"},
                s={"type": "string"},
                o={"type": "object"},
                l={"type": "array"},
                maybe={"anyOf": [{"type": "integer"}, {"type": "null"}]},
                either={"type": ["string", "integer"]},
                ref={"$ref": "#/properties/n"},
                level={"enum": ["1", "2"]},
                anything={},
            ),
        )
        given = {
            "n": "3",
            "x": "1e20",
            "b": "True",
            "s": "3",
            "o": '{"a": [1]}',
            "l": "['a', None]",
            "maybe": "null",
            "either": "02139",
            "ref": "4",
            "level": "1",
            "anything": "5",
            "undeclared": "6",
        }
        body = "".join(f"<parameter={key}>\n{value}\n</parameter>\n" for key, value in given.items())
        text = f"<tool_call>\n<function=f>\n{body}</function>\n</tool_call>"
        message = CODER.parse(QWEN.encode(text), STOP, tools=tools).message
        assert made(message) == [
            (
                "f",
                {
                    "n": 3,
                    "x": 1e20,
                    "b": True,
                    "s": "3",
                    "o": {"a": [1]},
                    "l": ["a", None],
                    "maybe": None,
                    "either": "02139",
                    "ref": 4,
                    "level": "1",
                    "anything": 5,
                    "undeclared": "6",
                },
            )
        ]

    def test_a_value_that_does_not_fit_its_type_stays_what_was_sampled(self) -> None:
        text = "<function=f><parameter=n>three</parameter></function>"
        message = CODER.parse(QWEN.encode(text), STOP, tools=(tool("f", n={"type": "integer"}),)).message
        assert made(message) == [("f", {"n": "three"})]

    @pytest.mark.parametrize("schema", [None, [], {"properties": []}, {"properties": {"n": {"anyOf": 3}}}])
    def test_a_schema_that_is_none_does_no_harm(self, schema: object) -> None:
        tools = ({"type": "function", "function": {"name": "f", "parameters": schema}},)
        text = "<function=f><parameter=n>3</parameter></function>"
        assert len(CODER.parse(QWEN.encode(text), STOP, tools=tools).message.tool_calls) == 1

    def test_one_newline_around_a_value_is_layout_and_the_rest_is_value(self) -> None:
        text = "<tool_call>\n<function=echo>\n<parameter=text>\n  a\n\n</parameter>\n</function>\n</tool_call>"
        assert made(read(text, grammar=CODER)) == [("echo", {"text": "  a\n"})]

    def test_a_call_cut_inside_a_value_is_no_call(self) -> None:
        text = "<tool_call>\n<function=echo>\n<parameter=text>\nrm -rf /"
        assert read(text, LENGTH, CODER) == Message(role="assistant", content=text)

    def test_prose_about_the_format_is_prose(self) -> None:
        text = "Write <function=echo> and then </function>."
        assert read(text, grammar=CODER) == Message(role="assistant", content=text)
        text = "<tool_call>\nI would call echo.\n</tool_call>"
        assert read(text, grammar=CODER) == Message(role="assistant", content=text)


class TestIdsOfTheModel:
    def test_kimi_writes_the_name_into_the_id(self) -> None:
        text = (
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.echo:3<|tool_call_argument_begin|>{}"
            "<|tool_call_end|><|tool_calls_section_end|>"
        )
        reply = QWEN.grammar("kimi_k2").parse(QWEN.encode(text), STOP, tools=TOOLS)
        assert reply == ParsedReply(
            Message(role="assistant", tool_calls=(ToolCall("echo", "{}"),)), ("functions.echo:3",)
        )

    def test_mistral_writes_it_beside_the_name_or_into_the_array(self) -> None:
        grammar = QWEN.grammar("mistral")
        text = '[TOOL_CALLS]echo[CALL_ID]abcdefghi[ARGS]{"text": "a"}'
        assert grammar.parse(QWEN.encode(text), STOP, tools=TOOLS).model_call_ids == ("abcdefghi",)
        text = '[TOOL_CALLS] [{"name": "echo", "arguments": {}, "id": "123456789"}, {"name": "echo", "arguments": {}}]'
        assert grammar.parse(QWEN.encode(text), STOP, tools=TOOLS).model_call_ids == ("123456789", "")


class TestStops:
    def test_a_stop_string_and_what_is_behind_it_is_cut(self) -> None:
        reply = HERMES.parse(QWEN.encode("one END two"), Finish("stop", "END"), stop_strings=("END", "never"))
        assert reply.message.content == "one "

    def test_a_stop_string_may_be_spelled_by_a_control_token(self) -> None:
        reply = HERMES.parse(QWEN.encode(PARIS_CALL), STOP, tools=TOOLS, stop_strings=("l_call>",))
        assert reply.message.content == "<too"

    def test_text_is_held_back_only_while_it_may_become_one(self) -> None:
        parser = HERMES.parser(stop_strings=("END",))
        assert parser.feed(QWEN.encode("an E")) == [ContentText("an")]
        assert parser.feed(QWEN.encode("ND?")) == []
        parser = HERMES.parser(stop_strings=("END",))
        assert parser.feed(QWEN.encode("an EN")) == [ContentText("an")]
        assert parser.feed(QWEN.encode("A")) == [ContentText(" ENA")]

    def test_stop_tokens_are_no_text_and_other_control_tokens_are(self) -> None:
        assert read("a<|im_start|>b<|im_end|>").content == "a<|im_start|>b"


class TestStreaming:
    def test_text_leaves_at_once_and_a_call_when_it_is_whole(self) -> None:
        parser = HERMES.parser(tools=TOOLS)
        assert parser.feed(QWEN.encode("<think>hm")) == [ReasoningText("hm")]
        assert parser.feed(QWEN.encode(" so</think>")) == [ReasoningText(" so")]
        assert parser.feed(QWEN.encode("\n\nHi")) == [ContentText("Hi")]
        assert parser.feed(QWEN.spell("<tool_")) == [ContentText("<tool_")]
        assert parser.feed(QWEN.encode(PARIS_CALL)[:-1]) == []
        assert parser.feed(QWEN.encode("</tool_call>")) == [
            CallMade(ToolCall("get_weather", '{"city": "Paris"}')),
        ]
        assert parser.finish(STOP) == []

    def test_a_block_leaves_as_content_as_soon_as_it_can_be_no_call(self) -> None:
        parser = HERMES.parser(tools=TOOLS)
        assert parser.feed(QWEN.encode("<tool_call>\n")) == []
        assert parser.feed(QWEN.encode("No")) == [ContentText("<tool_call>"), ContentText("\nNo")]
        parser = HERMES.parser(tools=TOOLS)
        assert parser.feed(QWEN.encode('<tool_call>{"name": "no JSON string has a\nline end'))[0] == (
            ContentText("<tool_call>")
        )

    def test_gpt_oss_streams_its_channels(self) -> None:
        parser = QWEN.grammar("harmony", "harmony").parser(tools=TOOLS)
        assert parser.feed(QWEN.encode("<|channel|>analysis<|message|>hm")) == [ReasoningText("hm")]
        assert parser.feed(QWEN.encode("<|end|>")) == []
        start = "<|start|>assistant<|channel|>commentary"
        assert parser.feed(QWEN.encode(f"{start}<|message|>Hi")) == [ContentText("Hi")]
        assert parser.feed(QWEN.encode(f"<|end|>{start} to=functions.echo <|constrain|>json<|message|>{{}}")) == []
        assert parser.finish(STOP) == [CallMade(ToolCall("echo", "{}"))]

    def test_no_broken_utf_8_leaves(self) -> None:
        grammar = ReplyGrammar(
            choose_formats("", tools="none", reasoning="none"),
            control_tokens={},
            decode=lambda ids: bytes(ids).decode(errors="replace"),
        )
        ids = list("aé🌸b".encode())
        parser = grammar.parser()
        texts = [event.text for number in ids for event in parser.feed([number]) if isinstance(event, ContentText)]
        assert texts == ["a", "é", "🌸", "b"]
        parser = grammar.parser()
        assert parser.feed(ids[:-2]) == [ContentText("aé")]
        assert parser.finish(LENGTH) == [ContentText("\ufffd")]


class TestChoosing:
    @pytest.mark.parametrize(
        ("template", "tools", "reasoning"),
        [
            ("{{ '<tool_call>' }} {% set x = content.split('</think>') %}", "hermes", "think"),
            ("<tool_call><function=x><parameter=y>", "qwen3_coder", "none"),
            ("<tool_call><arg_key><arg_value></think>", "glm", "think"),
            ("[TOOL_CALLS] [THINK]", "mistral", "mistral"),
            ("<|start|><|channel|>analysis<|message|>", "harmony", "harmony"),
            ("<|im_start|>", "none", "none"),
        ],
    )
    def test_the_template_says_which(self, template: str, tools: str, reasoning: str) -> None:
        formats = choose_formats(template)
        assert (formats.tools.name, formats.reasoning.name) == (tools, reasoning)

    def test_names_override_it_and_none_is_a_name(self) -> None:
        formats = choose_formats("<tool_call> </think>", tools="none", reasoning="mistral")
        assert (formats.tools.name, formats.reasoning.name) == ("none", "mistral")

    def test_an_unknown_name_is_refused_with_the_names_there_are(self) -> None:
        with pytest.raises(ValueError, match=r"hermess.*deepseek.*hermes"):
            choose_formats("", tools="hermess")
        with pytest.raises(ValueError, match=r"r1.*mistral.*think"):
            choose_formats("", reasoning="r1")

    def test_every_format_reads_plain_text(self) -> None:
        for name in FORMATS:
            assert read("Hello.", grammar=QWEN.grammar(name)).content == "Hello."
            assert read("Hello.", LENGTH, QWEN.grammar(name)).content == "Hello."
