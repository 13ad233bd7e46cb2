"""Reasoning that a harness moved into an assistant's text is moved back out, so that the text compares equal."""

from __future__ import annotations

import msgspec

from splice.parsers import ReasoningFormat
from splice.types import Message


def split_reasoning(message: Message, markers: ReasoningFormat) -> Message:
    """The assistant's message with a reasoning block at its text's start taken out of the text."""
    text = message.content.lstrip()
    if not markers.open or not markers.close or not text.startswith(markers.open):
        return message
    inside, closing, rest = text[len(markers.open) :].partition(markers.close)
    if not closing:
        return message
    return msgspec.structs.replace(message, content=rest, reasoning=message.reasoning or inside)
