"""The parent is the deepest turn of the same rendering; ties fall to what the client echoed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from splice.locate import Candidate, Echo, Located, Parent, RenderingChanged, Root, locate
from tests.splice.oracle_locate import slow_locate

OURS = "rendering a"
OTHER = "rendering b"


def turn(turn_id: str, depth: int = 1, **changes: Any) -> Candidate:
    facts: dict[str, Any] = {
        "root_id": f"root of {turn_id}",
        "rendering_signature": OURS,
        "extended": False,
        "generation_digest": f"digest of {turn_id}".encode(),
        "order": 0,
    }
    return Candidate(turn_id=turn_id, depth=depth, **(facts | changes))


def found(candidates: Sequence[Candidate], *echoes: Echo, depth: int = 1, **facts: Any) -> Located:
    facts = {"session_has_turns": True} | facts
    return locate(candidates, echoes, rendering_signature=OURS, depth=depth, **facts)


def chosen(candidates: Sequence[Candidate], *echoes: Echo, depth: int = 1) -> tuple[str, bool]:
    located = found(candidates, *echoes, depth=depth)
    assert isinstance(located, Parent)
    return located.candidate.turn_id, located.ambiguous


def test_the_deepest_turn_of_the_same_rendering_is_the_parent() -> None:
    deep, shallow = turn("deep", 2), turn("shallow", 1)
    assert found([shallow, deep], depth=2) == Parent(deep, edited=False, ambiguous=False)


def test_a_parent_that_is_not_the_last_assistant_message_means_edited_history() -> None:
    only = turn("only", 1)
    assert found([only], depth=3) == Parent(only, edited=True, ambiguous=False)


def test_no_assistant_message_is_a_first_turn() -> None:
    assert found([], depth=0) == Root("first_turn")


def test_assistant_messages_that_no_turn_equals_are_diverged_history() -> None:
    assert found([], depth=2) == Root("history_diverged")


def test_assistant_messages_in_a_session_without_turns_are_unknown_history() -> None:
    assert found([], depth=2, session_has_turns=False) == Root("unknown_history")


def test_an_echoed_turn_that_the_store_lacks_is_a_lost_turn() -> None:
    assert found([], Echo(2, turn_id="gone"), depth=2, unknown={"gone"}) == Root("turn_lost")


def test_a_lost_turn_below_a_known_one_is_not_hidden_by_going_on_from_the_known_one() -> None:
    known, echoes = turn("known", 1), [Echo(1, turn_id="known"), Echo(2, turn_id="gone")]
    assert found([known], *echoes, depth=2, unknown={"gone"}) == Root("turn_lost")
    assert found([turn("known", 2)], Echo(1, turn_id="gone"), depth=2, unknown={"gone"}) == Parent(
        turn("known", 2), edited=False, ambiguous=False
    )


def test_a_deeper_turn_of_another_rendering_is_a_change_of_rendering() -> None:
    other = turn("other", 2, rendering_signature=OTHER)
    assert found([turn("ours", 1), other], depth=2) == RenderingChanged(other)
    assert found([other], depth=2) == RenderingChanged(other)


def test_another_rendering_at_the_same_depth_is_no_change() -> None:
    ours = turn("ours", 2)
    assert found([turn("other", 2, rendering_signature=OTHER), ours], depth=2) == Parent(
        ours, edited=False, ambiguous=False
    )


def test_echoed_token_ids_choose_among_equal_turns() -> None:
    assert chosen([turn("a"), turn("b"), turn("c")], Echo(1, b"digest of b")) == ("b", False)


def test_token_ids_outweigh_an_echoed_call_id() -> None:
    assert chosen([turn("a"), turn("b")], Echo(1, b"digest of a", "b")) == ("a", False)
    assert chosen([turn("a"), turn("b")], Echo(1, turn_id="b"), Echo(1, b"digest of a")) == ("a", False)


def test_an_echoed_call_or_response_id_chooses_among_turns_of_equal_ids() -> None:
    twins = [turn(t, generation_digest=b"same") for t in "abc"]
    assert chosen(twins, Echo(1, b"same", "b")) == ("b", False)
    assert chosen(twins, Echo(1, turn_id="c")) == ("c", False)


def test_the_first_echoed_id_outweighs_a_later_one() -> None:
    assert chosen([turn("a"), turn("b")], Echo(1, turn_id="b"), Echo(1, turn_id="a")) == ("b", False)


def test_a_turn_that_nobody_extended_outweighs_a_later_one() -> None:
    extended = turn("later", extended=True, order=2)
    assert chosen([turn("fresh", order=1), extended]) == ("fresh", True)


@pytest.mark.parametrize("extended", [True, False])
def test_the_latest_wins_when_nothing_else_tells(*, extended: bool) -> None:
    turns = [turn(str(order), order=order, extended=extended) for order in (2, 3, 1)]
    assert chosen(turns) == ("3", True)


def test_ids_never_override_content() -> None:
    other_depth = [Echo(1, b"digest of shallow", "shallow")]
    assert chosen([turn("shallow", 1), turn("deep", 2)], *other_depth, depth=2) == ("deep", False)


def test_an_echo_that_equals_none_leaves_the_choice_a_guess() -> None:
    assert chosen([turn("a", order=1), turn("b", order=2)], Echo(1, b"digest of z", "z")) == ("b", True)


def test_an_echo_of_another_message_does_not_choose() -> None:
    assert chosen([turn("a", order=1), turn("b", order=2)], Echo(2, b"digest of a", "a"), depth=2) == ("b", True)


def test_a_single_turn_is_never_ambiguous() -> None:
    assert chosen([turn("only", extended=True)], Echo(1, b"digest of z", "z")) == ("only", False)


_CANDIDATES = st.lists(
    st.builds(
        Candidate,
        turn_id=st.sampled_from("abcdef"),
        root_id=st.just("r"),
        rendering_signature=st.sampled_from([OURS, OURS, OTHER]),
        depth=st.integers(1, 3),
        extended=st.booleans(),
        generation_digest=st.sampled_from([b"1", b"2"]),
        order=st.integers(0, 50),
    ),
    max_size=6,
    unique_by=(lambda c: c.turn_id, lambda c: c.order),
)
_ECHOES = st.lists(
    st.builds(
        Echo, st.integers(1, 3), st.sampled_from([b"", b"1", b"2", b"9"]), st.sampled_from(["", "a", "b", "c", "z"])
    ),
    max_size=3,
)


@given(candidates=_CANDIDATES, echoes=_ECHOES, has_turns=st.booleans(), unknown=st.sets(st.sampled_from("acz")))
def test_the_choice_is_the_one_that_trying_every_rule_in_turn_makes(
    *, candidates: list[Candidate], echoes: list[Echo], has_turns: bool, unknown: set[str]
) -> None:
    facts = {"session_has_turns": has_turns, "unknown": unknown}
    for depth in (0, 3):
        known = candidates if depth else []
        quick = locate(known, echoes, rendering_signature=OURS, depth=depth, **facts)
        assert quick == slow_locate(known, echoes, OURS, depth, **facts)


@given(_CANDIDATES, _ECHOES, st.randoms(use_true_random=False))
def test_the_order_of_candidates_does_not_matter(candidates: list[Candidate], echoes: list[Echo], random: Any) -> None:
    shuffled = random.sample(candidates, len(candidates))
    assert found(shuffled, *echoes, depth=3) == found(candidates, *echoes, depth=3)
