"""What one rendering of a chat template may spend: CPU time, characters, and the weight of what it builds.

A template builds a value that is small in memory and endless when printed by nesting a list in itself, so values
have a weight: the characters and elements that they would have when written out. Whatever a template builds is
weighed where it is built, so that no later operation on it, all in C and deaf to time bounds, can run away.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from itertools import chain
from typing import Any

import jinja2

_TICKS_PER_LOOK = 64
_LARGE = 10_000  # making this much takes time worth a look at the clock
# An honest template writes little beside its messages; some grow one string message by message.
_SIZE, _SIZE_PER_INPUT = 4_000_000, 16
_TOTAL, _TOTAL_PER_INPUT = 200_000_000, 500


class TooMuch(jinja2.TemplateRuntimeError):
    """The template ran too long or wrote too much."""


class Budget:
    """CPU time of the thread, so that a busy machine changes nothing; sizes in proportion to what was given."""

    __slots__ = ("_deadline", "_left", "_size", "_ticks", "_weights")

    def __init__(self, seconds: float, given: Any = ()) -> None:
        self._deadline = time.thread_time() + seconds
        self._ticks = 0
        # Holds what it has weighed, so that no other value takes its id.
        self._weights: dict[int, tuple[int, Any]] = {}
        weight = self.weigh(given)
        self._size = _SIZE + _SIZE_PER_INPUT * weight
        self._left = _TOTAL + _TOTAL_PER_INPUT * weight

    def tick(self) -> None:
        """Count a step. Raises TooMuch past the deadline."""
        self._ticks += 1
        if self._ticks % _TICKS_PER_LOOK == 0:
            self._look()

    def allow(self, size: int) -> None:
        """Let a value of this weight be. Raises TooMuch where it is enormous."""
        if size > self._size:
            raise TooMuch("it wrote too much")

    def spend(self, size: int) -> None:
        """Count a new text or list of this size. Raises TooMuch where it, or all of them, are enormous."""
        self.allow(size)
        self._left -= size
        if self._left < 0:
            raise TooMuch("it wrote too much")
        if size > _LARGE:
            self._look()

    def _look(self) -> None:
        if time.thread_time() > self._deadline:
            raise TooMuch("it ran for too long")

    def weigh(self, value: Any) -> int:
        """How much it would be, written out. Its parts are remembered, itself not: lists that grow are many."""
        if isinstance(value, str):
            return len(value)
        if not isinstance(value, list | tuple | dict):
            return 1
        return 1 + sum(map(self._part, _parts(value)))

    def _part(self, value: Any) -> int:
        if not isinstance(value, list | tuple | dict):
            return len(value) if isinstance(value, str) else 1
        known = self._weights.get(id(value))
        if known is None:
            self.tick()
            if len(value) > _LARGE:
                self._look()
            known = self._weights[id(value)] = (self.weigh(value), value)
        return known[0]


def _parts(value: list[Any] | tuple[Any, ...] | dict[Any, Any]) -> Iterable[Any]:
    return chain.from_iterable(value.items()) if isinstance(value, dict) else value


_budget: ContextVar[Budget] = ContextVar("template_budget")


def budget() -> Budget:
    """What the rendering, or the compilation, that runs in this thread may still spend."""
    return _budget.get()


@contextmanager
def bounded(limits: Budget) -> Iterator[None]:
    """Run under these limits."""
    token = _budget.set(limits)
    try:
        yield
    finally:
        _budget.reset(token)
