"""What probing learns of a template: where its turns end, what may follow, what it does to history.

Every fact is read off renderings of short dialogues, none from a table of models. A profile belongs to one
template and one set of template kwargs.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any, Literal

import msgspec

from splice.boundary.dialogue import ARGUMENT, Anchor, Rejected, Setting, Stage, common_start, sentinel_turn, unsung
from splice.boundary.thinking import Thinking, probe_thinking
from splice.reasoning import ThinkMarkers
from splice.shapes import Shape
from splice.types import Message, ToolCall

USER, OTHER_USER = Message("user", "zqUserA"), Message("user", "zqUserB")
SYSTEM, DEVELOPER = Message("system", "zqSystem"), Message("developer", "zqDeveloper")
SAID = Message("assistant", "zqSaid")
NAME = "zq_look"
# Ids of their own, so that made-up ones, which count up, do not look like an effect of history.
_CALLS = (ToolCall(NAME, id="zqCallNrA"), ToolCall("zq_find", id="zqCallNrB"))
_RESULTS = (
    Message("tool", "zqResultA", tool_call_id="zqCallNrA"),
    Message("tool", "zqResultB", tool_call_id="zqCallNrB"),
)

# In order of preference.
_ANCHORS: tuple[Anchor, ...] = ("argument", "content")
_ARGUMENTS: tuple[Literal["mapping", "string"], ...] = ("mapping", "string")
_SILENT: tuple[Literal["empty", "absent", "null"], ...] = ("empty", "absent", "null")


def stub_tool(name: str) -> Mapping[str, Any]:
    """A small tool, for templates that read tools where we render."""
    parameters = {
        "type": "object",
        "properties": {ARGUMENT: {"type": "string", "description": "A value."}},
        "required": [ARGUMENT],
    }
    return {"type": "function", "function": {"name": name, "description": "Looks.", "parameters": parameters}}


STUB, OTHER_STUB = stub_tool(NAME), stub_tool("zq_other")


class Ending(msgspec.Struct, frozen=True):
    """How one kind of assistant turn ends.

    `closing` is what the model writes itself between the sentinel and the end (the rest of a call);
    `terminator` the text that ends the turn, up to and including its last control token, "" where the next
    role's opener ends it. `opens`: the terminator opens the tool result at the same time.
    """

    terminator: str = ""
    closing: str = ""
    opens: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Profile:
    """A template's behaviour under one set of kwargs.

    refusals: why a kind of message cannot be appended, by kind. tools: whether the text after an assistant turn
    depends on no tools, on there being some, or on which. outline: whether it depends on the messages before.
    """

    shape: Shape
    call_anchor: Anchor
    said: Ending
    called: Ending
    glue: str
    enders: frozenset[str]
    openers: frozenset[str]
    prompts: Mapping[str, str]  # generation prompt by the last message's role
    tools: Literal["unread", "present", "full"]
    outline: bool
    refusals: Mapping[str, str]
    thinking: Thinking


APPENDED: Mapping[str, tuple[Message, ...]] = {
    "user": (OTHER_USER,),
    "users": (OTHER_USER, Message("user", "zqUserC")),
    "tool": _RESULTS[:1],
    "tools": _RESULTS,
    "system": (SYSTEM, OTHER_USER),
    "developer": (DEVELOPER, OTHER_USER),
    "assistant": (OTHER_USER, SAID, Message("user", "zqUserC")),
}
CALLS_FOR: Mapping[str, tuple[ToolCall, ...]] = {"tool": _CALLS[:1], "tools": _CALLS}


def probe(stage: Stage, kwargs: Mapping[str, Any]) -> Profile:
    """Read a template's behaviour off some hundred small renderings."""
    return _Probe(stage, kwargs).profile()


class _Probe:
    def __init__(self, stage: Stage, kwargs: Mapping[str, Any]) -> None:
        self._stage = stage
        self._eos = {text for text, number in stage.lexicon.ids.items() if number in stage.renderer.eos_ids}
        self._anchor: Anchor = "content"
        self._setting = self._base(kwargs)
        self._settle_shape()

    def profile(self) -> Profile:
        tools = self._tools_read()
        if tools == "full" and not self._setting.tools:
            self._setting = msgspec.structs.replace(self._setting, tools=(STUB,))
        said, called = self._said_ending(), self._called_ending()
        return Profile(
            shape=self._setting.shape,
            call_anchor=self._anchor,
            said=said,
            called=called,
            glue=self._glue(said),
            enders=self._enders(said, called),
            openers=frozenset() if said.terminator else self._openers(said, called),
            prompts=self._prompts(),
            tools=tools,
            outline=self._history_read(),
            refusals=self._refusals(called),
            thinking=probe_thinking(self._stage, self._setting, said.terminator),
        )

    # -- shapes

    def _base(self, kwargs: Mapping[str, Any]) -> Setting:
        """The plainest setting under which an assistant's turn and a user's text come out.

        Some templates walk over their tools without asking whether there are any, or want content in parts.
        """
        dialogue = [USER, sentinel_turn((), "content"), OTHER_USER]
        for parts, tools in product((False, True), ((), (STUB,))):
            setting = Setting(Shape(parts=parts), tools, kwargs)
            tail = self._stage.tail(dialogue, setting)
            if not isinstance(tail, Rejected) and OTHER_USER.content in tail:
                return setting
        return Setting(kwargs=kwargs)

    def _settle_shape(self) -> None:
        """The first message shape under which a call and its result come out whole."""
        original = self._setting
        for anchor, arguments, silent, tools in product(_ANCHORS, _ARGUMENTS, _SILENT, (original.tools, (STUB,))):
            shape = msgspec.structs.replace(original.shape, arguments=arguments, silent=silent)
            self._anchor = anchor
            self._setting = msgspec.structs.replace(original, shape=shape, tools=tools)
            if self._calls_come_out():
                break
        else:
            self._anchor = "content"
            self._setting = original
        self._change_shape(nine_digit_ids=self._wants_nine_digits())
        self._setting = msgspec.structs.replace(self._setting, tools=original.tools)
        self._change_shape(**self._developer_roles())
        thinking = probe_thinking(self._stage, self._setting, "")
        self._change_shape(think=ThinkMarkers(thinking.opening, thinking.closing), reasoning_field=thinking.field)

    def _change_shape(self, **changes: Any) -> None:
        shape = msgspec.structs.replace(self._setting.shape, **changes)
        self._setting = msgspec.structs.replace(self._setting, shape=shape)

    def _calls_come_out(self) -> bool:
        tail = self._tail(_CALLS[:1], _RESULTS[:1])
        if isinstance(tail, Rejected) or _RESULTS[0].content not in tail:
            return False
        text = self._stage.text([USER, sentinel_turn(_CALLS[:1], self._anchor), *_RESULTS[:1]], self._setting)
        if self._anchor == "content":
            return NAME not in tail.split(_RESULTS[0].content)[0]
        # Python's own spelling of a dictionary: the template wanted JSON text.
        return f"'{ARGUMENT}': '" not in str(text)

    def _wants_nine_digits(self) -> bool:
        call = ToolCall(NAME, "{}", id="call_of_another_length")
        dialogue = [USER, sentinel_turn([call], self._anchor), Message("tool", "zqResultA", tool_call_id=call.id)]
        return isinstance(self._stage.text(dialogue, self._setting), Rejected) and not isinstance(
            self._tail(_CALLS[:1], _RESULTS[:1]), Rejected
        )

    def _developer_roles(self) -> dict[str, str]:
        """Write developer messages as system messages where the template would lose them and keeps those."""
        heads = [([message, USER]) for message in (DEVELOPER, SYSTEM)]
        lates = [self._after((), (message, OTHER_USER)) for message in (DEVELOPER, SYSTEM)]
        return {"first_developer": self._kept_role(*heads), "late_developer": self._kept_role(*lates)}

    def _kept_role(self, developer: list[Message], system: list[Message]) -> str:
        lost = DEVELOPER.content not in str(self._stage.text(developer, self._setting))
        kept = SYSTEM.content in str(self._stage.text(system, self._setting))
        return "system" if lost and kept else "developer"

    # -- renderings

    def _after(self, calls: Sequence[ToolCall], appended: Sequence[Message]) -> list[Message]:
        return [USER, sentinel_turn(calls, self._anchor if calls else "content"), *appended]

    def _tail(self, calls: Sequence[ToolCall], appended: Sequence[Message], *, prompt: bool = True) -> str | Rejected:
        setting = msgspec.structs.replace(self._setting, generation_prompt=prompt)
        return self._stage.tail(self._after(calls, appended), setting)

    def _controls(self, text: str) -> list[str]:
        return [match[0] for match in self._stage.lexicon.tokens(text)]

    # -- endings

    def _said_ending(self) -> Ending:
        before_user = _before(self._tail((), (OTHER_USER,)), OTHER_USER)
        last = _or_empty(self._tail((), (), prompt=False))
        shared = common_start(last, before_user, self._stage.lexicon)
        before_system = _before(self._tail((), (SYSTEM, OTHER_USER)), SYSTEM)
        if before_system:  # what only a user message follows is no end of the turn
            shared = common_start(shared, before_system, self._stage.lexicon)
        if shared:
            return Ending(self._through_end(shared))
        controls = self._controls(before_user)
        if len(controls) < 2:  # a lone control token is the next role's opener (GLM), and the only end there is
            return Ending()
        # The last turn ends otherwise than earlier ones (gpt-oss), or not at all (Apertus).
        return Ending(before_user[: before_user.index(controls[0]) + len(controls[0])])

    def _through_end(self, shared: str) -> str:
        """What both the last and an earlier turn end with, without the glue after it."""
        controls = self._controls(shared)
        if not controls:
            return shared.rstrip() or shared
        ends = [token for token in controls if token in self._eos]
        if ends:
            return shared[: shared.rindex(ends[-1]) + len(ends[-1])]
        return shared[: shared.index(controls[0]) + len(controls[0])]

    def _called_ending(self) -> Ending:
        said = self._said_ending()
        if self._anchor == "content":
            return said
        before_result = _before(self._tail(_CALLS[:1], _RESULTS[:1]), _RESULTS[0])
        if said.terminator and said.terminator in before_result:
            return Ending(said.terminator, before_result[: before_result.index(said.terminator)])
        last = _or_empty(self._tail(_CALLS[:1], (), prompt=False))
        shared = self._before_opener(common_start(last, before_result, self._stage.lexicon))
        controls = self._controls(shared)
        if not controls:
            return Ending(closing=shared)
        ends = [token for token in controls if token in self._eos] or controls
        at = shared.rindex(ends[-1])
        return Ending(ends[-1], shared[:at], opens=ends[-1] in self._between_results())

    def _before_opener(self, text: str) -> str:
        """The text up to the first control token that also opens a generation: there another turn begins."""
        openers = self._controls(self._prompt_after(USER.role))
        for match in self._stage.lexicon.tokens(text):
            if match[0] in openers:
                return text[: match.start()]
        return text

    def _between_results(self) -> str:
        tail = self._tail(_CALLS, _RESULTS)
        if isinstance(tail, Rejected):
            return ""
        return tail.partition(_RESULTS[0].content)[2].partition(_RESULTS[1].content)[0]

    def _glue(self, said: Ending) -> str:
        rest = _before(self._tail((), (OTHER_USER,)), OTHER_USER)[len(said.terminator) :]
        return rest[: len(rest) - len(rest.lstrip())]

    def _enders(self, said: Ending, called: Ending) -> frozenset[str]:
        """Control tokens that end some turn, beside the tokenizer's own."""
        if not said.terminator:
            return frozenset()
        last = self._controls(_or_empty(self._tail((), (), prompt=False)))
        found = {*self._controls(said.terminator), *self._controls(called.terminator), *last[:1]}
        return frozenset(found - set(self._controls(self._prompt_after(USER.role))))

    def _openers(self, said: Ending, called: Ending) -> frozenset[str]:
        """Where nothing ends a turn, the control tokens that open the next one end it."""
        firsts = set()
        for kind, appended in APPENDED.items():
            calls = CALLS_FOR.get(kind, ())
            ending = called if calls else said
            zone = _before(self._tail(calls, appended), appended[0])
            firsts |= set(self._controls(zone.removeprefix(ending.closing).removeprefix(ending.terminator))[:1])
        return frozenset(firsts)

    # -- generation prompts

    def _prompts(self) -> Mapping[str, str]:
        return {role: self._prompt_after(role) for role in ("user", "tool", "assistant")}

    def _prompt_after(self, role: str) -> str:
        calls, appended = {"user": ((), (OTHER_USER,)), "tool": (_CALLS[:1], _RESULTS[:1])}.get(role, ((), ()))
        with_prompt, without = self._tail(calls, appended), self._tail(calls, appended, prompt=False)
        if isinstance(with_prompt, Rejected) or isinstance(without, Rejected):
            return ""
        return with_prompt[len(common_start(without, with_prompt, self._stage.lexicon)) :]

    # -- what the text after a turn depends on

    def _tools_read(self) -> Literal["unread", "present", "full"]:
        present = bool(self._setting.tools)
        for kind, appended in APPENDED.items():
            dialogue = self._after(CALLS_FOR.get(kind, ()), appended)
            none, stub, other = (
                self._stage.tail(dialogue, msgspec.structs.replace(self._setting, tools=tools))
                for tools in ((), (STUB,), (OTHER_STUB,))
            )
            if stub != other and not isinstance(stub, Rejected) and not isinstance(other, Rejected):
                return "full"
            present = present or (none != stub and not isinstance(none, Rejected) and not isinstance(stub, Rejected))
        return "present" if present else "unread"

    def _history_read(self) -> bool:
        """Whether what came before the turn changes what comes after it."""
        called = Message("assistant", tool_calls=(ToolCall("zq_before", id="zqCallNr0"),))
        cycle = [USER, called, Message("tool", "zqEarlier", tool_call_id="zqCallNr0")]
        histories = [[USER], [SYSTEM, USER], [USER, SAID, USER], cycle, [*cycle, SAID, USER], [SYSTEM, *cycle]]
        for kind, appended in APPENDED.items():
            turn = self._after(CALLS_FOR.get(kind, ()), appended)[1:]
            tails = [self._stage.tail([*history, *turn], self._setting) for history in histories]
            if len({tail for tail in tails if not isinstance(tail, Rejected)}) > 1:
                return True
        return False

    # -- what may follow

    def _refusals(self, called: Ending) -> Mapping[str, str]:
        refusals = {}
        for kind, appended in APPENDED.items():
            calls = CALLS_FOR.get(kind, ())
            refusal = unsung(self._stage, self._after(calls, appended), len(appended), self._setting)
            if not refusal and calls and not (called.terminator or called.closing or self._anchor == "content"):
                refusal = "where a turn that calls tools ends cannot be told"
            if refusal:
                refusals[kind] = refusal
        return refusals


def _before(tail: str | Rejected, message: Message) -> str:
    """What stands before the message's text, "" where it is missing."""
    return "" if isinstance(tail, Rejected) or message.content not in tail else tail.partition(message.content)[0]


def _or_empty(tail: str | Rejected) -> str:
    return "" if isinstance(tail, Rejected) else tail
