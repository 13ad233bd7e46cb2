"""Proof at start-up: fragments beside the template's full rendering, and texts to compare with an engine's tokenizer.

Short conversations are rendered whole and cut behind the first token that ends a turn, which knows nothing of what
probing found. What follows must be the fragment, id for id.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from splice.boundary.dialogue import Rejected, Stage, sentinel_span, sentinel_turn
from splice.boundary.profile import APPENDED, CALLS_FOR, SAID, SYSTEM, USER, Profile
from splice.boundary.report import base_setting
from splice.types import IdArray, Message

_HISTORIES = {"a first turn": [USER], "a system message": [SYSTEM, USER], "a long history": [USER, SAID, USER]}
_SHOWN = 4

# The ids of a conversation up to a reply's end, the reply, what is new, what was before it: to the fragment's ids,
# None where it is refused.
Fragment = Callable[[IdArray, Message, Sequence[Message], Sequence[Message]], IdArray | None]


@dataclass(frozen=True, slots=True)
class Proof:
    """One conversation: its text, the ids of the text, and those of lineage and fragment."""

    case: str
    text: str
    whole: IdArray
    spliced: IdArray


def proofs(stage: Stage, profile: Profile, fragment: Fragment) -> Iterator[Proof]:
    """A user's message and a tool's result after several histories, as far as the template takes them."""
    for kind in [kind for kind in ("user", "tool") if kind not in profile.refusals]:
        turn = sentinel_turn(CALLS_FOR.get(kind, ()), profile.call_anchor)
        for name, history in _HISTORIES.items():
            found = _proof(stage, profile, fragment, [*history, turn], APPENDED[kind])
            if found is not None:
                yield Proof(f"{kind} after {name}", *found)


def _proof(
    stage: Stage, profile: Profile, fragment: Fragment, past: Sequence[Message], new: Sequence[Message]
) -> tuple[str, IdArray, IdArray] | None:
    text = stage.text([*past, *new], base_setting(profile))
    span = None if isinstance(text, Rejected) else sentinel_span(text)
    if isinstance(text, Rejected) or span is None:
        return None
    stops = (m.end() for m in stage.lexicon.tokens(text) if m.start() >= span[1] and _ends(stage, profile, m[0]))
    cut = next(stops, None)
    if cut is None or cut > text.find(new[0].content, span[1]):
        return None
    before = stage.renderer.encode(text[:cut])
    added = fragment(before, past[-1], new, past[:-1])
    if added is None:
        return None
    return text, stage.renderer.encode(text), np.concatenate((before, added))


def _ends(stage: Stage, profile: Profile, token: str) -> bool:
    return stage.lexicon.ids[token] in stage.renderer.eos_ids or token in profile.enders or token in profile.openers


def difference(ours: IdArray, theirs: IdArray, decode: Callable[[IdArray], str]) -> str:
    """Where two encodings of the same text part, in words; "" where they do not."""
    if np.array_equal(ours, theirs):
        return ""
    shared = min(len(ours), len(theirs))
    apart = np.flatnonzero(ours[:shared] != theirs[:shared])
    at = int(apart[0]) if len(apart) else shared
    here, there = ours[at : at + _SHOWN], theirs[at : at + _SHOWN]
    return f"token {at}: {here.tolist()} ({decode(here)!r}) here, {there.tolist()} ({decode(there)!r}) there"
