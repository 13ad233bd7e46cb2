"""What harnesses do to a transcript that changes nothing: each edits one message in place."""

from __future__ import annotations

import json
from typing import Any


def respaced(message: dict[str, Any]) -> None:
    """Tool arguments dumped anew: other spacing, other key order."""
    for call in message.get("tool_calls", ()):
        arguments = json.loads(call["function"]["arguments"])
        call["function"]["arguments"] = json.dumps(dict(reversed(arguments.items())), indent=2)


def other_ids(message: dict[str, Any]) -> None:
    """Call ids rewritten, consistently."""
    for call in message.get("tool_calls", ()):
        call["id"] = f"toolu_{call['id'][-1]}"
    if message["role"] == "tool":
        message["tool_call_id"] = f"toolu_{message['tool_call_id'][-1]}"


def no_reasoning(message: dict[str, Any]) -> None:
    """Reasoning dropped."""
    message.pop("reasoning_content", None)


def reasoning_in_content(message: dict[str, Any]) -> None:
    """Reasoning moved into the text."""
    reasoning = message.pop("reasoning_content", None)
    if reasoning:
        message["content"] = f"<think>\n{reasoning}\n</think>\n\n{message['content'] or ''}"


def parts(message: dict[str, Any]) -> None:
    """Text as a list of text parts."""
    if message["content"]:
        message["content"] = [{"type": "text", "text": message["content"]}]


def null_or_empty(message: dict[str, Any]) -> None:
    """`null` for an empty text, and the other way round."""
    message["content"] = message["content"] or ("" if message["content"] is None else None)


def trimmed(message: dict[str, Any]) -> None:
    """White space around an assistant's text."""
    if message["role"] == "assistant" and message["content"]:
        message["content"] = f"\n {message['content'].strip()} \n"


def more_fields(message: dict[str, Any]) -> None:
    """Fields that OpenAI's SDK adds."""
    if message["role"] == "assistant":
        message |= {"refusal": None, "annotations": [], "audio": None, "function_call": None}
    if message["role"] == "tool":
        message["name"] = "bash"


# In an order in which any subset can be applied.
EQUAL = [respaced, other_ids, no_reasoning, reasoning_in_content, null_or_empty, trimmed, more_fields, parts]
