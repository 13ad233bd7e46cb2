"""The latest few results of a pure computation, shared by threads."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable
from threading import Lock
from typing import Generic, TypeVar

from splice.errors import TemplateRejected

_REMEMBERED = 128

Value = TypeVar("Value")


class Remembered(Generic[Value]):
    """The latest few results; that a template refuses is one too."""

    def __init__(self) -> None:
        self._values: OrderedDict[Hashable, Value | TemplateRejected] = OrderedDict()
        self._lock = Lock()

    def get(self, key: Hashable, compute: Callable[[], Value]) -> Value:
        """The remembered result, or a new one. Raises TemplateRejected where computing it did."""
        value = self._known(key)
        if value is None:
            try:
                value = compute()
            except TemplateRejected as rejected:
                value = rejected
            self._remember(key, value)
        if isinstance(value, TemplateRejected):
            raise TemplateRejected(value.words, runaway=value.runaway)
        return value

    def _known(self, key: Hashable) -> Value | TemplateRejected | None:
        with self._lock:
            if key in self._values:
                self._values.move_to_end(key)
            return self._values.get(key)

    def _remember(self, key: Hashable, value: Value | TemplateRejected) -> None:
        with self._lock:
            self._values[key] = value
            while len(self._values) > _REMEMBERED:
                self._values.popitem(last=False)
