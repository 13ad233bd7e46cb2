"""Which steps does a database still need? Pure: the ledger's labels in, the steps out."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence

from migrations.base import Step
from migrations.errors import DatabaseTooNew, LedgerGap, LedgerUnreadable, StepRenamed

_LABEL = re.compile(r"(\d+)_\w+", re.ASCII)


def plan(applied: Iterable[str], steps: Sequence[Step]) -> tuple[Step, ...]:
    """The steps that are not applied yet, in order.

    applied: labels of the ledger, in any order. steps: this release's, numbered 1, 2, 3 ... without a gap (else
    ValueError). Raises DatabaseTooNew, LedgerGap, StepRenamed, LedgerUnreadable.
    """
    _expect_counted(steps)
    recorded = sorted((_number(label), label) for label in applied)
    if newer := [label for number, label in recorded if number > len(steps)]:
        raise DatabaseTooNew(tuple(newer))
    for number, label in recorded:
        if label != steps[number - 1].label:
            raise StepRenamed(label, steps[number - 1].label)
    numbers = {number for number, _ in recorded}
    newest = max(numbers, default=0)
    if missing := [step.label for step in steps[:newest] if step.number not in numbers]:
        raise LedgerGap(tuple(missing))
    return tuple(steps[newest:])


def _expect_counted(steps: Sequence[Step]) -> None:
    numbers = [step.number for step in steps]
    if numbers != list(range(1, len(steps) + 1)):
        raise ValueError(f"steps must be numbered from 1 without a gap, got {numbers}")


def _number(label: str) -> int:
    match = _LABEL.fullmatch(label)
    if match is None or int(match[1]) < 1:
        raise LedgerUnreadable(label)
    return int(match[1])
