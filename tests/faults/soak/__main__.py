"""The soak as a command."""

from __future__ import annotations

import asyncio
import shutil
import signal
import sys
import tempfile
from pathlib import Path
from typing import Any

import click
import uvloop

from api.assets import qwen3_directory
from tests.faults.soak.outcome import Outcome
from tests.faults.soak.plan import REDIS_ARGUMENTS, Plan
from tests.faults.soak.run import soak

_DEFAULT = Plan()


@click.command("soak", context_settings={"show_default": True})
@click.option("--seconds", default=_DEFAULT.seconds, help="How long to play; starting and checking come on top.")
@click.option("--sessions", default=_DEFAULT.sessions, help="Rollouts open at once.")
@click.option("--rate", default=_DEFAULT.rate, help="Turns asked for a second.")
@click.option("--workers", default=_DEFAULT.workers, help="Worker processes; all but the first are killed.")
@click.option("--durability", default=_DEFAULT.durability, type=click.Choice(tuple(REDIS_ARGUMENTS)))
@click.option("--seed", default=_DEFAULT.seed)
@click.option("--worker-every-s", default=_DEFAULT.worker_every_s, help="Pause between SIGKILLs of a worker; 0: none.")
@click.option("--redis-every-s", default=_DEFAULT.redis_every_s, help="Pause between SIGKILLs of Redis; 0: none.")
@click.option("--cut-every-s", default=_DEFAULT.cut_every_s, help="Pause between cut connections; 0: none.")
@click.option("--engine-every-s", default=_DEFAULT.engine_every_s, help="Pause between the engine's fits; 0: none.")
@click.option("--hangs-up", default=_DEFAULT.hangs_up, help="Share of asks whose client leaves first.")
@click.option("--expiring-sessions", default=_DEFAULT.expiring_sessions, help="Sessions of the last phase; 0: none.")
@click.option("--json", "json_path", type=click.Path(path_type=Path, dir_okay=False), help="Write the outcome here.")
def main(json_path: Path | None, **knobs: Any) -> None:
    """Play rollouts while everything is killed, then compare what clients, engine and store say."""
    scratch = Path(tempfile.mkdtemp(prefix="tokensplice-soak-"))
    code = 1
    try:
        outcome = uvloop.run(_soaked(Plan(**knobs), scratch))
        for line in outcome.lines():
            click.echo(line)
        if json_path is not None:
            json_path.write_bytes(outcome.as_json())
        code = outcome.exit_code
    finally:
        if code:
            click.echo(f"logs, data and the engine's record: {scratch}", err=True)
        else:
            shutil.rmtree(scratch, ignore_errors=True)
    sys.exit(code)


async def _soaked(plan: Plan, scratch: Path) -> Outcome:
    """SIGTERM, as CI systems send it, stops the children as Ctrl-C does."""
    task = asyncio.current_task()
    assert task is not None
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, task.cancel)
    model = await asyncio.to_thread(qwen3_directory)
    return await soak(plan, model, scratch, lambda words: click.echo(words, err=True))


if __name__ == "__main__":
    main()
