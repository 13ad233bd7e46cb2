"""How many turns one worker runs at once; what is above that, or comes while it drains, is refused before it costs."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from api.errors import Draining, NotReady, Overloaded
from api.metrics import Metrics
from api.readiness import Readiness


class Admission:
    """Counts turns in and out."""

    def __init__(self, most: int, readiness: Readiness, metrics: Metrics) -> None:
        self._most = most
        self._readiness = readiness
        self._metrics = metrics
        self._count = 0

    @contextmanager
    def turn(self) -> Iterator[None]:
        """One turn's place. Raises Draining, NotReady, Overloaded; nothing was started then."""
        if self._readiness.draining:
            raise Draining("this worker is being stopped; try again, another one answers")
        if wrong := self._readiness.misfit():
            raise NotReady(wrong)
        if self._count >= self._most:
            raise Overloaded(f"this worker runs {self._count} turns, as many as it may; try again shortly")
        self._count += 1
        self._metrics.in_flight.inc()
        try:
            yield
        finally:
            self._count -= 1
            self._metrics.in_flight.dec()
