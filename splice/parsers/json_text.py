"""JSON as its writer spelled it: strict reading, and the parts of a text cut out without being rewritten."""

from __future__ import annotations

import json
import re
from typing import Any, NoReturn

from splice.parsers.scan import Broken

_SPACE = re.compile(r"\s*")


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")


def _refuse_repeats(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("a key comes twice")
    return found


# Clients keep either of two equal keys and many cannot read NaN: such text is not passed on as arguments.
_DECODER = json.JSONDecoder(parse_constant=_refuse_constant, object_pairs_hook=_refuse_repeats)


def read_json(text: str) -> Any:
    """Strict JSON. Raises Broken."""
    try:
        return _DECODER.decode(text)
    except (ValueError, RecursionError) as error:
        raise Broken from error


def json_members(text: str) -> dict[str, str]:
    """The members of a JSON object, each value as its writer spelled it. Raises Broken."""
    if not isinstance(read_json(text), dict):
        raise Broken
    members: dict[str, str] = {}
    at = _after(text, text.index("{") + 1)
    while text[at] != "}":
        key, at = _DECODER.raw_decode(text, at)
        start = _after(text, _after(text, at) + 1)
        _, at = _DECODER.raw_decode(text, start)
        members[key] = text[start:at]
        at = _after(text, at)
        at = _after(text, at + 1) if text[at] == "," else at
    return members


def json_elements(text: str) -> list[str]:
    """The elements of a JSON array, each as its writer spelled it. Raises Broken."""
    if not isinstance(read_json(text), list):
        raise Broken
    elements: list[str] = []
    at = _after(text, text.index("[") + 1)
    while text[at] != "]":
        _, end = _DECODER.raw_decode(text, at)
        elements.append(text[at:end])
        at = _after(text, end)
        at = _after(text, at + 1) if text[at] == "," else at
    return elements


def _after(text: str, at: int) -> int:
    match = _SPACE.match(text, at)
    assert match is not None
    return match.end()
