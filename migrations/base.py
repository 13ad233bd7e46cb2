"""What a migration step is, and the two keys in which the database remembers its steps.

These names are frozen: a step of today must find them for ever, so they are this package's own and come from
nowhere else.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass

from redis.asyncio import Redis

LEDGER = "ts1:migrations"  # HASH `<number>_<name>` -> when it was applied, ISO-8601
LOCK = "{ts1:migrations}:lock"  # STRING the runner's token while it works; the braces put it in the ledger's slot

_WIDTH = 4


@dataclass(frozen=True, slots=True)
class Step:
    """One numbered change of what is stored.

    `apply` must be safe to run twice, also after half of it ran, and while workers of the release before and of
    this one serve: it changes keys online or not at all. `required`: this release cannot serve without it.
    """

    number: int
    name: str
    apply: Callable[[Redis], Awaitable[None]]
    required: bool = False

    @property
    def label(self) -> str:
        """How the step stands in the ledger: sorted by number, readable by a person."""
        return f"{self.number:0{_WIDTH}}_{self.name}"
