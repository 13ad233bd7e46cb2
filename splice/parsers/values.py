"""What a tagged value means: text and a tool's JSON schema to JSON text.

Tags carry text, so `3` may be a number or a string; the schema decides. Numbers keep the model's own spelling, and a
value that does not fit its declared type stays a string: the client sees what was sampled, not a guess.
"""

from __future__ import annotations

import ast
import json
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from splice.parsers.json_text import read_json
from splice.parsers.scan import Broken

_INTEGER = re.compile(r"-?(0|[1-9]\d*)")
_NUMBER = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?")
_BOOLEANS = {"true": "true", "false": "false", "True": "true", "False": "false"}
_NULLS = {"null", "None"}
_DEEPEST_REFERENCE = 8


def parameters_of(tools: Sequence[Mapping[str, Any]]) -> dict[str, Mapping[str, Any]]:
    """The parameter schema of every offered tool, by the tool's name."""
    functions = [tool.get("function", tool) for tool in tools]
    named = [function for function in functions if isinstance(function, Mapping) and "name" in function]
    return {str(function["name"]): _mapping(function.get("parameters")) for function in named}


def typed(text: str, parameters: Mapping[str, Any], key: str) -> str:
    """JSON text of one argument, by the schema of the parameters that it belongs to."""
    schema = _mapping(parameters.get("properties")).get(key)
    if schema is None:
        return quoted(text)
    types = _types(schema, parameters, _DEEPEST_REFERENCE)
    stripped = text.strip()
    for kind, read in _READERS.items():
        if kind in types or (not types and kind != "null"):
            found = read(stripped)
            if found is not None:
                return found
    return quoted(text)


def untyped(text: str) -> str:
    """JSON text of an argument that its writer marked as JSON."""
    try:
        read_json(text)
    except Broken:
        return quoted(text)
    return text.strip()


def quoted(text: str) -> str:
    """Text as a JSON string."""
    return json.dumps(text, ensure_ascii=False)


def arguments(members: Mapping[str, str]) -> str:
    """An object of members whose values are JSON text already."""
    return "{" + ", ".join(f"{quoted(key)}: {value}" for key, value in members.items()) + "}"


def _types(schema: Any, root: Mapping[str, Any], depth: int) -> frozenset[str]:
    """Every JSON type that a schema allows; empty where it does not say."""
    if not isinstance(schema, Mapping) or depth == 0:
        return frozenset()
    named = schema.get("type")
    if isinstance(named, str):
        return frozenset((named,))
    if isinstance(named, list):
        return frozenset(map(str, named))
    if "enum" in schema or "const" in schema:
        return frozenset(_type_of(value) for value in _list(schema.get("enum")) or [schema.get("const")])
    branches = [branch for word in ("anyOf", "oneOf", "allOf") for branch in _list(schema.get(word))]
    if isinstance(schema.get("$ref"), str):
        branches.append(_referred(schema["$ref"], root))
    return frozenset().union(*(_types(branch, root, depth - 1) for branch in branches))


def _mapping(value: Any) -> Mapping[str, Any]:
    return value if isinstance(value, Mapping) else {}


def _list(value: Any) -> list[Any]:
    return value if isinstance(value, list) else []


def _referred(reference: str, root: Any) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        root = root.get(step) if isinstance(root, Mapping) else None
    return root


def _type_of(value: Any) -> str:
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null", list: "array"}
    return kinds.get(type(value), "object")


def _null(text: str) -> str | None:
    return "null" if text in _NULLS else None


def _integer(text: str) -> str | None:
    return text if _INTEGER.fullmatch(text) else None


def _number(text: str) -> str | None:
    return text if _NUMBER.fullmatch(text) else None


def _container(kind: type) -> Callable[[str], str | None]:
    def read(text: str) -> str | None:
        try:
            return text if isinstance(read_json(text), kind) else None
        except Broken:
            found = python_literal(text)
        return json.dumps(found, ensure_ascii=False) if isinstance(found, kind) else None

    return read


def python_literal(text: str) -> Any:
    """A Python literal, which models write for lists and objects; None when it is none."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            found = ast.literal_eval(text)
        json.dumps(found)
    except (ValueError, SyntaxError, TypeError, RecursionError, MemoryError):
        return None
    return found


# In this order, so that a union takes the narrowest type that the text fits; a string takes what is left.
_READERS: dict[str, Callable[[str], str | None]] = {
    "null": _null,
    "boolean": _BOOLEANS.get,
    "integer": _integer,
    "number": _number,
    "array": _container(list),
    "object": _container(dict),
}
