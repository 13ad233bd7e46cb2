"""What the demo says while it runs and at its end: a progress bar on a terminal, plain lines elsewhere."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Table

from api.demo.result import DemoResult

_PLAIN_STEPS = 8
_FINDINGS_SHOWN = 20


class Narrator:
    """Tells which stage the demo is at, and how far. Notes stay on the screen above the bar."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._bar = Progress(
            SpinnerColumn(),
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
            transient=True,
        )
        self._task: TaskID | None = None
        self._stage = ""
        self._done = 0
        self._total = 0

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def stage(self, words: str, total: int = 0) -> None:
        """Begin a stage of `total` steps; 0 when nobody can say how many."""
        self._stage, self._done, self._total = words, 0, total
        if not self._console.is_terminal:
            self.note(words)
            return
        if self._task is not None:  # not reset: rich cannot take a total back
            self._bar.remove_task(self._task)
        self._task = self._bar.add_task(words, total=total or None)

    def advance(self) -> None:
        """One step of the stage is done."""
        self._done += 1
        if self._task is not None:
            self._bar.advance(self._task)
        elif self._done * _PLAIN_STEPS // self._total != (self._done - 1) * _PLAIN_STEPS // self._total:
            self.note(f"{self._stage}: {self._done} of {self._total}")

    @contextmanager
    def silent(self) -> Iterator[None]:
        """Take the bar off the screen while somebody else writes there."""
        self._bar.stop()
        try:
            yield
        finally:
            self._bar.start()

    def note(self, words: str) -> None:
        """Something worth a line of its own."""
        self._console.print(words, markup=False, highlight=False, soft_wrap=True)


def show(result: DemoResult, console: Console) -> None:
    """The table, then the faults found, then one line to remember."""
    verdict = result.verdict
    table = Table(title=f"tokensplice demo: {verdict.rollouts} rollouts, {result.engine} engine", show_header=False)
    table.add_column(style="bold")
    table.add_column(justify="right")
    for name, value in _rows(result):
        table.add_row(name, value)
    console.print(table)
    for finding in verdict.findings[:_FINDINGS_SHOWN]:
        console.print(finding, style="red", markup=False, highlight=False, soft_wrap=True)
    if (more := len(verdict.findings) - _FINDINGS_SHOWN) > 0:
        console.print(
            f"and {more} more (--json has them all)", style="red", markup=False, highlight=False, soft_wrap=True
        )
    console.print(
        _last_line(result),
        style="green" if result.passed else "bold red",
        markup=False,
        highlight=False,
        soft_wrap=True,
    )


def _rows(result: DemoResult) -> list[tuple[str, str]]:
    verdict = result.verdict
    fresh = [(f"  fresh: {reason}", str(count)) for reason, count in sorted(verdict.fresh.items())]
    return [
        ("turns answered", str(verdict.turns)),
        ("  spliced", str(verdict.spliced)),
        *fresh,
        ("prefix breaks, as seen by the engine", f"{verdict.breaks} of {verdict.judged}"),
        ("a re-render would have broken", f"{verdict.broken_by_rerender} of {verdict.judged}"),
        ("turns lost", str(verdict.lost)),
        ("turns doubled", str(verdict.doubled)),
        ("turns never answered", str(verdict.unanswered)),
        ("requests repeated by players", str(verdict.retries)),
        ("  of these, replayed from the store", str(verdict.replayed)),
        ("generations whose reply reached nobody", str(verdict.abandoned)),
        ("workers killed / Redis killed", f"{result.worker_kills} / {result.redis_kills}"),
        ("seconds of play", f"{result.played_s:.1f}"),
    ]


def _last_line(result: DemoResult) -> str:
    if result.passed:
        return "Every later turn's prompt was the previous turn's prompt, plus the sampled ids, plus what was new."
    return "FAILED: " + "; ".join(result.complaints)
