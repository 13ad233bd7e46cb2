"""One string for ids and text: a control token of the format stands in it as one character that no text contains.

Decoded UTF-8 never holds a lone surrogate, so every control token that a format's markers are spelled with gets one.
The engines then match plain strings, and text that merely looks like a marker cannot match: its characters differ.
Where the vocabulary has no such token, the marker keeps its spelling and is matched as text.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import NamedTuple

_FIRST_SURROGATE = 0xD800
_SURROGATES = 2048
_ANY_SURROGATE = re.compile("[\ud800-\udfff]")

_NAME = "[^\\s<>\"'{}\\[\\](),;=\ud800-\udfff]{1,128}?"
_KEY = '[^<>"\\n\ud800-\udfff]{1,128}?'
# Each with the most characters that it matches: they are bounded, so that how a reply was cut into pieces cannot
# change what it is read as.
_HOLES = {
    "ws": (r"\s{0,64}", 64),
    "line": (r"\n", 1),
    "json": (r"(?=[\[{])", 1),
    "tag": ("(?=[<\ud800-\udfff])", 1),
    "end": (r"\Z", 0),
    "name": (f"(?P<name>{_NAME})", 128),
    "id": (f"(?P<id>{_NAME})", 128),
    "key": (f"(?P<key>{_KEY})", 128),
    "type": (r"(?P<type>\w{1,16})", 16),
    "index": (r"\d{1,6}", 6),
}
_HOLE = re.compile(r"\{(\w+)\}")


class Template(NamedTuple):
    """A compiled template.

    `viable` matches what may still become a match, so that hopeless text is let go at once; no match is longer than
    `width`.
    """

    full: re.Pattern[str]
    viable: re.Pattern[str]
    width: int


def _may_be_a_marker(token: str) -> bool:
    """Some vocabularies add white space and single characters as tokens too; no marker is one of those."""
    return len(token) > 2 and token == token.strip()


class Alphabet:
    """How ids and the spelled markers of one format appear in the stream."""

    def __init__(self, spellings: Iterable[str], control_tokens: Mapping[str, int], stop_ids: frozenset[int]) -> None:
        wanted = "\0".join(spellings)
        used = [token for token in control_tokens if _may_be_a_marker(token) and token in wanted][:_SURROGATES]
        self._sign = {token: chr(_FIRST_SURROGATE + n) for n, token in enumerate(used)}
        self._spelling = {sign: token for token, sign in self._sign.items()}
        # Stop tokens end a reply and are no part of its text. Any other control token that the model sampled stays
        # visible: leaving it out would hide from the client what the trainer is going to see.
        self.by_id = {
            number: self._sign.get(token, "" if number in stop_ids else token)
            for token, number in control_tokens.items()
        }
        for number in stop_ids:
            self.by_id.setdefault(number, "")
        tokens = sorted(used, key=len, reverse=True)
        self._tokens = re.compile("|".join(map(re.escape, tokens)) or r"(?!)")

    def literal(self, spelled: str) -> str:
        """A marker as it appears in the stream."""
        return self._tokens.sub(lambda found: self._sign[found[0]], spelled)

    def spell(self, text: str) -> str:
        """Stream text as a reader would see it."""
        return _ANY_SURROGATE.sub(lambda found: self._spelling.get(found[0], found[0]), text)

    def has_signs(self, text: str) -> bool:
        """Whether a control token stands in this text."""
        return _ANY_SURROGATE.search(text) is not None

    def width(self, sign: str) -> int:
        """How many characters one stream character is spelled with."""
        return len(self._spelling.get(sign, sign))

    def template(self, template: str) -> Template:
        """Compile a row's template: its text is literal, `{ws}`, `{name}`, `{key}`... are holes.

        What stands behind `{then}` has to come next and is left where it is.
        """
        before, _, after = template.partition("{then}")
        matched, ahead = self._atoms(before), self._atoms(after)
        viable = ""
        for atom, _ in reversed(matched + ahead):
            viable = rf"{atom}(?:\Z|{viable})"
        full = "".join(atom for atom, _ in matched)
        if ahead:
            full += f"(?={''.join(atom for atom, _ in ahead)})"
        width = sum(width for _, width in matched + ahead)
        return Template(re.compile(full), re.compile(rf"\Z|{viable}"), width)

    def _atoms(self, template: str) -> list[tuple[str, int]]:
        atoms: list[tuple[str, int]] = []
        for place, piece in enumerate(_HOLE.split(template)):
            atoms += [_HOLES[piece]] if place % 2 else ((re.escape(sign), 1) for sign in self.literal(piece))
        return atoms

    def templates(self, templates: Iterable[str]) -> tuple[Template, ...]:
        """Compile several templates."""
        return tuple(self.template(template) for template in templates)
