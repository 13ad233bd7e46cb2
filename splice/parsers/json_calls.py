"""The engine for calls whose arguments are JSON between markers: Hermes, DeepSeek, Kimi K2, Mistral, Llama 3."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from splice.parsers.alphabet import Alphabet
from splice.parsers.events import CallMade
from splice.parsers.formats import JsonCalls
from splice.parsers.json_text import json_elements, json_members, read_json
from splice.parsers.scan import Block, Broken, Cut, Scan, Source, json_end, made, one_of

# Kimi's ids carry the name: `functions.get_weather:0`.
_NAME_IN_ID = re.compile(r"(?:functions\.)?(?P<name>.+?)(?::\d+)?")


class JsonEngine:
    """Reads one call, or one array of calls, of a JSON format."""

    def __init__(self, row: JsonCalls, alphabet: Alphabet) -> None:
        self._row = row
        self._heads = alphabet.templates(row.heads)
        self._closes = alphabet.templates(row.closes)

    def scan(self, source: Source, tools: Mapping[str, Mapping[str, Any]]) -> Scan[Block]:
        """Read what begins at the start of the source."""
        del tools  # JSON brings its own types
        head = (yield from one_of(source, self._heads, 0)).match
        start = head.end()
        end = yield from json_end(source, start)
        text = source.alphabet.spell(source.text[start:end])
        named = head.groupdict()
        if "id" in named and "name" not in named:
            found = _NAME_IN_ID.fullmatch(named["id"])
            named["name"] = found["name"] if found else named["id"]
        calls = (_named_call(named, text),) if "name" in named else self._self_named(text)
        return Block((yield from self._closed(source, end)), calls)

    def _self_named(self, text: str) -> tuple[CallMade, ...]:
        if text.startswith("{"):
            return (self._call(text),)
        calls = tuple(self._call(element) for element in json_elements(text))
        if not calls:
            raise Broken
        return calls

    def _call(self, text: str) -> CallMade:
        members = json_members(text)
        name = read_json(members.get("name", "null"))
        key = next((key for key in self._row.arguments if key in members), None)
        if not isinstance(name, str) or not name or (key is None and self._row.bare):
            raise Broken
        given = members.get("id", '""')
        model_id = read_json(given) if given.startswith('"') else ""
        return made(name, arguments_of(members[key]) if key else "{}", model_id)

    def _closed(self, source: Source, end: int) -> Scan[int]:
        if not self._closes:
            return end
        try:
            return (yield from one_of(source, self._closes, end)).match.end()
        except Cut:
            # The model ended its turn behind a whole call and only left the closing marker out.
            if source.stopped and not source.text[end:].strip():
                return len(source.text)
            raise


def _named_call(head: Mapping[str, str], text: str) -> CallMade:
    return made(head["name"], arguments_of(text), head.get("id", ""))


def arguments_of(text: str) -> str:
    """Arguments as the model spelled them. A string that holds an object is that object, null is none."""
    value = read_json(text)
    if isinstance(value, str):
        text, value = value, read_json(value)
    if value is None:
        return "{}"
    if not isinstance(value, dict):
        raise Broken
    return text
