"""The plan of a turn: what the engine is to be sent, and how that came about.

`plan_turn` is the whole promise in one place: a prompt is either the parent's tokens plus the ids of what is
new, or it was rendered whole and says why. There is no third way.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import numpy as np

from splice.boundary import Prompt, Refusal, Splicer
from splice.calls import with_prompt_ids
from splice.identity import Conversation
from splice.locate import Parent, Root
from splice.types import IdArray, Lineage, Message, Origin, Rendering


class Window(msgspec.Struct, frozen=True):
    """An engine's limits in tokens: prompt and generation together, and the prompt alone."""

    context_length: int
    max_prompt_length: int


@dataclass(frozen=True, slots=True)
class Plan:
    """A prompt and its provenance.

    prompt: the parent's tokens followed by `delta`. new_messages: the request's messages that `delta` renders.
    clock: the root's template clock. notes: what the boundary saw that a reader of the turn should know.
    """

    origin: Origin
    prompt: IdArray
    delta: IdArray
    new_messages: tuple[Message, ...]
    clock: float
    parent_id: str = ""
    root_id: str = ""
    refusal: str = ""  # why the template could not be spliced, where that is the reason
    notes: tuple[str, ...] = ()


def plan_turn(
    located: Parent | Root,
    lineage: Lineage | None,
    conversation: Conversation,
    rendering: Rendering,
    *,
    splicer: Splicer,
    clock: float,
) -> Plan:
    """Splice onto the located parent, or render whole with the reason.

    lineage: the parent's tokens; None exactly on a root. clock: now, used by a new root only.
    Raises TemplateRejected when the template refuses the messages.
    """
    if isinstance(located, Root) or lineage is None:
        reason = located.reason if isinstance(located, Root) else "turn_lost"
        return _fresh(Origin("fresh", reason), conversation, rendering, splicer, clock)
    messages = conversation.messages
    split = parent_index(messages, located.candidate.depth) + 1
    written = {split - 1: lineage.head.model_call_ids}
    reply, *new = with_prompt_ids(messages, written, start=split - 1, answers=conversation.answers)
    prompt = splicer.after(lineage, reply, new, rendering, earlier=messages[: split - 1])
    if isinstance(prompt, Refusal):
        plan = _fresh(Origin("fresh", "template_unsupported"), conversation, rendering, splicer, clock)
        return replace(plan, refusal=prompt.reason)
    return Plan(
        Origin("spliced", "history_edited" if located.edited else "", located.ambiguous),
        np.concatenate((lineage.tokens, prompt.ids)),
        prompt.ids,
        messages[split:],
        lineage.head.clock,
        parent_id=located.candidate.turn_id,
        root_id=located.candidate.root_id,
        notes=prompt.notes,
    )


def parent_index(messages: Sequence[Message], depth: int) -> int:
    """Index of the `depth`-th assistant message (1-based)."""
    indices = [i for i, m in enumerate(messages) if m.role == "assistant"]
    return indices[depth - 1]


def room(prompt_length: int, wanted: int | None, window: Window) -> int | None:
    """How many tokens may be generated, at most `wanted`; None when the prompt does not fit at all.

    SGLang answers 400 when prompt and `max_new_tokens` exceed the window, so the wish is clamped here.
    """
    left = window.context_length - prompt_length
    if prompt_length > window.max_prompt_length or left < 1:
        return None
    return left if wanted is None else min(wanted, left)


def _fresh(origin: Origin, conversation: Conversation, rendering: Rendering, splicer: Splicer, clock: float) -> Plan:
    messages = with_prompt_ids(conversation.messages, {}, answers=conversation.answers)
    prompt: Prompt = splicer.whole(messages, rendering, clock)
    return Plan(origin, prompt.ids, prompt.ids, conversation.messages, clock)
