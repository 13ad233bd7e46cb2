"""What the demo says and how it exits: plain lines without a terminal, a table, one flat JSON object."""

from __future__ import annotations

import io
import json
import time

import msgspec
import pytest
from rich.console import Console

from api.demo.judge import Verdict
from api.demo.narration import Narrator, show
from api.demo.result import DemoOptions, DemoResult

GOOD = DemoResult(
    engine="sim",
    workers=3,
    worker_kills=1,
    redis_kills=1,
    played_s=9.87,
    verdict=Verdict(
        rollouts=32,
        turns=256,
        unanswered=0,
        spliced=224,
        fresh={"first_turn": 32},
        judged=224,
        breaks=0,
        lost=0,
        doubled=0,
        replayed=4,
        retries=9,
        broken_by_rerender=221,
        generations=258,
        abandoned=2,
    ),
)


def told(result: DemoResult) -> str:
    page = io.StringIO()
    show(result, Console(file=page, width=120))
    return page.getvalue()


def spoiled(**counts: object) -> DemoResult:
    return msgspec.structs.replace(GOOD, verdict=msgspec.structs.replace(GOOD.verdict, **counts))


def test_the_json_has_the_contracts_names_at_its_top() -> None:
    shown = json.loads(GOOD.as_json())
    contract = ("turns", "spliced", "fresh", "breaks", "lost", "replayed", "broken_by_rerender")
    assert [shown[name] for name in contract] == [256, 224, {"first_turn": 32}, 0, 0, 4, 221]
    assert shown["passed"]


def test_the_table_shows_breaks_beside_what_a_re_render_would_have_broken() -> None:
    page = told(GOOD)
    for words in ("0 of 224", "221 of 224", "fresh: first_turn", "Every later turn's prompt"):
        assert words in page


@pytest.mark.parametrize("fault", ["breaks", "lost", "doubled", "unanswered"])
def test_any_fault_exits_with_1_and_is_named(fault: str) -> None:
    result = spoiled(**{fault: 2}, findings=("break: rollout [rollout ab], turn 3: token 7 of 90 differs",))
    assert result.exit_code == 1
    assert "FAILED: 2 " in told(result)
    assert "rollout [rollout ab], turn 3" in told(result)


@pytest.mark.parametrize("empty", [{"judged": 0}, {"broken_by_rerender": 0}])
def test_a_run_that_proves_nothing_does_not_pass(empty: dict[str, int]) -> None:
    assert spoiled(**empty).exit_code == 1


@pytest.mark.parametrize("spared", ["worker_kills", "redis_kills"])
def test_a_run_without_its_crashes_does_not_pass(spared: str) -> None:
    assert msgspec.structs.replace(GOOD, **{spared: 0}).exit_code == 1


def test_a_flood_of_findings_is_cut_and_counted() -> None:
    page = told(spoiled(breaks=30, findings=tuple(f"break: turn {n}" for n in range(30))))
    assert "break: turn 19\n" in page
    assert "break: turn 20" not in page
    assert "and 10 more" in page


def test_a_good_run_exits_with_0() -> None:
    assert GOOD.exit_code == 0


def test_rollouts_and_turns_default_by_engine() -> None:
    sim, real = DemoOptions(), DemoOptions(engine="real")
    assert (sim.rollouts_played, sim.turns_played) == (32, 8)
    assert (real.rollouts_played, real.turns_played) == (8, 6)


def test_without_a_terminal_progress_is_told_in_plain_lines() -> None:
    page = io.StringIO()
    with Narrator(Console(file=page, width=200)) as narrator:
        narrator.stage("playing", 80)
        for _ in range(80):
            narrator.advance()
        narrator.note("SIGKILL [to] worker-1")
    lines = page.getvalue().splitlines()
    assert lines[:3] == ["playing", "playing: 10 of 80", "playing: 20 of 80"]
    assert lines[-2:] == ["playing: 80 of 80", "SIGKILL [to] worker-1"]
    assert "\x1b" not in page.getvalue()


def test_on_a_terminal_there_is_a_bar() -> None:
    page = io.StringIO()
    with Narrator(Console(file=page, force_terminal=True, width=100)) as narrator:
        narrator.stage("starting")
        narrator.stage("playing", 8)
        narrator.advance()
        with narrator.silent():
            before = len(page.getvalue())
            time.sleep(0.3)
            assert len(page.getvalue()) == before
        narrator.stage("stopping")
    assert "1/8" in page.getvalue()
    assert "0/?" in page.getvalue()
