"""The load: one conversation that grows by turns of equal length, resent whole each time as chat harnesses do.

What the user and the tools say is measured in tokens of the model's own tokenizer. Messages are kept as they go
over the wire, so that preparing a request is one join and no work grows between two turns.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence, Sized
from typing import Any

import numpy as np
import orjson

from api.bench.scale import PROMPT_TOKENS

Encode = Callable[[str], Sized]

_FRAME_TOKENS = 8  # what the template writes around a message, about

_SYSTEM = (
    "You are a careful software engineer working in a repository. Work in small steps, use the tools, "
    "read before you write, and say what you found. Never touch files outside the repository."
)
_SENTENCES = (
    "The {noun} in {path} returns {n} where the caller expects {m}.",
    "Please look at the {noun} again, it {verb} only when {m} workers run.",
    "I think the {noun} {verb} because {path} was changed last week.",
    "Keep the public interface as it is and add a test for the {noun}.",
    "After {n} retries the {noun} {verb}, see the log of build {m}.",
)
_LINES = (
    "{path}:{n}: AssertionError: expected {m}, found {n}",
    '  File "{path}", line {n}, in test_{noun}',
    "-rw-r--r-- 1 ci ci {n} Mar  3 04:{m:02} {path}",
    "INFO  [{noun}-{m}] took {n} ms, {m} rows",
    '{{"{noun}": {n}, "path": "{path}", "ok": false}}',
)
_NOUNS = ("parser", "scheduler", "cache", "offset", "exporter", "migration", "index", "queue", "session", "buffer")
_VERBS = ("fails", "stalls", "returns early", "leaks memory", "loses a row", "reads twice")
_FOLDERS = ("src", "tests", "app/core", "lib/io", "services/billing", "tools")


def _function(name: str, description: str, **parameters: str) -> Mapping[str, Any]:
    properties = {key: {"type": kind, "description": f"The {key} to use."} for key, kind in parameters.items()}
    schema = {"type": "object", "properties": properties, "required": list(parameters)}
    return {"type": "function", "function": {"name": name, "description": description, "parameters": schema}}


_TOOLS = (
    _function("run_shell", "Run a command in the repository and return its output.", command="string"),
    _function("read_file", "Read a file, or a part of it.", path="string", first_line="integer"),
    _function("write_file", "Replace a file's content.", path="string", content="string"),
    _function("search", "Search the code for a regular expression.", pattern="string", glob="string"),
    _function("run_tests", "Run the tests that match an expression.", expression="string"),
    _function("submit", "Say that the task is done.", summary="string"),
)


class Talk:
    """One session's transcript. `body` is the next request; `heard` takes its reply and says the next thing.

    tokens, sampled_tokens and text_bytes (UTF-8) are of what the server was sent and has answered.
    """

    def __init__(self, session: str, *, encode: Encode, seed: Sequence[int]) -> None:
        self.session = session
        self.tokens = self.sampled_tokens = self.text_bytes = 0
        self._unanswered_bytes = 0
        self._encode = encode
        self._random = np.random.default_rng(seed)
        self._messages: list[bytes] = []
        self._say({"role": "system", "content": _SYSTEM})
        # The first prompt holds the system text and the tools, so the user says nearly nothing.
        self._say({"role": "user", "content": f"Task {session}: {self._pick(_NOUNS)}."})
        rest = orjson.dumps({"model": "bench", "temperature": 1.0, "tools": _TOOLS})[1:]
        self._head, self._tail = b'{"messages":[', b"]," + rest

    def body(self) -> bytes:
        """The whole transcript as a chat request."""
        return self._head + b",".join(self._messages) + self._tail

    def heard(self, reply: Mapping[str, Any]) -> None:
        """Keep the message of a chat reply as it came, and answer its calls, or go on as a user would."""
        message, usage = reply["choices"][0]["message"], reply["usage"]
        self._say(message)
        self.text_bytes += self._unanswered_bytes
        self._unanswered_bytes = 0
        self.tokens = usage["total_tokens"]
        self.sampled_tokens += usage["completion_tokens"]
        calls = message.get("tool_calls") or ()
        if not calls:
            self._say({"role": "user", "content": self._text(_SENTENCES, " ", PROMPT_TOKENS)})
        for call in calls:
            content = self._text(_LINES, "\n", PROMPT_TOKENS // len(calls))
            self._say({"role": "tool", "tool_call_id": call["id"], "content": content})

    def _say(self, message: Mapping[str, Any]) -> None:
        self._messages.append(orjson.dumps(message))
        calls = message.get("tool_calls") or ()
        texts = [message.get("content") or "", *(call["function"]["arguments"] for call in calls)]
        self._unanswered_bytes += sum(len(text.encode()) for text in texts)

    def _text(self, patterns: Sequence[str], glue: str, tokens: int) -> str:
        """About as many tokens as a message of `tokens` may have."""
        pieces: list[str] = []
        room = tokens - _FRAME_TOKENS
        while True:
            piece = self._line(patterns)
            room -= len(self._encode(glue + piece))
            if room < 0:
                return glue.join(pieces)
            pieces.append(piece)

    def _line(self, patterns: Sequence[str]) -> str:
        low, high = (int(n) for n in self._random.integers(0, (60, 10_000)))
        path = f"{self._pick(_FOLDERS)}/{self._pick(_NOUNS)}_{high % 97}.py"
        pattern = self._pick(patterns)
        return pattern.format(n=high, m=low, path=path, noun=self._pick(_NOUNS), verb=self._pick(_VERBS))

    def _pick(self, choices: Sequence[str]) -> str:
        return choices[int(self._random.integers(len(choices)))]
