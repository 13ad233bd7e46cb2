"""What an engine answered becomes a sampled run only when every id and log prob can be trusted."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from splice.errors import GenerationInvalid
from splice.turn import checked_generation, checked_spans
from splice.types import TokenRun, WeightSpan

VOCABULARY = 100
REASONABLE = st.floats(max_value=0, allow_nan=False, allow_infinity=False)


def checked(ids: list[int], log_probs: list[float], vocab_size: int = VOCABULARY) -> TokenRun:
    return checked_generation(
        np.array(ids, dtype=np.int64), np.array(log_probs, dtype=np.float64), vocab_size=vocab_size
    )


@given(st.lists(st.tuples(st.integers(0, VOCABULARY - 1), REASONABLE)))
def test_ids_and_log_probs_are_kept_to_the_last_bit(sampled: list[tuple[int, float]]) -> None:
    run = checked([i for i, _ in sampled], [p for _, p in sampled])
    assert run.sampled
    assert run.log_probs is not None
    assert run.ids.tolist() == [i for i, _ in sampled]
    assert run.log_probs.tolist() == [p for _, p in sampled]


@pytest.mark.parametrize(("value", "kind"), [(-0.5, np.float32), (-0.1, np.float64), (-1e39, np.float64)])
def test_log_probs_are_narrow_exactly_when_that_loses_nothing(value: float, kind: type) -> None:
    run = checked([1], [value])
    assert run.log_probs is not None
    assert run.log_probs.dtype == kind


def test_an_empty_generation_is_legitimate() -> None:
    run = checked([], [])
    assert len(run) == 0
    assert run.sampled


def test_a_log_prob_a_hair_above_zero_is_rounding() -> None:
    assert len(checked([1], [1e-6])) == 1


BAD: dict[str, tuple[str, list[int], list[float]]] = {
    "log probs missing": ("log_probs", [1, 2], []),
    "ids missing": ("log_probs", [], [-1.0, -2.0]),
    "one log prob less": ("log_probs", [1, 2], [-1.0]),
    "one log prob more": ("log_probs", [1, 2], [-1.0, -1.0, -1.0]),
    "a log prob that is NaN, or was null": ("log_probs", [1, 2], [-1.0, math.nan]),
    "a log prob of minus infinity": ("log_probs", [1, 2], [-math.inf, -1.0]),
    "a log prob of infinity": ("log_probs", [1, 2], [-1.0, math.inf]),
    "a probability instead of a log prob": ("log_probs", [1, 2], [-1.0, 0.7]),
    "a negative id": ("ids", [1, -1], [-1.0, -1.0]),
    "the first id outside the vocabulary": ("ids", [1, VOCABULARY], [-1.0, -1.0]),
    "an id that would wrap around to a good one": ("ids", [1, 2**32 + 5], [-1.0, -1.0]),
}


@pytest.mark.parametrize(("field", "ids", "log_probs"), BAD.values(), ids=BAD.keys())
def test_an_answer_that_cannot_be_trusted_is_refused_by_field(
    field: str, ids: list[int], log_probs: list[float]
) -> None:
    with pytest.raises(GenerationInvalid) as refused:
        checked(ids, log_probs)
    assert refused.value.field == field


def test_a_refusal_says_where_and_what() -> None:
    with pytest.raises(GenerationInvalid, match="id 100 at position 1 is outside the vocabulary of 100"):
        checked([1, 100, 200], [-1.0, -1.0, -1.0])


def test_no_vocabulary_is_large_enough_for_an_id_beyond_32_bits() -> None:
    with pytest.raises(GenerationInvalid):
        checked([2**32], [-1.0], vocab_size=2**40)


def test_a_turns_ids_cannot_be_written_to() -> None:
    with pytest.raises(ValueError, match="read-only"):
        checked([1], [-0.1]).ids[0] = 2


def spans(*bounds: tuple[int, int]) -> tuple[WeightSpan, ...]:
    return tuple(WeightSpan(f"v{n}", start, end) for n, (start, end) in enumerate(bounds))


@given(st.lists(st.integers(0, 5), max_size=5))
def test_spans_that_follow_one_another_to_the_end_are_kept(lengths: list[int]) -> None:
    ends = np.cumsum(lengths, dtype=int).tolist()
    given_spans = spans(*zip([0, *ends], ends, strict=False))
    assert checked_spans(given_spans, sum(lengths)) == given_spans


def test_an_engine_that_reports_no_spans_leaves_them_empty() -> None:
    assert checked_spans((), 7) == ()


@pytest.mark.parametrize(
    "bounds",
    [
        pytest.param([(1, 4)], id="late start"),
        pytest.param([(0, 3)], id="early end"),
        pytest.param([(0, 5)], id="late end"),
        pytest.param([(0, 2), (3, 4)], id="gap"),
        pytest.param([(0, 3), (2, 4)], id="overlap"),
        pytest.param([(2, 4), (0, 2)], id="wrong order"),
        pytest.param([(0, 4), (4, 3), (3, 4)], id="backwards"),
    ],
)
def test_spans_with_a_gap_or_an_overlap_are_refused(bounds: list[tuple[int, int]]) -> None:
    with pytest.raises(GenerationInvalid) as refused:
        checked_spans(spans(*bounds), 4)
    assert refused.value.field == "weight_versions"


@pytest.mark.parametrize(
    ("ids", "log_probs"),
    [
        (np.zeros(2, np.int64), None),
        (np.zeros((1, 2), np.uint32), None),
        (np.zeros(2, np.uint32), np.zeros(3, np.float32)),
    ],
)
def test_a_run_whose_parts_do_not_fit_cannot_be_made(ids: Any, log_probs: Any) -> None:
    with pytest.raises(ValueError, match="ids"):
        TokenRun(ids, log_probs)
