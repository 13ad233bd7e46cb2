"""The simulated engine's script: exact answers, and every way in which an engine can misbehave."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import aiohttp
import orjson
import pytest

from tests.api.simulated import RELEASES, Json, chat, engine, vocabulary

PROMPT = chat("Write something long, please")


async def test_scripted_text_and_ids_are_answered_exactly() -> None:
    vocab = vocabulary()
    async with engine() as client:
        await client.script(
            {"text": "<think>\nhm</think>ok"},
            {"ids": [5, 6, 7], "log_probs": [-0.5, -1.0, -2.0]},
            {"text": "x", "eos": False, "finish": {"type": "stop", "matched": None}},
            {"ids": []},
        )
        thinking, exact, open_ended, empty = [await client.generate(PROMPT) for _ in range(4)]
    assert thinking["text"] == "<think>\nhm</think>ok"
    assert thinking["output_ids"][0] == vocab.encode("<think>")[0]
    assert exact["meta_info"]["output_token_logprobs"] == [[-0.5, 5, None], [-1.0, 6, None], [-2.0, 7, None]]
    assert open_ended["meta_info"]["finish_reason"] == {"type": "stop", "matched": None}
    assert (empty["output_ids"], empty["meta_info"]["output_token_logprobs"]) == ([], [])


async def test_directives_find_their_generation_by_prompt_and_by_number() -> None:
    async with engine() as client:
        await client.script({"match": "blue", "text": "was blue"}, {"call": 3, "text": "was third"}, {"text": "next"})
        texts = [(await client.generate(chat(word)))["text"] for word in ("red", "blue", "red", "red")]
    assert texts[:3] == ["next", "was blue", "was third"]
    assert texts[3] not in {"next", "was blue", "was third"}


async def test_a_directive_with_a_misspelt_name_is_refused() -> None:
    async with engine() as client:
        status, body = await client.post("/sim/script", [{"txet": "x"}])
        assert status == 400
        assert "txet" in body["error"]["message"]


def first_triple(reply: Json) -> list[Any]:
    triple: list[Any] = reply["meta_info"]["output_token_logprobs"][0]
    return triple


BREACHES = {
    "abort": lambda r: r["meta_info"]["finish_reason"]["type"] == "abort" and r["output_ids"],
    "abort_queued": lambda r: "prompt_tokens" not in r["meta_info"],
    "ids_missing": lambda r: "output_ids" not in r,
    "log_probs_missing": lambda r: "output_token_logprobs" not in r["meta_info"],
    "counts_differ": lambda r: len(r["meta_info"]["output_token_logprobs"]) == len(r["output_ids"]) - 1,
    "completion_tokens_differ": lambda r: r["meta_info"]["completion_tokens"] == len(r["output_ids"]) + 1,
    "ids_disagree": lambda r: first_triple(r)[1] != r["output_ids"][0],
    "null_log_prob": lambda r: first_triple(r)[0] is None,
    "nan_log_prob": lambda r: first_triple(r)[0] != first_triple(r)[0],
    "id_outside_vocabulary": lambda r: first_triple(r)[1] == r["output_ids"][0] > 151_669,
    "nan_happened": lambda r: r["meta_info"]["finish_reason"]["matched"] == "NaN happened",
}


@pytest.mark.parametrize("fault", BREACHES)
async def test_the_script_can_break_the_contract(fault: str) -> None:
    async with engine() as client:
        await client.script({"fault": fault, "times": 2})
        body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 900}, "return_logprob": True}
        async with client.session.post(client.url + "/generate", json=body) as response:
            assert response.status == 200
            assert BREACHES[fault](json.loads(await response.read()))
        async with client.session.post(client.url + "/generate", json=body | {"stream": True}) as response:
            last = (await response.read()).split(b"\n\n")[-3].removeprefix(b"data: ")
            assert BREACHES[fault](json.loads(last))
        assert [entry["fault"] for entry in await client.record()] == [fault] * 2
        expected = "aborted" if fault.startswith("abort") else "answered"
        assert [entry["outcome"] for entry in await client.record()] == [expected] * 2
        await client.generate(PROMPT)


@pytest.mark.parametrize(
    ("directive", "status", "body"),
    [
        ({"fault": "busy"}, 503, "The request queue is full."),
        ({"fault": "abort_status", "status": 500, "message": "oh"}, 500, "oh"),
        ({"fault": "abort_status", "status": 400, "message": "oh"}, 400, "oh"),
        ({"fault": "crash"}, 500, "Internal Server Error"),
        ({"fault": "too_long"}, 400, "longer than the model's context length"),
        ({"fault": "raw", "status": 502, "body": "<h1>Bad Gateway</h1>"}, 502, "<h1>"),
    ],
)
async def test_the_script_can_refuse(directive: Json, status: int, body: str) -> None:
    async with engine() as client:
        await client.script(directive)
        got, words = await client.refused(PROMPT)
        assert got == status
        assert body in str(words)
        assert (await client.record())[0]["outcome"] == "failed"
        await client.generate(PROMPT)


@pytest.mark.parametrize(("release", "expected"), list(zip(RELEASES, (200, 200, 429), strict=True)))
async def test_older_releases_pass_on_few_statuses_of_an_abort(release: str, expected: int) -> None:
    async with engine(version=release) as client:
        await client.script({"fault": "abort_status", "status": 429, "message": "slow down"})
        status, body = await client.refused(PROMPT)
        assert status == expected
        if status == 200:
            assert body["meta_info"]["finish_reason"]["status_code"] == 429
            assert (body["meta_info"]["prompt_tokens"], len(body["output_ids"])) == (1, 1)


async def test_the_script_can_cut_the_connection_before_and_within_the_body() -> None:
    async with engine() as client:
        await client.script({"fault": "drop_before"}, {"fault": "drop_midway"}, {"fault": "drop_midway"})
        with pytest.raises(aiohttp.ClientError):
            await client.generate(PROMPT)
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.generate(PROMPT)
        with pytest.raises(aiohttp.ClientPayloadError):
            await client.stream(PROMPT)
        assert [entry["outcome"] for entry in await client.record()] == ["failed"] * 3


async def test_the_script_can_answer_garbage() -> None:
    async with engine() as client:
        await client.script({"fault": "garbage"})
        async with client.session.post(client.url + "/generate", json={"input_ids": PROMPT}) as response:
            assert response.status == 200
            with pytest.raises(orjson.JSONDecodeError):
                orjson.loads(await response.read())


async def test_the_script_can_keep_a_client_waiting() -> None:
    async with engine() as client:
        await client.script({"delay_s": 30})
        waiting = asyncio.create_task(client.generate(PROMPT, rid="slow"))
        await client.until_running()
        await client.generate(PROMPT)
        assert not waiting.done()
        await client.post("/abort_request", {"rid": "slow"})
        await waiting
