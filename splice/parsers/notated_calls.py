"""Calls in notations that neither engine covers: Gemma's `call:f{key:value}` and Llama 4's `[f(key=value)]`."""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Mapping
from typing import Any

from splice.parsers.alphabet import Alphabet
from splice.parsers.events import CallMade
from splice.parsers.formats import NotatedCalls
from splice.parsers.json_text import read_json
from splice.parsers.scan import Block, Broken, Scan, Source, first_of, made, one_of
from splice.parsers.values import arguments, quoted, untyped

_PYTHON_STOP = re.compile(r"""["'\[\](){}]""")
_PYTHON_STRING_STOP = re.compile(r"""["'\\]""")


class GemmaEngine:
    """Reads Gemma's calls: unquoted keys, strings between quote tokens and without escapes, JSON otherwise."""

    def __init__(self, row: NotatedCalls, alphabet: Alphabet) -> None:
        self._heads = alphabet.templates(row.heads)
        self._closes = alphabet.templates(row.closes)
        self._quote = alphabet.literal(row.quote[0])
        self._quotes = alphabet.templates(row.quote)
        self._stops = (*self._quotes, *alphabet.templates("{[}]"), *self._closes)

    def scan(self, source: Source, tools: Mapping[str, Mapping[str, Any]]) -> Scan[Block]:
        """Read the call that begins at the start of the source."""
        del tools  # the notation tells strings from everything else
        head = (yield from one_of(source, self._heads, 0)).match
        end = yield from self._end(source, head.end())
        try:
            members, _ = self._object(source.text[head.end() : end], 0, source.alphabet)
        except (IndexError, RecursionError) as error:
            raise Broken from error
        close = yield from one_of(source, self._closes, end)
        return Block(close.match.end(), (made(head["name"], members),))

    def _end(self, source: Source, at: int) -> Scan[int]:
        depth = 0
        while True:
            stop = (yield from first_of(source, self._stops, at)).match
            at = stop.end()
            if stop[0] == self._quote:
                at = (yield from first_of(source, self._quotes, at)).match.end()
            elif stop[0] not in "{[}]":
                raise Broken  # the closing marker stands inside the braces
            else:
                depth += 1 if stop[0] in "{[" else -1
                if depth == 0:
                    return at

    def _object(self, text: str, at: int, alphabet: Alphabet) -> tuple[str, int]:
        members: dict[str, str] = {}
        at = _past(text, at + 1)
        while text[at] != "}":
            colon = text.find(":", at)
            if colon < 0:
                raise Broken
            key = alphabet.spell(text[at:colon].removeprefix(self._quote).removesuffix(self._quote))
            members[key], at = self._value(text, _past(text, colon + 1), alphabet)
            at = _past_comma(text, at)
        return arguments(members), at + 1

    def _array(self, text: str, at: int, alphabet: Alphabet) -> tuple[str, int]:
        elements: list[str] = []
        at = _past(text, at + 1)
        while text[at] != "]":
            element, at = self._value(text, at, alphabet)
            elements.append(element)
            at = _past_comma(text, at)
        return "[" + ", ".join(elements) + "]", at + 1

    def _value(self, text: str, at: int, alphabet: Alphabet) -> tuple[str, int]:
        if text.startswith(self._quote, at):
            start = at + len(self._quote)
            end = text.index(self._quote, start)
            return quoted(alphabet.spell(text[start:end])), end + len(self._quote)
        if text[at] == "{":
            return self._object(text, at, alphabet)
        if text[at] == "[":
            return self._array(text, at, alphabet)
        end = next(n for n in range(at, len(text)) if text[n] in ",}]")
        if end == at:
            raise Broken
        return untyped(text[at:end].strip()), end


def _past(text: str, at: int) -> int:
    while text[at].isspace():
        at += 1
    return at


def _past_comma(text: str, at: int) -> int:
    at = _past(text, at)
    if text[at] == ",":
        return _past(text, at + 1)
    if text[at] in "}]":
        return at
    raise Broken


class PythonEngine:
    """Reads a Python list of calls with keyword arguments that are literals."""

    def scan(self, source: Source, tools: Mapping[str, Mapping[str, Any]]) -> Scan[Block]:
        """Read the list that begins at the start of the source."""
        del tools  # Python brings its own types
        end = yield from _bracket_end(source)
        return Block(end, _python_calls(source.alphabet.spell(source.text[:end])))


def _bracket_end(source: Source) -> Scan[int]:
    depth = at = 0
    while True:
        match = _PYTHON_STOP.search(source.text, at)
        if match is None:
            at = len(source.text)
            yield from source.more()
            continue
        at = match.end()
        if match[0] in "\"'":
            at = yield from _python_string_end(source, at, match[0])
            continue
        depth += 1 if match[0] in "[({" else -1
        if depth == 0:
            return at


def _python_string_end(source: Source, at: int, quote: str) -> Scan[int]:
    while True:
        match = _PYTHON_STRING_STOP.search(source.text, at)
        if match is None or (match[0] == "\\" and match.end() == len(source.text)):
            at = len(source.text) if match is None else match.start()
            yield from source.more()
        elif match[0] == quote:
            return match.end()
        else:
            at = match.end() + (match[0] == "\\")


def _python_calls(text: str) -> tuple[CallMade, ...]:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # a model's `'\\d'` is not our source code
            tree = ast.parse(text.strip(), mode="eval").body
            calls = tree.elts if isinstance(tree, ast.List) else []
            made = tuple(_python_call(call) for call in calls)
    except (ValueError, SyntaxError, RecursionError, MemoryError) as error:
        raise Broken from error
    if not made:
        raise Broken
    return made


def _python_call(node: ast.expr) -> CallMade:
    if not isinstance(node, ast.Call) or node.args:
        raise Broken
    members = {keyword.arg or "": _literal(keyword.value) for keyword in node.keywords}
    if "" in members:
        raise Broken
    return made(ast.unparse(node.func), arguments(members))


def _literal(node: ast.expr) -> str:
    try:
        text = json.dumps(ast.literal_eval(node), ensure_ascii=False)
    except TypeError as error:
        raise Broken from error
    read_json(text)
    return text
