"""A real engine for the demo and the tests: llama.cpp's own HTTP server, with a witness in front of it.

    python -m api.demo.real_engine --port 8080 --gguf MODEL.gguf --ctx 8192 --parallel 4

llama.cpp (PyPI package `xllamacpp`, extra `real-engine`) runs in a process of its own on a free port; the witness
(`api/demo/witness.py`) listens on `--port`. Either ends with the other, however the other ends.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from api.demo.witness import LOOPBACK, Witness

READY_TIMEOUT_S = 120.0
STOP_TIMEOUT_S = 15.0
_PROMPT_CACHE_MIB = 512  # 8 GiB by default


class RealEngineUnavailable(Exception):
    """llama.cpp cannot be run here, or did not come up; the message says why."""


@contextlib.contextmanager
def running(
    gguf: Path, *, context_length: int = 8192, parallel: int = 4, threads: int | None = None, port: int = 0
) -> Iterator[str]:
    """Run engine and witness in processes of their own; yields the witness's URL once the engine answers.

    Raises RealEngineUnavailable.
    """
    options = ["--port", str(port), "--gguf", str(gguf), "--ctx", str(context_length), "--parallel", str(parallel)]
    with _process([*options, "--threads", str(threads or _spare_cores())]) as process:
        url = _announced(process)
        _wait_until_ready(url, process)
        yield url


def main(arguments: Sequence[str] | None = None) -> int:
    """The command line of `python -m api.demo.real_engine`."""
    options = _parser().parse_args(arguments)
    try:
        if options.bare:
            _serve_llama(options)
        else:
            asyncio.run(_serve_witness(options))
    except RealEngineUnavailable as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m api.demo.real_engine", description="llama.cpp with a witness")
    parser.add_argument("--port", type=int, default=0, help="where to listen; 0 picks a free port, which is printed")
    parser.add_argument("--gguf", type=Path, required=True, help="model file")
    parser.add_argument("--ctx", type=int, default=8192, help="window of each request, in tokens")
    parser.add_argument("--parallel", type=int, default=4, help="requests served at once")
    parser.add_argument("--threads", type=int, default=_spare_cores(), help="threads that compute (default: cores - 1)")
    parser.add_argument("--bare", action="store_true", help="llama.cpp alone, until standard input ends")
    return parser


def _spare_cores() -> int:
    """All but one: llama.cpp's threads wait for each other by spinning, so they must not share a core with us."""
    return max(1, (os.cpu_count() or 2) - 1)


def _serve_llama(options: argparse.Namespace) -> None:
    """Run llama.cpp's server in this process until standard input ends: also the sign of a parent's death."""
    try:
        import xllamacpp  # an optional extra
    except ImportError as error:
        raise RealEngineUnavailable(
            f"the real engine needs llama.cpp: `pip install xllamacpp` here ({error})"
        ) from error
    if not options.gguf.is_file():
        raise RealEngineUnavailable(f"there is no model file {options.gguf}")
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # a terminal sends it to both processes; the parent decides
    server = xllamacpp.Server(_llama_parameters(xllamacpp, options))
    _announce(server.listening_address)
    sys.stdin.buffer.read()
    del server  # ends llama.cpp's threads


def _llama_parameters(xllamacpp: Any, options: argparse.Namespace) -> Any:
    parameters = xllamacpp.CommonParams()
    parameters.model.path = str(options.gguf)
    parameters.model_alias = {options.gguf.stem}
    parameters.hostnames = [LOOPBACK]
    parameters.port = options.port
    parameters.n_parallel = options.parallel
    parameters.n_ctx = options.ctx * options.parallel  # llama.cpp shares it out among its slots
    parameters.cpuparams.n_threads = options.threads
    parameters.ctx_shift = False  # a prompt whose head is forgotten is another prompt
    parameters.cache_ram_mib = _PROMPT_CACHE_MIB
    parameters.ui = False
    parameters.verbosity = 1
    return parameters


async def _serve_witness(options: argparse.Namespace) -> None:
    stop = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    model = ["--gguf", str(options.gguf), "--ctx", str(options.ctx), "--parallel", str(options.parallel)]
    with _process(["--bare", *model, "--threads", str(options.threads)]) as engine:
        engine_url = await asyncio.to_thread(_announced, engine)
        async with Witness(engine_url).serving(options.port) as url:
            _announce(url)
            await _until_either(stop, engine)


async def _until_either(stop: asyncio.Event, engine: subprocess.Popen[bytes]) -> None:
    while not stop.is_set():
        if engine.poll() is not None:
            raise RealEngineUnavailable(f"llama.cpp ended with status {engine.returncode}")
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(stop.wait(), 0.5)


@contextlib.contextmanager
def _process(options: list[str]) -> Iterator[subprocess.Popen[bytes]]:
    """This module in another process, ended with SIGTERM and the end of its standard input."""
    # -P: a folder named api where the command was given must not be taken for ours.
    command = [sys.executable, "-P", "-m", "api.demo.real_engine", *options]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # noqa: S603
    try:
        yield process
    finally:
        _end(process, bare="--bare" in options)


def _end(process: subprocess.Popen[bytes], *, bare: bool) -> None:
    if not bare:
        process.terminate()
    for pipe in (process.stdin, process.stdout):
        if pipe is not None:
            pipe.close()
    try:
        process.wait(STOP_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def _announce(url: str) -> None:
    sys.stdout.write(f"{url}\n")
    sys.stdout.flush()


def _announced(process: subprocess.Popen[bytes]) -> str:
    """The URL that a started process prints as its first line."""
    assert process.stdout is not None
    line = process.stdout.readline().decode().strip()
    if not line:
        raise RealEngineUnavailable(f"llama.cpp did not start (status {process.wait()}); its words are above")
    return line


def _wait_until_ready(url: str, process: subprocess.Popen[bytes]) -> None:
    """Wait for the model: until then /health answers 503."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if process.poll() is not None:
            raise RealEngineUnavailable(f"the engine ended with status {process.returncode}; its words are above")
        with (
            contextlib.suppress(urllib.error.URLError, ConnectionError),
            urllib.request.urlopen(url + "/health"),  # noqa: S310 - our own loopback URL
        ):
            return
        time.sleep(0.1)
    raise RealEngineUnavailable(f"llama.cpp did not load its model within {READY_TIMEOUT_S:.0f} s")


if __name__ == "__main__":
    sys.exit(main())
