"""White space at the edges of content and reasoning.

White space between a marker and the edge of a text is layout and is left out; all other white space is text, at the
edges too. So what a model says without any marker arrives as it was sampled.
"""

from __future__ import annotations


class Channel:
    """One of the two texts of a reply, written piece by piece."""

    def __init__(self, *, marked: bool = False) -> None:
        self.started = False
        self._held = ""
        self._marked = marked

    def write(self, text: str) -> str:
        """What of this text can leave now, with what was held back before it."""
        body = text.rstrip()
        if not body:
            self._held += text
            return ""
        lead = self._held + text[: len(text) - len(text.lstrip())]
        if self._marked and not self.started:
            lead = ""
        self.started, self._marked, self._held = True, False, text[len(body) :]
        return lead + body.lstrip()

    def mark(self) -> None:
        """A marker stands here."""
        self._marked = True
        if not self.started:
            self._held = ""

    def finish(self) -> str:
        """The white space at the end, where it is text."""
        held = "" if self._marked else self._held
        self._held = ""
        return held
