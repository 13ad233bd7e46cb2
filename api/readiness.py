"""Is this worker fit to serve? The start-up checks of Redis, engine, tokenizer and template, kept for `/readyz`.

The parent runs them once and stops the start on a fault that waiting cannot heal; each worker runs them
again and goes on asking. Until the engine's tokenizer was compared, and once it was found to differ, no turn is served.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import msgspec

from api import log
from api.engine.base import Engine, EngineContract, EngineError, EngineFacts, EngineUnavailable
from api.migrate import missing
from api.settings import Settings
from migrations import DatabaseTooNew, MigrationError
from splice.boundary import Splicer, TemplateReport, difference
from splice.plan import Window
from store.durability import given, parse_durability, shortcoming
from store.errors import EvictionEnabled, ServerTooOld, StoreError
from store.redis import RedisStore

_RETRY_S = (0.2, 0.5, 1.0, 2.0, 5.0)
_AGAIN_S = 30.0  # an engine may be replaced by another while a worker runs

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
        self._redis_was_well = False
        self.draining = False
        self.checks: dict[str, Check] = {
            "redis": Check(ok=False, detail="not asked yet"),
            "migrations": Check(ok=False, detail="not looked at yet: Redis comes first"),
            "engine": Check(ok=False, detail="not asked yet"),
            "tokenizer": Check(ok=False, detail="not compared yet: the engine comes first"),
            "template": self._template(),
        }

    @property
    def template(self) -> TemplateReport:
        """What the served model's template allows."""
        return self._splicer.report

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
        window, self.checks["engine"] = await self._ask_engine()
        if window is not None:
            self.checks["tokenizer"] = await self._compare_tokenizers()
            if self.checks["tokenizer"].ok:
                self._window = window
        return all(check.ok for check in self.checks.values())

    def misfit(self) -> str:
        """Why a turn served now might have wrong tokens; "" when it would not."""
        return "; ".join(f"{name}: {check.detail}" for name, check in self.checks.items() if check.fatal)

    async def watch(self) -> None:
        """Check for as long as the worker runs: soon again while something fails, now and then afterwards."""
        log.event("template", **msgspec.to_builtins(self.template))
        failed: dict[str, str] | None = None
        attempt = 0
        while True:
            await self.check()
            now = {name: check.detail for name, check in self.checks.items() if not check.ok}
            if now != failed:
                log.event("not ready" if now else "ready", failed=now)
            failed, attempt = now, attempt + 1 if now else 0
            await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S)) - 1] if now else _AGAIN_S)

    def _template(self) -> Check:
        report = self._splicer.report
        if not report.spliceable:
            return Check(ok=False, detail="cannot be spliced: " + "; ".join(report.refusals), fatal=True)
        decode = self._splicer.renderer.decode
        wrong = [f"{p.case}: {d}" for p in self._splicer.proofs() if (d := difference(p.spliced, p.whole, decode))]
        if wrong:
            detail = "fragments differ from the template's own rendering at " + "; ".join(wrong)
            return Check(ok=False, detail=detail, fatal=True)
        return Check(ok=True, detail=f"spliceable; terminator {report.terminator!r}")

    async def _redis(self) -> Check:
        try:
            facts = await self._store.check_server()
        except (EvictionEnabled, ServerTooOld) as error:
            return Check(ok=False, detail=str(error), fatal=True)
        except StoreError as error:
            return Check(ok=False, detail=str(error))
        wanted = parse_durability(self._settings.durability)
        lacking = shortcoming(wanted, facts)
        if lacking:
            # Replicas come and go, and commits say so themselves; what never had enough was set up wrong.
            return Check(ok=False, detail=lacking, fatal=not (wanted.replicas and self._redis_was_well))
        self._redis_was_well = True
        return Check(ok=True, detail=f"{facts.product} {facts.version}, {given(facts)}")

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

    async def _ask_engine(self) -> tuple[Window | None, Check]:
        try:
            facts = await self._engine.facts()
        except EngineContract as error:
            return None, Check(ok=False, detail=str(error), fatal=True)
        except EngineError as error:
            return None, Check(ok=False, detail=str(error))
        window = self._limits(facts)
        return window, Check(ok=True, detail=f"{facts.kind} {facts.version}, context {window.context_length}")

    def _limits(self, facts: EngineFacts) -> Window:
        context = min(self._settings.context_length or facts.context_length, facts.context_length)
        return Window(context, min(facts.max_prompt_length, context - 1))

    async def _compare_tokenizers(self) -> Check:
        """The engine's ids of plain texts and of rendered conversations, beside ours."""
        renderer = self._splicer.renderer
        texts = [*_TOKENIZER_PROBES, *(p.text for p in self._splicer.proofs() if self._splicer.report.spliceable)]
        for text in texts:
            try:
                theirs = await self._engine.tokenize(text)
            except EngineError as error:
                return Check(ok=False, detail=f"the engine's tokenizer could not be asked: {error}")
            if where := difference(renderer.encode(text), theirs, renderer.decode):
                return Check(
                    ok=False,
                    detail=f"the local tokenizer differs from the engine's {where}; "
                    "point TOKENSPLICE_TOKENIZER at the model that the engine serves",
                    fatal=True,
                )
        return Check(ok=True, detail=f"equals the engine's on {len(texts)} texts")
