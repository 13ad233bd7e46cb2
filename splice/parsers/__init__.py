"""Reply parsers: sampled ids to reasoning, content and tool calls, while they arrive.

`ReplyGrammar(choose_formats(template), control_tokens=..., decode=..., stop_ids=...)` is made once per model.
Its `parser(...)` reads one reply piece by piece, its `parse(...)` reads it whole.
"""

from __future__ import annotations

from splice.parsers.events import CallMade, ContentText, Event, ParsedReply, ReasoningText, assemble
from splice.parsers.formats import FORMATS, REASONING, CallFormat, Formats, ReasoningFormat, choose_formats
from splice.parsers.reply import ReplyGrammar, ReplyParser

__all__ = [
    "FORMATS",
    "REASONING",
    "CallFormat",
    "CallMade",
    "ContentText",
    "Event",
    "Formats",
    "ParsedReply",
    "ReasoningFormat",
    "ReasoningText",
    "ReplyGrammar",
    "ReplyParser",
    "assemble",
    "choose_formats",
]
