"""The parts that a person reads with nothing but redis-cli, and that scripts read too: link lines and main keys."""

from __future__ import annotations

import json
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import blake2b
from typing import Any

from splice.identity import ids_digest
from splice.types import Turn
from store.errors import StoreCorrupt
from store.keys import NOTHING, SCHEMA_VERSION, quote, unquote
from store.views import SessionKey, SessionOpening, SessionState, SessionView

_STATES: Mapping[str, SessionState] = {"open": "open", "finished": "finished", "deleted": "deleted"}
_CONTENT_DIGEST = 15  # bytes: 20 characters without padding, which with "=" still fit a 24-byte allocation


@dataclass(frozen=True, slots=True)
class Link:
    """A turn's line: where it hangs and where its tokens are. Ids are as they stand in keys."""

    extended: bool
    order: int
    parent: str
    root: str
    session: str
    prompt_length: int
    delta_length: int
    delta: str
    generation_length: int
    generation_digest: bytes
    finish: str
    settings: str

    @property
    def lineage_length(self) -> int:
        """Tokens from the root up to and including this turn's generation."""
        return self.prompt_length + self.generation_length


def hash_field(digest: bytes) -> str:
    """A hash as a field's name: base64url without padding."""
    return urlsafe_b64encode(digest).rstrip(b"=").decode()


def hash_fields(digests: Sequence[bytes]) -> bytes:
    """Many 16-byte hashes in one string, 24 characters each; the first 22 of them are `hash_field`."""
    return urlsafe_b64encode(b"".join([digest + b"\0\0" for digest in digests]))


def content_field(data: bytes) -> str:
    """The name under which equal content is stored once; no turn id looks like it."""
    return "=" + hash_field(blake2b(data, digest_size=_CONTENT_DIGEST).digest()) if data else NOTHING


def unhash_field(field: str) -> bytes:
    """The hash that `hash_field` was given."""
    return urlsafe_b64decode(field + "=" * (-len(field) % 4))


def link_tail(turn: Turn, delta: str, settings: str) -> str:
    """A link line but for `extended` and `order`, which the commit script puts before it."""
    return " ".join(
        (
            quote(turn.parent_id),
            quote(turn.root_id if turn.parent_id else ""),
            NOTHING,
            str(turn.prompt_length),
            str(len(turn.delta)),
            delta,
            str(len(turn.generation)),
            hash_field(ids_digest(turn.generation.ids)),
            turn.finish.kind,
            settings,
        )
    )


def parse_link(line: bytes, turn: str) -> Link:
    """The line stored for `turn` (its quoted id). Fields that a newer release adds at the end are ignored."""
    try:
        extended, order, parent, root, session, prompt, n_delta, delta, n_sampled, digest, finish, settings = (
            line.decode().split(" ")[:12]
        )
        return Link(
            extended == "1",
            int(order),
            parent,
            turn if root == NOTHING else root,
            session,
            int(prompt),
            int(n_delta),
            delta,
            int(n_sampled),
            unhash_field(digest),
            finish,
            settings,
        )
    except ValueError as error:
        raise StoreCorrupt(f"links {turn}", str(error)) from error


@dataclass(frozen=True, slots=True)
class RootFact:
    """What a session's main key says of a root."""

    signature: str
    clock: float
    rendering: str

    @classmethod
    def parse(cls, text: bytes | None) -> RootFact:
        """From the field's value. Raises StoreCorrupt."""
        try:
            signature, clock, rendering = (text or b"").decode().split(" ")[:3]
            return cls(unquote(signature), float(clock), rendering)
        except ValueError as error:
            raise StoreCorrupt("session", f"root {text!r}: {error}") from error

    def __str__(self) -> str:
        return f"{quote(self.signature)} {self.clock!r} {self.rendering}"


def iso(seconds: float) -> str:
    """Seconds since the epoch as ISO-8601 in UTC, to the millisecond."""
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def session_fields(key: SessionKey, opening: SessionOpening, now: str) -> list[bytes]:
    """A new session's main key, as field, value, field, value; what was not given is not there."""
    given = {
        "run": opening.run_id,
        "group": opening.group_id,
        "group_size": str(opening.group_size or ""),
        "metadata": _json(opening.metadata),
        "sampling_params": _json(opening.sampling_params),
        "ttl_s": str(opening.ttl_s or ""),
        "on_rendering_change": opening.on_rendering_change,
        "on_overflow": opening.on_overflow,
        "thinking": opening.thinking,
        "parent_session": opening.parent_session_id,
        "unnamed": "1" if opening.unnamed else "",
    }
    fixed = {
        "id": key.session_id,
        "tenant": key.tenant,
        "schema": str(SCHEMA_VERSION),
        "state": "open",
        "created": now,
        "updated": now,
    }
    fields = {**fixed, **{name: value for name, value in given.items() if value}}
    return [part.encode(errors="surrogatepass") for pair in fields.items() for part in pair]


def session_view(key: SessionKey, fields: Mapping[bytes, bytes]) -> SessionView:
    """A main key, decoded. Raises StoreCorrupt."""
    text = {k.decode(errors="surrogatepass"): v.decode(errors="surrogatepass") for k, v in fields.items()}
    try:
        return _session_view(key, text)
    except (ValueError, KeyError) as error:
        raise StoreCorrupt(f"session {key.session_id!r}", repr(error)) from error


def _session_view(key: SessionKey, text: Mapping[str, str]) -> SessionView:
    roots = {k: v for k, v in text.items() if k.startswith("root:")}
    return SessionView(
        key=key,
        state=_STATES[text["state"]],
        opening=_opening(text),
        created_at=_seconds(text["created"]),
        updated_at=_seconds(text["updated"]),
        turns=int(text.get("turns", "0")),
        tokens=int(text.get("tokens", "0")),
        sampled_tokens=int(text.get("sampled_tokens", "0")),
        roots={unquote(k.removeprefix("root:")): RootFact.parse(v.encode()).signature for k, v in roots.items()},
        model=text.get("model", ""),
        last_turn_id=unquote(text.get("last_turn", NOTHING)),
        status=text.get("status", ""),
        reward=float(text["reward"]) if "reward" in text else None,
    )


def _opening(text: Mapping[str, str]) -> SessionOpening:
    return SessionOpening(
        run_id=text.get("run", ""),
        group_id=text.get("group", ""),
        group_size=int(text.get("group_size", "0")),
        metadata=json.loads(text.get("metadata", "{}")),
        sampling_params=json.loads(text.get("sampling_params", "{}")),
        ttl_s=int(text.get("ttl_s", "0")),
        on_rendering_change=text.get("on_rendering_change", ""),
        on_overflow=text.get("on_overflow", ""),
        thinking=text.get("thinking", ""),
        parent_session_id=text.get("parent_session", ""),
        unnamed=text.get("unnamed") == "1",
    )


def _seconds(text: str) -> float:
    return datetime.fromisoformat(text).timestamp()


def _json(value: Mapping[str, Any]) -> str:
    return json.dumps(dict(value), ensure_ascii=False) if value else ""
