"""The command line: each command parses, calls one thing, and prints."""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from typing import Any, NoReturn, TypeVar

import click
import msgspec

from api.demo.engine_sim import main as engine_sim
from api.settings import PREFIX, BadSettings, Settings

Command = TypeVar("Command", bound=Callable[..., Any])


def _settings_options(command: Command) -> Command:
    """One flag for each setting, from the one table."""
    for setting in reversed(fields(Settings)):
        command = click.option(
            "--" + setting.name.replace("_", "-"),
            setting.name,
            default=None,
            metavar="VALUE",
            help=f"{setting.metadata['help']} [{PREFIX}{setting.name.upper()}]",
        )(command)
    return command


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(package_name="tokensplice", prog_name="tokensplice")
def main() -> None:
    """Token-exact sessions between agent harnesses and inference engines."""


@main.command()
@click.option("--host", default="127.0.0.1", show_default=True, help="Address to bind.")
@click.option("--port", default=8100, show_default=True, help="Port to bind; 0 takes a free one.")
@click.option("--workers", type=click.IntRange(min=1), default=1, show_default=True, help="Worker processes.")
@click.option(
    "--embedded-redis",
    type=click.Path(path_type=Path, file_okay=False),
    help="Start and own a private Redis server with its data in this directory.",
)
@_settings_options
def serve(host: str, port: int, workers: int, embedded_redis: Path | None, **flags: str | None) -> None:
    """Run the HTTP front end."""
    from api.preparation import PreparationError
    from api.serve import CannotStart, serve
    from store.errors import StoreError

    try:
        serve(flags, host=host, port=port, workers=workers, embedded_redis=embedded_redis)
    except (BadSettings, CannotStart) as error:
        _fail(error.problems)
    except (PreparationError, StoreError) as error:
        _fail([str(error)])


@main.command()
@click.option("--engine", type=click.Choice(["sim", "real"]), default="sim", show_default=True, help="Who samples.")
@click.option("--rollouts", type=click.IntRange(min=1), default=None, help="How many rollouts [32; real: 8].")
@click.option("--turns", type=click.IntRange(min=1), default=None, help="Turns a rollout [8; real: 6].")
@click.option(
    "--workers", type=click.IntRange(min=1), default=3, show_default=True, help="Workers behind the balancer."
)
@click.option("--seed", type=int, default=0, show_default=True, help="Makes a run repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print the outcome as JSON.")
@click.option("--keep", is_flag=True, help="Leave everything running at the end, until Ctrl-C.")
def demo(**options: Any) -> None:
    """Play rollouts end to end on this machine, with crashes on the way, and judge every prompt."""
    from api.demo.run import DemoOptions
    from api.demo.run import main as run

    sys.exit(run(DemoOptions(**options)))


@main.command()
@click.option("--redis-url", metavar="VALUE", help=f"The database. [{PREFIX}REDIS_URL]")
@click.option("--dry-run", is_flag=True, help="Name what would be done, and change nothing.")
def migrate(redis_url: str | None, *, dry_run: bool) -> None:
    """Plan and apply the schema migrations that the database lacks."""
    from api.migrate import migrate
    from migrations import MigrationError

    try:
        url = Settings.from_env(os.environ, redis_url=redis_url).redis_url
        steps = asyncio.run(migrate(url, dry_run=dry_run))
    except BadSettings as error:
        _fail(error.problems)
    except MigrationError as error:
        _fail([str(error)])
    for step in steps:
        click.echo(f"{'pending' if dry_run else 'applied'} {step}")
    if not steps:
        click.echo("nothing to do: the database is up to date")


@main.group()
def template() -> None:
    """Look at chat templates."""


@template.command("check")
@click.argument("source", metavar="PATH_OR_MODEL")
@click.option("--tokenizer", help="Whose ids to use for a bare .jinja file [a stand-in's].")
@click.option("--json", "as_json", is_flag=True, help="Print the report as JSON.")
def template_check(source: str, tokenizer: str | None, *, as_json: bool) -> None:
    """Report what can be spliced with a chat template; exit 1 when it cannot be."""
    from api.preparation import PreparationError
    from api.template import check, table
    from splice.errors import TemplateRejected

    try:
        report = check(source, tokenizer)
    except (PreparationError, TemplateRejected) as error:
        _fail([str(error)])
    click.echo(msgspec.json.encode(report).decode() if as_json else table(report))
    sys.exit(0 if report.spliceable else 1)


@main.command()
@click.option("--quick", is_flag=True, help="A short run with rough figures.")
@click.option("--json", "as_json", is_flag=True, help="Print every figure as JSON.")
def bench(**options: bool) -> None:
    """Measure what a turn costs against its context: CPU, Redis, bytes, beside a floor and whole renders."""
    from api.bench.run import BenchOptions
    from api.bench.run import main as run

    sys.exit(run(BenchOptions(**options)))


@main.command()
@_settings_options
def doctor(**flags: str | None) -> None:
    """Check Redis, engine, tokenizer and template with the settings that `serve` takes; exit 1 on a fault."""
    from api.doctor import examine

    try:
        checks = asyncio.run(examine(Settings.from_env(os.environ, **flags)))
    except BadSettings as error:
        _fail(error.problems)
    for name, check in checks.items():
        click.echo(f"{'ok  ' if check.ok else 'FAIL'} {name}: {check.detail}")
    sys.exit(0 if all(check.ok for check in checks.values()) else 1)


def _fail(problems: list[str]) -> NoReturn:
    for problem in problems:
        click.echo(f"tokensplice: {problem}", err=True)
    sys.exit(2)


main.add_command(engine_sim)


if __name__ == "__main__":
    main()
