"""What is asked before a template's operation that could fill the memory: of filters, methods and operators.

Each check takes the operation's arguments and raises TooMuch; the operation's result is bounded where they pass.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from api.sandbox_budget import TooMuch, budget

_MAX_WIDTH = 100_000  # padding, indent, repetition: no template has use for more
_MAX_BITS = 100_000  # of an integer
_WIDE_FORMAT = re.compile(r"[0-9]{6}")
_FIELD = re.compile(r"[%{]")


def _widest(arguments: Iterable[Any]) -> int:
    widest = max((abs(argument) for argument in arguments if isinstance(argument, int)), default=0)
    if widest > _MAX_WIDTH:
        raise TooMuch("it asked for an enormous width")
    return widest


def _widths(value: Any, *args: Any, **kwargs: Any) -> None:
    """Each part of the value may be padded, filled up, or set apart with a text."""
    others = (*args, *kwargs.values())
    widest = _widest(others)
    texts = sum(budget().weigh(other) for other in others if not isinstance(other, int))
    budget().allow((widest + texts + 1) * (budget().weigh(value) + texts))


def _short(value: Any, *_args: Any, **_kwargs: Any) -> None:
    """Some filters take more than linear time; no template has use for them on long texts."""
    if budget().weigh(value) > _MAX_WIDTH:
        raise TooMuch("it asked too much of a slow filter")


def _short_widths(value: Any, *args: Any, **kwargs: Any) -> None:
    _short(value)
    _widths(value, *args, **kwargs)


def _replacement(value: Any, old: Any = "", new: Any = "", *_args: Any, **_kwargs: Any) -> None:
    text = str(value)
    budget().spend(text.count(str(old)) * len(str(new)) + len(text))


def _translation(text: str, table: Any = None, *_args: Any) -> None:
    widest = max((budget().weigh(part) for part in table.values()), default=1) if isinstance(table, dict) else 1
    budget().spend(len(text) * widest)


def _format(value: Any, *args: Any, **kwargs: Any) -> None:
    """Every field may print every argument, as wide as it says."""
    if _WIDE_FORMAT.search(str(value)):
        raise TooMuch("it asked for an enormous width")
    given = (*args, *kwargs.values())
    width = _widest(given) + budget().weigh(given)
    budget().spend(len(str(value)) + len(_FIELD.findall(str(value))) * width)


def _joining(parts: Any, separator: Any = "", *_args: Any, **_kwargs: Any) -> None:
    count = len(parts) if isinstance(parts, list | tuple | dict | str) else 1
    budget().spend(budget().weigh(parts) + count * len(str(separator)))


def _joining_method(separator: str, parts: Any = ()) -> None:
    _joining(parts, separator)


def _listing(value: Any) -> None:
    budget().spend(8 * len(value) if isinstance(value, str | list | tuple | dict) else 0)


def _sum(left: Any, right: Any) -> None:
    if isinstance(left, str) and isinstance(right, str):
        budget().spend(len(left) + len(right))
    elif isinstance(left, list | tuple) and isinstance(right, list | tuple):
        budget().allow(budget().weigh(left) + budget().weigh(right))


def _product(left: Any, right: Any) -> None:
    for sequence, times in ((left, right), (right, left)):
        if isinstance(sequence, str | list | tuple) and isinstance(times, int):
            budget().spend(budget().weigh(sequence) * times)
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() + right.bit_length() > _MAX_BITS:
        raise TooMuch("it made an enormous number")


def _power(left: Any, right: Any) -> None:
    if isinstance(left, int) and isinstance(right, int) and left.bit_length() * max(right, 0) > _MAX_BITS:
        raise TooMuch("it made an enormous number")


def _modulo(left: Any, right: Any) -> None:
    if isinstance(left, str):
        _format(left, *(right if isinstance(right, tuple) else (right,)))


Check = Callable[..., None]

FILTER_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("batch", "center", "indent", "round", "slice", "tojson", "truncate"), _widths),
    **dict.fromkeys(("striptags", "title", "urlize", "wordcount"), _short),
    "format": _format,
    "join": _joining,
    "list": _listing,
    "replace": _replacement,
    "wordwrap": _short_widths,
}
METHOD_CHECKS: Mapping[str, Check] = {
    **dict.fromkeys(("center", "expandtabs", "ljust", "rjust", "zfill"), _widths),
    "format": _format,
    "format_map": _format,
    "join": _joining_method,
    "replace": _replacement,
    "translate": _translation,
}
BINARY_CHECKS: Mapping[str, Check] = {"+": _sum, "*": _product, "**": _power, "%": _modulo}
