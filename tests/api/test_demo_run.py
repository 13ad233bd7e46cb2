"""The demo itself: a small one passes with its crashes, and no run leaves a process behind."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil
import pytest

from api.assets import qwen3_directory

SMALL = ("--rollouts", "6", "--turns", "5")


@pytest.fixture(scope="module", autouse=True)
def _tokenizer() -> None:
    qwen3_directory()


@contextmanager
def demo(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """A running demo, started from a folder that holds an `api` of its own."""
    (folder / "api").mkdir()
    (folder / "api" / "__init__.py").write_text("raise RuntimeError('not ours')")
    command = [sys.executable, "-P", "-m", "api", "demo", *SMALL, *options]
    process = subprocess.Popen(command, cwd=folder, text=True, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
            process.communicate(timeout=60)


def heard(process: subprocess.Popen[str], words: str) -> str:
    """The first line on standard error with these words."""
    assert process.stderr is not None
    for line in process.stderr:
        if words in line:
            return line
    raise AssertionError(f"it never said {words!r}")


def family(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def gone(processes: list[psutil.Process]) -> bool:
    _, alive = psutil.wait_procs(processes, timeout=10)
    return not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def test_a_small_demo_keeps_the_promise_through_its_crashes(tmp_path: Path) -> None:
    with demo(tmp_path, "--json") as process:
        heard(process, "SIGKILL to worker")
        children = family(process)
        shown, said = process.communicate(timeout=90)
    outcome = json.loads(shown)
    assert process.returncode == 0, said
    assert (outcome["turns"], outcome["breaks"], outcome["lost"], outcome["doubled"]) == (30, 0, 0, 0)
    assert outcome["fresh"] == {"first_turn": 6}
    assert outcome["spliced"] == outcome["judged"] == 24
    assert outcome["broken_by_rerender"] > 12
    assert (outcome["worker_kills"], outcome["redis_kills"]) == (1, 1)
    assert len(children) >= 4
    assert gone(children)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_a_demo_stopped_half_way_stops_everything(tmp_path: Path, how: signal.Signals) -> None:
    with demo(tmp_path, "--workers", "1") as process:
        heard(process, "playing")
        children = family(process)
        process.send_signal(how)
        process.communicate(timeout=60)
    assert process.returncode == 130
    assert len(children) >= 3
    assert gone(children)


def test_keep_leaves_everything_up_until_ctrl_c(tmp_path: Path) -> None:
    with demo(tmp_path, "--keep", "--workers", "1") as process:
        sessions = heard(process, "sessions: ").split()[1]
        with urllib.request.urlopen(sessions, timeout=10) as answer:
            assert len(json.load(answer)["sessions"]) == 6
        children = family(process)
        process.send_signal(signal.SIGINT)
        shown, _ = process.communicate(timeout=60)
    assert process.returncode == 0
    assert "prefix breaks" in shown
    assert gone(children)
