"""Two workers and the obvious model are told the same things in any order; they must say the same."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule, run_state_machine_as_test

from splice.locate import Parent, locate
from splice.types import Message
from store import keys
from store.errors import StoreError
from store.redis import RedisStore
from store.tasks import end
from store.views import FindQuery, SessionKey, SessionOpening
from tests.oracle import Oracle
from tests.store.building import Conversation, digest_of

OPENING = SessionOpening()
SESSIONS = st.sampled_from(["s", "other"])
WORKERS = st.sampled_from([0, 1])
SIGNATURES = st.sampled_from(["a" * 32, "b" * 32])
WORDS = st.sampled_from(["x", "y"])  # few, so that conversations coincide
KEYS = st.sampled_from(["", "", "", "k1", "k 2"])
SIZES = st.tuples(st.integers(0, 40), st.integers(0, 40))
PICK = st.integers(0, 10**6)
MARKS = st.sampled_from(["none", "none", "retry", "retry", "key", "asked"])


async def outcome(work: Awaitable[Any]) -> Any:
    """What was answered, or which refusal with which facts."""
    try:
        return await work
    except StoreError as error:
        return type(error), vars(error)


def outcome_of(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except StoreError as error:
        return type(error), vars(error)


class StoreMachine(RuleBasedStateMachine):
    url = ""

    @initialize()
    def begin(self) -> None:
        self.runner = asyncio.Runner()
        self.rng = random.Random(0)
        self.tenant = f"oracle-{secrets.token_hex(6)}"
        self.oracle = Oracle()
        self.made: list[tuple[SessionKey, Conversation]] = []  # every turn ever offered, committed or refused
        # One worker remembers nearly nothing, so both ways of reading are taken.
        sizes = (1 << 20, 900)
        self.workers = [self.runner.run(RedisStore.connect(self.url, cache_bytes=size)) for size in sizes]
        self.asked: list[tuple[int, FindQuery, Conversation]] = []  # every attempt ever begun
        self.dead: set[int] = set()
        for worker in (0, 1):
            self.runner.run(self.hold_alive(worker))

    def teardown(self) -> None:
        for worker in self.workers:
            self.runner.run(worker.close())
        self.runner.close()

    async def hold_alive(self, worker: int) -> None:
        """Alive until a rule says otherwise, however slow the machine is."""
        liveness = self.workers[worker]._liveness
        await liveness.announce()
        await end(liveness._task)
        await self.workers[worker]._client.persist(keys.alive(liveness.worker_id))

    def names(self, workers: set[int]) -> set[str]:
        return {self.workers[worker]._liveness.worker_id for worker in workers}

    def key(self, session: str) -> SessionKey:
        return SessionKey(self.tenant, session)

    def offer(self, worker: int, key: SessionKey, conversation: Conversation, idempotency_key: str = "") -> None:
        turn = conversation.head
        store = self.workers[worker]
        answered = self.runner.run(outcome(store.commit(key, turn, OPENING, idempotency_key=idempotency_key)))
        name = store._liveness.worker_id
        assert answered == outcome_of(lambda: self.oracle.commit(key, turn, OPENING, idempotency_key, name))
        self.made.append((key, conversation))

    @rule(worker=WORKERS, session=SESSIONS, signature=SIGNATURES, said=WORDS, reply=WORDS, sizes=SIZES, ikey=KEYS)
    def root(self, worker, session, signature, said, reply, sizes, ikey) -> None:
        fresh = Conversation().then(
            self.rng, said=said, reply=Message("assistant", reply), signature=signature, sizes=sizes
        )
        self.offer(worker, self.key(session), fresh, ikey)

    @rule(worker=WORKERS, pick=PICK, said=WORDS, reply=WORDS, sizes=SIZES, ikey=KEYS)
    def extend(self, worker, pick, said, reply, sizes, ikey) -> None:
        if self.made:
            key, parent = self.made[pick % len(self.made)]
            signature = parent.head.rendering_signature
            longer = parent.then(
                self.rng, said=said, reply=Message("assistant", reply), signature=signature, sizes=sizes
            )
            self.offer(worker, key, longer, ikey)

    @rule(worker=WORKERS, pick=PICK)
    def repeat(self, worker, pick) -> None:
        if self.made:
            self.offer(worker, *self.made[pick % len(self.made)])

    @rule(worker=WORKERS, session=SESSIONS)
    def open(self, worker, session) -> None:
        answered = self.runner.run(outcome(self.workers[worker].open_session(self.key(session), OPENING)))
        expected = outcome_of(lambda: self.oracle.open_session(self.key(session), OPENING))
        assert answered == expected if isinstance(expected, tuple) else answered[1] == expected

    @rule(worker=WORKERS, session=SESSIONS, chance=st.integers(0, 3))
    def delete(self, worker, session, chance) -> None:
        if not chance:
            answered = self.runner.run(outcome(self.workers[worker].delete(self.key(session))))
            assert answered == outcome_of(lambda: self.oracle.delete(self.key(session)))

    @rule(worker=WORKERS, session=SESSIONS, chance=st.integers(0, 5))
    def finish(self, worker, session, chance) -> None:
        if not chance:
            answered = self.runner.run(outcome(self.workers[worker].finish(self.key(session))))
            expected = outcome_of(lambda: self.oracle.finish(self.key(session)))
            assert answered == expected if isinstance(expected, tuple) else answered.state == "finished"

    @rule(worker=WORKERS, pick=PICK, signature=SIGNATURES, ikey=KEYS, hinted=st.booleans(), echoed=st.booleans())
    def find(self, worker, pick, signature, ikey, hinted, echoed) -> None:
        if not self.made:
            return
        key, conversation = self.made[pick % len(self.made)]
        query = conversation.query(
            key,
            signature=signature,
            said="x",
            idempotency_key=ikey,
            hints=(conversation.head.turn_id,) if hinted else (),
            generation_digests=(digest_of(conversation.head),) if echoed else (),
        )
        found = self.runner.run(self.workers[worker].find(query))
        hits = self.oracle.candidates(query)
        right = max((c.depth for c in hits if c.rendering_signature == signature), default=0)
        assert list(found.candidates) == [c for c in hits if c.depth >= right]
        assert list(found.equal_requests) == self.oracle.equal_requests(query)
        session = self.oracle.sessions.get(key)
        answered = session.answers.get(ikey) if session else None
        assert found.idempotent == ((answered.turn_id, answered.request_hash) if answered else None)
        known = {turn.turn_id for turn in session.turns} if session else set()
        assert found.unknown_hints == tuple(hint for hint in query.hints if hint not in known)
        chosen = locate(hits, (), rendering_signature=signature, depth=len(query.chain), session_has_turns=True)
        if isinstance(chosen, Parent) and not hinted and not echoed:
            assert found.lineage.head.turn_id == chosen.candidate.turn_id
        if found.lineage:
            assert np.array_equal(found.lineage.tokens, self.oracle.lineage(key, found.lineage.head.turn_id))

    # Attempts. Each of their steps is one atomic call, so rules in any order are two clients interleaved at every
    # await: an attempt may be asked for, taken over, committed, given up and asked for again at any moment.

    @rule(worker=WORKERS, session=SESSIONS, said=WORDS, mark=MARKS, ikey=st.sampled_from(["k1", "k 2"]), pick=PICK)
    def ask(self, worker, session, said, mark, ikey, pick) -> None:
        key, parent = (
            self.made[pick % len(self.made)] if self.made and pick % 3 else (self.key(session), Conversation())
        )
        signature = parent.head.rendering_signature if parent.turns else "a" * 32
        attempt = parent.then(self.rng, said=said, reply=Message("assistant", "z"), signature=signature)
        ikey = ikey if mark == "key" else ""
        query = attempt.same_query(key, attempt_id=attempt.head.turn_id, mark=mark, idempotency_key=ikey)
        self.asked.append((worker, query, attempt))
        self.ask_again(len(self.asked) - 1)

    @rule(pick=PICK)
    def ask_again(self, pick) -> None:
        if self.asked:
            worker, query, _ = self.asked[pick % len(self.asked)]
            found = self.runner.run(self.workers[worker].find(query))
            gone = self.names(self.dead - {worker})
            assert found.verdict == self.oracle.verdict(query, self.workers[worker]._liveness.worker_id, gone)

    @rule(pick=PICK)
    def commit_attempt(self, pick) -> None:
        if self.asked:
            worker, query, attempt = self.asked[pick % len(self.asked)]
            self.offer(worker, query.key, attempt, query.idempotency_key)

    @rule(pick=PICK)
    def release(self, pick) -> None:
        if self.asked:
            worker, query, _ = self.asked[pick % len(self.asked)]
            self.runner.run(self.workers[worker].release(query.lease))
            self.oracle.release(query.lease)

    @rule(pick=PICK, other=WORKERS)
    def wait_for(self, pick, other) -> None:
        if self.asked:
            worker, query, _ = self.asked[pick % len(self.asked)]
            facts = (query.key, query.attempt_id, self.workers[worker]._liveness.worker_id, query.request_hash)
            answered = self.runner.run(outcome(self.workers[other].outcome(*facts)))
            gone = self.names(self.dead - {other})
            assert answered == outcome_of(lambda: self.oracle.outcome(*facts, gone))

    @rule(worker=WORKERS, pick=PICK, delivered=st.booleans())
    def mark(self, worker, pick, delivered) -> None:
        if self.made:
            key, conversation = self.made[pick % len(self.made)]

            async def written() -> None:
                self.workers[worker].mark(key, conversation.head.turn_id, delivered=delivered)
                await self.workers[worker]._attempts._flush()

            self.runner.run(written())
            self.oracle.mark(key, conversation.head.turn_id, delivered=delivered)

    @rule(worker=WORKERS, lives=st.booleans())
    def die_or_live(self, worker, lives) -> None:
        liveness = self.workers[worker]._liveness
        name = keys.alive(liveness.worker_id)
        client = self.workers[worker]._client
        self.runner.run(client.set(name, liveness._facts) if lives else client.delete(name))
        (self.dead.discard if lives else self.dead.add)(worker)

    @rule(worker=WORKERS, pick=PICK)
    def lineage_of(self, worker, pick) -> None:
        if self.made:
            key, conversation = self.made[pick % len(self.made)]
            session, turn_id = self.oracle.sessions.get(key), conversation.head.turn_id
            if session and any(turn.turn_id == turn_id for turn in session.turns):
                lineage = self.runner.run(self.workers[worker].lineage_of(key, turn_id))
                assert np.array_equal(lineage.tokens, self.oracle.lineage(key, turn_id))

    @invariant()
    def forests_are_equal(self) -> None:
        for session in ("s", "other"):
            if hasattr(self, "oracle") and self.key(session) in self.oracle.sessions:
                forest = self.runner.run(outcome(self.workers[0].turns(self.key(session))))
                expected = outcome_of(lambda session=session: self.oracle.turns(self.key(session)))
                assert (forest if isinstance(forest, tuple) else forest.turns) == expected
                if not isinstance(forest, tuple):
                    assert forest.delivered == self.oracle.delivered(self.key(session))


def test_the_store_does_what_the_model_does(redis_url):
    StoreMachine.url = redis_url
    run_state_machine_as_test(
        StoreMachine,
        settings=settings(
            max_examples=50,
            stateful_step_count=60,
            deadline=None,
            derandomize=True,
            suppress_health_check=list(HealthCheck),
        ),
    )


@pytest.mark.parametrize("seed", range(3))
async def test_random_forests_are_read_back_as_they_were_written(store, other_store, tenant, seed):
    rng, key = random.Random(seed), SessionKey(tenant, "s")
    forest = [Conversation()]
    for n in range(60):
        forest.append(rng.choice(forest).then(rng, sizes=(rng.randrange(60), rng.randrange(60))))
        await (store, other_store)[n % 2].commit(key, forest[-1].head, OPENING)
    for conversation in forest[1:]:
        found = await rng.choice((store, other_store)).find(conversation.query(key))
        assert np.array_equal(found.lineage.tokens, conversation.tokens)
    assert (await store.turns(key)).turns == tuple(c.head for c in forest[1:])
