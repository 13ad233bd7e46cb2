"""Planning: what is missing is applied in order, and a ledger that makes no sense is refused."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from redis.asyncio import Redis

from migrations import STEPS, DatabaseTooNew, LedgerGap, LedgerUnreadable, Step, StepRenamed, plan


async def nothing(connection: Redis) -> None:
    """A step that changes nothing."""


def steps(count: int) -> tuple[Step, ...]:
    return tuple(Step(n, f"step{n}", nothing) for n in range(1, count + 1))


@settings(derandomize=True, deadline=None)
@given(st.integers(0, 12), st.data())
def test_what_is_missing_at_the_end_is_pending_in_order(count: int, data: st.DataObject) -> None:
    known = steps(count)
    done = data.draw(st.integers(0, count))
    labels = data.draw(st.permutations([step.label for step in known[:done]]))
    assert plan(labels, known) == known[done:]


def test_planning_twice_says_the_same_and_changes_nothing() -> None:
    known, applied = steps(3), ["0001_step1"]
    assert plan(applied, known) == plan(applied, known) == known[1:]
    assert applied == ["0001_step1"]


def test_a_database_of_a_newer_release_is_refused_by_name() -> None:
    with pytest.raises(DatabaseTooNew) as refused:
        plan(["0001_step1", "0002_step2", "0003_later"], steps(2))
    assert refused.value.labels == ("0003_later",)


def test_a_gap_is_refused_by_name() -> None:
    with pytest.raises(LedgerGap) as refused:
        plan(["0001_step1", "0004_step4"], steps(4))
    assert refused.value.missing == ("0002_step2", "0003_step3")


def test_a_number_under_another_name_is_refused() -> None:
    with pytest.raises(StepRenamed) as refused:
        plan(["0001_other"], steps(2))
    assert (refused.value.recorded, refused.value.ours) == ("0001_other", "0001_step1")


@pytest.mark.parametrize("field", ["", "step1", "0000_zero", "1", "-1_minus", "0001_", "0001_ x"])
def test_a_field_that_names_no_step_is_refused(field: str) -> None:
    with pytest.raises(LedgerUnreadable) as refused:
        plan([field], steps(1))
    assert refused.value.field == field


@pytest.mark.parametrize("numbers", [(2,), (1, 3), (2, 1), (1, 1)])
def test_steps_of_a_release_are_numbered_from_one_without_a_gap(numbers: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match="numbered from 1"):
        plan([], [Step(n, "step", nothing) for n in numbers])


def test_the_steps_of_this_release_can_be_planned() -> None:
    assert plan([], STEPS) == STEPS
    assert plan([step.label for step in STEPS], STEPS) == ()


def test_applied_steps_keep_their_names_for_ever() -> None:
    assert [step.label for step in STEPS] == ["0001_schema"]
