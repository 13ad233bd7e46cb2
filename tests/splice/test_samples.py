"""Samples of random forests equal the slow rows, and every sampled id trains exactly once."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from splice.samples import Sample, assemble, received
from splice.types import Finish, Message, Origin, TokenRun, Turn, WeightSpan
from tests.splice.oracle_samples import slow_rows


def sampled(ids: list[int]) -> TokenRun:
    """Each id names its log prob, so that one cannot be moved without the other."""
    return TokenRun(np.array(ids, dtype=np.uint32), -np.array(ids, dtype=np.float64) / 7)


def a_turn(turn_id: str, parent: Turn | None, delta: list[int], generation: list[int], cut: int | None = None) -> Turn:
    """cut: where the weights changed during the generation."""
    end = len(generation)
    versions = () if cut is None else (WeightSpan("1", 0, cut), WeightSpan("2", cut, end))
    return Turn(
        turn_id=turn_id,
        parent_id=parent.turn_id if parent else "",
        root_id=parent.root_id if parent else turn_id,
        rendering_signature="s",
        clock=0.0,
        origin=Origin("spliced" if parent else "fresh"),
        prompt_length=len(delta),
        delta=TokenRun.context(delta),
        generation=sampled(generation),
        messages=(Message("user", f"ask {turn_id}"),),
        reply=Message("assistant", f"say {turn_id}"),
        chain_hash=b"",
        request_hash=b"",
        finish=Finish("stop"),
        finish_reason="stop",
        created_at=0.0,
        weight_versions=versions,
    )


def a_forest(random: Random, count: int, *, roots: float, depth_first: float) -> list[Turn]:
    """Turns in commit order; every sampled id is used once in the whole forest."""
    forest: list[Turn] = []
    unused = iter(range(1, 10**9))
    for n in range(count):
        parent = None
        if forest and random.random() >= roots:
            parent = forest[-1] if random.random() < depth_first else random.choice(forest)
        generation = [next(unused) for _ in range(random.choice([0, 1, 1, 2, 5]))]
        delta = [random.randrange(100) for _ in range(random.randrange(4))]
        cut = random.choice([None, 0, len(generation) // 2, len(generation)])
        forest.append(a_turn(f"t{n}", parent, delta, generation, cut))
    return forest


@settings(max_examples=60)
@given(
    st.integers(0, 2**32),
    st.one_of(st.integers(0, 30), st.integers(0, 500)),
    st.sampled_from([0.0, 0.05, 0.5, 1.0]),
    st.sampled_from([0.0, 0.5, 0.9]),
)
def test_samples_of_a_random_forest_equal_the_slow_rows(
    seed: int, count: int, roots: float, depth_first: float
) -> None:
    forest = a_forest(Random(seed), count, roots=roots, depth_first=depth_first)
    samples = list(assemble(forest))
    rows = slow_rows(forest)
    assert [s.sample_id for s in samples] == [r.sample_id for r in rows]
    for sample, row in zip(samples, rows, strict=True):
        assert sample.token_ids.tolist() == row.token_ids
        assert sample.loss_mask.tolist() == row.loss_mask
        assert sample.log_probs.tolist() == row.log_probs
        assert versions_by_token(sample) == row.versions
        assert list(sample.messages) == row.messages
    assert_every_sampled_id_trains_once(forest, samples)


def versions_by_token(sample: Sample) -> list[str]:
    versions = [""] * len(sample.token_ids)
    for span in sample.weight_versions:
        versions[span.start : span.end] = [span.version] * (span.end - span.start)
    return versions


def assert_every_sampled_id_trains_once(forest: list[Turn], samples: list[Sample]) -> None:
    trained = Counter(i for s in samples for i in s.token_ids[s.loss_mask == 1].tolist())
    assert trained == Counter(i for turn in forest for i in turn.generation.ids.tolist())


def test_a_long_chain_of_500_turns_is_one_sample() -> None:
    (sample,) = assemble(a_forest(Random(1), 500, roots=0.0, depth_first=1.0))
    assert len(sample.turns) == 500
    assert all(turn.trains for turn in sample.turns)


def test_no_turns_are_no_samples() -> None:
    assert list(assemble([])) == []


def test_boundaries_name_where_each_turn_lies() -> None:
    root = a_turn("root", None, [1, 2, 3], [10, 11], cut=1)
    leaf = a_turn("leaf", root, [4], [12])
    (sample,) = assemble([root, leaf])
    assert sample.token_ids.tolist() == [1, 2, 3, 10, 11, 4, 12]
    assert [(t.prompt_start, t.generation_start, t.generation_end) for t in sample.turns] == [(0, 3, 5), (5, 6, 7)]
    assert sample.weight_versions == (WeightSpan("1", 3, 4), WeightSpan("2", 4, 5))
    assert [m.content for m in sample.messages] == ["ask root", "say root", "ask leaf", "say leaf"]


def test_a_shared_prefix_trains_with_the_leaf_that_was_committed_first_only() -> None:
    root = a_turn("root", None, [1], [10])
    late_leaf = a_turn("a", root, [2], [11])
    first_leaf = a_turn("b", root, [3], [12])
    last = a_turn("a2", late_leaf, [4], [13])
    first, second = assemble([root, late_leaf, first_leaf, last])
    assert (first.sample_id, first.loss_mask.tolist()) == ("b", [0, 1, 0, 1])
    assert (second.sample_id, second.loss_mask.tolist()) == ("a2", [0, 0, 0, 1, 0, 1])
    assert second.log_probs[1] == 0.0
    assert [t.trains for t in second.turns] == [False, True, True]


def test_roots_of_one_session_are_samples_of_their_own() -> None:
    samples = list(assemble([a_turn("main", None, [1], [10]), a_turn("title", None, [2], [11])]))
    assert [s.token_ids.tolist() for s in samples] == [[1, 10], [2, 11]]


def test_an_empty_generation_is_a_turn_that_trains_nothing() -> None:
    root = a_turn("root", None, [1], [])
    (sample,) = assemble([root, a_turn("leaf", root, [2], [10])])
    assert sample.loss_mask.tolist() == [0, 0, 1]


@pytest.mark.parametrize("branches", [1, 4, 64])
def test_all_arrays_of_a_sample_have_one_length(branches: int) -> None:
    root = a_turn("root", None, [1, 2], [10])
    forest = [root, *(a_turn(f"leaf {n}", root, [3] * n, [20 + n]) for n in range(branches))]
    samples = list(assemble(forest))
    assert len(samples) == branches
    for sample in samples:
        assert len(sample.token_ids) == len(sample.loss_mask) == len(sample.log_probs)
        assert sample.turns[-1].generation_end == len(sample.token_ids)
    assert_every_sampled_id_trains_once(forest, samples)


def equal_answers(*states: bool | None) -> tuple[list[Turn], dict[str, bool | None]]:
    """A root, and answers to one and the same request after it, each delivered or not."""
    root = a_turn("root", None, [1], [10])
    answers = [replace(a_turn(f"a{n}", root, [2], [20 + n]), request_hash=b"same") for n in range(len(states))]
    return [root, *answers], {answer.turn_id: state for answer, state in zip(answers, states, strict=True)}


@pytest.mark.parametrize(
    ("states", "kept"),
    [
        ((True, True), ["a0", "a1"]),
        ((True, False), ["a0"]),
        ((False,), []),
        ((None,), ["a0"]),
        ((None, False), ["a0"]),
        ((None, None), ["a0", "a1"]),
        ((None, True), ["a1"]),
        ((False, None, True, True), ["a2", "a3"]),
    ],
)
def test_answers_that_were_not_delivered_are_left_out_and_unknown_ones_where_another_was(
    states: tuple[bool | None, ...], kept: list[str]
) -> None:
    turns, delivered = equal_answers(*states)
    assert [turn.turn_id for turn in received(turns, delivered)] == ["root", *kept]


@pytest.mark.parametrize("states", [(False, None), (None, None)])
def test_who_goes_on_from_a_turn_has_received_it(states: tuple[bool | None, ...]) -> None:
    turns, delivered = equal_answers(*states)
    child = a_turn("child", turns[1], [3], [30])
    assert [turn.turn_id for turn in received([*turns, child], delivered)] == ["root", "a0", "child"]


def test_the_turn_before_an_undelivered_one_ends_its_sample() -> None:
    turns, delivered = equal_answers(False)
    (sample,) = assemble(received(turns, delivered))
    assert sample.sample_id == "root"
    assert sample.token_ids.tolist() == [1, 10]


def test_turns_of_which_nothing_is_noted_were_delivered() -> None:
    turns, _ = equal_answers(True, True)
    assert received(turns, {}) == turns
