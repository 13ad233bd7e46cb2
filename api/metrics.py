"""Facts as Prometheus metrics. With several workers, `PROMETHEUS_MULTIPROC_DIR` makes any of them answer for all."""

from __future__ import annotations

import os

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest, multiprocess

from api.facts import TurnDone

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_STAGE_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 1, 5, 30, 120, 600)


class Metrics:
    """This worker's counters. One instance a process."""

    def __init__(self) -> None:
        shared = "PROMETHEUS_MULTIPROC_DIR" in os.environ
        self._registry = CollectorRegistry()
        registry = self._registry
        self.turns = Counter(
            "tokensplice_turns", "Turns answered, by origin and reason.", ["origin", "reason", "outcome"],
            registry=registry,
        )  # fmt: skip
        self.ambiguous = Counter(
            "tokensplice_ambiguous_parents", "Turns whose parent was chosen among equals by a guess.",
            registry=registry,
        )  # fmt: skip
        self.tokens = Counter(
            "tokensplice_tokens", "Tokens: prompt (whole), delta (new in the prompt), generated.", ["kind"],
            registry=registry,
        )  # fmt: skip
        self.stages = Histogram(
            "tokensplice_turn_stage_seconds", "Seconds of a turn, by stage.", ["stage"],
            buckets=_STAGE_BUCKETS, registry=registry,
        )  # fmt: skip
        self.errors = Counter(
            "tokensplice_errors", "Requests answered with an error, by code.", ["code"], registry=registry
        )
        self.in_flight = Gauge(
            "tokensplice_turns_in_flight", "Turns running now.", registry=registry,
            multiprocess_mode="livesum" if shared else "all",
        )  # fmt: skip

    def turn(self, fact: TurnDone) -> None:
        """Count one answered turn."""
        turn = fact.turn
        outcome = "replayed" if fact.replayed else "committed"
        self.turns.labels(turn.origin.kind, turn.origin.reason, outcome).inc()
        for stage, seconds in fact.stages_s.items():
            self.stages.labels(stage).observe(seconds)
        if fact.replayed:
            return
        if turn.origin.ambiguous:
            self.ambiguous.inc()
        self.tokens.labels("prompt").inc(turn.prompt_length)
        self.tokens.labels("delta").inc(len(turn.delta))
        self.tokens.labels("generated").inc(len(turn.generation))

    def exposition(self) -> bytes:
        """The text that `/metrics` answers."""
        if "PROMETHEUS_MULTIPROC_DIR" in os.environ:
            registry = CollectorRegistry()
            multiprocess.MultiProcessCollector(registry)  # type: ignore[no-untyped-call]
            return generate_latest(registry)
        return generate_latest(self._registry)
