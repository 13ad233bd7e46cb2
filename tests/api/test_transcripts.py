"""A transcript that grew is read from where it grew, and reads as if it were read whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from api.dialects import chat
from api.dialects.chat import Transcript
from api.request import BadRequest
from api.transcripts import Transcripts

_TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=8) | st.sampled_from(['"]', "},{", "[]", ",", "\\"])
_CALL = st.fixed_dictionaries(
    {"id": _TEXT, "type": st.just("function"), "function": st.fixed_dictionaries({"name": _TEXT, "arguments": _TEXT})}
)
_MESSAGE = st.one_of(
    st.fixed_dictionaries({"role": st.sampled_from(["user", "system"]), "content": _TEXT}),
    st.fixed_dictionaries({"role": st.just("tool"), "content": _TEXT, "tool_call_id": _TEXT}),
    st.fixed_dictionaries(
        {"role": st.just("assistant"), "content": _TEXT, "id": st.just("chatcmpl-" + "0" * 20)},
        optional={"tool_calls": st.lists(_CALL, max_size=2), "generation_token_ids": st.just([1, 2])},
    ),
)


def body(messages: list[dict[str, Any]], **dump: Any) -> bytes:
    return b'{"model": "m", "messages": %s, "temperature": 1}' % json.dumps(messages, **dump).encode()


@given(
    turns=st.lists(st.lists(_MESSAGE, min_size=1, max_size=3), min_size=1, max_size=5),
    indents=st.lists(st.sampled_from([None, 1]), min_size=5, max_size=5),
    edit=st.booleans(),
)
def test_what_is_read_piece_by_piece_is_what_is_read_whole(
    turns: list[list[dict[str, Any]]], indents: list[int | None], *, edit: bool
) -> None:
    transcripts: Transcripts[Transcript] = Transcripts(1_000_000)
    messages: list[dict[str, Any]] = []
    for new, indent in zip(turns, indents, strict=False):
        messages = [*messages, *new]
        if edit and len(messages) > 2:
            messages[1] = {"role": "user", "content": "edited"}
        sent = body(messages, indent=indent)
        pieces, whole = chat.decode(sent, transcripts=transcripts, session="session"), chat.decode(sent)
        assert pieces.conversation.messages == whole.conversation.messages
        assert pieces.conversation.chain == whole.conversation.chain
        assert pieces.conversation.replies == whole.conversation.replies
        assert pieces.conversation.answers == whole.conversation.answers
        near = {e.depth for e in whole.echoes if e.generation_digest}
        assert [e for e in pieces.echoes if e.depth in near] == [e for e in whole.echoes if e.depth in near]
        assert [(e.depth, e.turn_id) for e in pieces.echoes] == [(e.depth, e.turn_id) for e in whole.echoes]


def test_the_messages_of_a_grown_transcript_are_the_very_same_objects() -> None:
    transcripts: Transcripts[Transcript] = Transcripts(1_000_000)
    first = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]
    before = chat.decode(body(first), transcripts=transcripts, session="s").conversation.messages
    after = chat.decode(
        body([*first, {"role": "user", "content": "c"}]), transcripts=transcripts, session="s"
    ).conversation.messages
    assert all(old is new for old, new in zip(before, after, strict=False))
    assert [m.content for m in after] == ["a", "b", "c"]
    other = chat.decode(
        body([*first, {"role": "user", "content": "c"}]), transcripts=transcripts, session="another"
    ).conversation.messages
    assert other == after
    assert other[0] is not after[0]


def test_a_bad_message_in_the_new_part_is_named_by_its_place_in_the_whole() -> None:
    transcripts: Transcripts[Transcript] = Transcripts(1_000_000)
    first = [{"role": "user", "content": "a"}]
    chat.decode(body(first), transcripts=transcripts, session="s")
    with pytest.raises(BadRequest) as caught:
        chat.decode(body([*first, {"role": "nobody", "content": "c"}]), transcripts=transcripts, session="s")
    assert "messages[1].role" in caught.value.problems


def test_memory_is_bounded_and_the_least_recently_used_goes_first() -> None:
    transcripts: Transcripts[int] = Transcripts(4 * 300)
    for n in range(5):
        transcripts.keep(n, b"[" + b"1" * 98 + b"]", n)
    assert transcripts.known(0, b"[" + b"1" * 98 + b",2]") is None
    known = transcripts.known(4, b"[" + b"1" * 98 + b",2]")
    assert known is not None
    assert (known.read, known.rest) == (4, b"[2]")
