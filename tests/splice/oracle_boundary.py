"""The obvious slow way to know a fragment: render the whole conversation, and cut it at a unique marker.

Nothing here probes. The parent's text or argument ends with MARKER, every new message ends with a marker of
its own; what the model sampled is taken to end with the first of its stop tokens after MARKER.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec

from splice.boundary import Splicer
from splice.errors import TemplateRejected
from splice.renderer import Renderer
from splice.shapes import Shape, template_messages
from splice.types import Message, ToolCall

MARKER = "MARKPARENT"
TOOL: Mapping[str, Any] = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Tells the weather.",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string", "description": "Where."}},
            "required": ["city"],
        },
    },
}


def user(text: str) -> Message:
    return Message("user", text)


def said(text: str) -> Message:
    return Message("assistant", text)


def called(count: int, city: str, stem: str = "abcdefg") -> Message:
    arguments = json.dumps({"city": city})
    return Message(
        "assistant", tool_calls=tuple(ToolCall("get_weather", arguments, f"{stem}{n:02d}") for n in range(count))
    )


def result(text: str, number: int = 0, stem: str = "abcdefg") -> Message:
    return Message("tool", text, tool_call_id=f"{stem}{number:02d}")


PARENT = said(f"Here is what I know. {MARKER}")
CASES: Mapping[str, tuple[Message, tuple[Message, ...]]] = {
    "user": (PARENT, (user("What about Lyon? NEWA"),)),
    "users": (PARENT, (user("What about Lyon? NEWA"), user("And Nice? NEWB"))),
    "tool": (called(1, MARKER), (result("sunny, 21 NEWA"),)),
    "tools": (called(2, MARKER), (result("sunny, 21 NEWA"), result("rain NEWB", 1))),
    "tools_reversed": (called(2, MARKER), (result("sunny, 21 NEWA", 1), result("rain NEWB"))),
    "tool_then_system": (called(1, MARKER), (result("sunny, 21 NEWA"), Message("system", "Remember. NEWB"))),
    "tool_then_user": (called(1, MARKER), (result("sunny, 21 NEWA"), user("Also NEWB"))),
    "system": (PARENT, (Message("system", "Remember. NEWB"), user("Go on. NEWA"))),
    "developer": (PARENT, (Message("developer", "Remember. NEWB"), user("Go on. NEWA"))),
    "client_assistant": (PARENT, (user("Go on. NEWA"), said("The client wrote this. NEWC"), user("Now NEWB"))),
}
_CYCLE = (user("Hi"), called(1, "Oslo", "zzzzzzz"), result("cold", stem="zzzzzzz"))
HISTORIES: Mapping[str, tuple[Message, ...]] = {
    "short": (user("Weather in Paris?"),),
    "long": (user("Hi"), said("Hello."), user("Tell me more."), said("Sure."), user("Weather?")),
    "system": (Message("system", "Be brief."), user("Hi"), said("Hello."), user("Weather?")),
    "after a cycle": (*_CYCLE, said("Cold."), user("Weather?")),
    "in a cycle": (Message("system", "Be brief."), *_CYCLE),
}


@dataclass(frozen=True)
class Truth:
    """The whole conversation's text; where the parent's own text ends, and where its stop token does."""

    text: str
    marked: int
    closed: int  # where the model's own text ends, as far as that can be told without a stop token
    stopped: int

    @property
    def opened(self) -> int:
        """Where the stop token begins; where there is none, the turn's end."""
        return self.stopped - self.stop_length

    stop_length: int = 0


def truth(  # noqa: PLR0917 - the whole of a conversation
    renderer: Renderer,
    shape: Shape,
    stops: Sequence[str],
    history: Sequence[Message],
    parent: Message,
    new: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any] = {},
) -> Truth | None:
    """What the template itself makes of it; None where it raises, or loses or moves a message."""
    text = own_rendering(renderer, shape, [*history, parent, *new], tools, kwargs, prompt=True)
    if text and MARKER not in text and parent.tool_calls:
        # The template leaves out calls: mark the same turn in its content.
        said_too = msgspec.structs.replace(parent, content=PARENT.content)
        text = own_rendering(renderer, shape, [*history, said_too, *new], tools, kwargs, prompt=True)
    if MARKER not in text:
        return None
    marked = text.rindex(MARKER) + len(MARKER)
    ends = [text.find(message.content.split()[-1], marked) for message in new]
    if min(ends) < 0:
        return None
    between = text[marked : min(ends)]
    closed = marked + _own_text(between, parent)
    found = [(between.index(stop) + len(stop), len(stop)) for stop in stops if stop in between]
    if not found:
        return Truth(text, marked, closed, closed)
    end, length = min(found)
    return Truth(text, marked, closed, marked + end, length)


def _own_text(between: str, parent: Message) -> int:
    """How far the model's own text goes on after the marker: it closes the call that it wrote."""
    if not parent.tool_calls:
        return 0
    # Two templates end a calling turn with nothing that their models stop on.
    for closing in ('"\n        }\n    }\n]```\n', '"}\n```'):
        if between.startswith(closing):
            return len(closing)
    return 0


def own_rendering(
    renderer: Renderer,
    shape: Shape,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]],
    kwargs: Mapping[str, Any],
    *,
    prompt: bool,
) -> str:
    """The template's own text, "" where it raises."""
    try:
        return renderer.render(
            template_messages(messages, shape), tools=tools, kwargs=kwargs, add_generation_prompt=prompt
        )
    except TemplateRejected:
        return ""


def shape_of(splicer: Splicer, kwargs: Mapping[str, Any] = {}) -> Shape:
    """The message shape that the model's template wants; all else the oracle finds out itself."""
    return splicer._profile(kwargs).shape
