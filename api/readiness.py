"""Is this worker fit to serve? The start-up checks of Redis, engine, tokenizer and template, kept for `/readyz`.

The parent runs them once and stops the start on a fault that waiting cannot heal; each worker runs them
again, and goes on asking while the engine or Redis is away.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import numpy as np

from api import log
from api.engine.base import Engine, EngineContract, EngineError, EngineFacts, EngineUnavailable
from api.migrate import missing
from api.settings import Settings
from migrations import DatabaseTooNew, MigrationError
from splice.boundary import Splicer
from splice.plan import Window
from store.errors import EvictionEnabled, ServerTooOld, StoreError
from store.redis import RedisStore

_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)

# Spells no control token; mixes what tokenizers disagree about first.
_TOKENIZER_PROBES = (
    "The quick brown fox: 12345.678 + 0x9F\n\tif (a != b) { return `c`; }\n\n",
    "naïve café — 東京タワー 你好 привет 😀👩‍👩‍👧 \u200bzero-width",
    "   leading, trailing   \n\n\n  and  runs of   spaces\r\n",
)


@dataclass(frozen=True, slots=True)
class Check:
    """One named check. `fatal`: waiting will not heal it."""

    ok: bool
    detail: str
    fatal: bool = False


class Readiness:
    """The checks' last outcome, the engine's window once known, and whether the worker is being stopped."""

    def __init__(self, store: RedisStore, engine: Engine, splicer: Splicer, settings: Settings) -> None:
        self._store = store
        self._engine = engine
        self._splicer = splicer
        self._settings = settings
        self._window: Window | None = None
        self.draining = False
        self.checks: dict[str, Check] = {
            "redis": Check(ok=False, detail="not asked yet"),
            "migrations": Check(ok=False, detail="not asked yet"),
            "engine": Check(ok=False, detail="not asked yet"),
            "tokenizer": Check(ok=False, detail="not compared yet"),
            "template": self._template(),
        }

    @property
    def ready(self) -> bool:
        """Whether turns can be served."""
        return not self.draining and all(check.ok for check in self.checks.values())

    def window(self) -> Window:
        """The engine's limits. Raises EngineUnavailable while they are unknown."""
        if self._window is None:
            raise EngineUnavailable(f"not checked yet ({self.checks['engine'].detail})")
        return self._window

    async def check(self) -> bool:
        """Run every check once; whether all passed."""
        self.checks["redis"] = await self._redis()
        if self.checks["redis"].ok:
            self.checks["migrations"] = await self._migrations()
        self.checks["engine"] = await self._ask_engine()
        if self.checks["engine"].ok:
            self.checks["tokenizer"] = await self._compare_tokenizers()
        return all(check.ok for check in self.checks.values())

    async def settle(self) -> None:
        """Check until everything passes; a worker's background task."""
        attempt = 0
        while not await self.check():
            if attempt == 0:
                log.event("not ready", failed={n: c.detail for n, c in self.checks.items() if not c.ok})
            await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
            attempt += 1
        log.event("ready", checks={n: c.detail for n, c in self.checks.items()})

    def _template(self) -> Check:
        report = self._splicer.report
        if report.spliceable:
            return Check(ok=True, detail=f"spliceable; terminator {report.terminator!r}")
        return Check(ok=False, detail="cannot be spliced: " + "; ".join(report.refusals), fatal=True)

    async def _redis(self) -> Check:
        try:
            facts = await self._store.check_server()
        except (EvictionEnabled, ServerTooOld) as error:
            return Check(ok=False, detail=str(error), fatal=True)
        except StoreError as error:
            return Check(ok=False, detail=str(error))
        if self._settings.durability == "aof" and not facts.append_only:
            return Check(
                ok=False,
                detail="durability is aof but the server keeps no append-only file: set `appendonly yes` there, "
                "or TOKENSPLICE_DURABILITY=memory if losing every session with the server is meant",
                fatal=True,
            )
        return Check(ok=True, detail=f"{facts.product} {facts.version}, append-only {facts.append_only}")

    async def _migrations(self) -> Check:
        """A database that is newer than this worker is refused; one that is older only lacks what is required."""
        try:
            steps = await missing(self._settings.redis_url)
        except DatabaseTooNew as error:
            return Check(ok=False, detail=str(error), fatal=True)
        except MigrationError as error:
            return Check(ok=False, detail=str(error))
        required = [step.label for step in steps if step.required]
        if required:
            return Check(
                ok=False, detail=f"run `tokensplice migrate`: {', '.join(required)} must come first", fatal=True
            )
        return Check(ok=True, detail=f"{len(steps)} pending, none of them required" if steps else "up to date")

    async def _ask_engine(self) -> Check:
        try:
            facts = await self._engine.facts()
        except EngineContract as error:
            return Check(ok=False, detail=str(error), fatal=True)
        except EngineError as error:
            return Check(ok=False, detail=str(error))
        self._window = self._limits(facts)
        return Check(ok=True, detail=f"{facts.kind} {facts.version}, context {self._window.context_length}")

    def _limits(self, facts: EngineFacts) -> Window:
        context = min(self._settings.context_length or facts.context_length, facts.context_length)
        return Window(context, min(facts.max_prompt_length, context - 1))

    async def _compare_tokenizers(self) -> Check:
        for text in _TOKENIZER_PROBES:
            try:
                theirs = await self._engine.tokenize(text)
            except EngineError as error:
                return Check(ok=False, detail=f"the engine's tokenizer could not be asked: {error}")
            ours = self._splicer.renderer.encode(text)
            if not np.array_equal(ours, theirs):
                at = _first_difference(ours.tolist(), theirs.tolist())
                return Check(
                    ok=False,
                    detail=f"the local tokenizer differs from the engine's at token {at} of {text!r}: "
                    f"{ours[at : at + 4].tolist()} here, {theirs[at : at + 4].tolist()} there; "
                    "point TOKENSPLICE_TOKENIZER at the model that the engine serves",
                    fatal=True,
                )
        return Check(ok=True, detail=f"equals the engine's on {len(_TOKENIZER_PROBES)} texts")


def _first_difference(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b)))
