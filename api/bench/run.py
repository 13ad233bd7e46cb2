"""`tokensplice bench`: start the processes, play, work out the figures, print them. Stops whatever it started."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path

import msgspec
from rich.console import Console

from api.assets import AssetChanged, AssetUnavailable, qwen3_directory
from api.bench import scale as scales
from api.bench.deployment import deployed
from api.bench.figures import SLOPE_BOUND_MS, BenchResult, Machine, band_of, curve_of, fit, line_of, storage_of
from api.bench.measure import Measurement, TurnFailed
from api.bench.probes import RedisProbe, machine
from api.bench.report import show
from api.demo.narration import Narrator
from api.demo.processes import ChildFailed
from api.preparation import prepare_model
from api.rendering import ModelRenderer
from splice.boundary import Splicer
from store.errors import StoreError

_INTERRUPTED = 130
_FEWEST_STORED = 8192  # shorter sessions are mostly their own keys


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchOptions:
    """What the command line asks for."""

    quick: bool = False
    as_json: bool = False


def main(options: BenchOptions) -> int:
    """Run the bench for a command line: everything said on the way, and an exit code."""
    scratch = Path(tempfile.mkdtemp(prefix="tokensplice-bench-"))
    console = Console(stderr=True)
    code = 1
    try:
        result = asyncio.run(_until_terminated(options, scratch, console))
        _tell(result, options)
        code = 0
    except (ChildFailed, AssetChanged, AssetUnavailable, StoreError, TurnFailed) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = _INTERRUPTED
    finally:
        if code in (0, _INTERRUPTED):
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            console.print(f"logs of every process: {scratch}", markup=False, highlight=False, soft_wrap=True)
    return code


async def _until_terminated(options: BenchOptions, scratch: Path, console: Console) -> BenchResult:
    """SIGTERM, as CI systems send it, stops the children as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_bench(scales.QUICK if options.quick else scales.FULL, scratch, console)


async def run_bench(scale: scales.Scale, scratch: Path, console: Console) -> BenchResult:
    """Measure at this scale. Logs and data go to `scratch`, progress to `console`."""
    began = time.monotonic()
    with Narrator(console) as narrator:
        narrator.stage("tokenizer and template")
        model = await asyncio.to_thread(qwen3_directory, progress=narrator.note)
        splicer = Splicer(ModelRenderer.load(await asyncio.to_thread(prepare_model, str(model))))
        narrator.stage("starting Redis, engine, worker and floor")
        async with deployed(model, scratch) as services:
            probe = RedisProbe(services.redis.url)
            here = machine(probe.version)
            measurement = Measurement(scale, services, probe, splicer)
            narrator.stage("playing", scale.rounds * scale.sessions * scale.repetitions)
            for number in range(scale.repetitions):
                await measurement.repetition(number, narrator.advance)
            probe.close()
            narrator.stage("stopping everything")
    return _result(scale, measurement, here, time.monotonic() - began)


def _result(scale: scales.Scale, measurement: Measurement, here: Machine, took_s: float) -> BenchResult:
    measures = [measurement.bands[context] for context in scale.contexts]
    curve = curve_of(measurement.turns, min(scale.contexts) - scales.TURN_TOKENS)
    worker = fit(curve)
    bands = tuple(band_of(measure, worker) for measure in measures)
    return BenchResult(
        machine=here,
        sessions=scale.sessions,
        repetitions=scale.repetitions,
        turns=len(measurement.turns),
        took_s=took_s,
        worker=worker,
        floor=line_of({measure.context: measure.floor_ms for measure in measures}),
        whole=line_of({measure.context: measure.whole_ms for measure in measures}),
        largest_residual_percent=max((band.residual_percent for band in bands), key=abs),
        slope_bound_ms=SLOPE_BOUND_MS,
        within_slope_bound=worker.slope_ms <= SLOPE_BOUND_MS,
        bands=bands,
        storage=tuple(storage_of(measure) for measure in measures if measure.context >= _FEWEST_STORED),
        curve=curve,
    )


def _tell(result: BenchResult, options: BenchOptions) -> None:
    if options.as_json:
        sys.stdout.write(msgspec.json.encode(result).decode() + "\n")
        sys.stdout.flush()
    else:
        show(result, Console())
