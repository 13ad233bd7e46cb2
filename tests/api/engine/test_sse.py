"""Server-sent events arrive in any pieces and mean the same."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.engine import sse
from api.engine.sse import Event, EventTooLarge, SseDecoder

SAMPLES = {
    "two events": (b"data: a\n\ndata: b\n\n", [Event("a"), Event("b")]),
    "CR LF line ends": (b"data: a\r\n\r\ndata: b\r\n\r\n", [Event("a"), Event("b")]),
    # A last CR may be half of a CR LF: only the next byte tells.
    "CR line ends": (b"data: a\r\rdata: b\r\r:", [Event("a"), Event("b")]),
    "several data lines": (b"data: a\ndata:b\ndata:  c\n\n", [Event("a\nb\n c")]),
    "comments, ids and retry times": (b": ping\nid: 7\nretry: 10\ndata: a\n\n", [Event("a")]),
    "a named event": (b"event: error\ndata: {}\n\ndata: x\n\n", [Event("{}", "error"), Event("x")]),
    "a name without data is no event": (b"event: ping\n\ndata: x\n\n", [Event("x")]),
    "an empty data line": (b"data\n\n", [Event("")]),
    "a byte order mark": (b"\xef\xbb\xbfdata: a\n\n", [Event("a")]),
    "characters of many bytes": ("data: é漢😀\n\n".encode(), [Event("é漢😀")]),
    "the end of a stream": (b'data: {"a": 1}\n\ndata: [DONE]\n\n', [Event('{"a": 1}'), Event("[DONE]")]),
    "a cut-off event is none": (b"data: a\n\ndata: b\n", [Event("a")]),
}


def decode(pieces: list[bytes]) -> list[Event]:
    decoder = SseDecoder()
    return [event for piece in pieces for event in decoder.feed(piece)]


@pytest.mark.parametrize("name", SAMPLES)
def test_a_stream_means_the_same_whole_and_byte_by_byte(name: str) -> None:
    stream, events = SAMPLES[name]
    assert decode([stream]) == events
    assert decode([stream[at : at + 1] for at in range(len(stream))]) == events


@given(
    st.lists(st.text(alphabet="a:\n\r é😀\ufeff", max_size=6)).map(lambda parts: "data: ".join(parts).encode()),
    st.lists(st.integers(0, 60)),
)
def test_cutting_a_stream_anywhere_changes_nothing(stream: bytes, cuts: list[int]) -> None:
    places = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    pieces = [stream[start:end] for start, end in pairwise(places)]

    assert decode(pieces) == decode([stream])


@given(st.lists(st.text(alphabet=st.characters(exclude_characters="\r", exclude_categories=["Cs"]))))
def test_what_is_written_as_events_is_read_back(texts: list[str]) -> None:
    stream = "".join("".join(f"data: {line}\n" for line in text.split("\n")) + "\n" for text in texts)

    assert decode([stream.encode()]) == [Event(text) for text in texts]


def test_an_event_without_end_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sse, "MAX_EVENT_BYTES", 100)
    decoder = SseDecoder()
    decoder.feed(b"data: " + b"a" * 50 + b"\n")

    with pytest.raises(EventTooLarge):
        decoder.feed(b"data: " + b"b" * 50)
