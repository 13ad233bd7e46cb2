"""The engine for calls whose arguments are tagged values: Qwen3-Coder, GLM, DeepSeek's DSML, MiniMax, Kimi K3."""

from __future__ import annotations

import html
from collections.abc import Mapping
from typing import Any

from splice.parsers.alphabet import Alphabet
from splice.parsers.formats import TaggedCalls
from splice.parsers.scan import Block, Scan, Source, first_of, made, one_of
from splice.parsers.values import arguments, quoted, typed, untyped


class TaggedEngine:
    """Reads one call of a tagged format."""

    def __init__(self, row: TaggedCalls, alphabet: Alphabet) -> None:
        self._row = row
        self._heads = alphabet.templates((*row.empty, *row.heads))
        self._parts = alphabet.templates((*row.closes, *row.parameters))
        self._value_ends = alphabet.templates(row.value_ends)
        self._last_value_ends = alphabet.templates(row.last_value_ends)

    def scan(self, source: Source, tools: Mapping[str, Mapping[str, Any]]) -> Scan[Block]:
        """Read the call that begins at the start of the source."""
        head = yield from one_of(source, self._heads, 0)
        name, at = head.match["name"], head.match.end()
        members: dict[str, str] = {}
        if head.which >= len(self._row.empty):
            at = yield from self._members(source, at, tools.get(name, {}), members)
        return Block(at, (made(name, arguments(members)),))

    def _members(self, source: Source, at: int, schema: Mapping[str, Any], members: dict[str, str]) -> Scan[int]:
        while True:
            part = yield from one_of(source, self._parts, at)
            if part.which < len(self._row.closes):
                return part.match.end()
            start = part.match.end()
            end = yield from first_of(source, self._value_ends, start, last=self._last_value_ends)
            text = source.alphabet.spell(source.text[start : end.match.start()])
            key = html.unescape(part.match["key"]) if self._row.escaped else part.match["key"]
            members[key] = self._value(text, key, part.match.groupdict().get("type", ""), schema)
            at = end.match.end()

    def _value(self, text: str, key: str, written_type: str, schema: Mapping[str, Any]) -> str:
        if self._row.newline_framed:
            text = text.removeprefix("\n").removesuffix("\n")
        if self._row.typing == "schema":
            return typed(text, schema, key)
        is_text = written_type == ("true" if self._row.typing == "string" else "string")
        return quoted(text) if is_text else untyped(text)
