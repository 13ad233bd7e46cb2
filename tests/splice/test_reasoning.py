"""Reasoning in an assistant's text is moved out of it, once and only where it is certain."""

from __future__ import annotations

import pytest

from splice.reasoning import ThinkMarkers, split_reasoning
from splice.types import Message

MARKERS = ThinkMarkers("<think>", "</think>")


@pytest.mark.parametrize(
    ("content", "reasoning", "left", "kept"),
    [
        ("<think>\nhm\n</think>\n\nYes", "", "Yes", "hm"),
        ("  <think>hm</think>Yes", "", "Yes", "hm"),
        ("<think>\n\n</think>\n\nYes", "", "Yes", ""),
        ("<think>hm</think>Yes", "hm\n", "Yes", "hm\n"),
        ("<think>other</think>Yes", "hm", "<think>other</think>Yes", "hm"),
        ("<think>hm", "", "<think>hm", ""),
        ("Yes <think>hm</think>", "", "Yes <think>hm</think>", ""),
        ("hm</think>Yes", "", "hm</think>Yes", ""),
    ],
)
def test_a_block_at_the_start_is_reasoning(content: str, reasoning: str, left: str, kept: str) -> None:
    message = split_reasoning(Message("assistant", content, reasoning), MARKERS)
    assert (message.content, message.reasoning) == (left, kept)
    assert split_reasoning(message, MARKERS) == message


def test_a_model_without_markers_has_ordinary_text() -> None:
    message = Message("assistant", "<think>hm</think>Yes")
    assert split_reasoning(message, ThinkMarkers()) == message
