"""Ids come from clients: none may leave its place in a key, or reach another tenant's."""

from __future__ import annotations

import random
import secrets

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from store import keys
from store.views import SessionKey, SessionOpening
from tests.store.building import grown

HOSTILE = [
    *("", " ", "a b", "{x}", "}", "{", ":", "a:b", "%", "%25", "\n", "\x00", "a/../b", "*", "~", "-"),
    *("\u00e9\U0001f600", "\ud800"),
]
IDS = st.one_of(st.sampled_from(HOSTILE), st.text(max_size=12), st.text(st.characters(codec=None), max_size=4))


@given(IDS)
@example("%7B")
def test_a_quoted_id_comes_back_and_holds_nothing_that_separates(identifier):
    quoted = keys.quote(identifier)
    assert keys.unquote(quoted) == identifier
    assert quoted
    assert quoted.isascii()
    assert not set(quoted) & set("{}: *?[]\n\r\t\0/\\")


@given(IDS, IDS, IDS, IDS)
def test_no_two_sessions_share_a_key_or_a_tag(tenant, session, other_tenant, other_session):
    if (tenant, session) == (other_tenant, other_session):
        return
    mine = {*keys.Tree(tenant, session).all(session), keys.listing(tenant), keys.listing(tenant, session or "r")}
    theirs = {*keys.Tree(other_tenant, other_session).all(other_session), keys.seen(other_tenant, "A" * 22)}
    if tenant != other_tenant:
        theirs |= {keys.listing(other_tenant), keys.listing(other_tenant, other_session or "r")}
    assert not mine & theirs
    tag = keys.Tree(tenant, session).tag
    assert all(name.startswith(tag + ":") for name in keys.Tree(tenant, session).all(session))
    assert tag.count("{") == tag.count("}") == 1


@pytest.mark.parametrize("session", HOSTILE)
async def test_a_session_of_any_name_works_and_is_listed_by_it(store, session):
    tenant = f"{session}{secrets.token_hex(6)}{session}"
    key, conversation = SessionKey(tenant, session), grown(random.Random(1), 2)
    opening = SessionOpening(run_id=session + "r", group_id=session)
    for turn, idempotency_key in zip(conversation.turns, ("", session + "k"), strict=True):
        await store.commit(key, turn, opening, idempotency_key=idempotency_key, unnamed=True)
    found = await store.find(conversation.same_query(key, idempotency_key=session + "k", hints=(session + "h",)))
    assert found.session.opening == opening
    assert found.idempotent[0] == conversation.head.turn_id
    assert found.unknown_hints == (session + "h",)
    assert np.array_equal((await store.lineage_of(key, conversation.head.turn_id)).tokens, conversation.tokens)
    assert [view.key for view in (await store.sessions(tenant, session + "r")).sessions] == [key]
    assert (await store.trace(tenant, conversation.chain()))[0].session_id == session
    await store.delete(key)
    assert (await store.sessions(tenant)).sessions == ()
