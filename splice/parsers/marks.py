"""Finding the first marker in a stream, and telling how much of its end may still become one."""

from __future__ import annotations

import re
from collections.abc import Mapping
from enum import Enum, auto


class Kind(Enum):
    """What a marker begins or ends."""

    REASONING = auto()
    REASONING_END = auto()
    SECTION = auto()
    SECTION_END = auto()
    CALL = auto()
    LAYOUT = auto()
    LAYOUT_AFTER_REASONING = auto()


class Marks:
    """A set of markers, as they stand in the stream."""

    def __init__(self, kinds: Mapping[str, Kind]) -> None:
        self.kinds = {mark: kind for mark, kind in kinds.items() if mark}
        longest_first = sorted(self.kinds, key=len, reverse=True)
        self._any = re.compile("|".join(map(re.escape, longest_first)) or r"(?!)")
        self._longest = max(map(len, self.kinds), default=1) - 1
        self._first = {mark[0] for mark in self.kinds if len(mark) > 1}

    def search(self, text: str) -> re.Match[str] | None:
        """The first marker."""
        return self._any.search(text)

    def doubtful(self, text: str) -> int:
        """How many characters at the end may be the beginning of a marker."""
        start = max(0, len(text) - self._longest)
        for place in range(start, len(text)):
            if text[place] in self._first and any(mark.startswith(text[place:]) for mark in self.kinds):
                return len(text) - place
        return 0
