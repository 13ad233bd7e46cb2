"""Finding the parent: which stored turn does this request go on from?

The request carries its whole message list. Its chain hash at every assistant message is looked up; the
parent is the deepest hit whose root has the request's rendering signature. That one rule gives retries
(same parent), parallel branches (siblings), edited and truncated history (a shallower parent), side calls,
compaction and sub-agents (new root) without a mode for each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from splice.types import FreshReason

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence


class Candidate(msgspec.Struct, frozen=True):
    """A stored turn whose conversation equals the request's first messages, up to an assistant message.

    `depth` counts the request's assistant messages up to and including the equal one (1-based).
    `generation_digest` is `identity.ids_digest` of its sampled ids. `order` grows with commit time.
    """

    turn_id: str
    root_id: str
    rendering_signature: str
    depth: int
    extended: bool
    generation_digest: bytes
    order: int


class Echo(msgspec.Struct, frozen=True):
    """What the client echoed of one assistant message, strongest first when several agree.

    `generation_digest` from echoed token ids; `turn_id` from a call id, response id or previous_response_id.
    """

    depth: int
    generation_digest: bytes = b""
    turn_id: str = ""


class Parent(msgspec.Struct, frozen=True, tag=True):
    """Splice onto this turn. `edited`: it is not the request's last assistant message."""

    candidate: Candidate
    edited: bool
    ambiguous: bool


class Root(msgspec.Struct, frozen=True, tag=True):
    """Render whole: nothing stored can be extended."""

    reason: FreshReason


class RenderingChanged(msgspec.Struct, frozen=True, tag=True):
    """A deeper turn equals the request's messages but was rendered under another signature."""

    candidate: Candidate


Located = Parent | Root | RenderingChanged


def locate(
    candidates: Sequence[Candidate],
    echoes: Sequence[Echo],
    *,
    rendering_signature: str,
    depth: int,
    session_has_turns: bool,
    unknown: Collection[str] = (),
) -> Located:
    """Choose the parent among equal-looking turns.

    candidates: every hit of the request's chain hashes, in any order. depth: how many assistant messages
    the request has. unknown: echoed turn ids that the store does not have. One deeper than every hit is a lost
    write: what it said cannot be spliced onto, and going on from before it would hide the loss.
    """
    matching = [c for c in candidates if c.rendering_signature == rendering_signature]
    deepest = max((c.depth for c in matching), default=0)
    others = [c for c in candidates if c.depth > deepest]
    if others:
        return RenderingChanged(max(others, key=lambda c: (c.depth, c.order)))
    if any(echo.turn_id in unknown and echo.depth > deepest for echo in echoes):
        return Root("turn_lost")
    if not matching:
        return Root(_root_reason(depth, session_has_turns=session_has_turns))
    chosen, ambiguous = _choose([c for c in matching if c.depth == deepest], echoes)
    return Parent(chosen, edited=deepest < depth, ambiguous=ambiguous)


def _root_reason(depth: int, *, session_has_turns: bool) -> FreshReason:
    if depth == 0:
        return "first_turn"
    return "history_diverged" if session_has_turns else "unknown_history"


def _choose(equal: list[Candidate], echoes: Sequence[Echo]) -> tuple[Candidate, bool]:
    """The tie rule, strongest evidence first; the last two steps are guesses and say so."""
    if len(equal) == 1:
        return equal[0], False
    at_depth = [e for e in echoes if e.depth == equal[0].depth]
    for digest in (e.generation_digest for e in at_depth if e.generation_digest):
        narrowed = [c for c in equal if c.generation_digest == digest]
        equal = narrowed or equal
        if len(equal) == 1:
            return equal[0], False
    for turn_id in (e.turn_id for e in at_depth if e.turn_id):
        for candidate in equal:
            if candidate.turn_id == turn_id:
                return candidate, False
    untouched = [c for c in equal if not c.extended]
    return max(untouched or equal, key=lambda c: c.order), True
