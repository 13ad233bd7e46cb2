"""The checker, tested by planting: a clean record passes, and each fault that is put into it is found and named."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from msgspec.structs import replace

from tests.faults.checker import KINDS, Report, check, tally
from tests.faults.records import (
    Ask,
    Attempt,
    Evidence,
    Generation,
    Rollout,
    Sample,
    StoredSession,
    StoredTurn,
    pack,
)

FAILED = Attempt(outcome="failed", words="502")


@dataclass
class Run:
    """A record that a test may spoil before it is checked. Two rollouts of three asks each, in a session each."""

    rollouts: list[Rollout] = field(default_factory=list)
    generations: list[Generation] = field(default_factory=list)
    sessions: list[StoredSession] = field(default_factory=list)

    def check(self) -> Report:
        return check(Evidence(tuple(self.rollouts), tuple(self.generations), tuple(self.sessions)))

    def spoil_ask(self, **changes: Any) -> None:
        """The first rollout's second ask."""
        first = self.rollouts[0]
        asks = (first.asks[0], replace(first.asks[1], **changes), *first.asks[2:])
        self.rollouts[0] = replace(first, asks=asks)

    def spoil_answer(self, **changes: Any) -> None:
        self.spoil_ask(attempts=(replace(self.rollouts[0].asks[1].attempts[0], **changes),))

    def spoil_turn(self, **changes: Any) -> None:
        """The turn of that ask, as it is stored."""
        first = self.sessions[0]
        turns = (first.turns[0], replace(first.turns[1], **changes), *first.turns[2:])
        self.spoil_session(turns=turns)

    def spoil_session(self, **changes: Any) -> None:
        self.sessions[0] = replace(self.sessions[0], **changes)

    def store_another(self, **changes: Any) -> None:
        """A sibling of that turn, out of a generation of its own."""
        sibling = replace(self.sessions[0].turns[1], turn_id="sibling", nonces=("n-other",), generation=pack([77]))
        self.spoil_session(turns=(*self.sessions[0].turns, replace(sibling, **changes)))
        self.generations.append(replace(self.generations[1], rid="sibling", nonce="n-other", output=pack([77])))

    def spoil_generation(self, **changes: Any) -> None:
        self.generations[1] = replace(self.generations[1], **changes)


def clean() -> Run:
    run = Run()
    for name in ("a", "b"):
        _play(run, name)
    return run


def _play(run: Run, name: str) -> None:
    tokens: list[int] = []
    asks: list[Ask] = []
    turns: list[StoredTurn] = []
    for n in range(3):
        turn_id, nonce, word = f"{name}{n}", f"n-{name}{n}", f"q-{name}{n}"
        delta, output = [ord(name), n, 1], [ord(name), n, 2, 3]
        reply = f"reply {nonce}".encode()
        prompt = tokens + delta
        tokens = prompt + output
        run.generations.append(
            Generation(
                rid=turn_id, prompt=pack(prompt), output=pack(output), outcome="answered", nonce=nonce, word=word
            )
        )
        turns.append(
            StoredTurn(
                turn_id=turn_id,
                parent_id=f"{name}{n - 1}" if n else "",
                word=word,
                prompt_length=len(prompt),
                delta=pack(delta),
                generation=pack(output),
                delivered=True,
                reply=reply,
                nonces=(nonce,),
            )
        )
        answer = Attempt(
            outcome="answered",
            status=200,
            session_id=name,
            turn_id=turn_id,
            splice="spliced" if n else "fresh; reason=first_turn",
            reply=reply,
            nonces=(nonce,),
            generation=pack(output),
        )
        asks.append(Ask(word=word, once=True, attempts=(answer,), key=f"key-{turn_id}"))
    run.rollouts.append(Rollout(tag=name, asks=tuple(asks), finished=True))
    sample = Sample(tuple(turn.turn_id for turn in turns), pack(tokens))
    run.sessions.append(StoredSession(session_id=name, state="finished", turns=tuple(turns), samples=(sample,)))


def test_a_clean_record_has_no_finding_and_is_counted_whole() -> None:
    report = clean().check()
    assert report.findings == ()
    assert (report.rollouts, report.answered, report.acknowledged, report.stored, report.sessions) == (2, 6, 6, 6, 2)
    assert report.extensions == 4


def test_nothing_at_all_is_clean() -> None:
    assert check(Evidence((), (), ())).findings == ()


def _not_stored(run: Run) -> None:
    first = run.sessions[0]
    run.spoil_session(turns=(first.turns[0], first.turns[2]))


def _session_gone(run: Run) -> None:
    del run.sessions[0]


def _other_reply(run: Run) -> None:
    run.spoil_turn(reply=b"another")


def _other_ids_than_told(run: Run) -> None:
    run.spoil_answer(generation=pack([9]))


def _other_ids_than_sampled(run: Run) -> None:
    run.spoil_turn(generation=pack([9]))
    run.spoil_answer(generation=None)


def _other_delta(run: Run) -> None:
    run.spoil_turn(delta=pack([9]))


def _other_length(run: Run) -> None:
    run.spoil_turn(prompt_length=1)


def _never_sampled(run: Run) -> None:
    run.spoil_generation(nonce="n-x", rid="x")


def _exported_otherwise(run: Run) -> None:
    sample = run.sessions[0].samples[0]
    run.spoil_session(samples=(replace(sample, tokens=sample.tokens[4:]),))


def _discarded_and_lost(run: Run) -> None:
    answer = run.rollouts[0].asks[1].attempts[0]
    run.spoil_ask(once=False, attempts=(replace(answer, outcome="discarded", turn_id="gone"), answer))


def _marked_retry_got_a_second_turn(run: Run) -> None:
    answer = run.rollouts[0].asks[1].attempts[0]
    sibling = replace(answer, outcome="discarded", turn_id="sibling", nonces=("n-other",), generation=pack([77]))
    run.spoil_ask(attempts=(sibling, answer))
    run.store_another()


def _marked_retry_left_a_second_turn(run: Run) -> None:
    run.spoil_ask(attempts=(FAILED, *run.rollouts[0].asks[1].attempts))
    run.store_another()


def _one_attempt_made_two_turns(run: Run) -> None:
    run.spoil_ask(once=False)
    run.store_another(delivered=False)


def _one_generation_in_two_turns(run: Run) -> None:
    run.spoil_ask(once=False, attempts=(FAILED, *run.rollouts[0].asks[1].attempts))
    run.store_another(nonces=run.sessions[0].turns[1].nonces)


def _one_turn_for_two_asks(run: Run) -> None:
    first = run.rollouts[0].asks[0].attempts[0]
    run.spoil_answer(turn_id=first.turn_id, nonces=first.nonces, reply=first.reply, generation=first.generation)


def _two_turns_for_one_key(run: Run) -> None:
    run.spoil_ask(key=run.rollouts[0].asks[0].key)


def _prompt_differs(run: Run) -> None:
    spoilt = pack([5]) + run.generations[1].prompt[4:]
    run.spoil_generation(prompt=spoilt)
    run.generations[2] = replace(run.generations[2], prompt=spoilt + run.generations[2].prompt[len(spoilt) :])


def _prompt_is_only_repeated(run: Run) -> None:
    before = run.generations[0]
    run.spoil_generation(prompt=before.prompt + before.output)


def _served_fresh(run: Run) -> None:
    run.spoil_answer(splice="fresh; reason=turn_lost")


def _unexplained_turn(run: Run) -> None:
    run.store_another(word="q-unknown", delivered=False)


def _unended_session(run: Run) -> None:
    run.spoil_session(state="open")


def _nobodys_session(run: Run) -> None:
    session = run.sessions[0]
    run.rollouts[0] = replace(run.rollouts[0], finished=False, asks=run.rollouts[0].asks[:2])
    run.spoil_session(state="open", turns=session.turns[:2], samples=())
    turns = tuple(replace(turn, turn_id=f"x{turn.turn_id}") for turn in session.turns[:2])
    attempts = tuple(
        replace(run.rollouts[0].asks[0].attempts[0], outcome="discarded", session_id="x", turn_id=turn.turn_id)
        for turn in turns
    )
    run.spoil_ask(once=False, attempts=(*attempts, *run.rollouts[0].asks[1].attempts))
    run.sessions.append(replace(session, session_id="x", state="open", turns=turns, samples=()))


def _not_exported(run: Run) -> None:
    run.spoil_session(samples=())


def _gave_up(run: Run) -> None:
    run.rollouts[0] = replace(run.rollouts[0], stuck="no answer in 9 attempts")


PLANTED: tuple[tuple[str, Callable[[Run], None]], ...] = (
    ("lost", _not_stored),
    ("lost", _session_gone),
    ("lost", _other_reply),
    ("lost", _other_ids_than_told),
    ("lost", _other_ids_than_sampled),
    ("lost", _other_delta),
    ("lost", _other_length),
    ("lost", _never_sampled),
    ("lost", _exported_otherwise),
    ("lost", _discarded_and_lost),
    ("doubled", _marked_retry_got_a_second_turn),
    ("doubled", _marked_retry_left_a_second_turn),
    ("doubled", _one_attempt_made_two_turns),
    ("doubled", _one_generation_in_two_turns),
    ("doubled", _one_turn_for_two_asks),
    ("doubled", _two_turns_for_one_key),
    ("broken", _prompt_differs),
    ("broken", _prompt_is_only_repeated),
    ("broken", _served_fresh),
    ("orphaned", _unexplained_turn),
    ("orphaned", _unended_session),
    ("orphaned", _nobodys_session),
    ("orphaned", _not_exported),
    ("stuck", _gave_up),
)


@pytest.mark.parametrize(("kind", "plant"), PLANTED, ids=lambda value: getattr(value, "__name__", str(value)))
def test_a_planted_fault_is_found(kind: str, plant: Callable[[Run], None]) -> None:
    run = clean()
    plant(run)
    assert tally(run.check())[kind] >= 1, run.check().findings  # type: ignore[index]


def test_every_kind_is_planted() -> None:
    assert {kind for kind, _ in PLANTED} == set(KINDS)


def test_a_fault_is_named_by_its_rollout_and_turn() -> None:
    run = clean()
    _prompt_differs(run)
    (finding,) = [one for one in run.check().findings if one.kind == "broken"]
    assert (finding.where, finding.silent) == ("rollout a, ask q-a1", True)
    assert "turn a1: token 0 of 7" in finding.words


def test_a_break_that_the_reply_admits_is_no_silent_one() -> None:
    run = clean()
    _served_fresh(run)
    assert [one.silent for one in run.check().findings] == [False]


def test_a_retry_that_was_replayed_is_no_fault() -> None:
    run = clean()
    answer = run.rollouts[0].asks[1].attempts[0]
    run.spoil_ask(attempts=(FAILED, replace(answer, outcome="discarded"), replace(answer, replayed=True)))
    report = run.check()
    assert (report.findings, report.replayed) == ((), 1)


@pytest.mark.parametrize("delivered", [True, False, None])
def test_an_unmarked_repeat_may_leave_a_sibling_of_a_failed_attempt(delivered: bool | None) -> None:  # noqa: FBT001
    run = clean()
    run.spoil_ask(once=False, attempts=(FAILED, *run.rollouts[0].asks[1].attempts))
    run.store_another(delivered=delivered)
    report = run.check()
    assert (report.findings, report.unanswered) == ((), 1)


def test_a_first_turn_thrown_away_without_a_session_id_accounts_for_its_session() -> None:
    run = clean()
    first = run.rollouts[0].asks[0]
    other = replace(first.attempts[0], outcome="discarded", session_id="c", turn_id="c0", nonces=("n-c0",))
    asks = (replace(first, once=False, attempts=(other, *first.attempts)), *run.rollouts[0].asks[1:])
    run.rollouts[0] = replace(run.rollouts[0], asks=asks)
    turn = replace(run.sessions[0].turns[0], turn_id="c0", nonces=("n-c0",))
    run.generations.append(replace(run.generations[0], rid="c0", nonce="n-c0"))
    run.sessions.append(StoredSession(session_id="c", state="open", turns=(turn,), samples=()))
    assert run.check().findings == ()


def test_a_session_left_for_its_ttl_on_purpose_is_accounted_for() -> None:
    run = clean()
    run.rollouts[0] = replace(run.rollouts[0], finished=False)
    run.spoil_session(state="open")
    assert run.check().findings == ()
