"""`tokensplice demo`: the main job end to end on this machine, judged from the engine's own record.

Starts the services, plays the rollouts, kills a worker and Redis while turns are in flight, collects what every
witness has to say, and hands it to the judge. Whatever happens, everything that it started is stopped.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import signal
import sys
import tempfile
import time
import uuid
from pathlib import Path

import aiohttp
from rich.console import Console

from api.assets import AssetChanged, AssetUnavailable
from api.demo.evidence import PlayedRollout
from api.demo.harm import Harm
from api.demo.judge import Judge, Verdict
from api.demo.narration import Narrator, show
from api.demo.player import Game, Player
from api.demo.processes import ChildFailed
from api.demo.rerender import Rerenderer
from api.demo.result import DemoOptions, DemoResult
from api.demo.stage import Model, Stage, model_for, stage
from api.demo.testimony import Witnesses, WitnessSilent
from store.errors import StoreError

__all__ = ["DemoOptions", "DemoResult", "main", "run_demo"]

_INTERRUPTED = 130


def main(options: DemoOptions) -> int:
    """Run the demo for a command line: everything said on the way, and an exit code."""
    scratch = Path(tempfile.mkdtemp(prefix="tokensplice-demo-"))
    console = Console(stderr=True)
    code = 1
    try:
        code = asyncio.run(_until_terminated(options, scratch, console)).exit_code
    except (ChildFailed, AssetChanged, AssetUnavailable, StoreError, WitnessSilent) as error:
        console.print(str(error), style="bold red", markup=False, highlight=False, soft_wrap=True)
    except (KeyboardInterrupt, asyncio.CancelledError):
        code = _INTERRUPTED
    finally:
        if code in (0, _INTERRUPTED):
            shutil.rmtree(scratch, ignore_errors=True)
        else:
            console.print(f"logs of every process: {scratch}", markup=False, highlight=False, soft_wrap=True)
    return code


async def _until_terminated(options: DemoOptions, scratch: Path, console: Console) -> DemoResult:
    """SIGTERM, as CI systems send it, stops the children as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    return await run_demo(options, scratch, console)


async def run_demo(options: DemoOptions, scratch: Path, console: Console) -> DemoResult:
    """Play, judge and tell. Logs and data go to `scratch`, progress to `console`, the outcome to standard output."""
    with Narrator(console) as narrator:
        narrator.stage("tokenizer and template")
        model = await asyncio.to_thread(model_for, options, narrator.note)
        narrator.stage("starting Redis, engine and workers")
        async with stage(options, model, scratch) as services:
            result = await _played(options, model, services, narrator)
            with narrator.silent():
                _tell(result, options)
            if options.keep:
                await _hold(services, narrator)
            narrator.stage("stopping everything")
    return result


async def _played(options: DemoOptions, model: Model, services: Stage, narrator: Narrator) -> DemoResult:
    total = options.rollouts_played * options.turns_played
    narrator.note(services.addresses)
    narrator.stage("playing", total)
    game = _game(options, services)
    harm = Harm(services, narrator, total)
    began = time.monotonic()
    rollouts = await _play(game, options.rollouts_played, harm)
    played_s = time.monotonic() - began
    narrator.stage("judging", total)
    verdict = await _judged(model, services, game, rollouts, narrator)
    return DemoResult(
        engine=options.engine,
        workers=options.workers,
        worker_kills=harm.worker_kills,
        redis_kills=harm.redis_kills,
        played_s=round(played_s, 2),
        verdict=verdict,
    )


def _game(options: DemoOptions, services: Stage) -> Game:
    real = options.engine == "real"
    return Game(
        base_url=services.balancer.url,
        run_id=f"demo-{uuid.uuid4().hex[:8]}",
        turns=options.turns_played,
        seed=options.seed,
        tools=not real,
        asks_ids=real,
        max_tokens=64 if real else 512,
    )


async def _play(game: Game, rollouts: int, harm: Harm) -> list[PlayedRollout]:
    """All rollouts at once, while harm is done to the services. Ends early if that cannot be undone."""
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0)) as client:
        players = [Player(game, number, client, harm.answered) for number in range(rollouts)]
        playing = asyncio.gather(*(player.play() for player in players))
        playing.add_done_callback(harm.end)
        inflicting = asyncio.create_task(harm.inflict())
        try:
            played, _ = await asyncio.gather(playing, inflicting)
        finally:
            playing.cancel()
            inflicting.cancel()
            await asyncio.gather(playing, inflicting, return_exceptions=True)
    return played


async def _judged(
    model: Model, services: Stage, game: Game, rollouts: list[PlayedRollout], narrator: Narrator
) -> Verdict:
    witnesses = Witnesses(services.client, engine_url=services.engine.url, product_url=services.balancer.url)
    record = await witnesses.record()
    named = {turn.session_id for rollout in rollouts for turn in rollout.turns}
    stored = await witnesses.stored(game.run_id, named)
    tokenizer = await asyncio.to_thread(Rerenderer, model.directory)
    judge = Judge(record, decode=tokenizer.decode, rerender=tokenizer.rerender)
    return await asyncio.to_thread(judge.verdict, rollouts, stored, narrator.advance)


def _tell(result: DemoResult, options: DemoOptions) -> None:
    if options.as_json:
        sys.stdout.write(result.as_json().decode() + "\n")
        sys.stdout.flush()
    else:
        show(result, Console())


async def _hold(services: Stage, narrator: Narrator) -> None:
    narrator.stage("everything stays up until Ctrl-C")
    narrator.note(f"sessions: {services.balancer.url}/sessions\n{services.addresses}")
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
