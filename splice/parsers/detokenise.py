"""Ids to stream text, piece by piece: no broken UTF-8 leaves, and how the ids were cut changes nothing.

Text runs between control tokens are decoded behind a little context, since some decoders treat the start of a text
specially; what ends inside a character waits for the rest of it. A stop string ends the stream where it begins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from splice.parsers.alphabet import Alphabet

_REPLACEMENT = "\ufffd"
_LONGEST_CONTEXT = 8
# Bytes that never become a character are shown as they are after so many ids; a real character needs four bytes.
_LONGEST_WAIT = 64

Decode = Callable[[Sequence[int]], str]


class Detokeniser:
    """Turns sampled ids into stream text."""

    def __init__(self, alphabet: Alphabet, decode: Decode) -> None:
        self._by_id = alphabet.by_id
        self._decode = decode
        self._waiting: list[int] = []
        self._context: list[int] = []
        self._context_text = ""

    def feed(self, ids: Iterable[int]) -> str:
        """The text that these ids complete."""
        pieces: list[str] = []
        run: list[int] = []
        for number in ids:
            control = self._by_id.get(number)
            if control is None:
                run.append(number)
                continue
            pieces += (self._text(run), self.finish(), control)
            self._settle([number])
            run = []
        pieces.append(self._text(run))
        return "".join(pieces)

    def finish(self) -> str:
        """What still waits for bytes that will not come."""
        text = self._decoded(self._waiting) if self._waiting else ""
        self._waiting = []
        return text

    def _text(self, run: list[int]) -> str:
        if not run:
            return ""
        # All at once where that leaves no doubt; id by id where it does, so that the result depends on the ids alone.
        text = self._decoded(self._waiting + run)
        if _REPLACEMENT not in text:
            self._settle(self._waiting + run)
            return text
        return "".join(self._text_of_one(number) for number in run)

    def _text_of_one(self, number: int) -> str:
        self._waiting.append(number)
        text = self._decoded(self._waiting)
        if text.endswith(_REPLACEMENT) and len(self._waiting) < _LONGEST_WAIT:
            return ""
        self._settle(self._waiting)
        return text

    def _decoded(self, ids: list[int]) -> str:
        text = self._decode(self._context + ids)
        if text.startswith(self._context_text):
            return text[len(self._context_text) :]
        return self._decode(ids)

    def _settle(self, ids: list[int]) -> None:
        for length in range(1, _LONGEST_CONTEXT + 1):
            self._context = ids[-length:]
            self._context_text = self._decode(self._context)
            if self._context_text and _REPLACEMENT not in self._context_text:
                break
        self._waiting = []


class StopCut:
    """Ends the stream where the first stop string begins, and holds back what may become one."""

    def __init__(self, alphabet: Alphabet, stop_strings: Sequence[str]) -> None:
        self._alphabet = alphabet
        self._stops = tuple(stop for stop in stop_strings if stop)
        self._held = ""
        self._stopped = False

    def feed(self, text: str) -> str:
        """The part of the stream that is certainly before any stop string."""
        if not self._stops:
            return text
        if self._stopped:
            return ""
        stream = self._held + text
        spelled = self._alphabet.spell(stream)
        places = [place for place in map(spelled.find, self._stops) if place >= 0]
        if places:
            self._stopped, self._held = True, ""
            return self._up_to(stream, min(places))
        keep = self._split(stream, len(spelled) - self._doubtful(spelled))
        self._held = stream[keep:]
        return stream[:keep]

    def finish(self) -> str:
        """What was held back and turned out to be text."""
        held, self._held = self._held, ""
        return held

    def _doubtful(self, spelled: str) -> int:
        longest = max(map(len, self._stops)) - 1
        for length in range(min(longest, len(spelled)), 0, -1):
            if any(stop.startswith(spelled[-length:]) for stop in self._stops):
                return length
        return 0

    def _split(self, stream: str, place: int) -> int:
        """The last index of the stream that is spelled within the first `place` characters."""
        if not self._alphabet.has_signs(stream):
            return place
        for index, sign in enumerate(stream):
            place -= self._alphabet.width(sign)
            if place < 0:
                return index
        return len(stream)

    def _up_to(self, stream: str, place: int) -> str:
        split = self._split(stream, place)
        before = stream[:split]
        rest = place - len(self._alphabet.spell(before))
        return before + self._alphabet.spell(stream[split : split + 1])[:rest]
