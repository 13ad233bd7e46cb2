"""gpt-oss's Harmony format: a reply is a row of messages, each with a channel and perhaps a recipient.

    <|channel|>analysis<|message|>...<|end|><|start|>assistant<|channel|>commentary to=functions.f<|message|>{}<|call|>

A message ends at an end marker that the next message, or the end of the reply, follows; elsewhere such a marker is
text. What `functions.` receives is a call, `analysis` is reasoning, everything else is content.
"""

from __future__ import annotations

import re

from splice.parsers.alphabet import Alphabet
from splice.parsers.channels import Channel
from splice.parsers.events import ContentText, Event, ReasoningText
from splice.parsers.formats import NotatedCalls
from splice.parsers.json_calls import arguments_of
from splice.parsers.marks import Kind, Marks
from splice.parsers.scan import Broken, made

_RECIPIENT = re.compile(r"\bto=([^\s<\ud800-\udfff]+)")
_FUNCTION = "functions."


class HarmonyMachine:
    """Reads one reply."""

    def __init__(self, row: NotatedCalls, alphabet: Alphabet) -> None:
        start, end, self._message, self._channel, _, call, over = map(alphabet.literal, row.layout)
        ends = "|".join(map(re.escape, (end, call, over)))
        self._alphabet = alphabet
        self._start = start
        self._end = re.compile(f"(?:{ends})(?={re.escape(start)})")
        self._last_end = re.compile(rf"(?:{ends})+\Z")
        self._header_end = re.compile(f"(?P<body>{re.escape(self._message)})|(?:{ends})?(?={re.escape(start)})")
        self._ends = Marks(dict.fromkeys((end + start, call + start, over + start), Kind.LAYOUT))
        self._overlap = max(map(len, (end, call, over))) + len(start)
        self._text = ""
        self._searched = 0  # no message ends before this place
        self._header: str | None = None  # None between messages
        self._calls = 0
        self._reasoning = Channel(marked=True)
        self._content = Channel(marked=True)
        self._events: list[Event] = []

    def feed(self, text: str) -> list[Event]:
        """What this text lets go."""
        whole, self._text = self._text, ""
        whole += text
        self._text = whole
        while self._read_header() if self._header is None else self._read_body():
            pass
        events, self._events = self._events, []
        return events

    def finish(self, *, stopped: bool) -> list[Event]:
        """What was held back until the reply's end."""
        if self._header is not None:
            closed = self._last_end.search(self._text)
            body = self._text[: closed.start()] if closed else self._text
            self._finish_message(body, closed[0] if closed else "", whole=stopped or closed is not None)
        elif stopped or self._channel not in self._text:
            self._show(self._text)
        self._say(ReasoningText, self._reasoning.finish())
        self._say(ContentText, self._content.finish())
        return self._events

    def _read_header(self) -> bool:
        own_start = len(self._start) if self._text.startswith(self._start) else 0
        found = self._header_end.search(self._text, max(own_start, self._searched))
        if found is None:
            return self._wait()
        header = self._pass(found)
        if found["body"] is None:
            self._show(header + found[0])  # no message has such a header
        else:
            self._header = header
            self._separate()
        return True

    def _read_body(self) -> bool:
        found = self._end.search(self._text, self._searched)
        if found is not None:
            self._finish_message(self._pass(found), found[0], whole=True)
            return True
        if not self._recipient():
            doubtful = self._ends.doubtful(self._text)
            self._write(self._text[: len(self._text) - doubtful])
            self._text = self._text[len(self._text) - doubtful :]
        return self._wait()

    def _pass(self, found: re.Match[str]) -> str:
        """Leave what was found behind, and return what stands before it."""
        before, self._text, self._searched = self._text[: found.start()], self._text[found.end() :], 0
        return before

    def _wait(self) -> bool:
        self._searched = max(0, len(self._text) - self._overlap)
        return False

    def _finish_message(self, body: str, end: str, *, whole: bool) -> None:
        recipient, header = self._recipient(), self._header or ""
        if not recipient:
            self._write(body)
            self._channel_of(header).mark()
        elif whole or not (self._calls or not body.strip()):
            self._call(recipient, body, header + self._message + body + end, whole=whole)
        self._header = None

    def _call(self, recipient: str, body: str, spelled: str, *, whole: bool) -> None:
        try:
            if not whole or not recipient.startswith(_FUNCTION):
                raise Broken
            call = made(recipient.removeprefix(_FUNCTION), arguments_of(self._alphabet.spell(body.strip())))
        except Broken:
            self._show(spelled)
            return
        self._calls += 1
        self._events.append(call)

    def _recipient(self) -> str:
        found = _RECIPIENT.search(self._header or "")
        return found[1] if found and found[1] != "assistant" else ""

    def _channel_of(self, header: str) -> Channel:
        name = header.rpartition(self._channel)[2].split()[:1]
        return self._reasoning if name == ["analysis"] else self._content

    def _separate(self) -> None:
        """Messages on the same channel become lines of one text."""
        channel = self._channel_of(self._header or "")
        if channel.started and not self._recipient():
            self._write("\n")

    def _write(self, text: str) -> None:
        channel = self._channel_of(self._header or "")
        kind = ReasoningText if channel is self._reasoning else ContentText
        self._say(kind, channel.write(self._alphabet.spell(text)))

    def _show(self, text: str) -> None:
        self._say(ContentText, self._content.write(self._alphabet.spell(text)))

    def _say(self, kind: type[ReasoningText | ContentText], text: str) -> None:
        if text:
            self._events.append(kind(text))
