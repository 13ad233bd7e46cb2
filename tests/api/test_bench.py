"""The bench runs and its counts hold; of times only the arithmetic is tested, machines are too noisy for more."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import msgspec
import psutil
import pytest
from rich.console import Console

from api.assets import qwen3_directory
from api.bench.figures import BandMeasure, BenchResult, StoredSession, TurnSample, band_of, curve_of, fit, storage_of
from api.bench.probes import ProcessClock, RedisProbe, stage_seconds
from api.bench.report import show
from api.bench.run import run_bench
from api.bench.scale import FULL, QUICK, TURN_TOKENS
from api.bench.talk import Talk
from api.dialects import chat
from api.preparation import prepare_model
from api.rendering import ModelRenderer
from splice.types import Message
from store.embedded import EmbeddedRedis


@pytest.fixture(scope="module")
def quick(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """One short run, through the command line."""
    qwen3_directory()
    command = [sys.executable, "-P", "-m", "api", "bench", "--quick", "--json"]
    folder = tmp_path_factory.mktemp("elsewhere")
    done = subprocess.run(command, cwd=folder, text=True, capture_output=True, timeout=100, check=False)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_a_quick_run_measures_every_turn_of_every_session(quick: Any) -> None:
    assert quick["turns"] == QUICK.sessions * QUICK.rounds * QUICK.repetitions
    for band in quick["bands"]:
        rounds = QUICK.band_end(band["context"]) - QUICK.band_start(band["context"])
        assert band["turns"] == rounds * QUICK.sessions
        assert 0.75 * band["context"] < band["mean_context"] <= 1.05 * band["context"]


def test_the_slope_is_reported_as_a_number_and_held_against_the_bound(quick: Any) -> None:
    assert math.isfinite(quick["worker"]["slope_ms"])
    assert quick["slope_bound_ms"] == 0.05
    assert quick["within_slope_bound"] == (quick["worker"]["slope_ms"] <= quick["slope_bound_ms"])
    assert quick["worker"]["fixed_ms"] > 0


def test_a_turn_is_two_scripts_in_two_round_trips(quick: Any) -> None:
    for band in quick["bands"]:
        # find and commit; deliveries are marked in batches, for one turn at a time at most one call each
        assert 2 <= band["redis_commands"]["evalsha"] <= 3
        assert band["redis_reads"] < 3.5


def test_what_redis_is_sent_grows_by_far_less_than_the_request(quick: Any) -> None:
    first, last = quick["bands"][0], quick["bands"][-1]
    grown = last["request_bytes"] - first["request_bytes"]
    assert last["redis_bytes_in"] - first["redis_bytes_in"] < grown / 20


def test_bytes_a_token_do_not_grow_with_the_session(quick: Any) -> None:
    shortest, longest = quick["storage"][0], quick["storage"][-1]
    assert longest["tokens"] > 1.8 * shortest["tokens"]
    assert longest["beside_text"] == pytest.approx(shortest["beside_text"], rel=0.05)
    assert longest["text"] == pytest.approx(shortest["text"], rel=0.1)


def test_each_band_has_stages_a_floor_and_a_whole_render(quick: Any) -> None:
    for band in quick["bands"]:
        assert {"locate", "plan", "generate", "commit"} <= band["stages_ms"].keys()
        assert band["floor_cpu_ms"] > 0
        assert band["whole_cpu_ms"] > 0
        assert band["redis_cpu_ms"] > 0


def test_the_machine_is_described(quick: Any) -> None:
    assert quick["machine"]["cores"] == len(os.sched_getaffinity(0))
    assert quick["machine"]["redis"].split()[0] in {"redis", "valkey"}
    assert all(quick["machine"][name] for name in ("cpu", "kernel", "python"))


def test_bands_lie_one_after_another() -> None:
    for scale in (QUICK, FULL):
        edges = [edge for c in scale.contexts for edge in (scale.band_start(c), scale.band_end(c))]
        assert edges == sorted(edges)
        assert scale.rounds * TURN_TOKENS == max(scale.contexts)


def test_a_line_is_fitted_through_points_that_lie_on_it() -> None:
    line = fit([(1000.0 * n, 2.0 + 0.25 * n) for n in range(4, 65)])
    assert line.fixed_ms == pytest.approx(2.0)
    assert line.slope_ms == pytest.approx(0.25)
    assert line.at(40_000) == pytest.approx(12.0)


def test_the_curve_takes_the_median_of_equal_turns_and_drops_short_contexts() -> None:
    turns = [TurnSample(n, 1000 * n, ms, 0, 0) for n in (3, 5) for ms in (float(n), 2.0 * n, 90.0)]
    assert curve_of(turns, shortest=4000) == ((5000, 10.0),)


def test_band_figures_are_of_one_turn() -> None:
    measure = BandMeasure(8000, turns=[TurnSample(1, 8000, ms, 10, 20) for ms in (3.0, 4.0, 8.0)])
    measure.floor_ms, measure.whole_ms = [2.0], [40.0]
    measure.redis_commands.update({"evalsha": 6})
    measure.redis_cpu_ms, measure.stages_ms = 1.5, {"plan": 6.0}
    band = band_of(measure, fit([(0.0, 1.0), (8000.0, 5.0)]))
    assert (band.worker_cpu_ms, band.worker_cpu_mean_ms, band.times_floor, band.times_dearer_whole) == (4, 5, 2, 10)
    assert band.residual_percent == pytest.approx(-20)
    assert (band.redis_commands, band.redis_cpu_ms, band.stages_ms) == ({"evalsha": 2}, 0.5, {"plan": 2})


def test_log_probs_are_counted_against_sampled_tokens_only() -> None:
    stored = StoredSession(
        tokens=100, sampled_tokens=50, text_utf8_bytes=500, text_bytes=250, ids_bytes=300, log_probs_bytes=200,
        other_bytes=100,
    )  # fmt: skip
    storage = storage_of(BandMeasure(100, stored=[stored], memory_per_token=[9.0]))
    assert storage.beside_text_for_each_prompt == 4
    assert storage.beside_text_for_each_sampled == 8
    assert storage.beside_text == 6
    assert storage.budget_share == 600 / (50 * 10 + 50 * 6)
    assert storage.text_share_of_utf8 == 0.5


def test_a_talk_resends_its_transcript_and_answers_calls() -> None:
    renderer = ModelRenderer.load(prepare_model(str(qwen3_directory())))
    talk = Talk("s", encode=renderer.encode, seed=(1,))
    call = {"id": "c1", "type": "function", "function": {"name": "run_shell", "arguments": '{"command": "ls"}'}}
    usage = {"total_tokens": 9, "completion_tokens": 4}
    before = chat.decode(talk.body())
    talk.heard({"choices": [{"message": {"role": "assistant", "content": "a"}}], "usage": usage})
    message = {"role": "assistant", "content": None, "tool_calls": [call]}
    talk.heard({"choices": [{"message": message}], "usage": usage})
    after = chat.decode(talk.body())
    assert after.conversation.messages[: len(before.conversation.messages)] == before.conversation.messages
    said, answer, result = after.conversation.messages[-3:]
    assert (said.role, answer.tool_calls[0].id, result.role, result.tool_call_id) == ("user", "c1", "tool", "c1")
    assert after.rendering == before.rendering
    assert (talk.tokens, talk.sampled_tokens) == (9, 8)
    for text in (said.content, result.content):
        assert 200 <= len(renderer.encode(text)) <= 256
    sent = [m for m in after.conversation.messages[:-1] if isinstance(m, Message)]
    assert talk.text_bytes == sum(len(m.content) + sum(len(c.arguments) for c in m.tool_calls) for m in sent)


def test_a_process_clock_counts_every_thread_and_nothing_while_it_sleeps() -> None:
    work = "sum(i * i for i in range(10**6))"
    loop = f" t = threading.Thread(target=lambda: {work})\n t.start()\n t.join()\n print(flush=True)"
    code = f"import sys, threading\nfor _ in sys.stdin:\n{loop}"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        clock = ProcessClock(process.pid)
        process.stdin.write(b"\n")
        process.stdin.flush()
        process.stdout.readline()
        time.sleep(0.05)
        worked = clock.ns()
        time.sleep(0.05)
        assert clock.ns() - worked < 5_000_000
        assert worked > 10_000_000
        process.stdin.close()


def test_a_redis_probe_leaves_its_own_commands_out(tmp_path: Path) -> None:
    with EmbeddedRedis(tmp_path / "redis") as server:
        probe, other = RedisProbe(server.url), RedisProbe(server.url)
        before = probe.counters()
        other.sizes("default", "nobody")
        counted = probe.between(before, probe.counters())
        assert counted.commands == {"scan": 1}
        assert counted.reads == 1
        probe.close()
        other.close()


def test_stage_times_are_read_off_the_metrics_page() -> None:
    page = (
        "# HELP tokensplice_turn_stage_seconds s\n# TYPE tokensplice_turn_stage_seconds histogram\n"
        'tokensplice_turn_stage_seconds_sum{stage="plan"} 0.5\n'
        'tokensplice_turn_stage_seconds_count{stage="plan"} 3\n'
        "# HELP tokensplice_turns t\n# TYPE tokensplice_turns counter\ntokensplice_turns_total 3\n"
    )
    assert stage_seconds(page) == {"plan": 0.5}


def test_what_is_shown_names_the_bound_and_fits_eighty_columns(quick: Any) -> None:
    console = Console(file=io.StringIO(), width=80)
    show(msgspec.convert(quick, BenchResult), console)
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    assert "the bound of 0.05" in shown
    assert "…" not in shown


async def test_a_run_that_is_stopped_half_way_stops_everything(tmp_path: Path) -> None:
    console = Console(file=io.StringIO())
    before = set(psutil.Process().children(recursive=True))
    running = asyncio.create_task(run_bench(QUICK, tmp_path, console))
    for _ in range(600):
        if "playing" in console.file.getvalue():  # type: ignore[attr-defined]
            break
        await asyncio.sleep(0.1)
    started = [child for child in psutil.Process().children(recursive=True) if child not in before]
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running
    assert len(started) >= 4
    assert not [child for child in started if child.is_running() and child.status() != psutil.STATUS_ZOMBIE]
