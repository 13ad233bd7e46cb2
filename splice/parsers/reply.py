"""One reply, read while it is sampled: ids in, events out.

Text leaves as soon as it cannot be part of a marker or a stop string, a call when its block is complete. What looked
like a call and is none leaves as content, markers and all. Two cases have no answer before the reply ends:

* A call before the end of the reasoning. If the reasoning is closed later, it was a draft and is reasoning text; if
  it never is, the model forgot to close it and the call counts.
* A reply cut off by its length inside a block. A bare marker says nothing, and behind complete calls the rest of
  one more is not an answer: both are left out of the message (the ids keep them). Otherwise the text is content.

Stop tokens are no part of the text. Any other control token that the model sampled is shown as it is spelled. A
request without tools has its calls left in the content, for harnesses that read them themselves.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, Protocol

import numpy as np

from splice.parsers.alphabet import Alphabet
from splice.parsers.detokenise import Decode, Detokeniser, StopCut
from splice.parsers.events import Event, ParsedReply, assemble
from splice.parsers.formats import NONE, CallFormat, Formats, JsonCalls, NotatedCalls, TaggedCalls
from splice.parsers.harmony import HarmonyMachine
from splice.parsers.json_calls import JsonEngine
from splice.parsers.machine import Engine, Machine
from splice.parsers.marks import Kind, Marks
from splice.parsers.notated_calls import GemmaEngine, PythonEngine
from splice.parsers.tagged_calls import TaggedEngine
from splice.parsers.values import parameters_of
from splice.types import Finish, IdArray

# The generation prompt's end is short; what is before it is history.
_PROMPT_END = 64
_PIECE = 256


class _StreamReader(Protocol):
    def feed(self, text: str) -> list[Event]: ...

    def finish(self, *, stopped: bool) -> list[Event]: ...


class ReplyParser:
    """Reads one reply. Feeding the same ids in other pieces gives the same reply."""

    def __init__(self, detokeniser: Detokeniser, stop_cut: StopCut, reader: _StreamReader) -> None:
        self._detokeniser = detokeniser
        self._stop_cut = stop_cut
        self._reader = reader

    def feed(self, ids: Iterable[int] | IdArray) -> list[Event]:
        """The events that these ids complete."""
        numbers = iter(ids.tolist() if isinstance(ids, np.ndarray) else ids)
        events: list[Event] = []
        # A reader keeps what it was fed and has not read yet as one string: short pieces keep it short.
        while piece := list(islice(numbers, _PIECE)):
            events += self._reader.feed(self._stop_cut.feed(self._detokeniser.feed(piece)))
        return events

    def finish(self, finish: Finish) -> list[Event]:
        """The events that waited for the end of the reply."""
        text = self._stop_cut.feed(self._detokeniser.finish()) + self._stop_cut.finish()
        return self._reader.feed(text) + self._reader.finish(stopped=finish.kind == "stop")


class ReplyGrammar:
    """How one model's replies are read: made once, then asked for a parser per reply. Safe to share."""

    def __init__(
        self,
        formats: Formats,
        *,
        control_tokens: Mapping[str, int],
        decode: Decode,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.formats = formats
        self._decode = decode
        reasoning = (formats.reasoning.open, formats.reasoning.close, *formats.reasoning.closes)
        self._alphabet = Alphabet((*formats.tools.spellings, *reasoning), control_tokens, stop_ids)
        self._engine = _engine(formats.tools, self._alphabet)
        self._marks = _marks(formats, self._alphabet)
        self._marks_without_tools = _marks(Formats(NONE, formats.reasoning), self._alphabet)

    def parser(
        self,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_open: bool = False,
        stop_strings: Sequence[str] = (),
    ) -> ReplyParser:
        """A parser for one reply. `reasoning_open` when the prompt ends inside the reasoning."""
        return ReplyParser(
            Detokeniser(self._alphabet, self._decode),
            StopCut(self._alphabet, stop_strings),
            self._reader(parameters_of(tools), reasoning_open=reasoning_open),
        )

    def parse(
        self,
        ids: Iterable[int] | IdArray,
        finish: Finish,
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        reasoning_open: bool = False,
        stop_strings: Sequence[str] = (),
    ) -> ParsedReply:
        """Read a whole reply."""
        parser = self.parser(tools=tools, reasoning_open=reasoning_open, stop_strings=stop_strings)
        return assemble(parser.feed(ids) + parser.finish(finish))

    def reasoning_open(self, prompt_ids: Sequence[int] | IdArray) -> bool:
        """Whether a prompt ends inside the reasoning: with its opening marker and nothing but white space after it."""
        marker = self._alphabet.literal(self.formats.reasoning.open)
        end = Detokeniser(self._alphabet, self._decode).feed(map(int, prompt_ids[-_PROMPT_END:]))
        return bool(marker) and end.rstrip().endswith(marker)

    def _reader(self, tools: Mapping[str, Mapping[str, Any]], *, reasoning_open: bool) -> _StreamReader:
        row = self.formats.tools
        if isinstance(row, NotatedCalls) and row.notation == "harmony":
            return HarmonyMachine(row, self._alphabet)
        return Machine(
            row if tools else NONE,
            self._engine,
            self._marks if tools else self._marks_without_tools,
            self._alphabet,
            tools=tools,
            reasoning_open=reasoning_open and bool(self.formats.reasoning.close),
        )


def _engine(row: CallFormat, alphabet: Alphabet) -> Engine | None:
    match row:
        case JsonCalls():
            return JsonEngine(row, alphabet)
        case TaggedCalls():
            return TaggedEngine(row, alphabet)
        case NotatedCalls(notation="gemma"):
            return GemmaEngine(row, alphabet)
        case NotatedCalls(notation="python"):
            return PythonEngine()
        case _:
            return None


def _marks(formats: Formats, alphabet: Alphabet) -> Marks:
    row = formats.tools
    kinds = dict.fromkeys(row.layout, Kind.LAYOUT)
    kinds |= {opening: Kind.SECTION for opening, _ in row.sections}
    kinds |= {closing: Kind.SECTION_END for _, closing in row.sections}
    kinds |= dict.fromkeys(row.openers, Kind.CALL)
    kinds |= {formats.reasoning.open: Kind.REASONING, formats.reasoning.close: Kind.REASONING_END}
    kinds |= dict.fromkeys(formats.reasoning.closes, Kind.LAYOUT_AFTER_REASONING)
    return Marks({alphabet.literal(mark): kind for mark, kind in kinds.items()})
