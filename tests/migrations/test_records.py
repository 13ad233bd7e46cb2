"""Records become new ones on read, by pure steps, and are left alone where no step applies."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgpack
import pytest

from migrations import upgrade
from store.codec import decode_record, encode_record
from tests.splice.test_samples import a_turn

OLD = {"schema": 1, "min_reader": 1, "told": "stop", "weights": [["v1", 0, 2]], "digest": b"\x00\xff"}


def rename_told(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {"reason" if name == "told" else name: value for name, value in fields.items()}


def demand_new_readers(fields: Mapping[str, Any]) -> Mapping[str, Any]:
    return {**fields, "min_reader": 3}


STEPS = {1: rename_told, 2: demand_new_readers}


def test_a_record_of_this_release_is_returned_byte_for_byte() -> None:
    record = encode_record(a_turn("t", None, [1], [2], cut=1))
    assert upgrade(record) is record
    assert decode_record(record).schema == 1


def test_an_old_record_goes_through_every_step_in_order() -> None:
    upgraded = upgrade(msgpack.packb(OLD), STEPS)
    assert msgpack.unpackb(upgraded) == {
        "schema": 3, "min_reader": 3, "reason": "stop", "weights": [["v1", 0, 2]], "digest": b"\x00\xff",
    }  # fmt: skip
    assert list(msgpack.unpackb(upgraded))[:2] == ["schema", "min_reader"]


def test_upgrading_twice_changes_nothing_more() -> None:
    once = upgrade(msgpack.packb(OLD), STEPS)
    assert upgrade(once, STEPS) is once


def test_a_record_in_the_middle_goes_through_the_rest() -> None:
    middle = msgpack.packb({**rename_told(OLD), "schema": 2})
    assert upgrade(middle, STEPS) == upgrade(msgpack.packb(OLD), STEPS)


def test_a_record_of_a_newer_release_is_left_to_its_reader() -> None:
    newer = msgpack.packb({**OLD, "schema": 9, "min_reader": 9})
    assert upgrade(newer, STEPS) is newer


@pytest.mark.parametrize(
    "damaged",
    [b"", b"\xc1", b"\x80", b"\x81", b"\x01", b"\x81\xa6schema", b"\x81\xa6schema\xc0", b"\x81\x01\x02", b"\x81\xd9"],
)
def test_what_is_no_record_is_left_to_its_reader(damaged: bytes) -> None:
    assert upgrade(damaged, STEPS) is damaged
