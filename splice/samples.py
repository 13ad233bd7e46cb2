"""From a forest of turns to training rows, in one linear pass: which turns count, and how they are laid out.

A sample is one root-to-leaf lineage. A turn shared by several lineages trains in the first of them, in
commit order of the leaves; elsewhere its ids are context (mask 0, log prob 0.0), so that a prefix never
trains twice.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from splice.types import IdArray, Message, Turn, WeightSpan


@dataclass(frozen=True, slots=True)
class SampleTurn:
    """Where one turn lies in a sample's arrays: prompt delta [prompt_start, generation_start), then sampled ids."""

    turn: Turn
    prompt_start: int
    generation_start: int
    generation_end: int
    trains: bool


@dataclass(frozen=True, slots=True)
class Sample:
    """One lineage as a trainer wants it; all arrays have the same length.

    loss_mask is 1 on sampled ids that this sample trains; log_probs is 0.0 wherever the mask is 0.
    weight_versions are positions in `token_ids`.
    """

    sample_id: str
    token_ids: IdArray
    loss_mask: npt.NDArray[np.uint8]
    log_probs: npt.NDArray[np.float64]
    weight_versions: tuple[WeightSpan, ...]
    turns: tuple[SampleTurn, ...]
    messages: tuple[Message, ...]


def received(turns: Sequence[Turn], delivered: Mapping[str, bool | None]) -> list[Turn]:
    """The turns that a client acted on, or may have: what samples are made of.

    delivered: by turn id; True where it is missing. Who goes on from a turn has received it. One that its client was
    seen not to receive is left out; so is one of which nobody knows, where the client has another answer to the same
    request.
    """
    parents = {turn.parent_id for turn in turns}
    states = {t.turn_id: t.turn_id in parents or delivered.get(t.turn_id, True) for t in turns}
    answered = {t.request_hash for t in turns if states[t.turn_id]}
    return [t for t in turns if states[t.turn_id] or (states[t.turn_id] is None and t.request_hash not in answered)]


def assemble(turns: Sequence[Turn]) -> Iterator[Sample]:
    """One sample a leaf, in commit order. turns: a session's whole forest, in commit order."""
    by_id = {turn.turn_id: turn for turn in turns}
    parents = {turn.parent_id for turn in turns}
    trained: set[str] = set()
    for leaf in turns:
        if leaf.turn_id in parents:
            continue
        path = _path(leaf, by_id)
        yield _sample(path, trained)
        trained.update(turn.turn_id for turn in path)


def _path(leaf: Turn, by_id: dict[str, Turn]) -> list[Turn]:
    path = [leaf]
    while path[-1].parent_id:
        path.append(by_id[path[-1].parent_id])
    return path[::-1]


def _sample(path: Sequence[Turn], trained: set[str]) -> Sample:
    length = sum(len(t.delta) + len(t.generation) for t in path)
    ids = np.empty(length, dtype=np.uint32)
    mask = np.zeros(length, dtype=np.uint8)
    log_probs = np.zeros(length, dtype=np.float64)
    placed: list[SampleTurn] = []
    spans: list[WeightSpan] = []
    position = 0
    for turn in path:
        start, end = position + len(turn.delta), position + len(turn.delta) + len(turn.generation)
        trains = turn.turn_id not in trained
        ids[position:start] = turn.delta.ids
        ids[start:end] = turn.generation.ids
        if trains and turn.generation.log_probs is not None:
            mask[start:end] = 1
            log_probs[start:end] = turn.generation.log_probs
        spans += [WeightSpan(s.version, start + s.start, start + s.end) for s in turn.weight_versions]
        placed.append(SampleTurn(turn, position, start, end, trains))
        position = end
    messages = tuple(m for turn in path for m in (*turn.messages, turn.reply))
    return Sample(path[-1].turn_id, ids, mask, log_probs, tuple(spans), tuple(placed), messages)
