"""A worker's bounded memory of lineage tokens. Turns never change, so an entry is right for as long as its turn exists.

Whether it still exists is asked in the round trip that `find` makes anyway. A conversation's lineages share one
growing buffer, a *strand*: the turn at its end is extended in place, so a turn costs what it adds, and a branch copies
once.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from splice.types import IdArray

_ENTRY_BYTES = 300  # bookkeeping of one turn, about
_SPARE = 4  # a buffer that must grow gets a quarter more than it needs

TurnKey = tuple[str, str]  # the tree's tag, the quoted turn id


class _Strand:
    """A buffer of ids whose first `length` are in use."""

    __slots__ = ("buffer", "length", "turns")

    def __init__(self, ids: IdArray) -> None:
        self.buffer = ids
        self.length = len(ids)
        self.turns: dict[TurnKey, tuple[int, bytes]] = {}

    @property
    def cost(self) -> int:
        return self.buffer.nbytes + _ENTRY_BYTES * len(self.turns)

    def view(self, length: int) -> IdArray:
        """The first ids, read-only; what is appended later lies behind them."""
        ids = self.buffer[:length]
        ids.setflags(write=False)
        return ids

    def append(self, runs: Sequence[IdArray]) -> None:
        needed = self.length + sum(len(run) for run in runs)
        if needed > len(self.buffer) or not self.buffer.flags.writeable:
            grown = np.empty(needed + needed // _SPARE, np.uint32)
            grown[: self.length] = self.buffer[: self.length]
            self.buffer = grown
        for run in runs:
            self.buffer[self.length : self.length + len(run)] = run
            self.length += len(run)


class LineageCache:
    """Lineage tokens by turn, least recently used strands first out. Belongs to one event loop."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._cost = 0
        self._strands: OrderedDict[int, _Strand] = OrderedDict()
        self._of_turn: dict[TurnKey, _Strand] = {}
        self._of_chain: dict[tuple[str, bytes], list[TurnKey]] = {}

    def __len__(self) -> int:
        return len(self._of_turn)

    @property
    def cost(self) -> int:
        """Bytes held, about."""
        return self._cost

    def held(self, tree: str, chain: Sequence[bytes], most: int) -> dict[str, IdArray]:
        """The deepest cached turns of a conversation, and their tokens; `chain` is shallowest first."""
        found: dict[str, IdArray] = {}
        for digest in reversed(chain):
            for key in self._of_chain.get((tree, digest), ()):
                if len(found) == most:
                    return found
                strand = self._of_turn[key]
                self._strands.move_to_end(id(strand))
                found[key[1]] = strand.view(strand.turns[key][0])
        return found

    def get(self, tree: str, turn: str) -> IdArray | None:
        """A turn's lineage, itself included."""
        strand = self._of_turn.get((tree, turn))
        if strand is None:
            return None
        self._strands.move_to_end(id(strand))
        return strand.view(strand.turns[tree, turn][0])

    def put(self, tree: str, turn: str, chain_hash: bytes, tokens: IdArray) -> None:
        """Keep a whole lineage."""
        if (tree, turn) not in self._of_turn:
            self._add(_Strand(tokens), (tree, turn), chain_hash)

    def extend(self, tree: str, parent: str, turn: str, chain_hash: bytes, runs: Sequence[IdArray]) -> IdArray | None:
        """Keep the lineage that goes on from a cached turn by `runs`; None when that turn is not cached."""
        strand = self._of_turn.get((tree, parent))
        if strand is None:
            return None
        known = self.get(tree, turn)
        if known is not None:
            return known
        length = strand.turns[tree, parent][0]
        if strand.length == length:
            self._cost -= strand.cost
            strand.append(runs)
            self._cost += strand.cost
        else:
            strand = _Strand(np.concatenate([strand.view(length), *runs]))
        tokens = strand.view(strand.length)
        self._add(strand, (tree, turn), chain_hash)
        return tokens

    def _add(self, strand: _Strand, key: TurnKey, chain_hash: bytes) -> None:
        if id(strand) in self._strands:
            self._cost -= strand.cost
        strand.turns[key] = (strand.length, chain_hash)
        self._cost += strand.cost
        self._strands[id(strand)] = strand
        self._strands.move_to_end(id(strand))
        self._of_turn[key] = strand
        self._of_chain.setdefault((key[0], chain_hash), []).append(key)
        while self._cost > self._max_bytes and self._strands:
            self._drop(next(iter(self._strands.values())))

    def _drop(self, strand: _Strand) -> None:
        del self._strands[id(strand)]
        self._cost -= strand.cost
        for key, (_, chain_hash) in strand.turns.items():
            del self._of_turn[key]
            same = self._of_chain[key[0], chain_hash]
            same.remove(key)
            if not same:
                del self._of_chain[key[0], chain_hash]
