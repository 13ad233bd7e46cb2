"""The parent by elimination: every rule of the tie order is tried on every candidate, strongest rule first."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

from splice.locate import Candidate, Echo, Located, Parent, RenderingChanged, Root

Rule = Callable[[Candidate], bool]


def slow_locate(
    candidates: Sequence[Candidate],
    echoes: Sequence[Echo],
    signature: str,
    depth: int,
    *,
    session_has_turns: bool,
    unknown: Collection[str] = (),
) -> Located:
    """See `splice.locate.locate`."""
    lost = any(e.depth > depth and e.turn_id in unknown for e in echoes)
    for level in range(depth, 0, -1):
        equal = [c for c in candidates if c.depth == level]
        ours = [c for c in equal if c.rendering_signature == signature]
        if ours and lost:
            return Root("turn_lost")
        if ours:
            turn, ambiguous = _narrow(ours, [e for e in echoes if e.depth == level])
            return Parent(turn, edited=level < depth, ambiguous=ambiguous)
        if equal:
            return RenderingChanged(_latest(equal))
        if any(e.depth == level and e.turn_id in unknown for e in echoes):
            lost = True
    if lost:
        return Root("turn_lost")
    if depth == 0:
        return Root("first_turn")
    return Root("history_diverged" if session_has_turns else "unknown_history")


def _narrow(left: list[Candidate], echoes: Sequence[Echo]) -> tuple[Candidate, bool]:
    evidence: list[Rule] = [_has_digest(e.generation_digest) for e in echoes if e.generation_digest]
    evidence += [_is_turn(e.turn_id) for e in echoes if e.turn_id]
    for rule in evidence:
        left = [c for c in left if rule(c)] or left
    if len(left) == 1:
        return left[0], False
    return _latest([c for c in left if not c.extended] or left), True


def _has_digest(digest: bytes) -> Rule:
    return lambda candidate: candidate.generation_digest == digest


def _is_turn(turn_id: str) -> Rule:
    return lambda candidate: candidate.turn_id == turn_id


def _latest(candidates: Sequence[Candidate]) -> Candidate:
    return max(candidates, key=lambda c: c.order)
