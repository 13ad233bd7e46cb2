"""Short made-up dialogues, and what a template writes after their assistant turn.

The assistant turn carries a sentinel, as its content or as the value of each call's argument. What follows the
sentinel in the rendered text is all that a fragment needs to know, and does not depend on how long the real
conversation is.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from typing import Any, Literal

import msgspec

from splice.content import NOTHING_SPELLED, Lexicon, Mask, masked
from splice.errors import TemplateRejected
from splice.renderer import Renderer
from splice.shapes import Shape, template_messages
from splice.types import Message, ToolCall

Anchor = Literal["content", "argument"]

ARGUMENT = "zqkey"
_SENTINEL = "zqSentinel"
_STUB_TEXT = "zqEarlier"


class Rejected(msgspec.Struct, frozen=True):
    """The template raised; `words` are its own."""

    words: str


class Setting(msgspec.Struct, frozen=True):
    """What a dialogue is rendered with, beside its messages."""

    shape: Shape = Shape()
    tools: tuple[Mapping[str, Any], ...] = ()
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)
    clock: float = 0.0
    generation_prompt: bool = True
    first_call: int = 0


class Stage:
    """Renders dialogues through one model's template, content masked unless told otherwise."""

    def __init__(self, renderer: Renderer, lexicon: Lexicon, *, mask_content: bool) -> None:
        self.renderer = renderer
        self.lexicon = lexicon
        self._mask_content = mask_content

    def bounded(self, seconds: float) -> Stage:
        """The same stage, whose renderings may together take so much CPU time."""
        return Stage(self.renderer.bounded(seconds), self.lexicon, mask_content=self._mask_content)

    def render(self, messages: Sequence[Message], setting: Setting) -> tuple[str, Mask]:
        """The dialogue's text and what its placeholders mean. Raises TemplateRejected."""
        fields = template_messages(messages, setting.shape, first_call=setting.first_call)
        values: list[Any] = [fields, list(setting.tools)]
        mask = NOTHING_SPELLED
        if self._mask_content:
            values, mask = masked(values, self.lexicon)
        text = self.renderer.render(
            values[0],
            tools=values[1],
            kwargs=setting.kwargs,
            add_generation_prompt=setting.generation_prompt,
            clock=setting.clock,
        )
        mask.check(text)
        return text, mask

    def text(self, messages: Sequence[Message], setting: Setting) -> str | Rejected:
        """The dialogue's text, or why there is none. Raises TemplateRejected where it ran away."""
        try:
            return self.render(messages, setting)[0]
        except TemplateRejected as rejected:
            if rejected.runaway:
                raise
            return Rejected(rejected.words)

    def tail(self, messages: Sequence[Message], setting: Setting) -> str | Rejected:
        """What stands after the sentinel, or why nothing does."""
        text = self.text(messages, setting)
        if isinstance(text, Rejected):
            return text
        tail = after_sentinel(text)
        return Rejected("it leaves out the assistant's turn") if tail is None else tail


def sentinel_turn(calls: Sequence[ToolCall], anchor: Anchor, salt: str = "") -> Message:
    """An assistant message whose text, or whose last call's argument, is the sentinel."""
    if anchor == "content" or not calls:
        bare = tuple(msgspec.structs.replace(call, arguments="{}") for call in calls)
        return Message("assistant", _mark(0, salt), tool_calls=bare)
    marked = tuple(
        msgspec.structs.replace(call, arguments=json.dumps({ARGUMENT: _mark(number, salt)}))
        for number, call in enumerate(calls)
    )
    return Message("assistant", tool_calls=marked)


def after_sentinel(text: str, salt: str = "") -> str | None:
    """What stands after the last sentinel; some templates render only the first of several calls."""
    span = sentinel_span(text, salt)
    return None if span is None else text[span[1] :]


def sentinel_span(text: str, salt: str = "") -> tuple[int, int] | None:
    """Where the last sentinel stands."""
    marks = list(re.finditer(rf"{_SENTINEL}{salt}\d+z", text))
    return marks[-1].span() if marks else None


def salt_for(messages: Sequence[Message]) -> str:
    """Letters that tell our sentinel from a text that happens to hold one."""
    salt = ""
    while any(_SENTINEL + salt in message.content for message in messages):
        salt += "q"
    return salt


def outline(messages: Sequence[Message]) -> list[Message]:
    """The conversation with its roles, calls and system texts, and nothing of its length.

    A round is what goes on from a user's message to the next. Of rounds of one shape in the conversation's middle, one
    or two are kept, as many as leave odd and even counts as they were: what templates read off a history is who spoke
    at its ends, whether something occurred, and whether roles alternate.
    """
    rounds = _rounds(messages)
    first, middle, last = rounds[:2], rounds[2:-2], rounds[2:][-2:]
    counts = Counter(_shape(a_round) for a_round in middle)
    kept: Counter[Hashable] = Counter()
    chosen: list[list[Message]] = []
    for a_round in middle:
        shape = _shape(a_round)
        kept[shape] += 1
        if kept[shape] <= 2 - counts[shape] % 2:
            chosen.append(a_round)
    return [_outlined(message) for a_round in (*first, *chosen, *last) for message in a_round]


def _rounds(messages: Sequence[Message]) -> list[list[Message]]:
    """The conversation cut before each user message that follows another role's; what comes first is a round too."""
    rounds: list[list[Message]] = [[]]
    for message in messages:
        if message.role == "user" and rounds[-1] and rounds[-1][-1].role != "user":
            rounds.append([])
        rounds[-1].append(message)
    return rounds


def _shape(a_round: Sequence[Message]) -> Hashable:
    """Equal for rounds that differ in nothing but what was said. System texts count: they may be hoisted."""
    return tuple((m.role, len(m.tool_calls), m.content if m.role in {"system", "developer"} else "") for m in a_round)


def _outlined(message: Message) -> Message:
    if message.role in {"system", "developer"}:
        return message
    calls = tuple(msgspec.structs.replace(call, arguments="{}") for call in message.tool_calls)
    content = "" if calls else _STUB_TEXT
    return msgspec.structs.replace(message, content=content, reasoning="", tool_calls=calls)


def _mark(number: int, salt: str) -> str:
    return f"{_SENTINEL}{salt}{number}z"


def marked(messages: Sequence[Message]) -> list[Message]:
    """The messages with a text each that cannot be mistaken for another's."""
    return [
        msgspec.structs.replace(message, content=f"zqNew{number}z", reasoning="") if message.content else message
        for number, message in enumerate(messages)
    ]


def unsung(stage: Stage, dialogue: Sequence[Message], appended: int, setting: Setting) -> str:
    """Why the dialogue's last `appended` messages cannot follow its sentinel; "" where each comes out in place.

    Results of tools may come in another order than they were given: some templates sort them by call.
    """
    tail = stage.tail(dialogue, setting)
    if isinstance(tail, Rejected):
        return f"the template refuses: {tail.words}"
    position = 0
    for message in dialogue[len(dialogue) - appended :]:
        found = tail.find(message.content, 0 if message.role == "tool" else position)
        if found < 0:
            elsewhere = message.content in str(stage.text(dialogue, setting))
            return f"the template {'moves' if elsewhere else 'leaves out'} a {message.role} message that comes late"
        position = max(position, found)
    return ""


def common_start(left: str, right: str, lexicon: Lexicon) -> str:
    """The longest common beginning that cuts no control token of either text apart."""
    length = 0
    for a, b in zip(left, right, strict=False):
        if a != b:
            break
        length += 1
    for text in (left, right):
        for match in lexicon.tokens(text):
            if match.start() < length < match.end():
                length = match.start()
    return left[:length]
