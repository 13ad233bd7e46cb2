"""The template report: what probing found, in words and fields for a person or a start-up check."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from functools import lru_cache

import msgspec

from splice.boundary.dialogue import Rejected, Setting, Stage, sentinel_turn
from splice.boundary.profile import APPENDED, OTHER_USER, SAID, STUB, SYSTEM, USER, Profile
from splice.types import Message, ToolCall

_KNOWN_KWARGS: Mapping[str, tuple[object, ...]] = {
    "enable_thinking": (False, True),
    "thinking": (False, True),
    "reasoning_effort": ("low", "high"),
    "preserve_thinking": (True, False),
    "clear_thinking": (False, True),
}


class TemplateReport(msgspec.Struct, frozen=True):
    """What can be spliced with this template, and what it does to a conversation.

    `appendable` says for each kind of message whether it may follow a generation. `rewrites` lists what the
    template changes in history; spliced prompts keep the tokens as they were. `thinking` is the state in which
    a generation starts when nothing is asked for: "open", "closed" or "unset".
    """

    spliceable: bool
    terminator: str = ""
    tool_terminator: str = ""
    glue: str = ""
    generation_prompt: str = ""
    generation_prompt_after_tools: str = ""
    stop_tokens: tuple[str, ...] = ()
    appendable: dict[str, bool] = msgspec.field(default_factory=lambda: dict.fromkeys(APPENDED, False))
    rewrites: tuple[str, ...] = ()
    refusals: tuple[str, ...] = ()
    thinking: str = "unset"
    thinking_markers: tuple[str, str] = ("", "")
    generation_only_kwargs: tuple[str, ...] = ()
    tools_in_fragment: str = ""
    outline_needed: bool = False
    call_arguments: str = ""


def unspliceable(words: str) -> TemplateReport:
    """The report on a template that refuses everything, in its own words."""
    return TemplateReport(spliceable=False, refusals=(f"everything: the template refuses: {words}",))


def report(stage: Stage, profile: Profile) -> TemplateReport:
    """The report on a template under its default kwargs."""
    eos = [text for text, number in stage.lexicon.ids.items() if number in stage.renderer.eos_ids]
    return TemplateReport(
        spliceable="user" not in profile.refusals,
        terminator=profile.said.terminator,
        tool_terminator=profile.called.terminator,
        glue=profile.glue,
        generation_prompt=profile.prompts["user"],
        generation_prompt_after_tools=profile.prompts["tool"],
        stop_tokens=tuple(sorted({*eos, *profile.enders, *profile.openers})),
        appendable={kind: kind not in profile.refusals for kind in APPENDED},
        rewrites=tuple(_rewrites(stage, profile)),
        refusals=tuple(f"{kind}: {why}" for kind, why in profile.refusals.items()),
        thinking=thinking_state(profile.prompts["user"], profile),
        thinking_markers=(profile.thinking.opening, profile.thinking.closing),
        generation_only_kwargs=tuple(_generation_only(stage, profile)),
        tools_in_fragment=profile.tools,
        outline_needed=profile.outline,
        call_arguments=profile.shape.arguments,
    )


def thinking_state(generation_prompt: str, profile: Profile) -> str:
    """Whether a generation after this prompt begins inside a reasoning block."""
    opening, closing = profile.thinking.opening, profile.thinking.closing
    if opening and generation_prompt.rfind(opening) > generation_prompt.rfind(closing):
        return "open"
    return "closed" if closing and closing in generation_prompt else "unset"


def base_setting(profile: Profile, kwargs: Mapping[str, object] | None = None) -> Setting:
    """What a made-up dialogue is rendered with under this profile."""
    tools = () if profile.tools == "unread" else (STUB,)
    return Setting(shape=profile.shape, kwargs=kwargs or {}, tools=tools)


def changes_only_the_prompt(stage: Stage, profile: Profile, kwargs: Mapping[str, object], name: str) -> bool:
    """Whether this keyword changes nothing but the generation prompt, beside the other keywords."""
    if not mentions(stage.renderer.template, name):
        return True
    others = {key: value for key, value in kwargs.items() if key != name}
    with_it, without = (
        [stage.text(dialogue, setting) for dialogue in _dialogues() for setting in _settings(profile, given)]
        for given in (kwargs, others)
    )
    return with_it == without


@lru_cache(maxsize=1024)
def mentions(template: str, name: str) -> bool:
    """Whether the template can read a keyword of this name."""
    return re.search(rf"\b{re.escape(name)}\b", template) is not None


def _settings(profile: Profile, kwargs: Mapping[str, object]) -> Iterator[Setting]:
    for tools in ((), (STUB,)):
        yield Setting(shape=profile.shape, kwargs=kwargs, tools=tools, generation_prompt=False)


def _dialogues() -> list[list[Message]]:
    """Conversations in which a keyword that touches history has something to touch."""
    thought = Message("assistant", "zqSaid", reasoning="zqReasoning")
    called = Message("assistant", reasoning="zqReasoning", tool_calls=(ToolCall("zq_look", '{"zqkey": "v"}'),))
    result = Message("tool", "zqResult")
    return [
        [USER],
        [SYSTEM, USER],
        [USER, thought, OTHER_USER, thought],
        [SYSTEM, USER, called, result],
        [USER, called, result, thought, OTHER_USER, SAID, USER],
    ]


def _generation_only(stage: Stage, profile: Profile) -> Iterator[str]:
    for name, values in _KNOWN_KWARGS.items():
        if mentions(stage.renderer.template, name) and all(
            changes_only_the_prompt(stage, profile, {name: value}, name) for value in values
        ):
            yield name


def _rewrites(stage: Stage, profile: Profile) -> Iterator[str]:
    setting = base_setting(profile)
    thought = Message("assistant", "zqSaid", reasoning="zqReasoning")
    later = stage.text([USER, thought, OTHER_USER], setting)
    if (profile.thinking.opening or profile.thinking.field) and "zqReasoning" not in str(later):
        yield "drops reasoning from earlier turns"
    if profile.tools == "full":
        yield "moves the tools to the last user message"
    if SYSTEM.content in str(stage.tail([SYSTEM, USER, sentinel_turn((), "content"), OTHER_USER], setting)):
        yield "moves the system message to the last user message"
    if "moves" in profile.refusals.get("system", ""):
        yield "hoists late system messages to the head"
    if profile.shape.late_developer == "system":
        yield "knows no developer role: such messages are written as system messages"
    if profile.call_anchor == "content" and "tool" not in profile.refusals:
        yield "leaves out the calls of earlier turns"
    if profile.outline:
        yield "writes the same message otherwise after another history"
    dates = {stage.text([USER], msgspec.structs.replace(setting, clock=clock)) for clock in (0.0, 1.7e9)}
    if len(dates) > 1 and not any(isinstance(text, Rejected) for text in dates):
        yield "stamps the date (frozen when a conversation starts)"
