"""Old records to new ones, on read: a chain of pure steps from one schema number to the next.

Records are MessagePack maps that begin with `schema` and `min_reader`. They are read untyped here, so that a step
written today still reads today's records when every type has changed.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import msgpack

RecordStep = Callable[[Mapping[str, Any]], Mapping[str, Any]]

# schema -> what makes the next schema of it. Schema 1 is the first and the newest: nothing to do yet.
RECORD_STEPS: Mapping[int, RecordStep] = {}


def upgrade(record: bytes, steps: Mapping[int, RecordStep] = RECORD_STEPS) -> bytes:
    """The record in the newest schema that `steps` lead to; one that no step applies to comes back as it is.

    So does what is no record at all, and what a newer release wrote: refusing those is the reader's part.
    """
    schema = _schema(record)
    if schema not in steps:
        return record
    fields: Mapping[str, Any] = msgpack.unpackb(record, strict_map_key=False)
    while schema in steps:
        changed = steps[schema](fields)
        schema += 1
        fields = {**changed, "schema": schema}
    upgraded: bytes = msgpack.packb({"schema": schema, "min_reader": fields["min_reader"], **fields})
    return upgraded


def _schema(record: bytes) -> int:
    """The first field's value, without decoding the others; 0 for what is no record."""
    head = msgpack.Unpacker()
    head.feed(record)
    try:
        if head.read_map_header() and head.unpack() == "schema" and isinstance(schema := head.unpack(), int):
            return schema
    except (ValueError, msgpack.exceptions.UnpackException):
        return 0
    return 0
