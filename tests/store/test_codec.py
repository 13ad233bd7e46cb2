"""Packed arrays, text and link lines come back as they were."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from splice.types import Message, Rendering, ToolCall
from store import codec
from store.errors import StoreCorrupt
from store.readable import hash_field, hash_fields, parse_link, unhash_field

IDS = arrays.arrays(np.uint32, st.integers(0, 40), elements=st.one_of(st.integers(0, 2**18), st.integers(0, 2**32 - 1)))
TEXTS = st.text(st.characters(codec="utf-8"), max_size=60)
CALLS = st.builds(ToolCall, TEXTS, TEXTS, TEXTS)
MESSAGES = st.builds(
    Message,
    st.sampled_from(["system", "developer", "user", "assistant", "tool"]),
    *(TEXTS, TEXTS, st.lists(CALLS, max_size=2).map(tuple), TEXTS, TEXTS),
)
JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**80), 2**80) | st.floats(allow_nan=False) | TEXTS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3),
    max_leaves=8,
)


@given(st.lists(IDS, max_size=5))
def test_ids_of_any_width_come_back_in_order(runs):
    ids = codec.unpack_ids([codec.pack_ids(run) for run in runs], [len(run) for run in runs])
    assert ids.dtype == np.uint32
    assert np.array_equal(ids, codec.joined(runs))


def test_a_vocabulary_of_today_takes_three_bytes_an_id():
    assert codec.pack_ids(np.array([1, 151_935], np.uint32)) == b"\x01\0\0\x7f\x51\x02"


@given(arrays.arrays(np.float64, st.integers(0, 20), elements=st.floats(-1e300, 0.001)))
def test_log_probs_lose_nothing(values):
    assert np.array_equal(codec.unpack_log_probs(codec.pack_log_probs(values)), values)


@given(arrays.arrays(np.float32, st.integers(1, 20), elements=st.floats(-(2.0**100), 0, width=32)))
def test_single_floats_take_four_bytes_whatever_holds_them(values):
    for held in (values, values.astype(np.float64)):
        packed = codec.pack_log_probs(held)
        assert (packed[:2], len(packed)) == (b"f4", 2 + 4 * len(values))


@given(st.lists(MESSAGES, max_size=3).map(tuple), MESSAGES)
def test_messages_come_back(messages, reply):
    assert codec.unpack_text(codec.pack_text(messages, reply)) == (messages, reply)


@given(st.lists(st.dictionaries(TEXTS, JSON, max_size=3), max_size=2), st.dictionaries(TEXTS, JSON, max_size=3))
def test_tools_come_back_with_their_key_order(tools, kwargs):
    value = codec.unpack_shared(codec.pack_rendering(Rendering(tuple(tools), kwargs)))
    assert value == {"tools": tools, "kwargs": kwargs}
    assert [list(tool) for tool in value["tools"]] == [list(tool) for tool in tools]


@given(st.lists(st.binary(min_size=16, max_size=16), max_size=4))
def test_hashes_travel_together_as_they_do_alone(digests):
    together = hash_fields(digests).decode()
    assert [together[24 * n :][:22] for n in range(len(digests))] == [hash_field(digest) for digest in digests]
    assert [unhash_field(hash_field(digest)) for digest in digests] == digests


@pytest.mark.parametrize(
    "read",
    [
        lambda: codec.unpack_text(b"?text"),
        lambda: codec.unpack_text(b"btext"),
        lambda: codec.unpack_text(b"r\x90"),
        lambda: codec.unpack_text(b"r\x91\x91\x63"),
        lambda: codec.unpack_log_probs(b"f9...."),
        lambda: codec.unpack_shared(None),
        lambda: codec.unpack_shared(b"r{"),
        lambda: codec.unpack_ids([b"1234567"], [2]),
        lambda: codec.decode_record(b""),
        lambda: codec.decode_record(b"\x80"),
        lambda: parse_link(b"0 1 too short", "t"),
    ],
)
def test_bytes_that_we_did_not_write_are_called_corrupt(read):
    with pytest.raises(StoreCorrupt):
        read()
