"""The judge sees what was planted: breaks, lost turns, doubled turns. A judge that cannot is worth nothing."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import msgspec

from api.demo.evidence import AnsweredTurn, Generation, Json, PlayedRollout, StoredTurn
from api.demo.judge import Judge, Verdict


def spell(text: str) -> tuple[int, ...]:
    return tuple(map(ord, text))


def decode(ids: tuple[int, ...]) -> str:
    return "".join(map(chr, ids))


def rerender(messages: Sequence[Json], _tools: Sequence[Json]) -> tuple[int, ...]:
    """Loses the trailing space of what the model wrote, as templates that strip content do."""
    return spell("".join(f"<{message['role'][0]}>{message['content'].strip()}" for message in messages) + "<a>")


@dataclass
class Run:
    """An honest run, to plant faults in: two rollouts of three turns each."""

    record: list[Generation] = field(default_factory=list)
    rollouts: list[PlayedRollout] = field(default_factory=list)
    stored: dict[str, list[StoredTurn]] = field(default_factory=dict)

    def play(self, name: str, turns: int) -> None:
        tag = f"[rollout {name}]"
        messages: tuple[Json, ...] = ({"role": "user", "content": f"{tag} go"},)
        prompt, parent, answered = rerender(messages, ()), None, []
        for turn in range(turns):
            n = len(self.record)
            said = f"n-{n} done "
            delta = prompt[len(self.tokens(name)) :]
            self.record.append(Generation(n, prompt, spell(said), "answered", nonce=f"n-{n}"))
            held = StoredTurn(f"t{n}", delta, spell(said), len(prompt), parent)
            self.stored.setdefault(name, []).append(held)
            answered.append(
                AnsweredTurn(
                    messages=messages,
                    nonces=(f"n-{n}",),
                    generation_ids=None,
                    prompt_length=None,
                    session_id=name,
                    turn_id=f"t{n}",
                    splice="spliced" if turn else "fresh; reason=first_turn",
                    replayed=False,
                    attempts=1,
                )
            )
            parent = f"t{n}"
            messages = (*messages, {"role": "assistant", "content": said}, {"role": "user", "content": "more"})
            prompt = prompt + spell(said) + spell("<u>more<a>")
        self.rollouts.append(PlayedRollout(tag=tag, tools=(), turns=tuple(answered), wanted=turns))

    def tokens(self, name: str) -> tuple[int, ...]:
        held = self.stored.get(name, [])
        return tuple(token for turn in held for token in turn.delta_token_ids + turn.generation_token_ids)

    def verdict(self) -> Verdict:
        return Judge(self.record, decode=decode, rerender=rerender).verdict(self.rollouts, self.stored)

    def change_generation(self, n: int, change: Callable[[Generation], Generation]) -> None:
        self.record[n] = change(self.record[n])

    def change_turn(self, rollout: int, turn: int, **changes: object) -> None:
        played = self.rollouts[rollout]
        turns = list(played.turns)
        turns[turn] = msgspec.structs.replace(turns[turn], **changes)
        self.rollouts[rollout] = msgspec.structs.replace(played, turns=tuple(turns))


def honest() -> Run:
    run = Run()
    run.play("aa", 3)
    run.play("bb", 3)
    return run


def faults(verdict: Verdict) -> tuple[int, int, int]:
    return verdict.breaks, verdict.lost, verdict.doubled


def test_an_honest_run_is_clean_and_fully_counted() -> None:
    verdict = honest().verdict()
    assert faults(verdict) == (0, 0, 0)
    assert (verdict.turns, verdict.judged, verdict.spliced, verdict.fresh) == (6, 4, 4, {"first_turn": 2})
    assert (verdict.generations, verdict.abandoned, verdict.unanswered) == (6, 0, 0)
    assert verdict.findings == ()


def test_every_turn_that_a_re_render_would_break_is_counted() -> None:
    assert honest().verdict().broken_by_rerender == 4


def test_a_re_render_that_keeps_every_token_is_counted_as_none() -> None:
    run = honest()
    faithful = Judge(
        run.record,
        decode=decode,
        rerender=lambda messages, _: spell("".join(f"<{m['role'][0]}>{m['content']}" for m in messages) + "<a>"),
    )
    assert faithful.verdict(run.rollouts, run.stored).broken_by_rerender == 0


def test_one_changed_token_in_the_history_is_a_break_in_that_turn_and_the_place_is_named() -> None:
    run = honest()

    def changed(one: Generation) -> Generation:
        return msgspec.structs.replace(one, input_ids=(*one.input_ids[:25], 999, *one.input_ids[26:]))

    run.change_generation(1, changed)
    verdict = run.verdict()
    assert verdict.breaks == 2  # it does not extend the turn before, the next one does not extend it
    assert "rollout [rollout aa], turn 2: token 25 of" in verdict.findings[0]


def test_a_prompt_that_adds_nothing_is_a_break() -> None:
    run = honest()
    before = run.record[1]
    run.change_generation(2, lambda one: msgspec.structs.replace(one, input_ids=before.input_ids + before.output_ids))
    assert run.verdict().breaks == 1


def test_a_fresh_turn_is_a_break_even_when_its_ids_agree() -> None:
    run = honest()
    run.change_turn(0, 1, splice="fresh; reason=history_diverged")
    verdict = run.verdict()
    assert (verdict.breaks, verdict.fresh) == (1, {"first_turn": 2, "history_diverged": 1})


def test_a_turn_that_does_not_say_how_it_was_made_is_a_break() -> None:
    run = honest()
    run.change_turn(0, 1, splice="")
    verdict = run.verdict()
    assert (verdict.breaks, verdict.fresh) == (1, {"first_turn": 2, "unsaid": 1})


def test_another_rollouts_prompt_is_a_break_even_on_a_first_turn() -> None:
    run = honest()
    run.change_generation(3, lambda one: msgspec.structs.replace(one, input_ids=run.record[0].input_ids))
    assert run.verdict().breaks == 2  # the first turn is not its own; the second does not extend that


def test_a_fresh_render_in_a_new_session_cannot_hide() -> None:
    run = honest()
    run.change_turn(0, 2, session_id="new", splice="fresh; reason=first_turn")
    run.stored["new"] = [msgspec.structs.replace(run.stored["aa"].pop(), parent_turn_id=None)]
    assert run.verdict().breaks == 1


def test_a_reply_that_the_engine_never_sampled_is_lost() -> None:
    run = honest()
    run.change_turn(1, 2, nonces=("n-77",))
    assert faults(run.verdict()) == (0, 1, 0)


def test_a_reply_made_of_an_aborted_generation_is_lost() -> None:
    run = honest()
    run.change_generation(5, lambda one: msgspec.structs.replace(one, outcome="aborted"))
    assert faults(run.verdict()) == (0, 1, 0)


def test_an_answered_turn_that_the_product_does_not_hold_is_lost() -> None:
    run = honest()
    del run.stored["aa"][2]
    assert faults(run.verdict()) == (0, 1, 0)


def test_a_session_that_is_gone_loses_every_turn() -> None:
    run = honest()
    del run.stored["aa"]
    assert faults(run.verdict()) == (0, 3, 0)


def test_a_turn_stored_with_other_ids_than_the_engine_sampled_is_lost() -> None:
    run = honest()
    held = run.stored["aa"][2]
    run.stored["aa"][2] = msgspec.structs.replace(held, generation_token_ids=(*held.generation_token_ids[:-1], 7))
    assert faults(run.verdict()) == (0, 1, 0)


def test_a_turn_stored_under_another_parent_is_lost() -> None:
    run = honest()
    run.stored["aa"][2] = msgspec.structs.replace(run.stored["aa"][2], parent_turn_id="t0")
    assert faults(run.verdict()) == (0, 1, 0)


def test_parents_that_go_round_in_a_circle_are_seen_and_end() -> None:
    run = honest()
    run.stored["aa"][0] = msgspec.structs.replace(run.stored["aa"][0], parent_turn_id="t2")
    assert run.verdict().lost == 3


def test_a_second_turn_that_nobody_was_answered_with_is_doubled() -> None:
    run = honest()
    run.stored["aa"].append(msgspec.structs.replace(run.stored["aa"][2], turn_id="twin"))
    assert faults(run.verdict()) == (0, 0, 1)


def test_the_same_turn_listed_twice_is_doubled() -> None:
    run = honest()
    run.stored["bb"].append(run.stored["bb"][0])
    assert faults(run.verdict()) == (0, 0, 1)


def test_a_stray_session_is_doubled() -> None:
    run = honest()
    run.stored["stray"] = [msgspec.structs.replace(run.stored["aa"][0], turn_id="t9")]
    assert faults(run.verdict()) == (0, 0, 1)


def test_one_generation_that_answers_two_turns_is_doubled() -> None:
    run = honest()
    run.change_turn(0, 2, nonces=("n-1",), turn_id="t1")
    assert run.verdict().doubled >= 1


def test_a_generation_whose_reply_was_lost_is_no_previous_turn_and_no_fault() -> None:
    run = honest()
    run.record.append(msgspec.structs.replace(run.record[1], n=9, nonce="n-9"))
    verdict = run.verdict()
    assert faults(verdict) == (0, 0, 0)
    assert (verdict.generations, verdict.abandoned) == (7, 1)


def test_turns_that_players_gave_up_on_are_counted_with_their_reason() -> None:
    run = honest()
    run.rollouts[0] = msgspec.structs.replace(run.rollouts[0], wanted=5, gave_up="HTTP 503")
    verdict = run.verdict()
    assert verdict.unanswered == 2
    assert verdict.findings == ("unanswered: rollout [rollout aa], turn 4: HTTP 503",)


def test_replays_and_retries_are_counted() -> None:
    run = honest()
    run.change_turn(0, 1, replayed=True, attempts=3)
    verdict = run.verdict()
    assert (verdict.replayed, verdict.retries) == (1, 2)


def test_without_nonces_the_replys_ids_and_the_tag_tell_the_generation() -> None:
    run = honest()
    for n, one in enumerate(run.record):
        # The same words in both rollouts: only the tag can tell them apart.
        run.record[n] = msgspec.structs.replace(one, nonce="")
    for rollout, played in enumerate(run.rollouts):
        for turn in range(len(played.turns)):
            told = run.record[rollout * 3 + turn]
            run.change_turn(rollout, turn, nonces=(), generation_ids=told.output_ids, prompt_length=len(told.input_ids))
    verdict = run.verdict()
    assert faults(verdict) == (0, 0, 0)
    assert verdict.judged == 4


def test_equal_words_in_two_rollouts_are_told_apart_by_the_tag() -> None:
    run = Run()
    run.play("aa", 1)
    run.play("bb", 1)
    yes = spell("Yes.")
    for n in range(2):
        run.change_generation(n, lambda one: msgspec.structs.replace(one, nonce="", output_ids=yes))
        name = "ab"[n] * 2
        run.stored[name] = [msgspec.structs.replace(run.stored[name][0], generation_token_ids=yes)]
        length = len(run.record[n].input_ids)
        run.change_turn(n, 0, nonces=(), generation_ids=yes, prompt_length=length)
    assert faults(run.verdict()) == (0, 0, 0)


def test_a_reply_whose_ids_are_not_those_sampled_is_lost() -> None:
    run = honest()
    run.change_turn(0, 2, generation_ids=spell("n-2 other"))
    assert faults(run.verdict()) == (0, 1, 0)


def test_a_rollout_without_turns_is_judged_without_a_word() -> None:
    run = Run(rollouts=[PlayedRollout(tag="[rollout cc]", tools=(), turns=(), wanted=2, gave_up="HTTP 500")])
    verdict = run.verdict()
    assert (verdict.turns, verdict.unanswered, verdict.judged) == (0, 2, 0)
