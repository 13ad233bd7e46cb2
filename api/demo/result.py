"""What a demo run is asked for and what comes of it, as values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import msgspec

from api.demo.judge import Verdict

DemoEngine = Literal["sim", "real"]


@dataclass(frozen=True, slots=True, kw_only=True)
class DemoOptions:
    """A run of the demo. Rollouts and turns default by engine: 32 of 8, or 8 of 6 on the real one."""

    engine: DemoEngine = "sim"
    rollouts: int | None = None
    turns: int | None = None
    workers: int = 3
    seed: int = 0
    keep: bool = False  # leave everything running until Ctrl-C
    as_json: bool = False

    @property
    def rollouts_played(self) -> int:
        """How many rollouts there will be."""
        return self.rollouts or (32 if self.engine == "sim" else 8)

    @property
    def turns_played(self) -> int:
        """How many turns each will have."""
        return self.turns or (8 if self.engine == "sim" else 6)


class DemoResult(msgspec.Struct, frozen=True, kw_only=True):
    """A verdict, and what was done to the services meanwhile."""

    engine: DemoEngine
    workers: int
    worker_kills: int
    redis_kills: int
    played_s: float
    verdict: Verdict

    @property
    def complaints(self) -> tuple[str, ...]:
        """Why the run proves nothing, or proves the contrary. Empty when all is well."""
        verdict = self.verdict
        counts = {
            "prefix breaks": verdict.breaks,
            "turns lost": verdict.lost,
            "turns doubled": verdict.doubled,
            "turns never answered": verdict.unanswered,
        }
        said = [f"{count} {name}" for name, count in counts.items() if count]
        if not verdict.judged:
            said.append("no turn could be judged")
        elif not verdict.broken_by_rerender:
            said.append("a re-render would have broken nothing, so this run proves nothing")
        if not (self.worker_kills and self.redis_kills):
            said.append("the rollouts ended before worker and Redis were killed")
        return tuple(said)

    @property
    def passed(self) -> bool:
        """Whether the promise was kept and put to the test."""
        return not self.complaints

    @property
    def exit_code(self) -> int:
        """For the shell."""
        return 0 if self.passed else 1

    def as_json(self) -> bytes:
        """One flat object: the verdict's counts beside the rest."""
        counts = msgspec.to_builtins(self.verdict)
        own = {name: getattr(self, name) for name in self.__struct_fields__ if name != "verdict"}
        return msgspec.json.encode(counts | own | {"passed": self.passed, "complaints": self.complaints})
