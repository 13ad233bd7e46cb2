"""What the store promises a turn's path, on a real server."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest

from splice.identity import chain_hashes
from splice.locate import Echo, Parent, locate
from splice.types import Message, TokenRun
from store.cluster import Cluster
from store.errors import (
    AlreadyAnswered,
    ParentMissing,
    RenderingDiffers,
    SessionClosed,
    SessionFinished,
    SessionMissing,
    TurnMissing,
)
from store.redis import RedisStore
from store.views import EarlierTurn, Reward, SessionKey, SessionOpening
from tests.store.building import SIGNATURE, Conversation, digest_of, grown, rich_turn

pytestmark = pytest.mark.topologies

OPENING = SessionOpening()


@pytest.fixture
def key(tenant: str) -> SessionKey:
    return SessionKey(tenant, "rollout-1")


@pytest.fixture
def rng() -> random.Random:
    return random.Random(7)


async def bytes_sent(store: RedisStore) -> int:
    """By every primary."""
    asked = {"target_nodes": Cluster.PRIMARIES} if isinstance(store._client, Cluster) else {}
    said = await store._client.info("stats", **asked)
    each = said.values() if asked else [said]
    return sum(one["total_net_output_bytes"] for one in each)


async def commit_all(store: RedisStore, key: SessionKey, conversation: Conversation) -> None:
    for turn in conversation.turns:
        await store.commit(key, turn, OPENING)


async def test_a_committed_turn_is_found_by_another_worker_with_every_token(store, other_store, key, rng):
    conversation = grown(rng, 5)
    await commit_all(store, key, conversation)
    found = await other_store.find(conversation.query(key))
    assert [c.turn_id for c in found.candidates] == [conversation.head.turn_id]
    assert found.candidates[0].depth == 5
    assert found.lineage.head.turn_id == conversation.head.turn_id
    assert found.lineage.head.root_id == conversation.turns[0].turn_id
    assert found.lineage.head.clock == conversation.turns[0].clock
    assert found.lineage.head.finish == conversation.head.finish
    assert np.array_equal(found.lineage.tokens, conversation.tokens)
    assert np.array_equal(found.lineage.generation, conversation.head.generation.ids)
    assert found.session.turns == 5


async def test_a_worker_that_has_a_prefix_is_sent_only_the_rest(store, other_store, key, rng):
    conversation = grown(rng, 3)
    await commit_all(store, key, conversation)
    await other_store.find(conversation.query(key))
    longer = conversation.then(rng, sizes=(300, 200)).then(rng)
    await commit_all(store, key, Conversation(longer.turns[3:]))
    before = await bytes_sent(store)
    found = await other_store.find(longer.query(key))
    sent = await bytes_sent(store) - before
    assert np.array_equal(found.lineage.tokens, longer.tokens)
    assert 521 * 3 < sent < 521 * 3 + 36_000  # INFO's own answers are in it, three of them on a cluster
    unchanged = await other_store.find(longer.query(key))
    assert np.array_equal(unchanged.lineage.tokens, longer.tokens)


async def test_a_lineage_handed_out_does_not_change_when_the_conversation_goes_on(store, key, rng):
    conversation = grown(rng, 2)
    await commit_all(store, key, conversation)
    held = (await store.find(conversation.query(key))).lineage.tokens
    copy = held.copy()
    await store.commit(key, conversation.then(rng, sizes=(400, 400)).head, OPENING)
    assert np.array_equal(held, copy)
    assert not held.flags.writeable


async def test_every_field_of_a_turn_comes_back(store, other_store, key, rng):
    conversation = rich_turn(rng, grown(rng, 1))
    await commit_all(store, key, conversation)
    assert (await other_store.turns(key)).turns == conversation.turns
    assert await other_store.turn(key, conversation.head.turn_id) == conversation.head
    assert await other_store.turn(key, conversation.turns[0].turn_id) == conversation.turns[0]


async def test_an_empty_generation_is_a_turn_that_can_be_gone_on_from(store, other_store, key, rng):
    conversation = grown(rng, 1).then(rng, sizes=(5, 0)).then(rng)
    await commit_all(store, key, conversation)
    found = await other_store.find(conversation.query(key))
    assert np.array_equal(found.lineage.tokens, conversation.tokens)
    assert (await other_store.turns(key)).turns == conversation.turns


async def test_ids_beyond_three_bytes_and_doubles_are_kept_exactly(store, other_store, key, rng):
    wide = TokenRun(np.array([1, 2**32 - 1, 2**24], np.uint32), np.array([-0.1, -1e-9, -2.0], np.float64))
    conversation = grown(rng, 1).then(rng, generation=wide).then(rng)
    await commit_all(store, key, conversation)
    found = await other_store.find(conversation.query(key))
    assert np.array_equal(found.lineage.tokens, conversation.tokens)
    assert (await other_store.turns(key)).turns == conversation.turns


async def test_equal_prompt_deltas_are_stored_once(store, key, rng):
    first = grown(rng, 1, sizes=(1000, 4))
    for _ in range(5):
        sibling = Conversation().then(rng, sizes=(0, 4), delta=first.head.delta, prompt_length=1000)
        await store.commit(key, sibling.head, OPENING)
    tokens = await store._client.hgetall(_key(key, "tokens"))
    assert sum(name.startswith(b"=") for name in tokens) == 1


async def test_a_sibling_is_legal_and_both_go_on(store, other_store, key, rng):
    parent = grown(rng, 2)
    left, right = parent.then(rng), parent.then(rng)
    await commit_all(store, key, left)
    await other_store.commit(key, right.head, OPENING)
    for branch in (left, right):
        found = await other_store.find(branch.query(key))
        assert np.array_equal(found.lineage.tokens, branch.tokens)


@pytest.mark.parametrize("evidence", ["ids", "turn id", "nothing"])
async def test_the_server_expects_the_same_of_equal_looking_turns_as_the_core_chooses(
    store, other_store, key, rng, evidence
):
    parent, reply = grown(rng, 1), Message("assistant", "the same words")
    twins = [parent.then(rng, said="go on", reply=reply) for _ in range(3)]
    await commit_all(store, key, twins[0])
    for twin in twins[1:]:
        await store.commit(key, twin.head, OPENING)
    await store.commit(key, twins[2].then(rng).head, OPENING)
    echo = {
        "ids": Echo(2, generation_digest=digest_of(twins[0].head)),
        "turn id": Echo(2, turn_id=twins[0].head.turn_id),
        "nothing": Echo(2),
    }[evidence]
    query = twins[0].query(
        key,
        hints=tuple(filter(None, [echo.turn_id])),
        generation_digests=tuple(filter(None, [echo.generation_digest])),
    )
    found = await other_store.find(query)
    located = locate(found.candidates, [echo], rendering_signature=SIGNATURE, depth=2, session_has_turns=True)
    assert isinstance(located, Parent)
    assert found.lineage.head.turn_id == located.candidate.turn_id
    assert len(found.candidates) == 3


async def test_another_rendering_is_reported_and_does_not_hide_the_right_one(store, key, rng):
    shallow = grown(rng, 1)
    other = Conversation(messages=shallow.messages).then(rng, signature="b" * 32)
    await commit_all(store, key, shallow)
    await store.commit(key, replace(other.head, messages=other.messages), OPENING)
    found = await store.find(replace(other, turns=()).query(key))
    assert [(c.depth, c.rendering_signature[0]) for c in found.candidates] == [(2, "b"), (1, "a")]
    assert found.lineage.head.turn_id == shallow.head.turn_id


async def test_an_equal_request_a_key_and_a_lost_turn_are_told_in_the_same_round_trip(store, other_store, key, rng):
    conversation = grown(rng, 2)
    await store.commit(key, conversation.turns[0], OPENING)
    await store.commit(key, conversation.head, OPENING, idempotency_key="try: 1 {x}")
    query = conversation.same_query(key, idempotency_key="try: 1 {x}", hints=("lost0", conversation.turns[0].turn_id))
    found = await other_store.find(query)
    assert found.equal_requests == (EarlierTurn(conversation.head.turn_id, extended=False),)
    assert found.idempotent == (conversation.head.turn_id, conversation.head.request_hash)
    assert found.unknown_hints == ("lost0",)
    await store.commit(key, conversation.then(rng).head, OPENING)
    assert (await store.find(query)).equal_requests[0].extended


async def test_one_idempotency_key_never_gets_two_turns(store, other_store, key, rng):
    first, second = (Conversation().then(rng, said="same") for _ in range(2))
    await store.commit(key, first.head, OPENING, idempotency_key="k")
    with pytest.raises(AlreadyAnswered) as refused:
        await other_store.commit(key, second.head, OPENING, idempotency_key="k")
    assert refused.value.turn_id == first.head.turn_id
    assert (await store.session(key)).turns == 1


async def test_a_repeated_commit_changes_nothing(store, other_store, key, rng):
    conversation = grown(rng, 2)
    await commit_all(store, key, conversation)
    before = await store._client.hgetall(_key(key, "links"))
    await asyncio.gather(*(w.commit(key, conversation.head, OPENING) for w in (store, other_store) for _ in range(8)))
    assert await store._client.hgetall(_key(key, "links")) == before
    assert (await store.session(key)).turns == 2


async def test_concurrent_commits_of_one_session_are_all_kept(store, other_store, key, rng):
    root = grown(rng, 1)
    await commit_all(store, key, root)
    branches = [root.then(rng) for _ in range(64)]
    await asyncio.gather(
        *((store, other_store)[n % 2].commit(key, branch.head, OPENING) for n, branch in enumerate(branches))
    )
    forest = await store.turns(key)
    assert {t.turn_id for t in forest.turns} == {t.turn_id for b in branches for t in b.turns}
    assert (forest.session.turns, forest.session.sampled_tokens) == (65, 65 * 9)


async def test_a_commit_without_its_parent_or_under_another_rendering_is_refused_whole(store, key, rng):
    conversation = grown(rng, 2)
    with pytest.raises(ParentMissing):
        await store.commit(key, conversation.head, OPENING)
    with pytest.raises(SessionMissing):
        await store.session(key)
    await store.commit(key, conversation.turns[0], OPENING)
    with pytest.raises(RenderingDiffers):
        await store.commit(key, replace(conversation.head, rendering_signature="b" * 32), OPENING)
    assert (await store.session(key)).turns == 1


async def test_a_deleted_session_is_gone_and_says_so(store, other_store, key, rng):
    conversation = grown(rng, 2)
    await commit_all(store, key, conversation)
    await store.delete(key)
    await store.delete(key)
    assert (await store.find(conversation.query(key))).session.state == "deleted"
    assert (await store.find(conversation.query(key))).lineage is None
    for refused in (
        other_store.commit(key, conversation.then(rng).head, OPENING),
        other_store.turns(key),
        other_store.turn(key, conversation.head.turn_id),
        other_store.open_session(key, OPENING),
        other_store.finish(key),
        other_store.set_reward(key, 1.0),
    ):
        with pytest.raises(SessionClosed):
            await refused
    assert await other_store.closed([key, SessionKey(key.tenant, "another")]) == (key,)
    left = [name.decode() async for name in store._client.scan_iter(f"*{key.tenant}:*")]
    assert left == [_key(key, "session:rollout-1")]
    assert await store._client.pttl(_key(key, "session:rollout-1")) > 0


async def test_a_finished_session_takes_no_turn_but_answers_and_takes_rewards(store, key, rng):
    conversation = grown(rng, 1)
    await commit_all(store, key, conversation)
    for _ in range(2):
        view = await store.finish(key, status="solved", reward=0.5)
    assert (view.state, view.status, view.reward) == ("finished", "solved", 0.5)
    with pytest.raises(SessionFinished):
        await store.commit(key, conversation.then(rng).head, OPENING)
    await store.commit(key, conversation.head, OPENING)  # a repeat of one that is there
    await store.set_reward(key, -1.0, source="judge")
    await store.set_reward(key, 0.25, turn_id=conversation.head.turn_id, source="judge")
    forest = await store.turns(key)
    assert forest.session.reward == -1.0
    assert forest.rewards == {conversation.head.turn_id: Reward(0.25, "judge")}


async def test_what_does_not_exist_is_named(store, key, rng):
    for missing in (
        store.session(key),
        store.delete(key),
        store.finish(key),
        store.turns(key),
        store.set_reward(key, 1.0),
    ):
        with pytest.raises(SessionMissing):
            await missing
    await store.open_session(key, OPENING)
    for missing in (store.turn(key, "nope"), store.lineage_of(key, "nope"), store.set_reward(key, 1.0, "nope")):
        with pytest.raises(TurnMissing):
            await missing
    found = await store.find(grown(rng, 2).query(key))
    assert (found.candidates, found.lineage, found.session.turns) == ((), None, 0)


async def test_opening_a_session_keeps_what_it_was_made_with(store, other_store, key, rng):
    opening = SessionOpening(
        run_id="run/1",
        group_id="g",
        group_size=8,
        metadata={"seed": 2**70, "né": ["x"]},
        sampling_params={"temperature": 0.7},
        ttl_s=120,
        on_rendering_change="fork",
        on_overflow="error",
        thinking="keep",
        parent_session_id="p",
    )
    view, created = await store.open_session(key, opening)
    assert created
    assert view.opening == opening
    again, created = await other_store.open_session(key, SessionOpening(run_id="other"))
    assert not created
    assert again == view
    await store.commit(key, grown(rng, 1).head, SessionOpening(run_id="other"))
    assert (await store.session(key)).opening == opening


async def test_lineage_of_reads_any_turn(store, other_store, key, rng):
    conversation = grown(rng, 4)
    await commit_all(store, key, conversation)
    at = conversation.turns[1]
    lineage = await other_store.lineage_of(key, at.turn_id)
    assert np.array_equal(lineage.tokens, conversation.tokens[: at.prompt_length + len(at.generation)])
    assert lineage.head.turn_id == at.turn_id


async def test_two_tenants_with_one_session_id_do_not_meet(store, tenant, rng):
    mine, theirs = SessionKey(tenant, "s"), SessionKey(tenant + "x", "s")
    conversation = grown(rng, 2)
    await commit_all(store, mine, conversation)
    found = await store.find(conversation.query(theirs))
    assert (found.session, found.candidates) == (None, ())


async def test_a_chain_is_matched_where_the_history_was_edited_above(store, key, rng):
    conversation = grown(rng, 3)
    await commit_all(store, key, conversation)
    messages = (*conversation.messages[:-1], Message("assistant", "edited"), Message("user", "next"))
    chain = tuple(h for h, m in zip(chain_hashes(messages), messages, strict=True) if m.role == "assistant")
    found = await store.find(replace(conversation.query(key), chain=chain))
    assert found.candidates[0].depth == 2
    assert found.lineage.head.turn_id == conversation.turns[1].turn_id


def _key(key: SessionKey, part: str) -> str:
    return f"ts1:{{{key.tenant}:{key.session_id}}}:{part}"
