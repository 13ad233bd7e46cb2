"""How harnesses send history back: the same conversation, hardly ever the same bytes.

Every habit here leaves the conversation what it was (DESIGN, "same message"): arguments spaced and ordered
anew, call ids replaced, reasoning dropped or moved, nothing spelled `null`, `""` or left out. A server that
compares bytes takes each for an edited history.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Mapping, Sequence
from random import Random
from typing import Any

import msgspec

from api.demo.evidence import Json

_ARGUMENTS: Mapping[str, Callable[[Any], str]] = {
    "compact": lambda value: json.dumps(value, separators=(",", ":"), ensure_ascii=False),
    "escaped": json.dumps,
    "sorted and indented": lambda value: json.dumps(value, sort_keys=True, indent=2),
}
_NOTHING: Mapping[str, Json] = {"null": {"content": None}, "empty": {"content": ""}, "left out": {}}
_SHARE = 0.3  # of harnesses that have each of the odder habits
_TOKEN_IDS = ("prompt_token_ids", "generation_token_ids", "generation_log_probs")


class Habits(msgspec.Struct, frozen=True, kw_only=True):
    """One harness's ways, the same for a whole rollout."""

    session: str = "url"  # url, header or none: then the conversation itself is all there is to go by
    arguments: str = "verbatim"
    nothing: str = "null"  # how a message without text is spelled
    text_as_parts: bool = False
    reasoning: str = "kept"  # kept, dropped, or renamed to the field's other name
    own_call_ids: bool = False
    names_tools: bool = False
    spurious_fields: bool = False
    echoes_ids: bool = False  # asks for token ids and sends them back with the history
    loses_replies: bool = False  # now and then a reply does not reach it, and it asks again

    @classmethod
    def drawn(cls, number: int, random: Random) -> Habits:
        """The habits of rollout `number`: how it names its session goes round, all else is drawn."""
        session = ("url", "header", "none", "url", "header", "none echoed")[number % 6]
        named = session in ("url", "header")
        return cls(
            session=session.partition(" ")[0],
            arguments=random.choice(("verbatim", *_ARGUMENTS)),
            nothing=random.choice(tuple(_NOTHING)),
            text_as_parts=random.random() < _SHARE,
            reasoning=random.choice(("kept", "dropped", "renamed")),
            # Without a session id, what the client echoes is what tells equal conversations apart.
            own_call_ids=named and random.random() < _SHARE,
            names_tools=random.random() < _SHARE,
            spurious_fields=random.random() < _SHARE,
            echoes_ids=session.endswith("echoed"),
            loses_replies=named and random.random() < _SHARE,
        )

    def history(self, messages: Sequence[Json]) -> tuple[Json, ...]:
        """The conversation as this harness sends it."""
        renamed = self._call_ids(messages)
        return tuple(self._retold(message, renamed) for message in messages)

    def _call_ids(self, messages: Sequence[Json]) -> Mapping[str, str]:
        calls = [call["id"] for message in messages for call in message.get("tool_calls") or ()]
        return {told: f"toolu_{place:04}" for place, told in enumerate(calls)} if self.own_call_ids else {}

    def _retold(self, message: Json, renamed: Mapping[str, str]) -> Json:
        if message["role"] == "assistant":
            return self._own_words(message, renamed)
        if message["role"] == "tool":
            told = message["tool_call_id"]
            kept = message if self.names_tools else {name: message[name] for name in message if name != "name"}
            return kept | {"tool_call_id": renamed.get(told, told)}
        return message | {"content": self._spelled(message["content"])}

    def _own_words(self, message: Json, renamed: Mapping[str, str]) -> Json:
        text = message.get("content") or ""
        retold: Json = {"role": "assistant"}
        retold |= {"content": self._spelled(text)} if text else _NOTHING[self.nothing]
        if message.get("tool_calls"):
            retold["tool_calls"] = [self._recalled(call, renamed) for call in message["tool_calls"]]
        reasoning = message.get("reasoning_content")
        if reasoning and self.reasoning != "dropped":
            retold["reasoning_content" if self.reasoning == "kept" else "reasoning"] = reasoning
        if self.spurious_fields:
            retold |= {"refusal": None, "annotations": [], "audio": None, "index": 0}
        if self.echoes_ids:
            retold |= {name: message[name] for name in _TOKEN_IDS if name in message}
        return retold

    def _recalled(self, call: Json, renamed: Mapping[str, str]) -> Json:
        function = call["function"]
        arguments = function["arguments"]
        if self.arguments in _ARGUMENTS:
            with contextlib.suppress(ValueError):  # what is no JSON goes back as it came
                arguments = _ARGUMENTS[self.arguments](json.loads(arguments))
        return {
            "id": renamed.get(call["id"], call["id"]),
            "type": "function",
            "function": {"name": function["name"], "arguments": arguments},
        }

    def _spelled(self, text: str) -> str | list[Json]:
        return [{"type": "text", "text": text}] if self.text_as_parts else text
