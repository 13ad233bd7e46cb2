"""Reading an engine's JSON: typed, and every misfit an EngineContract that names its field."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from api.engine.base import EngineContract

T = TypeVar("T")


class _NotANumber(Exception):
    """A NaN or an infinity, spelled as JavaScript does."""


def decoded(body: bytes | msgspec.Raw, kind: type[T], field: str, *, numbers: str = "") -> T:
    """`body` as a `kind`. An absent raw part is empty, and is named as missing.

    `numbers` names the field to blame for a NaN: some JSON writers spell it bare, and then no part can be read.
    """
    if not body:
        raise EngineContract(field, "missing")
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # ValidationError is a DecodeError
        literal = _bare_number(bytes(body))
        if literal:
            raise EngineContract(numbers or field, f"holds {literal}, which is not JSON") from error
        raise EngineContract(field, str(error)) from error


def _bare_number(body: bytes) -> str:
    """The NaN or infinity that keeps `body` from being JSON, "" where it is broken in another way."""

    def found(literal: str) -> None:
        raise _NotANumber(literal)

    try:
        json.loads(body, parse_constant=found)
    except _NotANumber as literal:
        return str(literal)
    except (ValueError, RecursionError):
        return ""
    return ""


def id_values(ids: Sequence[int], field: str) -> npt.NDArray[np.int64]:
    """Ids of any value an int64 can hold: whether they are in the vocabulary is judged later, once for all engines."""
    try:
        return np.array(ids, dtype=np.int64)
    except OverflowError as error:
        raise EngineContract(field, "an id does not fit 64 bits") from error


def token_ids(raw: msgspec.Raw, field: str) -> npt.NDArray[np.int64]:
    """A JSON list of ids."""
    return id_values(decoded(raw, list[int], field), field)
