"""Free JSON that clients send and that is kept, rendered or passed on: bounded here, so that nothing later trips."""

from __future__ import annotations

from api.request import BadRequest

_DEEPEST = 64
_INT64 = 2**63


def check_plain(value: object, path: str) -> None:
    """Refuse what cannot be written again everywhere: deep nesting, integers beyond 64 bits. Raises BadRequest."""
    level: list[object] = [value]
    for _ in range(_DEEPEST):
        for item in level:
            if isinstance(item, int) and not -_INT64 <= item < _INT64:
                raise BadRequest({path: "holds an integer beyond 64 bits"})
        level = [part for item in level for part in _parts(item)]
        if not level:
            return
    raise BadRequest({path: f"is nested more than {_DEEPEST} deep"})


def _parts(value: object) -> list[object]:
    if isinstance(value, dict):
        return list(value.values())
    return list(value) if isinstance(value, list | tuple) else []
