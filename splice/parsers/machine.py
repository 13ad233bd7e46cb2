"""The stream of one reply, told apart: reasoning, content, calls, and the markers around them.

Everything a marker stands for is decided here; what is inside a call is its engine's business.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from splice.parsers.alphabet import Alphabet
from splice.parsers.channels import Channel
from splice.parsers.events import ContentText, Event, ReasoningText
from splice.parsers.formats import CallFormat, JsonCalls
from splice.parsers.marks import Kind, Marks
from splice.parsers.scan import Block, Broken, Cut, Scan, Source

_LAYOUT = frozenset({Kind.LAYOUT, Kind.LAYOUT_AFTER_REASONING})
_REASONING_ENDS = frozenset({Kind.REASONING_END, Kind.LAYOUT_AFTER_REASONING})


class Engine(Protocol):
    """Reads what begins at the start of the source."""

    def scan(self, source: Source, tools: Mapping[str, Mapping[str, Any]]) -> Scan[Block]:
        """Return the block, or raise Broken or Cut."""


class Machine:
    """Reads one reply. `tools` are the parameter schemas of the offered tools."""

    def __init__(
        self,
        row: CallFormat,
        engine: Engine | None,
        marks: Marks,
        alphabet: Alphabet,
        *,
        tools: Mapping[str, Mapping[str, Any]],
        reasoning_open: bool,
    ) -> None:
        self._row = row
        self._engine = engine
        self._marks = marks
        self._tools = tools
        self._source = Source(alphabet)
        self._scan: Scan[Block] | None = None
        self._opener = ""
        self._reasoning = Channel(marked=True)
        self._content = Channel(marked=reasoning_open)
        self._in_reasoning = reasoning_open
        self._section = ""  # a section's opening, held until a call shows that it is one
        self._after_call = False
        self._calls = 0
        self._draft: str | None = None  # the text since a call inside the reasoning
        self._drafted: list[Event] = []
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """What this text lets go."""
        # Through a local name, CPython extends the string in place: a long call is not copied for every token.
        whole, self._source.text = self._source.text, ""
        whole += text
        self._source.text = whole
        self._run()
        events, self._events = self._events, []
        return events

    def finish(self, *, stopped: bool) -> list[Event]:
        """What was held back until the reply's end. `stopped` when the model ended it, not its length."""
        self._source.final, self._source.stopped = True, stopped
        self._run()
        if self._draft is not None and not self._calls:
            self._undo_draft()
        elif stopped:
            self._show("")
        self._say(ReasoningText, self._reasoning.finish() if self._in_reasoning else "")
        self._say(ContentText, self._content.finish())
        return self._events + self._drafted

    def _run(self) -> None:
        while self._source.text and (self._advance() if self._scan else self._read()):
            pass

    def _read(self) -> bool:
        text = self._source.text
        if self._row.bare and self._bare():
            return True
        found = self._marks.search(text)
        doubtful = 0 if self._source.final else self._marks.doubtful(text)
        self._plain(self._take(found.start() if found else len(text) - doubtful))
        if found is None:
            return False
        self._marker(found[0], self._marks.kinds[found[0]])
        return True

    def _bare(self) -> bool:
        """A call that no marker announces."""
        if self._in_reasoning or (self._content.started and not self._section):
            return False
        text = self._source.text
        separator = self._row.separator if isinstance(self._row, JsonCalls) and self._after_call else ""
        if text[0].isspace():
            self._plain(self._take(len(text) - len(text.lstrip())))
        elif separator and text.startswith(separator):
            self._take(len(separator))
        elif text[0] == self._row.bare:
            self._begin(text[0])
        else:
            return False
        return True

    def _marker(self, mark: str, kind: Kind) -> None:
        if self._in_reasoning:
            self._marker_in_reasoning(mark, kind)
        elif kind is Kind.CALL:
            self._begin(mark)
        elif kind is Kind.REASONING_END and self._draft is not None:
            self._discard_draft(mark)
        elif self._is_layout(mark, kind):
            self._take(len(mark))
            self._content.mark()
        else:
            self._plain(self._take(len(mark)))

    def _is_layout(self, mark: str, kind: Kind) -> bool:
        """Whether a marker means what it says where it stands; elsewhere it is text that spells it."""
        at_start = not self._content.started and not self._calls and not self._section
        if kind is Kind.REASONING and at_start and self._draft is None:
            self._in_reasoning = True
            return True
        if kind is Kind.SECTION:
            self._section += mark
            return True
        if kind is Kind.SECTION_END and (self._section or self._after_call):
            self._section = ""
            return True
        return kind in _LAYOUT or (kind is Kind.REASONING_END and at_start)

    def _marker_in_reasoning(self, mark: str, kind: Kind) -> None:
        if kind in _REASONING_ENDS:
            self._take(len(mark))
            self._reasoning.mark()
            self._content.mark()
            self._in_reasoning = False
        elif kind in {Kind.SECTION, Kind.CALL}:
            self._in_reasoning, self._draft = False, ""
        else:
            self._plain(self._take(len(mark)))

    def _begin(self, mark: str) -> None:
        assert self._engine is not None
        self._opener = mark
        self._scan = self._engine.scan(self._source, self._tools)

    def _advance(self) -> bool:
        assert self._scan is not None
        try:
            next(self._scan)
        except StopIteration as done:
            self._scan = None
            self._take_block(done.value)
        except Broken:
            self._scan = None
            self._plain(self._take(len(self._opener)))
        except Cut:
            self._scan = None
            self._take_rest()
        else:
            return False
        return True

    def _take_block(self, block: Block) -> None:
        unmarked = self._opener == self._row.bare and not self._section
        if unmarked and any(made.call.name not in self._tools for made in block.calls):
            self._plain(self._take(block.end))
            return
        self._take(block.end)
        self._section = ""
        self._after_call = True
        self._calls += len(block.calls)
        self._reasoning.mark()
        self._content.mark()
        (self._events if self._draft is None else self._drafted).extend(block.calls)

    def _take_rest(self) -> None:
        """The reply ended inside a call."""
        rest = self._take(len(self._source.text))
        only_marker = bool(self._opener) and not rest[len(self._opener) :].strip() and not self._row.bare
        if not self._source.stopped and (self._calls or only_marker):
            self._section = ""
            self._content.mark()
        else:
            self._plain(rest)

    def _plain(self, text: str) -> None:
        """Text that is no marker, or a marker that turned out to be text."""
        if self._in_reasoning:
            self._say(ReasoningText, self._reasoning.write(self._source.alphabet.spell(text)))
        elif not text.strip():
            if self._section:
                self._section += text
            else:
                self._show(text)
        elif self._draft is not None and not self._calls:
            self._undo_draft()
        else:
            self._after_call = False
            self._show(text)

    def _show(self, text: str) -> None:
        text, self._section = self._section + text, ""
        self._say(ContentText, self._content.write(self._source.alphabet.spell(text)))

    def _say(self, kind: type[ReasoningText | ContentText], text: str) -> None:
        if text:
            (self._events if self._draft is None else self._drafted).append(kind(text))

    def _take(self, length: int) -> str:
        text = self._source.text[:length]
        self._source.text = self._source.text[length:]
        if self._draft is not None:
            self._draft += text
        return text

    def _undo_draft(self) -> None:
        """What began like a call inside the reasoning is none: it is reasoning, and the reasoning goes on."""
        text, self._draft, self._section = self._draft or "", None, ""
        self._content = Channel(marked=True)
        self._in_reasoning = True
        self._plain(text)

    def _discard_draft(self, mark: str) -> None:
        """The reasoning is closed only now: the calls before were part of it."""
        text, self._draft, self._section = self._draft or "", None, ""
        self._drafted, self._calls, self._after_call = [], 0, False
        self._content = Channel(marked=True)
        self._say(ReasoningText, self._reasoning.write(self._source.alphabet.spell(text)))
        self._source.text = self._source.text[len(mark) :]
        self._reasoning.mark()
