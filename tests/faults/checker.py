"""The verdict on a fault run: three independent records compared. Pure and linear; imports nothing of the product.

lost      a reply that a client held and that the store lacks, holds otherwise, exports otherwise, or the engine
          never sampled
doubled   several turns where there should be one: for one Idempotency-Key, for one marked request, for one
          attempt, for one generation, or one turn for two asks
broken    a prompt that does not extend the rollout's previous answered turn, or was served fresh
orphaned  a stored turn that no attempt explains, a session that nobody ended, an answered leaf in no sample
stuck     a rollout that could not go on
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from itertools import chain, pairwise
from typing import Literal, get_args

import msgspec

from tests.faults.records import Ask, Attempt, Evidence, Generation, Ids, Rollout, StoredSession, StoredTurn

Kind = Literal["lost", "doubled", "broken", "orphaned", "stuck"]
KINDS: tuple[Kind, ...] = get_args(Kind)

_ID_BYTES = 4


class Finding(msgspec.Struct, frozen=True):
    """One fault. silent: the client was not told of it either."""

    kind: Kind
    where: str
    words: str
    silent: bool = True


class Report(msgspec.Struct, frozen=True, kw_only=True):
    """What was found, and how much was looked at."""

    findings: tuple[Finding, ...]
    rollouts: int
    acknowledged: int  # replies that clients held
    answered: int  # of these, those that rollouts went on from
    extensions: int  # answered turns whose prompt was compared with the one before
    attempts: int
    replayed: int
    generations: int
    unheard: int  # finished generations that became no turn
    stored: int
    unanswered: int  # stored turns whose reply never reached its client
    sessions: int

    def count(self, kind: Kind) -> int:
        """How many findings are of this kind."""
        return sum(finding.kind == kind for finding in self.findings)


class _Index:
    """Every record by what the others know it by."""

    def __init__(self, evidence: Evidence) -> None:
        self.evidence = evidence
        self.by_nonce = {one.nonce: one for one in evidence.generations if one.nonce}
        self.by_rid = {one.rid: one for one in evidence.generations if one.outcome == "answered"}
        self.turns = {(s.session_id, t.turn_id): t for s in evidence.sessions for t in s.turns}
        self.by_word: dict[str, list[str]] = defaultdict(list)
        for turn in self.turns.values():
            self.by_word[turn.word].append(turn.turn_id)
        self.asks = [(f"rollout {r.tag}, ask {a.word}", a) for r in evidence.rollouts for a in r.asks]
        self.words = {ask.word: ask for _, ask in self.asks}
        self.held = {one.turn_id for _, ask in self.asks for one in ask.attempts if one.acknowledged}

    def sampled(self, attempt: Attempt) -> Generation | None:
        """The generation behind a reply: by the nonce that it shows, else (cut too short to show it) by its rid."""
        shown = next((self.by_nonce[nonce] for nonce in attempt.nonces if nonce in self.by_nonce), None)
        return shown or self.by_rid.get(attempt.turn_id)


def check(evidence: Evidence) -> Report:
    """Compare the records."""
    index = _Index(evidence)
    rules = (_lost(index), _exported_otherwise(index), _doubled(index), _broken(index), _orphaned(index), _stuck(index))
    acknowledged = [one for _, ask in index.asks for one in ask.attempts if one.acknowledged]
    answers = [len([ask for ask in rollout.asks if ask.answer]) for rollout in evidence.rollouts]
    known = {turn_id for _, turn_id in index.turns}
    return Report(
        findings=tuple(chain.from_iterable(rules)),
        rollouts=len(evidence.rollouts),
        acknowledged=len(acknowledged),
        answered=sum(answers),
        extensions=sum(max(0, count - 1) for count in answers),
        attempts=sum(len(ask.attempts) for _, ask in index.asks),
        replayed=sum(one.replayed for one in acknowledged),
        generations=len(evidence.generations),
        unheard=sum(rid not in known for rid in index.by_rid),
        stored=len(index.turns),
        unanswered=sum(turn_id not in index.held for turn_id in known),
        sessions=len(evidence.sessions),
    )


def _lost(index: _Index) -> Iterator[Finding]:
    for where, ask in index.asks:
        for attempt in ask.attempts:
            if attempt.acknowledged and (words := _missing(index, attempt)):
                yield Finding("lost", where, f"turn {attempt.turn_id}: {words}")


def _missing(index: _Index, attempt: Attempt) -> str:
    """What is not as the client was told; "" when all is."""
    turn, generation = index.turns.get((attempt.session_id, attempt.turn_id)), index.sampled(attempt)
    if turn is None:
        return f"session {attempt.session_id} does not hold it"
    if generation is None:
        return "the engine never sampled it"
    return next((words for words, wrong in _differences(turn, generation, attempt) if wrong), "")


def _differences(turn: StoredTurn, generation: Generation, attempt: Attempt) -> Iterator[tuple[str, bool]]:
    told = attempt.generation
    yield "stored with another message than the client was sent", turn.reply != attempt.reply
    yield "stored with other ids than the client was sent", told is not None and told != turn.generation
    yield "stored with other ids than the engine sampled", turn.generation != generation.output
    yield "stored with another prompt length than the engine saw", turn.prompt_length != _length(generation.prompt)
    yield "stored with other new ids than the engine saw", not generation.prompt.endswith(turn.delta)


def _exported_otherwise(index: _Index) -> Iterator[Finding]:
    """A sample is its leaf's prompt and output, to the last id."""
    for session in index.evidence.sessions:
        for sample in session.samples:
            leaf = index.by_rid.get(sample.turn_ids[-1])
            if leaf is not None and sample.tokens != leaf.prompt + leaf.output:
                words = f"sample of turn {leaf.rid} has other ids than the engine saw"
                yield Finding("lost", f"session {session.session_id}", words)


def _doubled(index: _Index) -> Iterator[Finding]:
    answered: dict[str, str] = {}
    for where, ask in index.asks:
        yield from _doubled_ask(index, where, ask)
        for turn_id in {one.turn_id for one in ask.attempts if one.acknowledged}:
            if answered.setdefault(turn_id, where) != where:
                yield Finding("doubled", where, f"turn {turn_id} had answered {answered[turn_id]}")
    yield from _doubled_keys(index)
    yield from _doubled_generations(index.turns.values())


def _doubled_ask(index: _Index, where: str, ask: Ask) -> Iterator[Finding]:
    told = {one.turn_id for one in ask.attempts if one.acknowledged}
    stored = index.by_word[ask.word]
    made = told.union(stored)
    if ask.once and len(made) > 1:
        yield Finding("doubled", where, f"one marked request, turns {' '.join(sorted(made))}")
    elif len(stored) > len(ask.attempts):
        yield Finding("doubled", where, f"{len(ask.attempts)} attempts, turns {' '.join(sorted(stored))}")


def _doubled_keys(index: _Index) -> Iterator[Finding]:
    """A key is one request wherever it is used; one ask's own turns were looked at above."""
    first: dict[str, Ask] = {}
    for where, ask in index.asks:
        if ask.key and first.setdefault(ask.key, ask) is not ask:
            words = f"Idempotency-Key {ask.key} answered {first[ask.key].word} too, with another turn"
            turns = {one.turn_id for each in (ask, first[ask.key]) for one in each.attempts if one.acknowledged}
            if len(turns) > 1:
                yield Finding("doubled", where, words)


def _doubled_generations(turns: Iterable[StoredTurn]) -> Iterator[Finding]:
    first: dict[str, str] = {}
    for turn in turns:
        for nonce in turn.nonces:
            if first.setdefault(nonce, turn.turn_id) != turn.turn_id:
                words = f"generation {nonce} is in turn {first[nonce]} too"
                yield Finding("doubled", f"turn {turn.turn_id}", words)


def _broken(index: _Index) -> Iterator[Finding]:
    for rollout in index.evidence.rollouts:
        answered = [(ask.word, ask.answer) for ask in rollout.asks if ask.answer]
        for (_, before), (word, now) in pairwise(answered):
            words = _break(index.sampled(before), index.sampled(now), now)
            if words:
                told = not now.splice.startswith("spliced")
                yield Finding("broken", f"rollout {rollout.tag}, ask {word}", words, silent=not told)


def _break(before: Generation | None, now: Generation | None, answer: Attempt) -> str:
    if not answer.splice.startswith("spliced"):
        return f"turn {answer.turn_id} was served {answer.splice or 'without saying how'}"
    if before is None or now is None:
        return ""  # reported as lost
    prefix = before.prompt + before.output
    if now.prompt.startswith(prefix) and len(now.prompt) > len(prefix):
        return ""
    at = _first_difference(now.prompt, prefix)
    return f"turn {answer.turn_id}: token {at} of {_length(prefix)} differs from the previous answered turn's"


def _orphaned(index: _Index) -> Iterator[Finding]:
    ends = {last.turn_id: rollout for rollout in index.evidence.rollouts if (last := _last_answer(rollout)) is not None}
    for session in index.evidence.sessions:
        where = f"session {session.session_id}"
        for turn in session.turns:
            if turn.turn_id not in index.held and not _explained(index.words.get(turn.word), turn):
                yield Finding("orphaned", where, f"turn {turn.turn_id} answered nobody and is not marked so")
        if words := _unended(session, index.held, ends):
            yield Finding("orphaned", where, words)
    leaves = {turn_id for _, turn_id in index.turns} - {turn.parent_id for turn in index.turns.values()}
    exported = {turn_id for s in index.evidence.sessions for sample in s.samples for turn_id in sample.turn_ids}
    missing = leaves - exported
    for where, ask in index.asks:
        if ask.answer and ask.answer.turn_id in missing:
            yield Finding("orphaned", where, f"answered leaf {ask.answer.turn_id} is in no sample")


def _explained(ask: Ask | None, turn: StoredTurn) -> bool:
    """A turn that nobody held: it is marked so, or an attempt of its ask got no whole reply.

    `delivered: true` only says that the body was handed to an open connection: it may have broken behind it.
    """
    return ask is not None and (turn.delivered is False or any(not one.acknowledged for one in ask.attempts))


def _unended(session: StoredSession, held: set[str], ends: dict[str, Rollout]) -> str:
    """Sealed, or left on purpose, or opened by attempts that nobody was answered for."""
    if session.state == "finished" or not any(turn.turn_id in held for turn in session.turns):
        return ""
    rollouts = [ends[turn.turn_id] for turn in session.turns if turn.turn_id in ends]
    if any(rollout.finished for rollout in rollouts):
        return f"was finished by its rollout and is {session.state}"
    # A first reply that was thrown away, without a session id: the repeat opened another session.
    thrown_away = not rollouts and len(session.turns) == 1
    return "" if rollouts or thrown_away else f"is {session.state} and no rollout ends in it"


def _stuck(index: _Index) -> Iterator[Finding]:
    for rollout in index.evidence.rollouts:
        if rollout.stuck:
            yield Finding("stuck", f"rollout {rollout.tag}", rollout.stuck)


def _last_answer(rollout: Rollout) -> Attempt | None:
    return next((ask.answer for ask in reversed(rollout.asks) if ask.answer), None)


def _length(ids: Ids) -> int:
    return len(ids) // _ID_BYTES


def _first_difference(ids: Ids, prefix: Ids) -> int:
    return next((at // _ID_BYTES for at, pair in enumerate(zip(ids, prefix, strict=False)) if pair[0] != pair[1]),
                _length(min(ids, prefix, key=len)))  # fmt: skip


def tally(report: Report) -> Counter[Kind]:
    """Findings by kind, zeros included."""
    return Counter({kind: report.count(kind) for kind in KINDS})
