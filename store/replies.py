"""What the scripts answer, as the values of `store.views`; no IO."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from splice.locate import Candidate
from splice.types import Head, IdArray, Lineage, Rendering, TokenRun, Turn
from store import codec
from store.errors import StoreCorrupt
from store.keys import NOTHING, quote, unquote
from store.readable import Link, RootFact, parse_link, session_view, unhash_field
from store.views import (
    EarlierTurn,
    FindQuery,
    Forest,
    Found,
    Generate,
    Join,
    Mismatch,
    Replay,
    Reward,
    SessionKey,
    SessionView,
    Verdict,
)

Upgrade = Callable[[bytes], bytes]


@dataclass(frozen=True, slots=True)
class StoredTurn:
    """A turn's stored parts."""

    turn: str  # quoted id
    link: Link
    record: bytes
    delta: bytes
    generation: bytes
    log_probs: bytes | None
    text: bytes
    settings: bytes | None
    root: RootFact
    rendering: bytes | None

    def decode(self, upgrade: Upgrade) -> Turn:
        """The turn. Raises SchemaTooNew, StoreCorrupt."""
        link, root = self.link, self.root
        record = codec.decode_record(upgrade(self.record))
        messages, reply = codec.unpack_text(self.text)
        facts: Mapping[str, Any] = json.loads(record.facts) if record.facts else {}
        settings = codec.unpack_shared(self.settings)
        return Turn(
            turn_id=unquote(self.turn),
            parent_id=unquote(link.parent),
            root_id=unquote(link.root),
            rendering_signature=root.signature,
            clock=root.clock,
            origin=codec.origin_of(record),
            prompt_length=link.prompt_length,
            delta=TokenRun(codec.unpack_ids([self.delta], [link.delta_length])),
            generation=TokenRun(
                codec.unpack_ids([self.generation], [link.generation_length]), codec.unpack_log_probs(self.log_probs)
            ),
            messages=messages,
            reply=reply,
            chain_hash=record.chain,
            request_hash=record.request,
            finish=codec.finish_of(record),
            finish_reason=record.told,
            created_at=record.created,
            model_call_ids=record.call_ids,
            weight_versions=codec.spans_of(record),
            log_prob_kind=settings["log_prob_kind"],
            sampling_params=settings["sampling_params"],
            rendering=_rendering(self.rendering) if link.parent == NOTHING else Rendering(),
            model=settings["model"],
            engine=settings["engine"],
            engine_facts=facts.get("engine", {}),
            client_facts=facts.get("client", {}),
        )


def _rendering(data: bytes | None) -> Rendering:
    value = codec.unpack_shared(data)
    return Rendering(tuple(value["tools"]), value["kwargs"])


def stored_turn(turn: str, reply: Sequence[Any]) -> StoredTurn:
    """From the reply of `turn.lua`, which has found it."""
    _, line, record, delta, generation, log_probs, text, settings, root, rendering = reply
    return StoredTurn(
        turn,
        parse_link(line, turn),
        record or b"",
        delta or b"",
        generation or b"",
        log_probs,
        text or b"",
        settings,
        RootFact.parse(root),
        rendering,
    )


def pairs(flat: Sequence[bytes]) -> dict[bytes, bytes]:
    """A script's name, value, name, value ... as a mapping."""
    return dict(zip(flat[::2], flat[1::2], strict=True))


def forest(key: SessionKey, hashes: Sequence[Mapping[bytes, bytes]], upgrade: Upgrade) -> Forest:
    """From the whole of a tree's hashes, in the order of `keys.Tree.all` without index, requests and attempts."""
    session, links, turns, tokens, log_probs, text, shared, rewards, undelivered = hashes
    lines = {turn: parse_link(line, turn.decode()) for turn, line in links.items()}
    roots: dict[str, RootFact] = {}
    decoded = []
    for turn, link in sorted(lines.items(), key=lambda item: item[1].order):
        if link.root not in roots:
            roots[link.root] = RootFact.parse(session.get(f"root:{link.root}".encode()))
        root = roots[link.root]
        stored = StoredTurn(
            turn.decode(),
            link,
            turns.get(turn, b""),
            tokens.get(link.delta.encode(), b""),
            tokens.get(turn, b""),
            log_probs.get(turn),
            text.get(turn, b""),
            shared.get(link.settings.encode()),
            root,
            shared.get(root.rendering.encode()),
        )
        decoded.append(stored.decode(upgrade))
    delivered = {turn.turn_id: delivery(undelivered.get(quote(turn.turn_id).encode())) for turn in decoded}
    return Forest(session_view(key, session), tuple(decoded), _rewards(rewards), delivered)


def delivery(entry: bytes | None) -> bool | None:
    """What an entry of `delivered` means; a worker's name: nobody knows yet, or for ever."""
    return True if entry is None else False if entry == b"0" else None


def _rewards(entries: Mapping[bytes, bytes]) -> dict[str, Reward]:
    read = {unquote(turn.decode()): json.loads(entry) for turn, entry in entries.items()}
    return {turn: Reward(entry["reward"], entry["source"]) for turn, entry in read.items()}


@dataclass(frozen=True, slots=True)
class FoundLineage:
    """A lineage, and the chain hash under which the caller may cache it (empty: not known)."""

    lineage: Lineage
    turn: str  # quoted id
    base: str  # the cached turn it starts after, "" for none
    new: IdArray  # what follows the base


def found_lineage(reply: Sequence[Any], held: Mapping[str, IdArray], upgrade: Upgrade) -> FoundLineage | None:
    """The last part of `find.lua`'s reply; None when nothing was expected. Raises StoreCorrupt, SchemaTooNew."""
    if not reply:
        return None
    turn = reply[0].decode()
    if not reply[1]:
        raise StoreCorrupt(f"links {turn}", "an ancestor's line is gone")
    _, line, record, root, base, lengths, *chunks = reply
    if None in chunks:
        raise StoreCorrupt(f"tokens {turn}", "an ancestor's ids are gone")
    link, base = parse_link(line, turn), base.decode()
    new = codec.unpack_ids(chunks, [int(n) for n in lengths.split()])
    tokens = np.concatenate([held[base], new]) if base and len(new) else held[base] if base else new
    if len(tokens) != link.lineage_length:
        raise StoreCorrupt(f"tokens {turn}", f"{len(tokens)} ids where its line says {link.lineage_length}")
    tokens.setflags(write=False)
    head = _head(turn, link, codec.decode_record(upgrade(record)), RootFact.parse(root))
    return FoundLineage(Lineage(head, tokens), turn, base, new)


def _head(turn: str, link: Link, record: codec.TurnRecord, root: RootFact) -> Head:
    return Head(
        turn_id=unquote(turn),
        root_id=unquote(link.root),
        clock=root.clock,
        finish=codec.finish_of(record),
        generation_length=link.generation_length,
        model_call_ids=record.call_ids,
    )


def candidates(reply: Sequence[Any]) -> tuple[Candidate, ...]:
    """The second part of `find.lua`'s reply."""
    return tuple(_candidate(*hit) for hit in reply)


def _candidate(depth: int, turn: bytes, line: bytes, root: bytes) -> Candidate:
    link = parse_link(line, turn.decode())
    return Candidate(
        turn_id=unquote(turn.decode()),
        root_id=unquote(link.root),
        rendering_signature=RootFact.parse(root).signature,
        depth=depth,
        extended=link.extended,
        generation_digest=link.generation_digest,
        order=link.order,
    )


def found(query: FindQuery, reply: Sequence[Any], lineage: Lineage | None) -> Found:
    """Everything that `find.lua` answers."""
    fixed, hits, earlier, idempotent, unknown, _, words = reply
    chosen = candidates(hits)
    verdict, suspects = _verdict(*(word.decode() for word in words))
    return Found(
        session=_session(query.key, fixed, chosen),
        candidates=chosen,
        lineage=lineage,
        equal_requests=tuple(
            EarlierTurn(unquote(turn.decode()), extended == b"1")
            for turn, extended in zip(earlier[::2], earlier[1::2], strict=True)
        ),
        idempotent=_answer(idempotent),
        unknown_hints=tuple(unquote(hint.decode()) for hint in unknown),
        verdict=verdict,
        suspects=suspects,
    )


def _verdict(kind: str, *facts: str) -> tuple[Verdict, frozenset[str]]:
    """The verdict, and the workers that it takes to be alive."""
    match kind, facts:
        case "replay", (turn,):
            return Replay(unquote(turn)), frozenset()
        case "join", (attempt, worker):
            return Join(unquote(attempt), worker), frozenset({worker})
        case "mismatch", _:
            return Mismatch(), frozenset(facts)
        case "generate", _:
            return Generate(), frozenset(facts)
    raise StoreCorrupt("find", f"the script answered {kind!r}")


def _session(key: SessionKey, fixed: Sequence[bytes], hits: Sequence[Candidate]) -> SessionView | None:
    """Roots are those of the candidates only: a session may have thousands."""
    if not fixed:
        return None
    view = session_view(key, pairs(fixed))
    roots = {hit.root_id: hit.rendering_signature for hit in hits}
    return replace(view, roots=roots)


def _answer(value: bytes | None) -> tuple[str, bytes] | None:
    if not value:
        return None
    turn, request = value.decode().split(" ")[:2]
    return unquote(turn), unhash_field(request)
