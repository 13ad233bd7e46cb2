"""From what was collected to figures. Pure: samples in, one frozen result out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import TypeVar

import msgspec
import numpy as np

SLOPE_BOUND_MS = 0.05  # of worker CPU, for each 1,000 tokens of context
SAMPLED_BUDGET = 10  # stored bytes beside message text, for each sampled token
PROMPT_BUDGET = 6  # for each prompt token

Key = TypeVar("Key")


class Machine(msgspec.Struct, frozen=True):
    """Where it was measured. load: the one-minute load average before it began."""

    cores: int
    cpu: str
    kernel: str
    python: str
    redis: str
    load: float


class Line(msgspec.Struct, frozen=True):
    """Milliseconds of CPU a turn: fixed + slope for each 1,000 tokens of context."""

    fixed_ms: float
    slope_ms: float

    def at(self, context: float) -> float:
        """Milliseconds at a context of so many tokens."""
        return self.fixed_ms + self.slope_ms * context / 1000


def fit(points: Sequence[tuple[float, float]]) -> Line:
    """The least-squares line through (tokens of context, milliseconds)."""
    contexts, times = np.array(points, dtype=np.float64).T
    columns = np.column_stack((np.ones(len(contexts)), contexts / 1000))
    (fixed, slope), *_ = np.linalg.lstsq(columns, times, rcond=None)
    return Line(float(fixed), float(slope))


@dataclass(frozen=True, slots=True)
class TurnSample:
    """One turn, seen from outside. number: which turn of its session it was."""

    number: int
    context: int
    cpu_ms: float
    request_bytes: int
    reply_bytes: int


class StoredSession(msgspec.Struct, frozen=True):
    """One session's keys in Redis, the server's overheads included. other_bytes: all but text, ids and log probs."""

    tokens: int
    sampled_tokens: int
    text_utf8_bytes: int
    text_bytes: int
    ids_bytes: int
    log_probs_bytes: int
    other_bytes: int

    @property
    def beside_text(self) -> int:
        """Bytes that are not message text."""
        return self.ids_bytes + self.log_probs_bytes + self.other_bytes

    @property
    def for_each_prompt_token(self) -> float:
        """Bytes beside text; log probs are of sampled tokens only, the rest is every token's alike."""
        return (self.ids_bytes + self.other_bytes) / self.tokens

    @property
    def for_each_sampled_token(self) -> float:
        """Bytes beside text."""
        return self.for_each_prompt_token + self.log_probs_bytes / self.sampled_tokens

    @property
    def budget_share(self) -> float:
        """Bytes beside text against what tokens of both kinds may take; at most 1 is within."""
        prompt = self.tokens - self.sampled_tokens
        return self.beside_text / (SAMPLED_BUDGET * self.sampled_tokens + PROMPT_BUDGET * prompt)


@dataclass(slots=True)
class BandMeasure:
    """What was collected near one length of context, all repetitions together."""

    context: int
    turns: list[TurnSample] = field(default_factory=list)
    floor_ms: list[float] = field(default_factory=list)
    whole_ms: list[float] = field(default_factory=list)
    stored: list[StoredSession] = field(default_factory=list)
    memory_per_token: list[float] = field(default_factory=list)
    redis_cpu_ms: float = 0.0
    redis_reads: int = 0
    redis_bytes_in: int = 0
    redis_bytes_out: int = 0
    redis_commands: Counter[str] = field(default_factory=Counter)
    stages_ms: dict[str, float] = field(default_factory=dict)


class Band(msgspec.Struct, frozen=True):
    """Figures of turns near one length of context. Each is of one turn; CPU and stage times in milliseconds."""

    context: int
    mean_context: float
    turns: int
    worker_cpu_ms: float  # median
    worker_cpu_mean_ms: float
    fitted_ms: float
    residual_percent: float
    floor_cpu_ms: float
    times_floor: float
    whole_cpu_ms: float
    times_dearer_whole: float
    redis_cpu_ms: float
    redis_reads: float
    redis_commands: dict[str, float]
    redis_bytes_in: float
    redis_bytes_out: float
    request_bytes: float
    reply_bytes: float
    stages_ms: dict[str, float]


class Storage(msgspec.Struct, frozen=True):
    """Bytes in Redis of sessions of one length, for each token unless named otherwise; medians of sessions."""

    context: int
    tokens: float  # of a session
    text: float
    ids: float
    log_probs: float
    other: float
    beside_text: float
    beside_text_for_each_sampled: float
    beside_text_for_each_prompt: float
    budget_share: float
    text_share_of_utf8: float
    used_memory: float  # growth of the server's memory, everything included


class BenchResult(msgspec.Struct, frozen=True):
    """Every figure of a run."""

    machine: Machine
    sessions: int
    repetitions: int
    turns: int
    took_s: float
    worker: Line
    floor: Line
    whole: Line
    largest_residual_percent: float
    slope_bound_ms: float
    within_slope_bound: bool
    bands: tuple[Band, ...]
    storage: tuple[Storage, ...]
    curve: tuple[tuple[float, float], ...]  # context, median milliseconds of worker CPU; what was fitted

    @property
    def storage_spread_percent(self) -> float:
        """How far bytes a token beside text move from the shortest sessions to the longest, either way."""
        each = [one.beside_text for one in self.storage]
        return (max(each) / min(each) - 1) * 100


def curve_of(turns: Sequence[TurnSample], shortest: int) -> tuple[tuple[float, float], ...]:
    """For each number of a turn, the median over sessions and repetitions; turns below `shortest` are left out."""
    same: dict[int, list[TurnSample]] = {}
    for turn in turns:
        same.setdefault(turn.number, []).append(turn)
    points = (
        (median(turn.context for turn in group), median(turn.cpu_ms for turn in group)) for group in same.values()
    )
    return tuple(sorted(point for point in points if point[0] >= shortest))


def band_of(measure: BandMeasure, worker: Line) -> Band:
    """One band's figures against the fitted line."""
    turns = measure.turns
    count = len(turns)
    context = fmean(turn.context for turn in turns)
    measured = median(turn.cpu_ms for turn in turns)
    fitted = worker.at(context)
    floor, whole = median(measure.floor_ms), median(measure.whole_ms)
    return Band(
        context=measure.context,
        mean_context=context,
        turns=count,
        worker_cpu_ms=measured,
        worker_cpu_mean_ms=fmean(turn.cpu_ms for turn in turns),
        fitted_ms=fitted,
        residual_percent=(measured / fitted - 1) * 100,
        floor_cpu_ms=floor,
        times_floor=measured / floor,
        whole_cpu_ms=whole,
        times_dearer_whole=whole / measured,
        redis_cpu_ms=measure.redis_cpu_ms / count,
        redis_reads=measure.redis_reads / count,
        redis_commands=_each(measure.redis_commands, count),
        redis_bytes_in=measure.redis_bytes_in / count,
        redis_bytes_out=measure.redis_bytes_out / count,
        request_bytes=fmean(turn.request_bytes for turn in turns),
        reply_bytes=fmean(turn.reply_bytes for turn in turns),
        stages_ms=_each(measure.stages_ms, count),
    )


def storage_of(measure: BandMeasure) -> Storage:
    """What sessions take that have grown to the band's end."""
    stored = measure.stored
    return Storage(
        context=measure.context,
        tokens=median(one.tokens for one in stored),
        text=median(one.text_bytes / one.tokens for one in stored),
        ids=median(one.ids_bytes / one.tokens for one in stored),
        log_probs=median(one.log_probs_bytes / one.tokens for one in stored),
        other=median(one.other_bytes / one.tokens for one in stored),
        beside_text=median(one.beside_text / one.tokens for one in stored),
        beside_text_for_each_sampled=median(one.for_each_sampled_token for one in stored),
        beside_text_for_each_prompt=median(one.for_each_prompt_token for one in stored),
        budget_share=median(one.budget_share for one in stored),
        text_share_of_utf8=median(one.text_bytes / one.text_utf8_bytes for one in stored),
        used_memory=median(measure.memory_per_token),
    )


def _each(totals: Mapping[Key, float], count: int) -> dict[Key, float]:
    return {name: total / count for name, total in totals.items()}


def line_of(points: Mapping[int, Sequence[float]]) -> Line:
    """The line through the medians of what was measured at some lengths of context."""
    return fit([(float(context), median(times)) for context, times in points.items()])
