"""Reasoning that stands in an assistant's text is moved out of it.

Harnesses put a reply's reasoning back into its text, between the model's markers. Moved out again, the text
compares equal to what was sent, and the markers are none that somebody spelled.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import msgspec

from splice.types import Message


class Markers(Protocol):
    """The markers around reasoning, "" where there are none."""

    @property
    def open(self) -> str:
        """Stands before it."""

    @property
    def close(self) -> str:
        """Stands behind it."""


class ThinkMarkers(NamedTuple):
    """Markers as a template writes them."""

    open: str = ""
    close: str = ""


def split_reasoning(message: Message, markers: Markers) -> Message:
    """The assistant's message with a reasoning block at its text's start taken out of the text.

    A block beside reasoning of its own goes only where it says the same; otherwise it is text.
    """
    text = message.content.lstrip()
    if not markers.open or not markers.close or not text.startswith(markers.open):
        return message
    inside, closing, rest = text[len(markers.open) :].partition(markers.close)
    if not closing or message.reasoning.strip() not in {"", inside.strip()}:
        return message
    reasoning = message.reasoning or inside.strip("\n")
    return msgspec.structs.replace(message, content=rest.lstrip("\n"), reasoning=reasoning)
