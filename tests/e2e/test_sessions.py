"""The session routes, identity and keys, and what a person sees with redis-cli."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgpack
import pytest
import pytest_asyncio
import redis.asyncio as redis_client

from api.demo.processes import Child
from store.embedded import EmbeddedRedis
from tests.e2e.conftest import running_stack
from tests.e2e.stack import CALL, TOOLS, Stack, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = [{"role": "user", "content": "Hello."}]


async def test_a_session_can_be_opened_shown_listed_and_deleted(stack: Stack) -> None:
    opened = await stack.call(
        "POST", "/sessions", json={"run_id": "run-1", "group_id": "g", "metadata": {"task": 7}, "group_size": 4}
    )
    assert opened.status == 201
    session = opened.body["session_id"]
    assert opened.body["base_url"].endswith(f"/sessions/{session}/v1")
    await stack.chat(HELLO, session=session)
    shown = (await stack.call("GET", f"/sessions/{session}")).body
    assert (shown["run_id"], shown["group_id"], shown["metadata"]) == ("run-1", "g", {"task": 7})
    assert (shown["turns"], shown["state"], len(shown["roots"])) == (1, "open", 1)
    listed = (await stack.call("GET", "/sessions?run_id=run-1")).body["sessions"]
    assert [s["session_id"] for s in listed] == [session]
    assert (await stack.call("DELETE", f"/sessions/{session}")).status == 204
    assert (await stack.call("GET", f"/sessions/{session}")).status == 410
    gone = await stack.chat(HELLO, session=session)
    assert (gone.status, gone.code) == (410, "session_closed")


async def test_pages_of_sessions_meet_without_gaps(stack: Stack) -> None:
    for n in range(7):
        await stack.call("POST", "/sessions", json={"session_id": f"paged-{n}", "run_id": "paged"})
    seen: list[str] = []
    cursor = ""
    while True:
        page = (await stack.call("GET", f"/sessions?run_id=paged&limit=3&cursor={cursor}")).body
        seen += [s["session_id"] for s in page["sessions"]]
        cursor = page["cursor"]
        if not cursor:
            break
    assert sorted(seen) == [f"paged-{n}" for n in range(7)]


@pytest.mark.parametrize("session", ["a/b/c", "it's {odd}:*?", "ünï-☃", "..", "%2F", "a b+c&d=e#f"])
async def test_ids_with_slashes_and_odd_characters_are_one_session(stack: Stack, session: str) -> None:
    talk = Talk(stack)
    talk.session = session
    await talk.say("Hello.")
    second = await talk.say("Again.")
    assert second.splice == "spliced"
    by_header = await stack.chat(talk.messages, headers={"x-session-id": session} if session.isascii() else {})
    if session.isascii():
        assert by_header.parent == second.turn_id
    assert len(await stack.turns(session)) == (3 if session.isascii() else 2)


async def test_a_missing_session_is_404_and_a_bad_body_names_its_field(stack: Stack) -> None:
    assert (await stack.call("GET", "/sessions/no-such")).code == "not_found"
    assert (await stack.call("GET", "/sessions/no-such/turns")).code == "not_found"
    bad = await stack.call("POST", "/sessions", json={"metdata": {}})
    assert (bad.status, bad.code) == (400, "invalid_request")
    assert "metdata" in bad.body["error"]["message"]
    bad = await stack.call("POST", "/v1/chat/completions", json={"messages": [{"role": "usr", "content": 1}]})
    assert (bad.status, bad.code) == (400, "invalid_request")
    assert "messages" in bad.body["error"]["param"]
    bad = await stack.call("POST", "/v1/chat/completions", data=b"{nonsense")
    assert (bad.status, bad.code) == (400, "invalid_request")
    assert (await stack.call("GET", "/nowhere")).code == "not_found"
    assert (await stack.call("GET", "/sessions?limit=0")).code == "invalid_request"


async def test_finish_seals_and_rewards_are_kept(stack: Stack) -> None:
    talk = Talk(stack)
    await talk.say("Hello.")
    await stack.call("POST", f"/sessions/{talk.session}/reward", json={"reward": 0.5, "source": "unit tests"})
    done = await stack.call("POST", f"/sessions/{talk.session}/finish", json={"status": "solved"})
    assert (done.body["state"], done.body["status"], done.body["reward"]) == ("finished", "solved", 0.5)
    later = await talk.say("More?")
    assert (later.status, later.code) == (409, "session_finished")
    trajectory = (await stack.call("GET", f"/sessions/{talk.session}/trajectory")).body
    assert trajectory["reward"] == 0.5
    assert trajectory["samples"][0]["reward"] == 0.5


async def test_the_trajectory_is_what_the_engine_received_and_sampled(stack: Stack) -> None:
    talk = Talk(stack, tools=TOOLS)
    await stack.script({"text": CALL})
    await talk.say("List.")
    await talk.answer_tools("a.txt")
    last = await talk.say("Thanks.")
    entry = (await stack.record())[last.turn_id]
    sample = (await stack.call("GET", f"/sessions/{talk.session}/trajectory")).body["samples"][0]
    assert sample["token_ids"] == entry["input_ids"] + entry["output_ids"]
    assert len(sample["loss_mask"]) == len(sample["log_probs"]) == len(sample["token_ids"])
    record = await stack.record()
    for turn in sample["turns"]:
        generated = record[turn["turn_id"]]["output_ids"]
        assert sample["token_ids"][turn["generation_start"] : turn["generation_end"]] == generated
        assert set(sample["loss_mask"][turn["generation_start"] : turn["generation_end"]]) == {1}
        assert set(sample["loss_mask"][turn["prompt_start"] : turn["generation_start"]]) == {0}
    assert [m["role"] for m in sample["messages"]] == [m["role"] for m in talk.messages]
    url = talk.stack.workers[0].url + f"/sessions/{talk.session}/trajectory"
    async with stack.client.get(url, headers={"accept": "application/msgpack"}) as answer:
        assert msgpack.unpackb(await answer.read())["samples"][0]["token_ids"] == sample["token_ids"]


async def test_hgetall_on_a_sessions_main_key_tells_a_person_what_it_is(stack: Stack) -> None:
    talk = Talk(stack)
    await talk.say("Hello.")
    await talk.say("Again.")
    client = redis_client.Redis(unix_socket_path=stack.redis_url.removeprefix("unix://"), decode_responses=True)
    try:
        fields: dict[str, str] = await client.hgetall(f"ts1:{{default:{talk.session}}}:session:{talk.session}")
    finally:
        await client.aclose()
    turns = await stack.turns(talk.session or "")
    total = sum(len(t["delta_token_ids"]) + len(t["generation_token_ids"]) for t in turns)
    assert fields["id"] == talk.session
    assert fields["model"] == "m"
    assert int(fields["turns"]) == 2
    assert int(fields["tokens"]) == total
    assert fields[f"root:{turns[0]['turn_id']}"].startswith(turns[0]["rendering_signature"])
    assert fields["updated"].startswith("20")


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def keyed(
    start_engine: Callable[..., Child], start_worker: Callable[..., Child], tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[Stack]:
    """A deployment with keys of two tenants, an engine with a key, and a small body limit."""
    arguments = ("--api-keys", "red:k1,blue:k2", "--engine-api-key", "secret", "--max-body-bytes", "20000")
    async with running_stack(
        start_engine,
        start_worker,
        EmbeddedRedis(tmp_path_factory.mktemp("redis")),
        workers=1,
        engine_arguments=("--api-key", "secret"),
        worker_arguments=arguments,
    ) as running:
        yield running


def _bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_tenants_need_a_key_and_never_see_each_other(keyed: Stack) -> None:
    refused = await keyed.chat(HELLO, session="shared")
    assert (refused.status, refused.code) == (401, "unauthorized")
    assert (await keyed.chat(HELLO, session="shared", headers=_bearer("wrong"))).status == 401
    red = await keyed.chat(HELLO, session="shared", headers=_bearer("k1"))
    blue = await keyed.chat(HELLO, session="shared", headers={"x-api-key": "k2"})
    assert red.splice == blue.splice == "fresh; reason=first_turn"
    for key in ("k1", "k2"):
        listed = (await keyed.call("GET", "/sessions", headers=_bearer(key))).body["sessions"]
        assert [(s["session_id"], s["turns"]) for s in listed] == [("shared", 1)]
    assert (await keyed.call("GET", "/sessions/shared")).status == 401


async def test_a_session_key_is_the_session_and_opens_no_other(keyed: Stack) -> None:
    opened = (await keyed.call("POST", "/sessions", json={"session_id": "only"}, headers=_bearer("k1"))).body
    key = _bearer(opened["api_key"])
    talk = Talk(keyed, named=False, headers=key)
    first = await talk.say("Hello.")
    second = await talk.say("Again.")
    assert (first.session, second.session, second.splice) == ("only", "only", "spliced")
    other = await keyed.call("GET", "/sessions/shared", headers=key)
    assert (other.status, other.code) == (403, "forbidden")
    assert (await keyed.call("GET", "/sessions", headers=key)).status == 403
    forged = opened["api_key"][:-1] + ("0" if opened["api_key"][-1] != "0" else "1")
    assert (await keyed.chat(HELLO, headers=_bearer(forged))).status == 401


async def test_a_body_above_the_limit_is_413(keyed: Stack) -> None:
    large: list[dict[str, Any]] = [{"role": "user", "content": "x" * 30_000}]
    reply = await keyed.chat(large, headers=_bearer("k1"))
    assert (reply.status, reply.code) == (413, "body_too_large")


async def test_metrics_count_what_happened(stack: Stack) -> None:
    worker = stack.workers[0].url

    async def counted(line: str) -> float:
        text = str((await stack.call("GET", "/metrics", worker=worker)).body)
        return sum(float(row.rsplit(" ", 1)[1]) for row in text.splitlines() if row.startswith(line))

    spliced = 'tokensplice_turns_total{origin="spliced",outcome="committed",reason=""}'
    before = await counted(spliced)
    talk = Talk(stack)
    await talk.say("One.", worker=worker)
    await talk.say("Two.", worker=worker)
    assert await counted(spliced) == before + 1
    assert await counted("tokensplice_turn_stage_seconds_count") > 0


async def test_models_are_the_engines(stack: Stack) -> None:
    models = (await stack.call("GET", "/v1/models")).body
    assert models["object"] == "list"
    assert models["data"][0]["id"] == "simulated"


async def test_many_sessions_at_once_are_answered(stack: Stack) -> None:
    talks = [Talk(stack) for _ in range(48)]
    await asyncio.gather(*(talk.say("Hello.") for talk in talks))
    await asyncio.gather(*(talk.say("Again.") for talk in talks))
    for talk in talks[::12]:
        await talk.assert_all_contiguous()
