"""Training rows the slow way: lists, one id at a time, and a search through all earlier rows for each turn."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from splice.types import Message, Turn


@dataclass
class Row:
    """One lineage."""

    sample_id: str
    lineage: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)  # one a token, "" for none
    messages: list[Message] = field(default_factory=list)


def slow_rows(turns: Sequence[Turn]) -> list[Row]:
    """One row a leaf, leaves in commit order; a turn trains in the first row that contains it."""
    rows: list[Row] = []
    for leaf in turns:
        if not any(other.parent_id == leaf.turn_id for other in turns):
            rows.append(_row(leaf, turns, rows))
    return rows


def _row(leaf: Turn, turns: Sequence[Turn], earlier: Sequence[Row]) -> Row:
    row = Row(leaf.turn_id)
    for turn in _lineage(leaf, turns):
        trains = not any(turn.turn_id in other.lineage for other in earlier)
        row.lineage.append(turn.turn_id)
        row.messages += [*turn.messages, turn.reply]
        for token_id in turn.delta.ids.tolist():
            _append(row, token_id, 0, 0.0, "")
        for at, token_id in enumerate(turn.generation.ids.tolist()):
            log_prob = float(turn.generation.log_probs[at]) if turn.generation.log_probs is not None else 0.0
            version = next((s.version for s in turn.weight_versions if s.start <= at < s.end), "")
            _append(row, token_id, int(trains), log_prob if trains else 0.0, version)
    return row


def _append(row: Row, token_id: int, mask: int, log_prob: float, version: str) -> None:
    row.token_ids.append(token_id)
    row.loss_mask.append(mask)
    row.log_probs.append(log_prob)
    row.versions.append(version)


def _lineage(leaf: Turn, turns: Sequence[Turn]) -> list[Turn]:
    if not leaf.parent_id:
        return [leaf]
    parent = next(turn for turn in turns if turn.turn_id == leaf.parent_id)
    return [*_lineage(parent, turns), leaf]
