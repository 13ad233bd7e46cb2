"""What happened, as one frozen record a turn: metrics and log are separate readers of it."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from splice.types import Turn
from store.views import SessionKey


@dataclass(frozen=True, slots=True)
class TurnDone:
    """A turn that was answered. stages_s: seconds spent in each named stage."""

    turn: Turn
    key: SessionKey
    stages_s: dict[str, float]
    replayed: bool = False
    refusal: str = ""


Observer = Callable[[TurnDone], None]


class TurnFact:
    """Collects one turn's stage times on its way through the service."""

    __slots__ = ("_stages",)

    def __init__(self) -> None:
        self._stages: dict[str, float] = {}

    @contextmanager
    def stage(self, name: str) -> Iterator[None]:
        """Time one stage; a stage that raises is timed too."""
        start = time.perf_counter()
        try:
            yield
        finally:
            self._stages[name] = time.perf_counter() - start

    def done(self, turn: Turn, key: SessionKey, *, replayed: bool = False, refusal: str = "") -> TurnDone:
        """The finished record."""
        return TurnDone(turn, key, self._stages, replayed, refusal)
