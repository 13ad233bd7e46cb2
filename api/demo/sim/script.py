"""What a test tells the engine to do next: directives, and the queue that hands each to its request."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import msgspec

Fault = Literal[
    # The engine gives up.
    "abort",  # as /abort_request does: half the ids, 200
    "abort_status",  # with a status code: `status`, `message`
    "abort_queued",  # while waiting: no counts in the reply
    # The answer breaks the contract.
    "ids_missing",
    "log_probs_missing",
    "counts_differ",  # one log prob fewer than ids
    "completion_tokens_differ",
    "ids_disagree",  # output_ids against the log probs' ids
    "null_log_prob",
    "nan_log_prob",  # the bare word NaN, as Python's json writes and reads it
    "id_outside_vocabulary",
    "nan_happened",  # the engine replaced a bad token by EOS
    # The engine refuses or fails.
    "busy",  # 503, queue full
    "crash",  # 500, text/plain
    "too_long",  # 400, the length error
    "garbage",  # 200 with half a JSON object
    "drop_before",  # the connection closes before a status line
    "drop_midway",  # ... in the middle of the body
    "raw",  # `status`, `body`, `content_type` as given
]


class Directive(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One instruction. `match` and `call` say for which generation, the rest says what happens to it."""

    match: str | None = None  # a substring of the decoded prompt
    call: int | None = None  # the n-th generation since the start or the last reset, from 1
    times: int = 1

    text: str | None = None  # this text (control tokens spelled in it become single ids), then EOS
    ids: list[int] | None = None  # exactly these ids; no limit or stop is applied
    log_probs: list[float | None] | None = None
    canonical: bool = False  # do not split the text's tokens
    eos: bool = True  # False: the text is not followed by EOS
    finish: dict[str, Any] | None = None  # sent as it is
    meta_info: dict[str, Any] = {}  # merged over the reply's own
    delay_s: float = 0.0  # the generation takes this much longer

    fault: Fault | None = None
    status: int = 503
    message: str = "The request queue is full."
    body: str = ""
    content_type: str = "text/html"


NOTHING = Directive()


class Script:
    """Directives in order; each is used `times` times by the first generations that fit it."""

    def __init__(self, directives: Sequence[Directive] = ()) -> None:
        self._waiting: list[tuple[Directive, int]] = []
        self.extend(directives)

    def extend(self, directives: Sequence[Directive]) -> None:
        """Put more directives behind those that wait."""
        self._waiting += [(directive, directive.times) for directive in directives]

    def clear(self) -> None:
        """Drop what waits."""
        self._waiting.clear()

    def __len__(self) -> int:
        """How many generations the script still wants to speak for."""
        return sum(left for _, left in self._waiting)

    def take(self, call: int, prompt: Callable[[], str]) -> Directive:
        """The first directive that fits. `prompt` is asked only if a directive looks into it."""
        for at, (directive, left) in enumerate(self._waiting):
            if directive.call not in (None, call):
                continue
            if directive.match is not None and directive.match not in prompt():
                continue
            self._waiting[at : at + 1] = [(directive, left - 1)] if left > 1 else []
            return directive
        return NOTHING
