"""The formats as rows of data, and which of them a chat template asks for.

A row's markers are written as the model spells them; `alphabet.py` turns them into control tokens where the
vocabulary has such tokens, and explains the `{holes}` of the templates.

`sections` are wrappers that stand around calls and are not shown. A call begins at one of `openers`; without any
(`bare`) it begins at the reply's first character, and then only counts when its name is one of the offered tools,
since nothing else tells it from an answer that happens to look like one.
"""

# ruff: noqa: RUF001 - DeepSeek spells its markers with a full-width bar

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Literal, TypeVar

import msgspec


class CallFormat(msgspec.Struct, frozen=True, kw_only=True):
    """What every format for tool calls has, whichever engine reads it."""

    name: str
    signature: tuple[str, ...] = ()  # all of these stand in the chat template of a model that speaks the format
    sections: tuple[tuple[str, str], ...] = ()
    openers: tuple[str, ...] = ()
    bare: str = ""  # the first character of a call that no marker announces
    layout: tuple[str, ...] = ()  # markers that are neither calls nor text

    @property
    def spellings(self) -> tuple[str, ...]:
        """Every text of the row that may spell a control token."""
        found: list[str] = []
        for field in self.__struct_fields__:
            value = getattr(self, field)
            if isinstance(value, tuple):
                found += [text for item in value for text in (item if isinstance(item, tuple) else (item,))]
        return tuple(found)


class JsonCalls(CallFormat, frozen=True, kw_only=True):
    """Calls whose arguments are JSON. `heads` lead up to the JSON, `closes` follow it."""

    heads: tuple[str, ...]
    closes: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ("arguments", "parameters")
    separator: str = ""  # stands between calls


class TaggedCalls(CallFormat, frozen=True, kw_only=True):
    """Calls whose arguments are tagged values.

    A value ends at the first of `value_ends`. Some ask for what comes next, so that a closing tag inside a value is
    text; some are only that, and forgive a forgotten tag. `last_value_ends` do so at the end of the reply alone.
    `typing` tells where a value's type is written.
    """

    heads: tuple[str, ...]
    empty: tuple[str, ...] = ()  # whole calls without arguments
    parameters: tuple[str, ...]
    value_ends: tuple[str, ...]
    last_value_ends: tuple[str, ...] = ()
    closes: tuple[str, ...]
    typing: Literal["schema", "string", "type"] = "schema"
    newline_framed: bool = False  # one newline before and after a value is layout
    escaped: bool = False  # keys are written with XML entities


class NotatedCalls(CallFormat, frozen=True, kw_only=True):
    """Calls in a notation of their own, read by code of their own."""

    notation: Literal["gemma", "python", "harmony"]
    quote: tuple[str, ...] = ()
    heads: tuple[str, ...] = ()
    closes: tuple[str, ...] = ()


class ReasoningFormat(msgspec.Struct, frozen=True, kw_only=True):
    """How reasoning is marked, at the start of a reply. `closes` end it too, where `close` was forgotten."""

    name: str
    open: str = ""
    close: str = ""
    closes: tuple[str, ...] = ()
    signature: tuple[str, ...] = ()


class Formats(msgspec.Struct, frozen=True):
    """The two formats that a model's replies are read with."""

    tools: CallFormat
    reasoning: ReasoningFormat


NONE = CallFormat(name="none")

# In the order in which templates are tried: a row whose signature contains another row's comes first.
_CALL_ROWS: tuple[CallFormat, ...] = (
    NotatedCalls(
        name="harmony",
        signature=("<|channel|>", "<|message|>", "<|start|>"),
        notation="harmony",
        layout=("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>", "<|call|>", "<|return|>"),
    ),
    TaggedCalls(
        name="kimi_k3",
        signature=("<|open|>", "<|close|>", "<|sep|>"),
        sections=(("<|open|>tools<|sep|>", "<|close|>tools<|sep|>"),),
        openers=("<|open|>call ",),
        layout=("<|open|>response<|sep|>", "<|close|>response<|sep|>", "<|close|>message<|sep|>"),
        heads=('<|open|>call tool="{name}" index="{index}"<|sep|>', '<|open|>call tool="{name}"<|sep|>'),
        parameters=('{ws}<|open|>argument key="{key}" type="{type}"<|sep|>',),
        value_ends=("<|close|>argument<|sep|>",),
        closes=("{ws}<|close|>call<|sep|>",),
        typing="type",
        escaped=True,
    ),
    JsonCalls(
        name="kimi_k2",
        signature=("<|tool_calls_section_begin|>", "<|tool_call_argument_begin|>"),
        sections=(("<|tool_calls_section_begin|>", "<|tool_calls_section_end|>"),),
        openers=("<|tool_call_begin|>",),
        heads=("<|tool_call_begin|>{ws}{id}{ws}<|tool_call_argument_begin|>{ws}{json}",),
        closes=("{ws}<|tool_call_end|>",),
    ),
    TaggedCalls(
        name="deepseek_dsml",
        signature=("｜DSML｜",),
        sections=(
            ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
            ("<｜DSML｜tool_calls>", "</｜DSML｜tool_calls>"),
            ("<｜DSML｜ calls>", "</｜DSML｜ calls>"),
        ),
        openers=("<｜DSML｜invoke ", "<｜DSML｜ invoke "),
        heads=('<｜DSML｜{ws}invoke name="{name}">',),
        empty=('<｜DSML｜{ws}invoke name="{name}"{ws}/>',),
        parameters=('{ws}<｜DSML｜{ws}parameter name="{key}" string="{type}">',),
        value_ends=("</｜DSML｜parameter>", "</｜DSML｜ parameter>"),
        closes=("{ws}</｜DSML｜{ws}invoke>",),
        typing="string",
    ),
    JsonCalls(
        name="deepseek",
        signature=("<｜tool▁call▁begin｜>", "<｜tool▁sep｜>"),
        sections=(("<｜tool▁calls▁begin｜>", "<｜tool▁calls▁end｜>"),),
        openers=("<｜tool▁call▁begin｜>",),
        heads=(
            "<｜tool▁call▁begin｜>{ws}function<｜tool▁sep｜>{name}{ws}```json{ws}{json}",
            "<｜tool▁call▁begin｜>{ws}{name}{ws}<｜tool▁sep｜>{ws}{json}",
        ),
        closes=("{ws}<｜tool▁call▁end｜>", "{ws}```{ws}<｜tool▁call▁end｜>"),
    ),
    NotatedCalls(
        name="gemma4",
        signature=("<|tool_call>", "call:"),
        openers=("<|tool_call>",),
        notation="gemma",
        quote=('<|"|>',),
        heads=("<|tool_call>call:{name}{json}",),
        closes=("<tool_call|>",),
    ),
    TaggedCalls(
        name="glm",
        signature=("<arg_key>", "<arg_value>"),
        openers=("<tool_call>",),
        heads=("<tool_call>{ws}{name}{ws}{tag}",),
        parameters=("{ws}<arg_key>{key}</arg_key>{ws}<arg_value>",),
        value_ends=("</arg_value>", "{then}</tool_call>{ws}<tool_call>"),
        last_value_ends=("{then}</tool_call>{ws}{end}",),
        closes=("{ws}</tool_call>",),
    ),
    TaggedCalls(
        name="qwen3_coder",
        signature=("<function=", "<parameter="),
        sections=(("<tool_call>", "</tool_call>"),),
        openers=("<function=",),
        heads=("<function={name}>",),
        parameters=("{ws}<parameter={key}>",),
        value_ends=(
            "</parameter>{then}{ws}<parameter={key}>",
            "</parameter>{then}{ws}</function>",
            "</parameter>{then}{ws}</tool_call>",
            "{then}{line}<parameter={key}>",
            "{then}{line}</function>{ws}</tool_call>",
        ),
        closes=("{ws}</function>", "{ws}</tool_call>"),
        newline_framed=True,
    ),
    TaggedCalls(
        name="minimax_m2",
        signature=("<minimax:tool_call>",),
        sections=(("<minimax:tool_call>", "</minimax:tool_call>"),),
        openers=("<invoke ",),
        heads=('<invoke name="{name}">', "<invoke name={name}>"),
        parameters=('{ws}<parameter name="{key}">', "{ws}<parameter name={key}>"),
        value_ends=("</parameter>",),
        closes=("{ws}</invoke>",),
    ),
    JsonCalls(
        name="mistral",
        signature=("[TOOL_CALLS]",),
        openers=("[TOOL_CALLS]",),
        heads=(
            "[TOOL_CALLS]{ws}{json}",
            "[TOOL_CALLS]{ws}{name}{ws}[CALL_ID]{ws}{id}{ws}[ARGS]{ws}{json}",
            "[TOOL_CALLS]{ws}{name}{ws}[ARGS]{ws}{json}",
        ),
    ),
    JsonCalls(
        name="nemotron_v2",
        signature=("<TOOLCALL>",),
        openers=("<TOOLCALL>",),
        heads=("<TOOLCALL>{ws}{json}",),
        closes=("{ws}</TOOLCALL>",),
    ),
    JsonCalls(
        name="granite3",
        signature=("<|tool_call|>", "<|start_of_role|>"),
        openers=("<|tool_call|>",),
        heads=("<|tool_call|>{ws}{json}",),
    ),
    NotatedCalls(
        name="lfm2",
        signature=("<|tool_call_start|>", "<|im_start|>"),
        sections=(("<|tool_call_start|>", "<|tool_call_end|>"),),
        bare="[",
        notation="python",
    ),
    JsonCalls(
        name="hermes",
        signature=("<tool_call>",),
        openers=("<tool_call>",),
        heads=("<tool_call>{ws}{json}",),
        closes=("{ws}</tool_call>",),
    ),
    NotatedCalls(
        name="llama4_pythonic",
        signature=("<|header_start|>",),
        sections=(("<|python_start|>", "<|python_end|>"),),
        bare="[",
        notation="python",
    ),
    JsonCalls(
        name="llama3_json",
        signature=("<|start_header_id|>", '"parameters"'),
        sections=(("<|python_tag|>", ""),),
        bare="{",
        heads=("{json}",),
        separator=";",
    ),
)

_REASONING_ROWS: tuple[ReasoningFormat, ...] = (
    ReasoningFormat(name="harmony", signature=("<|channel|>", "<|message|>", "<|start|>")),
    ReasoningFormat(
        name="kimi_k3",
        open="<|open|>think<|sep|>",
        close="<|close|>think<|sep|>",
        closes=("<|open|>response<|sep|>",),
        signature=("<|open|>", "<|sep|>"),
    ),
    ReasoningFormat(name="gemma4", open="<|channel>thought", close="<channel|>", signature=("<|channel>",)),
    ReasoningFormat(name="mistral", open="[THINK]", close="[/THINK]", signature=("[THINK]",)),
    ReasoningFormat(name="think", open="<think>", close="</think>", signature=("</think>",)),
)

FORMATS: Mapping[str, CallFormat] = MappingProxyType({row.name: row for row in (NONE, *_CALL_ROWS)})
REASONING: Mapping[str, ReasoningFormat] = MappingProxyType(
    {row.name: row for row in (ReasoningFormat(name="none"), *_REASONING_ROWS)}
)


Row = TypeVar("Row", CallFormat, ReasoningFormat)


def choose_formats(template: str, *, tools: str = "", reasoning: str = "") -> Formats:
    """The formats that a chat template speaks, or those named.

    Raises ValueError, with the names there are, for a name that is none of them.
    """
    chosen_tools = _named(FORMATS, tools, "tool parser") if tools else _first(_CALL_ROWS, template) or NONE
    if reasoning:
        return Formats(chosen_tools, _named(REASONING, reasoning, "reasoning parser"))
    return Formats(chosen_tools, _first(_REASONING_ROWS, template) or REASONING["none"])


def _named(rows: Mapping[str, Row], name: str, what: str) -> Row:
    if name not in rows:
        raise ValueError(f"no {what} is called {name!r}; there are: {', '.join(sorted(rows))}")
    return rows[name]


def _first(rows: Sequence[Row], template: str) -> Row | None:
    return next((row for row in rows if all(mark in template for mark in row.signature)), None)
