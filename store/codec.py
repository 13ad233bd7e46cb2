"""Bytes of a turn: its ids, its log probs, its text and its record.

Ids and log probs are packed arrays that go to numpy at once, text is compressed per turn, and the record is
MessagePack behind a schema envelope: a reader ignores fields it does not know, and refuses a record whose
`min_reader` is above its own schema.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import brotli
import msgspec
import numpy as np

from splice.types import (
    Finish,
    IdArray,
    LogProbArray,
    Message,
    Origin,
    Rendering,
    Role,
    ToolCall,
    Turn,
    WeightSpan,
)
from store.errors import SchemaTooNew, StoreCorrupt
from store.keys import SCHEMA_VERSION

_MIN_READER = 1  # the oldest schema whose readers understand what we write
_NARROW_LIMIT = 1 << 24
_NARROW = 3
_WIDE = 4

# Turns of 1 to 2 kB of prose, code and JSON rows come to 0.46 of their UTF-8 size for 60 us. Quality 4 gives 0.49,
# 10 gives 0.43 for 1.1 ms; named fields instead of positions 0.49; zlib with a 32 kB dictionary of ours 0.46.
_QUALITY = 5
_WINDOW = 18
_ROLES: tuple[Role, ...] = ("system", "developer", "user", "assistant", "tool")  # stored by position: only append
_BROTLI, _RAW = b"b", b"r"
_SMALL = 32  # bytes that compression would only lengthen


class TurnRecord(msgspec.Struct, frozen=True, omit_defaults=True):
    """What is stored of a turn beside its link line, its ids and its text. New fields have defaults."""

    schema: int
    min_reader: int
    created: float
    chain: bytes
    request: bytes
    finish: tuple[str, int | str | None]
    told: str = "stop"  # the finish reason, as the client was sent it
    origin: tuple[str, str, bool] = ("spliced", "", False)  # kind, reason, ambiguous
    call_ids: tuple[str, ...] = ()
    weights: tuple[tuple[str, int, int], ...] = ()
    facts: str = ""  # JSON: {engine, client}


class Envelope(msgspec.Struct, frozen=True):
    """How every record begins, whatever wrote it."""

    schema: int
    min_reader: int


_encode_record = msgspec.msgpack.Encoder().encode
_decode_record = msgspec.msgpack.Decoder(TurnRecord).decode
_decode_envelope = msgspec.msgpack.Decoder(Envelope).decode
_decode_text = msgspec.msgpack.Decoder(list[tuple[Any, ...]]).decode


def pack_ids(ids: IdArray) -> bytes:
    """Three little-endian bytes an id, or four where one needs them; shape (n,), uint32."""
    raw = np.ascontiguousarray(ids, dtype="<u4")
    if len(raw) and int(raw.max()) >= _NARROW_LIMIT:
        return raw.tobytes()
    return raw.view(np.uint8).reshape(-1, _WIDE)[:, :_NARROW].tobytes()


def unpack_ids(chunks: Sequence[bytes], lengths: Sequence[int]) -> IdArray:
    """The ids of packed chunks, one after another; lengths: how many ids each holds. Raises StoreCorrupt."""
    data, count = b"".join(chunks), sum(lengths)
    if len(data) == _NARROW * count:  # the shortest there is, so every chunk is narrow
        return _widened(data)
    return joined([_unpacked(chunk, length) for chunk, length in zip(chunks, lengths, strict=True)])


def joined(runs: Sequence[IdArray]) -> IdArray:
    """Runs of ids, one after another, in an array of their own."""
    return np.concatenate([np.empty(0, np.uint32), *runs])


def _unpacked(chunk: bytes, length: int) -> IdArray:
    if len(chunk) == _NARROW * length:
        return _widened(chunk)
    if len(chunk) != _WIDE * length:
        raise StoreCorrupt("tokens", f"{len(chunk)} bytes cannot be {length} ids")
    return np.frombuffer(chunk, dtype="<u4")


def _widened(data: bytes) -> IdArray:
    wide = np.zeros((len(data) // _NARROW, _WIDE), np.uint8)
    wide[:, :_NARROW] = np.frombuffer(data, np.uint8).reshape(-1, _NARROW)
    return wide.view("<u4").reshape(-1)


def pack_log_probs(values: LogProbArray) -> bytes:
    """`f4` and single floats when they keep every value, else `f8` and doubles; "" for none."""
    if not len(values):
        return b""
    with np.errstate(over="ignore", under="ignore"):
        narrow = values.astype("<f4")
    if np.array_equal(narrow.astype(values.dtype), values):
        return b"f4" + narrow.tobytes()
    return b"f8" + values.astype("<f8").tobytes()


def unpack_log_probs(data: bytes | None) -> LogProbArray:
    """Log probs as they were packed. Raises StoreCorrupt."""
    if not data:
        return np.empty(0, np.float32)
    kinds = {b"f4": "<f4", b"f8": "<f8"}
    if data[:2] not in kinds:
        raise StoreCorrupt("logprobs", f"unknown format {data[:2]!r}")
    return np.frombuffer(data, dtype=kinds[data[:2]], offset=2)


def pack_text(messages: Sequence[Message], reply: Message) -> bytes:
    """A turn's new messages and its reply, compressed."""
    return _pack(msgspec.msgpack.encode([_positional(message) for message in (*messages, reply)]))


def unpack_text(data: bytes) -> tuple[tuple[Message, ...], Message]:
    """The messages and the reply. Raises StoreCorrupt."""
    try:
        *messages, reply = [_message(*parts[:6]) for parts in _decode_text(_unpack(data, "text"))]
    except (msgspec.MsgspecError, ValueError, TypeError, IndexError) as error:
        raise StoreCorrupt("text", str(error)) from error
    return tuple(messages), reply


def _positional(message: Message) -> list[Any]:
    """The message by position, what is empty at the end left out: names are worth a tenth of a compressed turn."""
    calls = [(call.name, call.arguments, call.id) for call in message.tool_calls]
    parts = [
        _ROLES.index(message.role),
        message.content,
        message.tool_call_id,
        calls,
        message.reasoning,
        message.name,
    ]
    while not parts[-1] and len(parts) > 1:
        parts.pop()
    return parts


def _message(
    role: int,
    content: str = "",
    answers: str = "",
    calls: Sequence[Sequence[str]] = (),
    thought: str = "",
    name: str = "",
) -> Message:
    return Message(_ROLES[role], content, thought, tuple(ToolCall(*call[:3]) for call in calls), answers, name)


def pack_settings(turn: Turn) -> bytes:
    """What a session's turns usually have in common."""
    return _pack_json(
        {
            "sampling_params": dict(turn.sampling_params),
            "model": turn.model,
            "engine": turn.engine,
            "log_prob_kind": turn.log_prob_kind,
        }
    )


def pack_rendering(rendering: Rendering) -> bytes:
    """Tools and template arguments, key order kept."""
    return _pack_json({"tools": list(rendering.tools), "kwargs": dict(rendering.kwargs)})


def unpack_shared(data: bytes | None) -> Mapping[str, Any]:
    """What `pack_settings` or `pack_rendering` packed. Raises StoreCorrupt."""
    if data is None:
        raise StoreCorrupt("shared", "a turn's settings are not there")
    try:
        value: Mapping[str, Any] = json.loads(_unpack(data, "shared"))
    except ValueError as error:
        raise StoreCorrupt("shared", str(error)) from error
    return value


def _pack_json(value: Mapping[str, Any]) -> bytes:
    """The standard library's JSON takes whatever a request's JSON can hold, integers of any size included."""
    return _pack(json.dumps(value, separators=(",", ":")).encode())


def _pack(raw: bytes) -> bytes:
    if len(raw) > _SMALL:
        packed = brotli.compress(raw, mode=brotli.MODE_TEXT, quality=_QUALITY, lgwin=_WINDOW)
        if len(packed) < len(raw):
            return bytes(_BROTLI + packed)
    return _RAW + raw


def _unpack(data: bytes, where: str) -> bytes:
    if data[:1] == _RAW:
        return data[1:]
    if data[:1] != _BROTLI:
        raise StoreCorrupt(where, f"unknown format {data[:1]!r}")
    try:
        return bytes(brotli.decompress(data[1:]))
    except brotli.error as error:
        raise StoreCorrupt(where, str(error)) from error


def encode_record(turn: Turn) -> bytes:
    """A turn's record."""
    facts = {"engine": dict(turn.engine_facts), "client": dict(turn.client_facts)}
    return _encode_record(
        TurnRecord(
            schema=SCHEMA_VERSION,
            min_reader=_MIN_READER,
            created=turn.created_at,
            chain=turn.chain_hash,
            request=turn.request_hash,
            finish=(turn.finish.kind, turn.finish.matched),
            told=turn.finish_reason,
            origin=(turn.origin.kind, turn.origin.reason, turn.origin.ambiguous),
            call_ids=turn.model_call_ids,
            weights=tuple((span.version, span.start, span.end) for span in turn.weight_versions),
            facts=json.dumps(facts, separators=(",", ":")) if any(facts.values()) else "",
        )
    )


def decode_record(data: bytes) -> TurnRecord:
    """A record that this release may read. Raises SchemaTooNew, StoreCorrupt."""
    try:
        record = _decode_record(data)
    except msgspec.MsgspecError as error:
        _refuse_newer(_envelope(data))  # a newer schema may well have other types
        raise StoreCorrupt("turns", str(error)) from error
    _refuse_newer(record)
    return record


def _envelope(data: bytes) -> Envelope:
    try:
        return _decode_envelope(data)
    except msgspec.MsgspecError as error:
        raise StoreCorrupt("turns", str(error)) from error


def _refuse_newer(record: Envelope | TurnRecord) -> None:
    if record.min_reader > SCHEMA_VERSION:
        raise SchemaTooNew(record.schema, record.min_reader, SCHEMA_VERSION)


def finish_of(record: TurnRecord) -> Finish:
    """The record's finish."""
    kind, matched = record.finish
    return Finish("length" if kind == "length" else "stop", matched)


def origin_of(record: TurnRecord) -> Origin:
    """The record's origin."""
    kind, reason, ambiguous = record.origin
    return Origin("fresh" if kind == "fresh" else "spliced", reason, ambiguous)


def spans_of(record: TurnRecord) -> tuple[WeightSpan, ...]:
    """The record's weight-version spans."""
    return tuple(WeightSpan(*span) for span in record.weights)
