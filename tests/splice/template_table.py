"""What tokensplice does with published chat templates, template by case: the tables in docs/templates.md.

    python -m tests.splice.template_table docs/templates.md

writes the tables anew: that of the templates in TRL's wheel always, that of a folder of one's own where
TOKENSPLICE_TEMPLATES names one. Every cell is judged by the slow oracle, on several histories, with tools and without.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from splice.boundary import Prompt, Refusal, Splicer
from splice.types import Finish, Head, IdArray, Lineage, Message, Rendering
from tests.splice.oracle_boundary import (
    CASES,
    HISTORIES,
    MARKER,
    TOOL,
    Truth,
    called,
    own_rendering,
    said,
    shape_of,
    truth,
)
from tests.template_models import OPENING_STOPS, folder_templates, renderer_for, stop_tokens, trl_templates

ANOTHER_STOP = "<|another_stop|>"
_REASONING = "Hm, let me see."
_ANSWER = said(MARKER)
_SWITCHES = ("enable_thinking", "thinking")

EXACT, REWRITTEN, UNKNOWN = "=", "~", "·"
# How the generation ended, and what follows it.
ENDINGS: Mapping[str, tuple[str, str]] = {
    "other stop": ("another stop token", "user"),
    "string": ("a stop string", "user"),
    "length": ("the length, in text", "user"),
    "in think": ("the length, in a think block", "user"),
    "in call": ("the length, in a call", "user"),
    "empty": ("the length, before the first token", "user"),
    "tool, other stop": ("another stop token", "tool"),
    "tool, string": ("a stop string", "tool"),
}
THINKING: Mapping[str, tuple[bool, str]] = {
    "on": (True, "user"),
    "off": (False, "user"),
    "on, tool": (True, "tool"),
    "off, tool": (False, "tool"),
}
COLUMNS = (*CASES, *ENDINGS, *THINKING)


class Wrong(AssertionError):
    """A fragment is not what the oracle says, or a splice was refused without need."""


@dataclass(frozen=True)
class Scene:
    """One conversation with one template, up to the turn that a generation follows."""

    splicer: Splicer
    history: Sequence[Message]
    rendering: Rendering

    def full(self, parent: Message, new: Sequence[Message]) -> Truth | None:
        """The whole conversation's text, cut at its markers."""
        renderer = self.splicer.renderer
        stops, kwargs = stop_tokens(renderer.template), self.rendering.kwargs
        shape = shape_of(self.splicer, kwargs)
        return truth(renderer, shape, stops, self.history, parent, new, self.rendering.tools, kwargs)

    def prompt(self) -> str:
        """What the generation was prompted with."""
        return self.own(self.history, prompt=True)

    def own(self, messages: Sequence[Message], *, prompt: bool = False) -> str:
        """The template's own rendering, "" where it raises."""
        shape = shape_of(self.splicer, self.rendering.kwargs)
        return own_rendering(
            self.splicer.renderer, shape, messages, self.rendering.tools, self.rendering.kwargs, prompt=prompt
        )

    def opens_thinking(self) -> bool:
        """Whether the prompt ends with the opening of a block."""
        opening, _ = self.splicer.report.thinking_markers
        return bool(opening) and self.prompt().rstrip().endswith(opening)

    def thinking_aloud(self, turn: Message = _ANSWER) -> str:
        """A last turn with reasoning."""
        return self.own([*self.history, msgspec.structs.replace(turn, reasoning=_REASONING)])

    def end_of_thinking(self) -> str:
        """What the template writes between reasoning and answer, where its markers are not turns of their own.

        Some show reasoning only after another turn, or in turns that call tools, and some never do.
        """
        _, closing = self.splicer.report.thinking_markers
        if not closing:
            return ""
        for scene in (self, Scene(self.splicer, HISTORIES["long"], self.rendering)):
            _, found, rest = scene.thinking_aloud().rpartition(_REASONING)
            if found:
                return rest[: rest.index(MARKER)]
        _, found, rest = self.thinking_aloud(called(1, MARKER)).rpartition(_REASONING)
        return rest[: rest.index(closing)] + closing if found else f"\n{closing}\n\n"

    def after(self, before: str, generation: str, finish: Finish, reply: Message, new: Sequence[Message]) -> str:
        """The fragment's text, checked for ids. Raises Refused."""
        encode = self.splicer.renderer.encode
        whole = encode(before + generation)
        sampled = len(whole) - len(encode(before)) if generation else 0
        head = Head("turn", "root", 0.0, finish, sampled)
        prompt = self.splicer.after(Lineage(head, whole), reply, new, self.rendering, earlier=self.history)
        if isinstance(prompt, Refusal):
            raise Refused(prompt.reason)
        return self._text(prompt, whole, before + generation)

    def _text(self, prompt: Prompt, whole: IdArray, spoken: str) -> str:
        """Ids after a stop token are those of the whole text; after a cut, of the fragment alone."""
        renderer = self.splicer.renderer
        text = renderer.decode(prompt.ids)
        ended = spoken.endswith((*stop_tokens(renderer.template), ANOTHER_STOP))
        ids = np.concatenate((whole, prompt.ids)) if ended else prompt.ids
        if not np.array_equal(ids, renderer.encode(spoken + text if ended else text)):
            raise Wrong(f"the ids are not those of the text: {text!r}")
        return text


class Refused(Exception):
    """The splicer refused, for this reason."""


@dataclass
class Row:
    """One template's cells: the marks of each case, a refusal's mark being its reason."""

    stem: str
    cells: dict[str, list[str]] = field(default_factory=dict)

    def spliced(self, case: str) -> bool:
        """Whether some conversation of this case was spliced."""
        return bool({EXACT, REWRITTEN} & set(self.cells[case]))


def row(stem: str, template: str) -> Row:
    """Every case with one template. Raises Wrong."""
    splicer = Splicer(renderer_for(template, stops=(ANOTHER_STOP,)))
    made = Row(stem)
    try:
        for case in CASES:
            made.cells[case] = _marks(_ended(scene, case) for scene in _scenes(splicer, {}))
        for name, (_, follow_up) in ENDINGS.items():
            made.cells[name] = _marks(_cut(scene, name, follow_up) for scene in _scenes(splicer, {}))
        for name, (on, follow_up) in THINKING.items():
            made.cells[name] = _marks(_thought(splicer, follow_up, on=on))
        if all(cell == [UNKNOWN] for cell in made.cells.values()):
            made.cells = {column: list(splicer.report.refusals[:1]) for column in COLUMNS}
    except Wrong as wrong:
        raise Wrong(f"{stem}: {wrong}") from wrong
    return made


def _marks(found: Iterator[str]) -> list[str]:
    marks = sorted(set(found), key=lambda mark: (len(mark), mark))
    return [mark for mark in marks if mark != UNKNOWN] or [UNKNOWN]


def _scenes(splicer: Splicer, kwargs: Mapping[str, Any]) -> Iterator[Scene]:
    """The histories that the template takes at all, with tools and without."""
    for history in HISTORIES.values():
        for tools in ((), (TOOL,)):
            scene = Scene(splicer, history, Rendering(tools, kwargs))
            if (tools or splicer.report.tools_in_fragment == "unread") and scene.own(history):
                yield scene


# -- after the turn's own end


def _ended(scene: Scene, case: str, reasoning: str = "") -> str:
    parent, new = CASES[case]
    parent = msgspec.structs.replace(parent, reasoning=reasoning)
    known = scene.full(parent, new)
    if known is None:
        return _refusal(scene, parent, new)
    begun, sampled = _split(known.text[: known.stopped], known.marked)
    _expect(scene, known.text[known.stopped :], begun, sampled, Finish("stop"), parent, new)
    prompt = scene.prompt()
    kept = known.text.startswith(prompt) and reasoning in known.text[len(prompt) : known.marked]
    return EXACT if kept else REWRITTEN


def _split(text: str, marked: int) -> tuple[str, str]:
    """A text whose end was sampled, parted where a word of it begins."""
    start = text.rindex(" ", 0, marked) if " " in text[:marked] else 0
    return text[:start], text[start:]


def _refusal(scene: Scene, parent: Message, new: Sequence[Message]) -> str:
    try:
        text = scene.after(scene.prompt(), f"Hm {ANOTHER_STOP}", Finish("stop"), parent, new)
    except Refused as refused:
        return str(refused)
    raise Wrong(f"spliced what the template does not take: {text!r}")


def _expect(
    scene: Scene,
    expected: str,
    before: str,
    generation: str,
    finish: Finish,
    reply: Message,
    new: Sequence[Message],
) -> None:
    try:
        text = scene.after(before, generation, finish, reply, new)
    except Refused as refused:
        raise Wrong(f"refused without need: {refused}") from refused
    if text != expected:
        raise Wrong(f"{text!r} for {expected!r} after {generation!r}")


# -- after another end


def _cut(scene: Scene, name: str, follow_up: str) -> str:
    parent, new = CASES[follow_up]
    known = scene.full(parent, new)
    if known is None:
        return _refusal(scene, parent, new)
    made = {"other stop": _other_stop, "in think": _in_think, "in call": _in_call, "empty": _empty}
    cut = made.get(name.removeprefix("tool, "), _unended)(scene, known)
    if cut is None:
        return UNKNOWN
    generation, expected = cut
    prompt = scene.prompt()
    if scene.opens_thinking() and name != "in think":
        generation, expected = _out_of_thinking(scene, generation, expected)
    reply = said(generation) if name == "in call" else parent
    kind = Finish("stop", "</stop>") if "string" in name else Finish("stop" if "stop" in name else "length")
    _expect(scene, expected, prompt, generation, kind, reply, new)
    return EXACT if known.text.startswith(prompt) else REWRITTEN


Cut = tuple[str, str] | None  # the generation, and what has to follow it


def _other_stop(_scene: Scene, known: Truth) -> Cut:
    if known.stopped == known.closed:  # it ends in plain characters: no slot to fill
        return None
    opens = known.text[: known.stopped].endswith(OPENING_STOPS)
    end = known.opened if opens else known.stopped
    return known.text[known.marked - len(MARKER) : known.opened].rstrip() + ANOTHER_STOP, known.text[end:]


def _unended(_scene: Scene, known: Truth) -> Cut:
    """Up to the turn's end. White space before it may be the template's own."""
    if known.opened == known.marked:
        return MARKER, known.text[known.marked :]
    own = known.text[known.marked : known.opened]
    kept = len(own.rstrip()) if known.stopped > known.closed else len(own)
    return MARKER + own[:kept], known.text[known.marked + kept :]


def _empty(_scene: Scene, known: Truth) -> Cut:
    return "", known.text[known.marked :]


def _in_think(scene: Scene, known: Truth) -> Cut:
    """A reply as the template writes it, cut in its reasoning."""
    thought, prompt = scene.thinking_aloud(), scene.prompt()
    opening, _ = scene.splicer.report.thinking_markers
    if thought.startswith(prompt) and _REASONING in thought:
        begun = thought[len(prompt) : thought.rindex(_REASONING)] + _REASONING
    elif opening:
        begun = ("" if scene.opens_thinking() else f"{opening}\n") + _REASONING
    else:
        return None
    return begun, scene.end_of_thinking() + known.text[known.marked :]


def _out_of_thinking(scene: Scene, generation: str, expected: str) -> tuple[str, str]:
    """The same after a prompt that opens a block: the reply closes it, an empty one cannot."""
    end = scene.end_of_thinking()
    return (_REASONING + end + generation, expected) if generation else ("", end + expected)


def _in_call(scene: Scene, known: Truth) -> Cut:
    """A call as the template writes it, cut in its argument."""
    calling, prompt = scene.own([*scene.history, called(1, MARKER)]), scene.prompt()
    if not calling.startswith(prompt) or MARKER not in calling:
        return None
    return calling[len(prompt) : calling.index(MARKER)], known.text[known.marked :]


# -- with thinking switched on and off


def _thought(splicer: Splicer, follow_up: str, *, on: bool) -> Iterator[str]:
    template = splicer.renderer.template
    switch = next((name for name in _SWITCHES if re.search(rf"\b{name}\b", template)), "")
    if switch:
        for scene in _scenes(splicer, {switch: on}):
            yield _ended(scene, follow_up, _REASONING if on else "")
    elif on and splicer.report.thinking_markers[1]:
        for scene in _scenes(splicer, {}):
            yield _ended(scene, follow_up, _REASONING)


# -- the tables


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown, with the reasons of the refusals numbered below."""
    reasons: dict[str, int] = {}
    lines = [f"| template | {' | '.join(COLUMNS)} |", f"| --- |{' :-: |' * len(COLUMNS)}"]
    for made in rows:
        cells = (" ".join(_shown(mark, reasons) for mark in made.cells[column]) for column in COLUMNS)
        lines.append(f"| {made.stem} | {' | '.join(cells)} |")
    lines += ["", *(f"{number}. {reason}" for reason, number in reasons.items()), "", _counts(rows)]
    return "\n".join(lines)


def _shown(mark: str, reasons: dict[str, int]) -> str:
    if mark in {EXACT, REWRITTEN, UNKNOWN}:
        return mark
    return str(reasons.setdefault(mark, len(reasons) + 1))


def _counts(rows: Sequence[Row]) -> str:
    counts = ", ".join(f"{case} {sum(made.spliced(case) for made in rows)}" for case in CASES)
    return f"Spliced, of {len(rows)}: {counts}. Wrong: 0. Crashed: 0."


def between(name: str, document: str) -> re.Match[str]:
    """The place of a table in the document."""
    found = re.search(rf"(?s)(?<=<!-- {name} -->\n).*?(?=\n<!-- /{name} -->)", document)
    assert found is not None, f"no place for the table {name}"
    return found


def read_table(name: str, document: str) -> dict[str, Row]:
    """A table's rows as they are written, by template."""
    lines = between(name, document)[0].splitlines()
    reasons = dict(line.split(". ", 1) for line in lines if re.match(r"\d+\. ", line))
    rows = {}
    for line in lines[2:]:
        stem, *cells = (cell.strip() for cell in line.strip("|").split("|"))
        if cells:
            marks = ([reasons.get(mark, mark) for mark in cell.split()] for cell in cells)
            rows[stem] = Row(stem, dict(zip(COLUMNS, marks, strict=True)))
    return rows


def templates_by_table() -> dict[str, dict[str, str]]:
    """Each table's templates: TRL's, and those of a folder where one is named."""
    return {name: found for name, found in (("trl", trl_templates()), ("folder", folder_templates())) if found}


def main(path: Path) -> None:
    """Write the tables into the document."""
    document = path.read_text()
    for name, templates in templates_by_table().items():
        place = between(name, document)
        rows = [row(stem, text) for stem, text in templates.items()]
        document = document[: place.start()] + table(rows) + document[place.end() :]
    path.write_text(document)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
