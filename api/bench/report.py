"""A result as tables and a plot for a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from api.bench.figures import Band, BenchResult, Line

_PLOT_ROWS = 16
_PLOT_WIDTH = 60
_EIGHTHS = " ▏▎▍▌▋▊▉█"


def show(result: BenchResult, console: Console) -> None:
    """Everything a reader wants at a glance; `--json` has the rest."""
    console.print(_where(result), markup=False, highlight=False, soft_wrap=True)
    for table in (
        _cpu(result.bands),
        _stages(result.bands),
        _traffic(result.bands),
        _commands(result.bands),
        _storage(result),
    ):
        console.print(table)
    for line in (*_plot(result), "", *_verdict(result)):
        console.print(line, markup=False, highlight=False, soft_wrap=True)


def _where(result: BenchResult) -> str:
    machine = result.machine
    return (
        f"{machine.cpu}, {machine.cores} cores, load {machine.load:.1f}; {machine.kernel}; {machine.python}; "
        f"{machine.redis}. {result.sessions} sessions side by side, {result.repetitions} repetitions, "
        f"{result.turns} turns in {result.took_s:.0f} s."
    )


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, title_justify="left", box=SIMPLE_HEAD, pad_edge=False, padding=(0, 1, 0, 0))
    for column in columns:
        table.add_column(column, justify="right", no_wrap=True)
    return table


def _cpu(bands: Iterable[Band]) -> Table:
    table = _table(
        "CPU ms a turn", "context", "worker", "mean", "off fit", "floor", "x floor", "whole", "x dearer", "Redis"
    )
    for band in bands:
        table.add_row(
            f"{band.context:,}",
            f"{band.worker_cpu_ms:.2f}",
            f"{band.worker_cpu_mean_ms:.2f}",
            f"{band.residual_percent:+.1f} %",
            f"{band.floor_cpu_ms:.2f}",
            f"{band.times_floor:.1f}",
            f"{band.whole_cpu_ms:.1f}",
            f"{band.times_dearer_whole:.0f}",
            f"{band.redis_cpu_ms:.2f}",
        )
    return table


def _stages(bands: Sequence[Band]) -> Table:
    names = list(dict.fromkeys(name for band in bands for name in band.stages_ms))
    table = _table("Elapsed ms a turn", "context", *names)
    for band in bands:
        table.add_row(f"{band.context:,}", *(f"{band.stages_ms.get(name, 0.0):.2f}" for name in names))
    return table


def _traffic(bands: Iterable[Band]) -> Table:
    table = _table("Traffic a turn", "context", "request kB", "reply kB", "Redis reads", "in kB", "out kB")
    for band in bands:
        table.add_row(
            f"{band.context:,}",
            f"{band.request_bytes / 1000:.1f}",
            f"{band.reply_bytes / 1000:.1f}",
            f"{band.redis_reads:.2f}",
            f"{band.redis_bytes_in / 1000:.1f}",
            f"{band.redis_bytes_out / 1000:.1f}",
        )
    return table


def _commands(bands: Sequence[Band]) -> Table:
    """What the server ran, inside scripts too; reads, above, tell the round trips."""
    table = _table("Redis commands a turn", "", *(f"{band.context:,}" for band in bands))
    last = bands[-1].redis_commands
    for name in sorted(last, key=lambda one: -last[one]):
        table.add_row(name, *(f"{band.redis_commands.get(name, 0.0):.2f}" for band in bands))
    return table


def _storage(result: BenchResult) -> Table:
    table = _table(
        "Bytes in Redis a token", "tokens", "text", "beside it", "of budget", "sampled", "prompt", "text/UTF-8",
        "memory",
    )  # fmt: skip
    for one in result.storage:
        table.add_row(
            f"{one.tokens:,.0f}",
            f"{one.text:.2f}",
            f"{one.beside_text:.2f}",
            f"{one.budget_share:.2f}",
            f"{one.beside_text_for_each_sampled:.2f}",
            f"{one.beside_text_for_each_prompt:.2f}",
            f"{one.text_share_of_utf8:.2f}",
            f"{one.used_memory:.2f}",
        )
    return table


def _plot(result: BenchResult) -> list[str]:
    """Worker CPU against context: a bar for each stretch of the curve, `|` where the fitted line passes."""
    groups = _split(result.curve, _PLOT_ROWS)
    most = max(*(ms for _, ms in result.curve), result.worker.at(result.curve[-1][0]))
    lines = ["worker CPU ms a turn against tokens of context; | is the fitted line"]
    for group in groups:
        context = sum(point[0] for point in group) / len(group)
        measured = sum(point[1] for point in group) / len(group)
        bar = list(_bar(measured / most * _PLOT_WIDTH).ljust(_PLOT_WIDTH + 1))
        bar[min(_PLOT_WIDTH, max(0, round(result.worker.at(context) / most * _PLOT_WIDTH)))] = "|"
        lines.append(f"{context:>8,.0f} {measured:6.2f} {''.join(bar).rstrip()}")
    return lines


def _split(points: Sequence[tuple[float, float]], rows: int) -> list[Sequence[tuple[float, float]]]:
    rows = min(rows, len(points))
    edges = [round(n * len(points) / rows) for n in range(rows + 1)]
    return [points[start:end] for start, end in pairwise(edges)]


def _bar(width: float) -> str:
    whole, part = divmod(round(width * 8), 8)
    return "█" * whole + (_EIGHTHS[part] if part else "")


def _verdict(result: BenchResult) -> list[str]:
    held = "within" if result.within_slope_bound else "ABOVE"
    first, last = result.storage[0].tokens, result.storage[-1].tokens
    residual = f"largest residual {result.largest_residual_percent:+.1f} %"
    spread = f"differ by {result.storage_spread_percent:.1f} % between {first:,.0f} and {last:,.0f} tokens"
    return [
        f"worker: {_said(result.worker)}, {held} the bound of {result.slope_bound_ms}; {residual}",
        f"floor: {_said(result.floor)}",
        f"rendered whole: {_said(result.whole)}",
        f"Redis: bytes a token beside text {spread}",
    ]


def _said(line: Line) -> str:
    return f"{line.fixed_ms:.2f} ms + {line.slope_ms:.4f} ms for each 1,000 tokens of context"
