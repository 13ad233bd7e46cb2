"""Prompts for a model: whole ones, and the ids that go on after a generation.

A fragment is rendered from `[user, assistant(sentinel), new messages...]` and is what stands after the
assistant's turn, so its cost does not grow with the conversation. Sampled ids are never touched: where the
model has already written the turn's end, only what follows it is added; where it was cut, the end is added.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from splice.boundary.dialogue import Setting, Stage, after_sentinel, marked, outline, salt_for, sentinel_turn, unsung
from splice.boundary.memory import Remembered
from splice.boundary.profile import STUB, USER, Ending, Profile, probe
from splice.boundary.proof import Proof, proofs
from splice.boundary.report import TemplateReport, changes_only_the_prompt, mentions, report, unspliceable
from splice.content import Lexicon, Mask
from splice.errors import TemplateRejected
from splice.renderer import Renderer
from splice.types import Finish, Head, IdArray, Lineage, Message, Rendering, id_array

_PROBING_S = 5.0  # CPU time that learning one thing about a template may take
_TELLING = 5  # letters of a word that is not there by chance
_LOOK_BACK = 48  # ids before a generation in which its prompt's end is looked for


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
        self._profiles: Remembered[Profile] = Remembered()
        self._signatures: Remembered[Mapping[str, Any]] = Remembered()
        self._sequences: Remembered[str] = Remembered()
        self._report: TemplateReport | None = None

    @property
    def report(self) -> TemplateReport:
        """What this template allows, under its default kwargs."""
        if self._report is None:
            try:
                self._report = report(self._stage.bounded(_PROBING_S), self._profile({}))
            except TemplateRejected as rejected:
                self._report = unspliceable(rejected.words)
        return self._report

    def proofs(self) -> Iterator[Proof]:
        """Short conversations, rendered whole and spliced, to be compared. Raises TemplateRejected."""
        profile = self._profile({})
        rendering = Rendering(() if profile.tools == "unread" else (STUB,))

        def fragment(
            before: IdArray, reply: Message, new: Sequence[Message], earlier: Sequence[Message]
        ) -> IdArray | None:
            lineage = Lineage(Head("", "", 0.0, Finish("stop"), 1), before)
            prompt = self.after(lineage, reply, new, rendering, earlier=earlier)
            return prompt.ids if isinstance(prompt, Prompt) else None

        yield from proofs(self._stage.bounded(_PROBING_S), profile, fragment)

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
        try:
            return self._after(lineage, reply, new_messages, rendering, earlier)
        except TemplateRejected as rejected:
            return Refusal(f"the template refuses: {rejected.words}")

    def signature(self, rendering: Rendering) -> str:
        """Equal exactly when a conversation's head renders equally: template, tokenizer, tools and kwargs."""
        lasting = self._lasting_kwargs(rendering.kwargs)
        content = json.dumps([self.renderer.identity, rendering.tools, lasting], sort_keys=True, ensure_ascii=False)
        return hashlib.sha256(content.encode("utf-8", "surrogatepass")).hexdigest()

    # -- the fragment

    def _after(
        self,
        lineage: Lineage,
        reply: Message,
        new_messages: Sequence[Message],
        rendering: Rendering,
        earlier: Sequence[Message],
    ) -> Prompt | Refusal:
        profile = self._profile(rendering.kwargs)
        if profile.outline and not earlier:
            return Refusal("the template writes this otherwise after another history, and none was given")
        scene = self._scene(profile, reply, new_messages, rendering, lineage.head.clock, earlier)
        if not profile.outline and (refusal := self._unsung(scene, profile, rendering)):
            return Refusal(refusal)
        text, mask = self._stage.render([*scene.before, scene.turn, *new_messages], scene.setting)
        tail = after_sentinel(text, scene.salt)
        # A proof that no other turn can use costs as much as the fragment: where the texts tell, it is spared.
        evident = not profile.outline or _evident(tail or "", mask, new_messages)
        if not evident and (refusal := self._unsung(scene, profile, rendering)):
            return Refusal(refusal)
        if tail is None:
            return Refusal("the template leaves out the assistant's turn")
        if missing := _missing(tail, mask, new_messages):
            return Refusal(f"the template leaves out or moves a {missing.role} message")
        return self._appended(profile, lineage, reply, new_messages, tail, mask)

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
            stage = self._stage.bounded(_PROBING_S)
            return unsung(stage, [*scene.before, turn, *marked(scene.new)], len(scene.new), scene.setting)

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
        if written is None:
            text = self._unfinished(lineage, ending, profile) + text
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
        glue = zone[: _first_text(zone, new_messages)]
        slot = self._slot(terminator, glue, profile)
        if token and token in [match[0] for match in self._lexicon.tokens(zone[:slot])]:
            return zone.index(token) + len(token)
        if token and self._ends(sampled, profile):
            if token in glue:
                return glue.index(token) + len(token)
            return 0 if ending.opens else slot
        if not token and terminator and not any(self._lexicon.tokens(terminator)):
            return self._spelled_end(terminator, sampled)
        return None

    def _slot(self, terminator: str, glue: str, profile: Profile) -> int:
        """Where the token that the model should have ended with ends, whether or not it did."""
        if not terminator:
            return 0
        for text in (terminator, glue):
            for match in self._lexicon.tokens(text):
                if self._lexicon.ids[match[0]] in self.renderer.eos_ids and match[0] not in profile.openers:
                    return match.end()
        return len(terminator)

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

    def _unfinished(self, lineage: Lineage, ending: Ending, profile: Profile) -> str:
        """What a cut generation lacks before its turn's end: a block's closing, white space after a call."""
        if self._thinking_open(lineage, profile):
            return profile.thinking.close
        call_end = ending.closing.rstrip()
        last_line = call_end.rsplit("\n", 1)[-1]
        if not last_line or not self.renderer.decode(lineage.generation[-len(last_line) :]).endswith(last_line):
            return ""
        return ending.closing[len(call_end) :]

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

    def _read(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The kwargs that the template can read at all; a client may send any number of others."""
        return {name: value for name, value in kwargs.items() if mentions(self.renderer.template, name)}

    def _profile(self, kwargs: Mapping[str, Any]) -> Profile:
        read = self._read(kwargs)
        return self._profiles.get(_key(read), lambda: probe(self._stage.bounded(_PROBING_S), read))

    def _lasting_kwargs(self, kwargs: Mapping[str, Any]) -> Mapping[str, Any]:
        """The kwargs that change more than the generation prompt."""
        read = self._read(kwargs)
        profile = self._profile(read)

        def compute() -> Mapping[str, Any]:
            stage = self._stage.bounded(_PROBING_S)
            return {k: v for k, v in read.items() if not changes_only_the_prompt(stage, profile, read, k)}

        return self._signatures.get(_key(read), compute)


def _key(kwargs: Mapping[str, Any]) -> bytes:
    """A digest: what clients send is not to be kept."""
    return hashlib.sha256(json.dumps(kwargs, sort_keys=True, default=str).encode()).digest()


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


def _evident(tail: str, mask: Mask, new_messages: Sequence[Message]) -> bool:
    """Whether every new message holds a word of its own, and these stand in the order of the messages."""
    restored = mask.restore(tail)
    samples = [_sample(message.content) for message in new_messages]
    once = all(len(sample) >= _TELLING and restored.count(sample) == 1 for sample in samples)
    places = [restored.find(sample) for sample in samples]
    return once and places == sorted(places)


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
