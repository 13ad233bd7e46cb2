"""A vocabulary small enough to read: one id a character, and one id for each control token."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from splice.parsers import ReplyGrammar, choose_formats

_FIRST_CONTROL_ID = 0x200000  # above every character

QWEN_MARKERS = ("<think>", "</think>", "<tool_call>", "</tool_call>", "<|im_end|>", "<|im_start|>")


class Vocabulary:
    """Text to ids and back; `markers` are control tokens."""

    def __init__(self, markers: Sequence[str] = ()) -> None:
        self.control_tokens: Mapping[str, int] = {mark: _FIRST_CONTROL_ID + n for n, mark in enumerate(markers)}
        self._spelled = {number: mark for mark, number in self.control_tokens.items()}
        longest_first = sorted(markers, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")

    def encode(self, text: str) -> list[int]:
        """Ids, markers as control tokens."""
        ids: list[int] = []
        at = 0
        for found in self._any.finditer(text):
            ids += [*map(ord, text[at : found.start()]), self.control_tokens[found[0]]]
            at = found.end()
        return ids + self.spell(text[at:])

    def spell(self, text: str) -> list[int]:
        """Ids, markers as ordinary characters."""
        return list(map(ord, text))

    def decode(self, ids: Sequence[int]) -> str:
        """Text, control tokens spelled."""
        return "".join(self._spelled.get(number) or chr(number) for number in ids)

    def grammar(self, tools: str, reasoning: str = "think", stop_tokens: Sequence[str] = ()) -> ReplyGrammar:
        """A grammar that reads this vocabulary."""
        return ReplyGrammar(
            choose_formats("", tools=tools, reasoning=reasoning),
            control_tokens=self.control_tokens,
            decode=self.decode,
            stop_ids=frozenset(self.control_tokens[token] for token in stop_tokens),
        )


def tool(name: str, **properties: object) -> dict[str, object]:
    """A tool in OpenAI's form."""
    return {"type": "function", "function": {"name": name, "parameters": {"type": "object", "properties": properties}}}
