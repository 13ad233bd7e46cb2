"""How a call is read while it is still arriving.

A scanner is a generator over the buffered stream: it yields when it needs more text, returns the block that it
found, raises `Broken` when what it reads can no longer become a call, and `Cut` when the reply ends first. It keeps
its place, so a long call is read once, however many pieces it comes in.
"""

from __future__ import annotations

import re
from collections.abc import Generator, Sequence
from typing import NamedTuple, TypeVar

from splice.parsers.alphabet import Alphabet, Template
from splice.parsers.events import CallMade
from splice.types import ToolCall

_STRING_STOP = re.compile(r'["\\\x00-\x1f]')
# Between the strings of a JSON text there is nothing but these: `true`, `false`, `null`, numbers and punctuation.
# Checking it while reading tells a broken text where it breaks, not at the end of the reply.
_BETWEEN_STRINGS = re.compile(r"[\s,:0-9eE+\-.truefalsn]*")


class Broken(Exception):
    """This is no call, whatever follows."""


class Cut(Exception):
    """The reply ended inside the call."""


class Block(NamedTuple):
    """Calls that were read, and where the text goes on after them."""

    end: int
    calls: tuple[CallMade, ...]


T = TypeVar("T")
Scan = Generator[None, None, T]


def made(name: str, arguments: str, model_id: str = "") -> CallMade:
    """A call, if it can be sent: JSON may escape half a character, which no UTF-8 can carry."""
    try:
        (name + arguments + model_id).encode()
    except UnicodeEncodeError as error:
        raise Broken from error
    return CallMade(ToolCall(name, arguments), model_id)


class Source:
    """The stream from the current marker on. `final` once nothing more will come, `stopped` if the model ended it."""

    def __init__(self, alphabet: Alphabet) -> None:
        self.alphabet = alphabet
        self.text = ""
        self.final = False
        self.stopped = False

    def more(self) -> Scan[None]:
        """Wait for more text."""
        if self.final:
            raise Cut
        yield


class Head(NamedTuple):
    """One of several patterns that matched."""

    which: int
    match: re.Match[str]


def one_of(source: Source, templates: Sequence[Template], at: int) -> Scan[Head]:
    """The template that matches here; Broken when none can any more."""
    while True:
        for which, template in enumerate(templates):
            match = template.full.match(source.text, at)
            if match is not None:
                return Head(which, match)
        if not any(template.viable.match(source.text, at) for template in templates):
            raise Broken
        yield from source.more()


def first_of(source: Source, templates: Sequence[Template], at: int, *, last: Sequence[Template] = ()) -> Scan[Head]:
    """The first place where a template matches; those in `last` count at the end of the reply only."""
    start = at
    overlap = max(template.width for template in (*templates, *last))
    while True:
        found = _earliest(templates, source.text, start)
        if found is not None:
            return found
        if source.final:
            found = _earliest(last, source.text, start)
            if found is None:
                raise Cut
            return Head(len(templates) + found.which, found.match)
        start = max(at, len(source.text) - overlap)
        yield


def _earliest(templates: Sequence[Template], text: str, start: int) -> Head | None:
    searched = ((which, template.full.search(text, start)) for which, template in enumerate(templates))
    found = [Head(which, match) for which, match in searched if match is not None]
    return min(found, key=lambda head: head.match.start(), default=None)


def json_end(source: Source, at: int) -> Scan[int]:
    """Where the JSON object or array that begins here ends. Not a validation, but no longer than the text."""
    depth = 0
    while True:
        at = yield from _next_bracket(source, at)
        depth += 1 if source.text[at] in "{[" else -1
        at += 1
        if depth <= 0:
            return at


def _next_bracket(source: Source, at: int) -> Scan[int]:
    while True:
        match = _BETWEEN_STRINGS.match(source.text, at)
        assert match is not None
        at = match.end()
        if at == len(source.text):
            yield from source.more()
        elif source.text[at] in "{}[]":
            return at
        elif source.text[at] == '"':
            at = yield from _string_end(source, at + 1)
        else:
            raise Broken


def _string_end(source: Source, at: int) -> Scan[int]:
    while True:
        match = _STRING_STOP.search(source.text, at)
        if match is None:
            at = len(source.text)
            yield from source.more()
        elif match[0] == '"':
            return match.end()
        elif match[0] != "\\":
            raise Broken
        elif match.end() == len(source.text):
            at = match.start()
            yield from source.more()
        else:
            at = match.end() + 1
