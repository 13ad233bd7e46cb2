"""How the harness reads messages, from replies and from the store alike: one spelling, nonces, and the ask's word."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

import orjson

_NONCE = re.compile(r"\bn-[0-9a-f]{6}\b")
_WORD = re.compile(r"\bq-\d{7}\b")


def word(number: int) -> str:
    """What tells one ask from every other, to client, engine and store. The imagined model never repeats digits."""
    return f"q-{number:07}"


def last_word(text: str) -> str:
    """The last ask's word in a text; "" when there is none."""
    found = _WORD.findall(text)
    return str(found[-1]) if found else ""


def spelled(message: Mapping[str, Any]) -> bytes:
    """An assistant message as it is compared: text, reasoning, calls with their ids."""
    calls = [
        (call["id"], call["function"]["name"], call["function"]["arguments"])
        for call in message.get("tool_calls") or ()
    ]
    return orjson.dumps([message.get("content") or "", message.get("reasoning_content") or "", calls])


def nonces(message: Mapping[str, Any]) -> tuple[str, ...]:
    """The engine's nonces in everything that a message shows."""
    calls = [call["function"]["arguments"] for call in message.get("tool_calls") or ()]
    shown = [message.get("content"), message.get("reasoning_content"), *calls]
    return tuple(dict.fromkeys(_NONCE.findall("\n".join(text for text in shown if text))))


def assembled(stream: bytes) -> dict[str, Any] | None:
    """The message of a stream of chunks; None when it was cut short."""
    message: dict[str, Any] = {"role": "assistant", "content": ""}
    calls: dict[int, dict[str, Any]] = {}
    lines = [line[6:] for line in stream.split(b"\n") if line.startswith(b"data: ")]
    if not lines or lines[-1] != b"[DONE]":
        return None
    for line in lines[:-1]:
        for choice in orjson.loads(line)["choices"]:
            _add(choice["delta"], message, calls)
    if calls:
        message["tool_calls"] = [calls[n] for n in sorted(calls)]
    return message


def _add(delta: Mapping[str, Any], message: dict[str, Any], calls: dict[int, dict[str, Any]]) -> None:
    for name, value in delta.items():
        if name == "tool_calls":
            calls.update({call["index"]: {k: v for k, v in call.items() if k != "index"} for call in value})
        elif name in ("content", "reasoning_content"):
            message[name] = (message.get(name) or "") + (value or "")
        elif name != "role":
            message[name] = value
