"""The verdict on a run, from its witnesses alone. Imports nothing of `splice` or `store`, on purpose.

A rollout is told by the tag in its user text, found in the prompts that the engine recorded: a prompt
rendered anew cannot hide behind a new session. Every answered turn after a rollout's first must have sent the
engine the prompt and the sampled ids of the rollout's previous answered turn, and then something new.

break    a later turn's prompt does not extend the previous answered turn, or was served fresh, or belongs
         to another rollout
lost     a turn that a player was answered with, and that the engine never sampled or the product does not
         hold as the engine saw it
doubled  a turn that the product holds and no player was answered with, or one that answered two turns
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from api.demo.evidence import AnsweredTurn, Generation, Json, PlayedRollout, StoredTurn

Ids = tuple[int, ...]
Rerender = Callable[[Sequence[Json], Sequence[Json]], Ids]


class Verdict(msgspec.Struct, frozen=True, kw_only=True):
    """What was counted. `findings` says each fault in words, rollout and turn named."""

    rollouts: int
    turns: int  # answered
    unanswered: int  # wanted, but the player gave up
    spliced: int
    fresh: dict[str, int]
    judged: int  # turns whose extension could be judged: all but first ones, unless lost
    breaks: int
    lost: int
    doubled: int
    replayed: int
    retries: int
    broken_by_rerender: int
    generations: int  # sampled by the engine
    abandoned: int  # of these, those whose reply never reached a player
    findings: tuple[str, ...] = ()


@dataclass(slots=True)
class _Tally:
    """Counts as they grow, each fault with its words."""

    counts: Counter[str] = field(default_factory=Counter)
    findings: list[str] = field(default_factory=list)

    def fault(self, kind: str, where: str, words: str) -> None:
        self.counts[kind] += 1
        self.findings.append(f"{kind}: {where}: {words}")


@dataclass(frozen=True, slots=True)
class _Witnessed:
    """One answered turn beside the engine's record of it."""

    where: str
    turn: AnsweredTurn
    generation: Generation | None
    own: bool  # the recorded prompt holds this rollout's tag and no other's


class Judge:
    """Judges one run.

    `decode` spells ids, control tokens included; `rerender` is what a server without memory would have
    sent for a request: the whole conversation through the template, then the tokenizer.
    """

    def __init__(self, record: Sequence[Generation], *, decode: Callable[[Ids], str], rerender: Rerender) -> None:
        self._record = record
        self._decode = decode
        self._rerender = rerender
        self._by_nonce: dict[str, list[Generation]] = {}
        self._by_ids: dict[tuple[Ids, int], list[Generation]] = {}
        for generation in record:
            if generation.outcome != "answered":
                continue  # a fragment: whoever was answered with it was answered with no turn
            if generation.nonce:
                self._by_nonce.setdefault(generation.nonce, []).append(generation)
            self._by_ids.setdefault((generation.output_ids, len(generation.input_ids)), []).append(generation)

    def verdict(
        self,
        rollouts: Sequence[PlayedRollout],
        stored: Mapping[str, Sequence[StoredTurn]],
        advance: Callable[[], None] = lambda: None,
    ) -> Verdict:
        """Judge every rollout against the record and `stored` (by session id). `advance` is called per turn."""
        tally = _Tally()
        tags = tuple(rollout.tag for rollout in rollouts)
        witnessed: list[_Witnessed] = []
        for rollout in rollouts:
            turns = [self._witness(rollout, index, tags) for index in range(len(rollout.turns))]
            _judge_extensions(turns, tally)
            self._judge_rerender(rollout, turns, tally, advance)
            witnessed += turns
        _judge_stored(witnessed, stored, tally)
        heard = _judge_heard(witnessed, tally)
        finished = [one.n for one in self._record if one.outcome == "answered"]
        answered = [one.turn for one in witnessed]
        return Verdict(
            rollouts=len(rollouts),
            turns=len(answered),
            unanswered=sum(rollout.wanted - len(rollout.turns) for rollout in rollouts),
            spliced=sum(turn.splice.startswith("spliced") for turn in answered),
            fresh=dict(Counter(_fresh_reason(turn) for turn in answered if not turn.splice.startswith("spliced"))),
            judged=tally.counts["judged"],
            breaks=tally.counts["break"],
            lost=tally.counts["lost"],
            doubled=tally.counts["doubled"],
            replayed=sum(turn.replayed for turn in answered),
            retries=sum(turn.attempts - 1 for turn in answered),
            broken_by_rerender=tally.counts["rerender"],
            generations=len(finished),
            abandoned=sum(n not in heard for n in finished),
            findings=(*tally.findings, *_given_up(rollouts)),
        )

    def _witness(self, rollout: PlayedRollout, index: int, tags: Sequence[str]) -> _Witnessed:
        """Find the generation that answered a turn. Ids alone may coincide between rollouts ("Yes."): tags decide."""
        turn = rollout.turns[index]
        found = self._candidates(turn)
        if turn.generation_ids is not None:
            found = [one for one in found if one.output_ids == turn.generation_ids]
        own = [one for one in found if self._tags_in(one, tags) == (rollout.tag,)]
        generation = next(reversed(own or found), None)
        return _Witnessed(f"rollout {rollout.tag}, turn {index + 1}", turn, generation, bool(own))

    def _candidates(self, turn: AnsweredTurn) -> list[Generation]:
        if turn.nonces:
            return [one for nonce in turn.nonces for one in self._by_nonce.get(nonce, ())]
        if turn.generation_ids is not None and turn.prompt_length is not None:
            return self._by_ids.get((turn.generation_ids, turn.prompt_length), [])
        return []

    def _tags_in(self, generation: Generation, tags: Sequence[str]) -> tuple[str, ...]:
        prompt = self._decode(generation.input_ids)
        return tuple(tag for tag in tags if tag in prompt)

    def _judge_rerender(
        self, rollout: PlayedRollout, turns: Sequence[_Witnessed], tally: _Tally, advance: Callable[[], None]
    ) -> None:
        """Count the turns that rendering whole would have broken, had it served the turn before as well."""
        previous: Ids | None = None
        for index, turn in enumerate(rollout.turns):
            rendered = self._rerender(turn.messages, rollout.tools)
            before = turns[index - 1].generation if index else None
            if before is not None and previous is not None:
                tally.counts["rerender"] += not _extends(rendered, previous + before.output_ids)
            previous = rendered
            advance()


def _judge_extensions(turns: Sequence[_Witnessed], tally: _Tally) -> None:
    for index, now in enumerate(turns):
        before = turns[index - 1].generation if index else None
        if now.generation is None:
            tally.fault("lost", now.where, "the engine's record does not hold what the player was answered")
        elif not now.own:
            tally.fault("break", now.where, "the engine was sent another rollout's prompt")
        if now.generation is not None and before is not None:
            tally.counts["judged"] += 1
            _judge_extension(now, before, now.generation, tally)


def _judge_extension(witnessed: _Witnessed, before: Generation, now: Generation, tally: _Tally) -> None:
    prefix = before.input_ids + before.output_ids
    if not _extends(now.input_ids, prefix):
        at = _first_difference(now.input_ids, prefix)
        words = f"token {at} of {len(prefix)} differs from the previous answered turn's"
        tally.fault("break", witnessed.where, words)
    elif not witnessed.turn.splice.startswith("spliced"):
        tally.fault("break", witnessed.where, f"served {witnessed.turn.splice or 'without saying how'}")


def _judge_stored(witnessed: Sequence[_Witnessed], stored: Mapping[str, Sequence[StoredTurn]], tally: _Tally) -> None:
    """The product's own turns: each answered one there, once, as the engine saw it; no others."""
    shelves = {session: {turn.turn_id: turn for turn in turns} for session, turns in stored.items()}
    unheard = Counter((session, turn.turn_id) for session, turns in stored.items() for turn in turns)
    for one in witnessed:
        turn = one.turn
        shelf = shelves.get(turn.session_id, {})
        held = shelf.get(turn.turn_id)
        unheard[turn.session_id, turn.turn_id] -= 1
        if held is None:
            tally.fault("lost", one.where, f"session {turn.session_id} does not hold turn {turn.turn_id}")
        elif one.generation is not None and not _as_sampled(held, shelf, one.generation):
            tally.fault("lost", one.where, f"turn {turn.turn_id} is stored with other ids than the engine saw")
    for (session, turn_id), times in unheard.items():
        for _ in range(times):
            tally.fault("doubled", f"session {session}", f"turn {turn_id} answered nobody")


def _judge_heard(witnessed: Sequence[_Witnessed], tally: _Tally) -> frozenset[int]:
    """The generations that reached a player. None may answer two turns."""
    heard: dict[int, str] = {}
    for one in witnessed:
        if one.generation is None:
            continue
        first = heard.setdefault(one.generation.n, one.where)
        if first != one.where:
            tally.fault("doubled", one.where, f"was answered with what had answered {first}")
    return frozenset(heard)


def _as_sampled(held: StoredTurn, shelf: Mapping[str, StoredTurn], generation: Generation) -> bool:
    prompt: list[Ids] = [held.delta_token_ids]
    parent = held.parent_turn_id
    while parent and len(prompt) <= 2 * len(shelf):
        above = shelf.get(parent)
        if above is None:
            return False
        prompt += (above.generation_token_ids, above.delta_token_ids)
        parent = above.parent_turn_id
    whole = tuple(token for part in reversed(prompt) for token in part)
    told = (whole, held.prompt_token_ids_length, held.generation_token_ids)
    return told == (generation.input_ids, len(generation.input_ids), generation.output_ids)


def _extends(ids: Ids, prefix: Ids) -> bool:
    return len(ids) > len(prefix) and ids[: len(prefix)] == prefix


def _first_difference(ids: Ids, prefix: Ids) -> int:
    return next((at for at, pair in enumerate(zip(ids, prefix, strict=False)) if pair[0] != pair[1]), len(ids))


def _fresh_reason(turn: AnsweredTurn) -> str:
    return turn.splice.partition("reason=")[2] or "unsaid"


def _given_up(rollouts: Iterable[PlayedRollout]) -> Iterator[str]:
    for rollout in rollouts:
        if rollout.gave_up:
            yield f"unanswered: rollout {rollout.tag}, turn {len(rollout.turns) + 1}: {rollout.gave_up}"
