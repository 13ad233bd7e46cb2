"""Prompts for a model: whole ones, and the ids that go on after a generation.

A fragment is rendered from `[user, assistant(sentinel), new messages...]` and is what stands after the
assistant's turn, so its cost does not grow with the conversation. Sampled ids are never touched: where the
model has already written the turn's end, only what follows it is added; where it was cut, the end is added.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections import OrderedDict
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from threading import Lock
from typing import Any, Generic, Literal, TypeVar

import numpy as np

from splice.boundary.dialogue import Setting, Stage, after_sentinel, marked, outline, salt_for, sentinel_turn, unsung
from splice.boundary.profile import STUB, USER, Ending, Profile, probe
from splice.boundary.report import TemplateReport, changes_only_the_prompt, mentions, report
from splice.content import Lexicon, Mask
from splice.errors import TemplateRejected
from splice.renderer import Renderer
from splice.types import IdArray, Lineage, Message, Rendering, id_array

_REMEMBERED = 128  # sets of kwargs whose profile is kept
_LOOK_BACK = 48  # ids before a generation in which its prompt's end is looked for

Value = TypeVar("Value")


@dataclass(frozen=True, slots=True)
class Prompt:
    """Ids to send: a whole prompt, or what is appended to the lineage's tokens.

    generation_prompt: the text that the template opens the reply with, which may open a reasoning block.
    notes: what a reader of the turn should know, such as an opener that the model chose wrongly.
    """

    ids: IdArray
    generation_prompt: str
    clock: float
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Refusal:
    """Nothing can be appended here with this template; `reason` says why."""

    reason: str


@dataclass(frozen=True, slots=True)
class _Scene:
    """The made-up dialogue of a fragment: what stands before the assistant's turn, the turn, what is new."""

    before: Sequence[Message]
    turn: Message
    new: tuple[Message, ...]
    setting: Setting
    salt: str


class _Sampled:
    """How a generation ended, as far as the boundary needs it."""

    __slots__ = ("ids", "last", "token")

    def __init__(self, ids: IdArray, names: Mapping[int, str]) -> None:
        self.ids = ids
        self.last = int(ids[-1]) if len(ids) else None
        self.token = names.get(self.last, "") if self.last is not None else ""


class Splicer:
    """One model's prompts. Probing happens once per template and set of kwargs, on first use."""

    def __init__(self, renderer: Renderer, *, control_tokens: Literal["text", "engine"] = "text") -> None:
        self.renderer = renderer
        self._lexicon = Lexicon(renderer)
        self._names = {number: text for text, number in self._lexicon.ids.items()}
        self._stage = Stage(renderer, self._lexicon, mask_content=control_tokens == "text")
        self._profiles: _Remembered[Profile] = _Remembered()
        self._signatures: _Remembered[Mapping[str, Any]] = _Remembered()
        self._sequences: _Remembered[str] = _Remembered()
        self._report: TemplateReport | None = None

    @property
    def report(self) -> TemplateReport:
        """What this template allows, under its default kwargs."""
        if self._report is None:
            self._report = report(self._stage, self._profile({}))
        return self._report

    def whole(self, messages: Sequence[Message], rendering: Rendering, clock: float) -> Prompt:
        """The conversation rendered from its start. Raises TemplateRejected."""
        profile = self._profile(rendering.kwargs)
        setting = Setting(profile.shape, tuple(rendering.tools), rendering.kwargs, clock)
        text, mask = self._stage.render(messages, setting)
        role = messages[-1].role if messages else "user"
        return Prompt(self._lexicon.encode(text, mask), _generation_prompt(text, role, profile), clock)

    def after(
        self,
        lineage: Lineage,
        reply: Message,
        new_messages: Sequence[Message],
        rendering: Rendering,
        *,
        earlier: Sequence[Message] = (),
    ) -> Prompt | Refusal:
        """The ids to append to the lineage's tokens, so that `new_messages` follow its head's generation.

        reply: the head's message as the request has it, with the call ids that belong in a prompt. earlier: the
        request's messages before it; of these only roles, calls and system texts are ever looked at, and only
        where the template makes the fragment depend on them.
        """
        profile = self._profile(rendering.kwargs)
        if profile.outline and not earlier:
            return Refusal("the template writes this otherwise after another history, and none was given")
        scene = self._scene(profile, reply, new_messages, rendering, lineage.head.clock, earlier)
        if refusal := self._unsung(scene, profile, rendering):
            return Refusal(refusal)
        try:
            text, mask = self._stage.render([*scene.before, scene.turn, *new_messages], scene.setting)
        except TemplateRejected as rejected:
            return Refusal(f"the template refuses: {rejected.words}")
        tail = after_sentinel(text, scene.salt)
        if tail is None:
            return Refusal("the template leaves out the assistant's turn")
        if missing := _missing(tail, mask, new_messages):
            return Refusal(f"the template leaves out or moves a {missing.role} message")
        return self._appended(profile, lineage, reply, new_messages, tail, mask)

    def signature(self, rendering: Rendering) -> str:
        """Equal exactly when a conversation's head renders equally: template, tokenizer, tools and kwargs."""
        lasting = self._lasting_kwargs(rendering.kwargs)
        content = json.dumps([self.renderer.identity, rendering.tools, lasting], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    # -- the fragment

    def _scene(
        self,
        profile: Profile,
        reply: Message,
        new_messages: Sequence[Message],
        rendering: Rendering,
        clock: float,
        earlier: Sequence[Message],
    ) -> _Scene:
        salt = salt_for(new_messages)
        before = outline(earlier) if profile.outline else [USER]
        left_out = sum(len(m.tool_calls) for m in earlier) - sum(len(m.tool_calls) for m in before)
        setting = Setting(
            profile.shape, _fragment_tools(profile, rendering), rendering.kwargs, clock, first_call=left_out
        )
        turn = sentinel_turn(reply.tool_calls, profile.call_anchor, salt)
        return _Scene(before, turn, tuple(new_messages), setting, salt)

    def _unsung(self, scene: _Scene, profile: Profile, rendering: Rendering) -> str:
        """Why such messages cannot be appended, proved on messages of the same kinds with telling texts."""

        def compute() -> str:
            turn = sentinel_turn(scene.turn.tool_calls, profile.call_anchor)
            return unsung(self._stage, [*scene.before, turn, *marked(scene.new)], len(scene.new), scene.setting)

        if profile.outline:
            return compute()
        kinds = [[m.role, len(m.tool_calls), bool(m.content)] for m in (scene.turn, *scene.new)]
        key = {"kinds": kinds, "kwargs": rendering.kwargs, "tools": bool(rendering.tools)}
        return self._sequences.get(_key(key), compute)

    def _appended(
        self,
        profile: Profile,
        lineage: Lineage,
        reply: Message,
        new_messages: Sequence[Message],
        tail: str,
        mask: Mask,
    ) -> Prompt | Refusal:
        ending = profile.called if reply.tool_calls else profile.said
        start = _turn_end(tail, ending)
        if start is None:
            return Refusal("the template ends this turn otherwise than its probe")
        zone = tail[start:]
        sampled = _Sampled(lineage.generation, self._names)
        written = self._written(zone, ending, profile, sampled, new_messages)
        notes = self._notes(zone, ending, profile, sampled, written)
        text = zone[written or 0 :]
        if written is None and self._thinking_open(lineage, profile):
            text = profile.thinking.close + text
        ids = self._encode(text, mask, sampled.token)
        role = new_messages[-1].role if new_messages else "assistant"
        return Prompt(ids, _generation_prompt(tail, role, profile), lineage.head.clock, notes)

    def _encode(self, text: str, mask: Mask, after: str) -> IdArray:
        if not text:
            return id_array(())
        return self._lexicon.encode(text, mask, after=after) if after else self._lexicon.encode_continuing(text, mask)

    def _written(
        self, zone: str, ending: Ending, profile: Profile, sampled: _Sampled, new_messages: Sequence[Message]
    ) -> int | None:
        """How much of the zone the model has written itself; None where it was cut before the turn's end."""
        token, terminator = sampled.token, ending.terminator
        if token and token in [match[0] for match in self._lexicon.tokens(terminator)]:
            return terminator.index(token) + len(token)
        if token and self._ends(sampled, profile):
            glue = zone[: _first_text(zone, new_messages)]
            if token in glue:
                return glue.index(token) + len(token)
            return 0 if ending.opens else len(terminator)
        if not token and terminator and not any(self._lexicon.tokens(terminator)):
            return self._spelled_end(terminator, sampled)
        return None

    def _ends(self, sampled: _Sampled, profile: Profile) -> bool:
        return (
            sampled.last in self.renderer.eos_ids or sampled.token in profile.enders or sampled.token in profile.openers
        )

    def _spelled_end(self, terminator: str, sampled: _Sampled) -> int | None:
        """A terminator of plain characters is told by its text."""
        text = self.renderer.decode(sampled.ids[-len(terminator) - 8 :])
        return len(terminator) if text.endswith(terminator) else None

    def _notes(
        self, zone: str, ending: Ending, profile: Profile, sampled: _Sampled, written: int | None
    ) -> tuple[str, ...]:
        if written != 0 or not sampled.token or not (ending.opens or sampled.token in profile.openers):
            return ()
        needed = next((match[0] for match in self._lexicon.tokens(zone)), "")
        return (f"the model stopped with {sampled.token} where {needed} belongs",)

    def _thinking_open(self, lineage: Lineage, profile: Profile) -> bool:
        """Whether the generation ended inside a reasoning block, judged by its tokens."""
        opening, closing = profile.thinking.opening, profile.thinking.closing
        if not opening or not profile.thinking.close:
            return False
        start = len(lineage.tokens) - lineage.head.generation_length
        prompt_end = lineage.tokens[max(start - _LOOK_BACK, 0) : start]
        ids = np.concatenate((self._after_last_end(prompt_end, profile), lineage.generation))
        marks = self._lexicon.ids
        if opening in marks and closing in marks:
            return _last_index(ids, marks[opening]) > _last_index(ids, marks[closing])
        text = self.renderer.decode(ids)
        return text.rfind(opening) > text.rfind(closing)

    def _after_last_end(self, ids: IdArray, profile: Profile) -> IdArray:
        """The end of a prompt without the message before it, whose text might spell a marker."""
        ends = self.renderer.eos_ids | {self._lexicon.ids[text] for text in profile.enders}
        found = np.flatnonzero(np.isin(ids, np.fromiter(ends, dtype=np.uint32)))
        return ids[found[-1] + 1 :] if len(found) else ids

    # -- what is remembered

    def _profile(self, kwargs: Mapping[str, Any]) -> Profile:
        read = {name: value for name, value in kwargs.items() if mentions(self.renderer.template, name)}
        return self._profiles.get(_key(read), lambda: probe(self._stage, read))

    def _lasting_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The kwargs that change more than the generation prompt."""
        profile = self._profile(kwargs)
        return self._signatures.get(
            _key(kwargs),
            lambda: {
                name: value
                for name, value in kwargs.items()
                if not changes_only_the_prompt(self._stage, profile, kwargs, name)
            },
        )


class _Remembered(Generic[Value]):
    """The latest few results of a pure computation."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Value] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, compute: Any) -> Value:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
                return self._values[key]
        value: Value = compute()
        with self._lock:
            self._values[key] = value
            while len(self._values) > _REMEMBERED:
                self._values.popitem(last=False)
        return value


def _key(kwargs: Mapping[str, Any]) -> str:
    return json.dumps(kwargs, sort_keys=True, default=str)


def _fragment_tools(profile: Profile, rendering: Rendering) -> tuple[Mapping[str, Any], ...]:
    """The tools, where the template writes them into the fragment; a stand-in where it only asks for some."""
    if profile.tools == "full":
        return tuple(rendering.tools)
    return (STUB,) if profile.tools == "present" and rendering.tools else ()


def _turn_end(tail: str, ending: Ending) -> int | None:
    """Where the model's own text ends and the turn's end begins."""
    if not ending.terminator:
        return len(ending.closing) if tail.startswith(ending.closing) else None
    at = tail.find(ending.terminator)
    return at if at >= 0 and (ending.closing or at == 0) else None


def _generation_prompt(text: str, role: str, profile: Profile) -> str:
    prompts = [profile.prompts.get(role, ""), *sorted(profile.prompts.values(), key=len, reverse=True)]
    return next((prompt for prompt in prompts if prompt and text.endswith(prompt)), "")


def _first_text(zone: str, new_messages: Sequence[Message]) -> int:
    """Where the first new message's own text begins, or the zone's end."""
    for message in new_messages:
        if sample := _sample(message.content):
            found = zone.find(sample)
            return found if found >= 0 else len(zone)
    return len(zone)


def _missing(tail: str, mask: Mask, new_messages: Sequence[Message]) -> Message | None:
    """A message of which the fragment holds nothing."""
    restored = mask.restore(tail)
    return next((m for m in new_messages if (sample := _sample(m.content)) and sample not in restored), None)


def _sample(content: str) -> str:
    """A piece of the text that trimming and quoting leave alone."""
    words = re.findall(r"\w{1,40}", content[:400])
    return max(words, key=len, default="")


def _last_index(ids: IdArray, number: int) -> int:
    found = np.flatnonzero(ids == number)
    return int(found[-1]) if len(found) else -1
