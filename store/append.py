"""What `find.lua` and `commit.lua` are told, and what the scripts' refusals mean."""

from __future__ import annotations

from collections.abc import Sequence

from splice.types import Turn
from store import codec, keys
from store.errors import (
    AlreadyAnswered,
    LeaseLost,
    ParentMissing,
    RenderingDiffers,
    SessionClosed,
    SessionFinished,
    SessionMissing,
    StoreCorrupt,
)
from store.readable import RootFact, content_field, hash_field, hash_fields, link_tail, session_fields, unhash_field
from store.scripts import Argument
from store.views import FindQuery, SessionKey, SessionOpening


def idempotency_field(key: str) -> str:
    """Where a request under an idempotency key is found; "" for none."""
    return "key:" + keys.quote(key) if key else ""


def find_args(
    query: FindQuery, worker: str, ttl_ms: int, *, cached: Sequence[str], gone: Sequence[str]
) -> list[Argument]:
    """In the order of `find.lua`'s header."""
    hints = [keys.quote(hint) for hint in query.hints]
    digests = [hash_field(digest) for digest in query.generation_digests]
    return [
        keys.quote(query.rendering_signature),
        hash_field(query.request_hash),
        idempotency_field(query.idempotency_key),
        "",
        hash_fields(query.chain),
        keys.quote(query.attempt_id) if query.attempt_id else "",
        worker,
        query.mark,
        ttl_ms,
        *map(len, (hints, digests, cached, gone)),
        *hints,
        *digests,
        *cached,
        *gone,
    ]


def lineage_args(turn: str, cached: Sequence[str]) -> list[Argument]:
    """To read one turn's lineage (a quoted id) and nothing else."""
    return ["", "", "", turn, "", "", "", "none", 0, 0, 0, len(cached), 0, *cached]


def commit_args(
    key: SessionKey,
    turn: Turn,
    opening: SessionOpening,
    text: bytes,
    idempotency_key: str,
    *,
    worker: str,
    now: str,
    ttl_ms: int,
) -> list[Argument]:
    """In the order of `commit.lua`'s header."""
    delta, generated = codec.pack_ids(turn.delta.ids), codec.pack_ids(turn.generation.ids)
    probabilities = turn.generation.log_probs
    settings = codec.pack_settings(turn)
    rendering = b"" if turn.parent_id else codec.pack_rendering(turn.rendering)
    delta_field, settings_field, rendering_field = map(content_field, (delta, settings, rendering))
    root_fact = RootFact(turn.rendering_signature, turn.clock, rendering_field)
    return [
        keys.quote(turn.turn_id),
        keys.quote(turn.parent_id),
        keys.quote(turn.root_id),
        keys.quote(turn.rendering_signature),
        str(root_fact) if not turn.parent_id else "",
        now,
        ttl_ms,
        link_tail(turn, delta_field, settings_field),
        delta_field,
        delta,
        generated,
        b"" if probabilities is None else codec.pack_log_probs(probabilities),
        codec.encode_record(turn),
        text,
        settings_field,
        settings,
        rendering_field,
        rendering,
        hash_field(turn.chain_hash),
        hash_field(turn.request_hash),
        idempotency_field(idempotency_key),
        len(turn.delta) + len(turn.generation),
        len(turn.generation),
        turn.model,
        worker,
        *session_fields(key, opening, now),
    ]


def refuse(answer: bytes, detail: Sequence[bytes], key: SessionKey, turn: Turn) -> None:
    """Raise what the commit script refused."""
    refuse_session(answer, key)
    if answer == b"finished":
        raise SessionFinished(key.session_id)
    if answer == b"no_parent":
        raise ParentMissing(key.session_id, turn.parent_id)
    if answer == b"other_rendering":
        raise RenderingDiffers(key.session_id, turn.turn_id)
    if answer == b"answered":
        answer_turn, request = detail[0].decode().split(" ")[:2]
        raise AlreadyAnswered(key.session_id, keys.unquote(answer_turn), unhash_field(request))
    if answer == b"fenced":
        raise LeaseLost(key.session_id, turn.turn_id)
    if answer not in {b"committed", b"repeated"}:
        raise StoreCorrupt("commit", f"the script answered {answer!r}")


def refuse_session(answer: bytes, key: SessionKey) -> None:
    """Raise what any script says of a session that is not there."""
    if answer == b"missing":
        raise SessionMissing(key.session_id)
    if answer == b"deleted":
        raise SessionClosed(key.session_id)
