"""The engine's own record of what it was sent and what it made of it: the judge of prefix breaks.

Append-only in memory. With a file, settled entries are appended to it and read back at the next start.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

Outcome = Literal["running", "answered", "aborted", "failed"]


@dataclass(slots=True)
class Entry:
    """One request. `n` counts from 1 in order of arrival; it is "running" until it is settled.

    "answered": a whole reply was written to an open connection, a scripted breach of the contract included.
    "aborted": by the client's leaving or by an abort. "failed": refused, or answered with an error.
    """

    n: int
    rid: str
    input_ids: npt.NDArray[np.int64]
    headers: Mapping[str, str]
    sampling_params: Mapping[str, Any]
    stream: bool
    prompt_tail: str = ""
    output_ids: list[int] = field(default_factory=list)
    log_probs: list[float | None] = field(default_factory=list)
    text: str = ""
    nonce: str = ""
    finish_reason: Mapping[str, Any] | None = None
    fault: str | None = None  # the script's
    outcome: Outcome = "running"
    problem: str = ""


class Record:
    """Every entry since the start or, with a file, since the file began."""

    def __init__(self, path: Path | None = None) -> None:
        self._path = path
        self.entries: list[Entry] = [] if path is None else _read(path)
        self._last = max((entry.n for entry in self.entries), default=0)

    def open(self, **facts: Any) -> Entry:
        """Begin the entry of a request that has arrived."""
        self._last += 1
        entry = Entry(n=self._last, **facts)
        self.entries.append(entry)
        return entry

    def settle(self, entry: Entry) -> None:
        """Make the entry durable; it changes no more."""
        if self._path is not None:
            with self._path.open("ab") as file:
                file.write(dump(entry) + b"\n")

    def clear(self) -> None:
        """Forget everything, the file included."""
        self.entries.clear()
        self._last = 0
        if self._path is not None:
            self._path.unlink(missing_ok=True)


def dump(value: object) -> bytes:
    """JSON, with id arrays as lists."""
    return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)


def _read(path: Path) -> list[Entry]:
    if not path.exists():
        return []
    whole = path.read_bytes()
    # A process killed while it wrote leaves a last line without its end: cut it, or the next line would join it.
    kept = whole[: whole.rfind(b"\n") + 1]
    if len(kept) < len(whole):
        path.write_bytes(kept)
    return sorted((_entry(line) for line in kept.splitlines()), key=lambda entry: entry.n)


def _entry(line: bytes) -> Entry:
    facts = orjson.loads(line)
    return Entry(**facts | {"input_ids": np.array(facts["input_ids"], np.int64)})
