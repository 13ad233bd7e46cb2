"""How a template writes reasoning: its markers, and how an unfinished block is closed."""

from __future__ import annotations

import re

import msgspec

from splice.boundary.dialogue import Rejected, Setting, Stage, common_start
from splice.types import Message, ToolCall

_USER = Message("user", "zqUserA")
_REASONING, _ANSWER = "zqReasoning", "zqAnswer"
_COMMON_MARKERS = ("<think>", "</think>")
_LONGEST_CLOSE = 64


class Thinking(msgspec.Struct, frozen=True):
    """Reasoning's markers, "" where the template shows none.

    `close` is the text that ends a block, white space included; "" where ending the turn ends it too.
    `field`: the template reads reasoning from a field of its own.
    """

    opening: str = ""
    closing: str = ""
    close: str = ""
    field: bool = False


def probe_thinking(stage: Stage, setting: Setting, terminator: str) -> Thinking:
    """Read the markers off a turn with reasoning, else off the template's own mention of the common ones."""
    setting = msgspec.structs.replace(setting, generation_prompt=False)
    before, found = _around(stage, setting)
    if found:
        if _ends_the_turn(stage, setting, found, terminator):
            return Thinking(field=True)
        closing = found.strip()
        opening = closing.replace("/", "", 1)
        controls = [match[0] for match in stage.lexicon.tokens(before)]
        if opening == closing:
            opening = controls[-1] if controls else ""
        return Thinking(opening, closing, found, field=True)
    if _COMMON_MARKERS[1] in stage.renderer.template:
        return Thinking(*_COMMON_MARKERS, "\n</think>\n\n")
    return Thinking()


def _ends_the_turn(stage: Stage, setting: Setting, between: str, terminator: str) -> bool:
    """Whether reasoning is a turn of its own (Harmony): then ending the turn ends it."""
    bare, prompted = (
        str(stage.text([_USER], msgspec.structs.replace(setting, generation_prompt=prompt))) for prompt in (False, True)
    )
    prompt = prompted[len(common_start(bare, prompted, stage.lexicon)) :]
    opener = next((match[0] for match in stage.lexicon.tokens(prompt)), "")
    return any(mark and mark in between for mark in (opener, terminator.strip()))


def _around(stage: Stage, setting: Setting) -> tuple[str, str]:
    """The text before reasoning, and that between it and the answer, or between it and a call."""
    said = Message("assistant", _ANSWER, reasoning=_REASONING)
    for earlier in ([_USER], [_USER, Message("assistant", "zqSaid"), _USER]):
        text = stage.text([*earlier, said], setting)
        if not isinstance(text, Rejected) and _REASONING in text and _ANSWER in text:
            before, _, rest = text.partition(_REASONING)
            return before, _short(rest.partition(_ANSWER)[0])
    calls = (ToolCall(_ANSWER),)
    thoughtful, silent = (
        stage.text([_USER, Message("assistant", reasoning=reasoning, tool_calls=calls)], setting)
        for reasoning in (_REASONING, "")
    )
    if isinstance(thoughtful, Rejected) or isinstance(silent, Rejected) or _REASONING not in thoughtful:
        return "", ""
    before, _, rest = thoughtful.partition(_REASONING)
    # Where a turn without reasoning has an empty block, the common marker tells where it ends.
    if marked := re.match(rf"\s*{re.escape(_COMMON_MARKERS[1])}", rest):
        return before, marked[0]
    return before, _short(_without_shared_end(rest.partition(_ANSWER)[0], silent.partition(_ANSWER)[0]))


def _without_shared_end(text: str, other: str) -> str:
    """The text without what the other ends with too: there the call begins."""
    length = 0
    while length < min(len(text), len(other)) and text[-1 - length] == other[-1 - length]:
        length += 1
    return text[: len(text) - length]


def _short(between: str) -> str:
    return between if 0 < len(between) <= _LONGEST_CLOSE else ""
