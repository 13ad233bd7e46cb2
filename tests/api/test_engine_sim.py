"""The simulated engine on the wire: limits, stops, streams, aborts, pauses, keys and its record."""

from __future__ import annotations

import ast
import asyncio
import sys
from pathlib import Path

import aiohttp
import pytest

import api.demo.sim
from api.assets import qwen3_directory
from tests.api.simulated import RELEASES, TOOLS, Client, chat, engine, vocabulary

PROMPT = chat("Write something long, please")


def test_the_simulation_shares_no_code_with_what_it_judges() -> None:
    folder = Path(api.demo.sim.__file__).parent
    allowed = {"aiohttp", "click", "msgspec", "numpy", "orjson", "tokenizers"}
    for path in (*folder.glob("*.py"), folder.parent / "engine_sim.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            for name in names:
                own = name.startswith("api.demo.sim") or name == "api.assets"  # assets only finds a tokenizer's folder
                assert own or not name.startswith("api"), f"{path.name} imports {name}"
                root = name.partition(".")[0]
                assert root in allowed | {"api"} | sys.stdlib_module_names, f"{path.name} imports {name}"


# Lengths.


def prompt_of(length: int) -> list[int]:
    return (PROMPT * (length // len(PROMPT) + 1))[:length]


@pytest.mark.parametrize(
    ("length", "max_new_tokens", "words"),
    [
        (100, None, "The input (100 tokens) is longer than the model's context length (100 tokens)."),
        (99, None, "Input length (99 tokens) exceeds the maximum allowed length (94 tokens). "),
        (94, None, "Input length (94 tokens) exceeds the maximum allowed length (94 tokens). "),
        (60, 41, "Requested token count exceeds the model's maximum context length of 100 tokens. "),
    ],
)
async def test_what_does_not_fit_the_window_is_a_400_with_the_engines_words(
    length: int, max_new_tokens: int | None, words: str
) -> None:
    async with engine(context_length=100) as client:
        status, body = await client.refused(prompt_of(length), sampling={"max_new_tokens": max_new_tokens})
        assert status == 400
        assert body["error"]["message"].startswith(words)
        assert (await client.record())[0]["outcome"] == "failed"


async def test_the_longest_accepted_prompt_is_seven_short_of_the_window() -> None:
    async with engine(context_length=100) as client:
        reply = await client.generate(prompt_of(93), sampling={"max_new_tokens": None})
        assert len(reply["output_ids"]) == 5
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 5}


async def test_a_generation_within_the_window_is_clamped_silently_by_two() -> None:
    async with engine(context_length=100) as client:
        reply = await client.generate(prompt_of(60), sampling={"max_new_tokens": 40, "ignore_eos": True})
        assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 38}


async def test_a_stream_learns_of_a_long_prompt_by_an_event() -> None:
    async with engine(context_length=100) as client:
        (event,) = await client.stream(prompt_of(100), sampling={"max_new_tokens": None})
        assert event["error"] == {
            "message": "The input (100 tokens) is longer than the model's context length (100 tokens).",
            "type": "invalid_request_error",
            "code": 400,
            "retryable": False,
        }
        (chunk,) = await client.stream(prompt_of(95), sampling={"max_new_tokens": None})
        assert chunk["meta_info"]["finish_reason"]["status_code"] == 400


async def test_a_server_that_truncates_does_so_silently_and_says_so_only_in_its_info() -> None:
    async with engine(context_length=100, allow_auto_truncate=True) as client:
        reply = await client.generate(prompt_of(150), sampling={"max_new_tokens": 4}, return_prompt_token_ids=True)
        assert reply["prompt_token_ids"] == prompt_of(93)
        assert reply["meta_info"]["prompt_tokens"] == 93
        assert (await client.get("/server_info"))[1]["allow_auto_truncate"] is True


async def test_a_prompt_may_be_put_and_may_be_text() -> None:
    text = vocabulary().decode(PROMPT)
    async with engine() as client:
        async with client.session.put(client.url + "/generate", json={"text": text}) as response:
            reply = await response.json()
        assert reply["meta_info"]["prompt_tokens"] == len(PROMPT)
        assert "output_token_logprobs" not in reply["meta_info"]
        assert (await client.record())[0]["input_ids"] == PROMPT


# Stops.


async def test_the_request_may_forbid_or_delay_the_end() -> None:
    async with engine() as client:
        for n in range(5):
            ignoring = await client.generate(chat(f"{n}"), sampling={"max_new_tokens": 300, "ignore_eos": True})
            assert ignoring["meta_info"]["finish_reason"] == {"type": "length", "length": 300}
            delayed = await client.generate(chat(f"{n}"), sampling={"max_new_tokens": 900, "min_new_tokens": 300})
            assert len(delayed["output_ids"]) > 300
            assert delayed["meta_info"]["finish_reason"]["type"] == "stop"


async def test_no_tokens_asked_for_is_an_empty_generation() -> None:
    async with engine() as client:
        reply = await client.generate(PROMPT, sampling={"max_new_tokens": 0})
    assert (reply["output_ids"], reply["text"]) == ([], "")
    assert reply["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert reply["meta_info"]["output_token_logprobs"] == []


async def test_without_a_limit_in_the_request_it_is_128() -> None:
    async with engine() as client:
        reply = await client.generate(PROMPT, sampling={"ignore_eos": True})
    assert len(reply["output_ids"]) == 128


@pytest.mark.parametrize(("release", "reason"), list(zip(RELEASES, ("length", "length", "stop"), strict=True)))
async def test_releases_disagree_about_eos_on_the_last_allowed_token(release: str, reason: str) -> None:
    async with engine(version=release) as client:
        await client.script({"text": "one two three four", "canonical": True})
        reply = await client.generate(PROMPT, sampling={"max_new_tokens": 5})
    assert len(reply["output_ids"]) == 5
    assert reply["meta_info"]["finish_reason"]["type"] == reason


async def test_tokens_that_spell_a_stop_string_stay_among_the_ids() -> None:
    vocab = vocabulary()
    async with engine() as client:
        await client.script({"text": "alpha beta STOP HERE gamma", "canonical": True, "times": 2})
        reply = await client.generate(PROMPT, sampling={"max_new_tokens": 50, "stop": ["zzz", "STOP HERE"]})
        kept = await client.generate(PROMPT, sampling={"max_new_tokens": 50, "stop": "STOP HERE", "no_stop_trim": True})
    assert reply["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP HERE"}
    assert vocab.decode(reply["output_ids"]) == "alpha beta STOP HERE"
    assert reply["text"] == "alpha beta "
    assert kept["text"] == "alpha beta STOP HERE"


async def test_a_regex_and_a_stop_token_stop_too() -> None:
    vocab = vocabulary()
    comma = vocab.encode(",")[0]
    async with engine() as client:
        await client.script({"text": "x 12345 y, z", "canonical": True, "times": 3})
        by_regex = await client.generate(PROMPT, sampling={"max_new_tokens": 50, "stop_regex": r"3\d"})
        by_token = await client.generate(PROMPT, sampling={"max_new_tokens": 50, "stop_token_ids": [comma]})
        ignored = await client.generate(
            PROMPT, sampling={"max_new_tokens": 50, "stop_token_ids": [comma], "ignore_eos": True}
        )
    assert vocab.decode(by_regex["output_ids"]) == "x 1234"
    assert by_token["output_ids"][-1] == comma == by_token["meta_info"]["finish_reason"]["matched"]
    assert ignored["output_ids"].count(comma) == 1
    assert ignored["output_ids"][-1] != comma


async def test_special_tokens_show_in_the_text_only_when_asked_for() -> None:
    async with engine() as client:
        reply = await client.generate(
            PROMPT, sampling={"max_new_tokens": 900, "no_stop_trim": True, "skip_special_tokens": False}
        )
    assert reply["text"].endswith("<|im_end|>")


# Streams.


async def test_chunks_repeat_everything_from_the_start_by_default() -> None:
    async with engine(stream_interval=7) as client:
        chunks = await client.stream(PROMPT)
        final = chunks[-1]
        assert len(chunks) > 3
        for chunk in chunks:
            ids, meta = chunk["output_ids"], chunk["meta_info"]
            assert ids == final["output_ids"][: len(ids)]
            assert final["text"].startswith(chunk["text"])
            assert len(ids) == meta["completion_tokens"] == len(meta["output_token_logprobs"])
            assert (meta["finish_reason"] is None) == (chunk is not final)
        assert final["output_ids"] == (await client.record())[0]["output_ids"]


async def test_incremental_chunks_add_up_to_the_generation() -> None:
    async with engine(stream_interval=5, incremental_streaming=True) as client:
        chunks = await client.stream(PROMPT)
        (entry,) = await client.record()
        assert [token for chunk in chunks for token in chunk["output_ids"]] == entry["output_ids"]
        triples = [triple for chunk in chunks for triple in chunk["meta_info"]["output_token_logprobs"]]
        assert [token for _, token, _ in triples] == entry["output_ids"]
        assert chunks[-1]["meta_info"]["output_token_logprobs_length"] == len(triples)
        assert "".join(chunk["text"] for chunk in chunks) + "<|im_end|>" == entry["text"]
        assert (await client.get("/server_info"))[1]["incremental_streaming_output"] is True


# In flight: duplicates, aborts, pauses, slots.


async def test_a_request_id_in_flight_is_refused_and_free_again_afterwards() -> None:
    async with engine(first_token_s=0.2) as client:
        first = asyncio.create_task(client.generate(PROMPT, rid="same"))
        await client.until_running()
        status, body = await client.refused(PROMPT, rid="same")
        assert (status, body) == (400, {"error": {"message": "Duplicate request ID detected: same"}})
        await first
        await client.generate(PROMPT, rid="same")


async def test_an_abort_takes_every_request_whose_id_begins_so_and_keeps_what_was_made() -> None:
    async with engine(per_token_s=0.05) as client:
        playing = [asyncio.create_task(client.generate(PROMPT, rid=rid)) for rid in ("a1", "a10", "b1")]
        await client.until_running(3)
        await asyncio.sleep(0.25)
        assert await client.post("/abort_request", {"rid": "a1"}) == (200, "")
        for reply in await asyncio.gather(*playing[:2]):
            made = len(reply["output_ids"])
            assert made >= 2
            assert reply["meta_info"]["completion_tokens"] == made == len(reply["meta_info"]["output_token_logprobs"])
            assert reply["meta_info"]["finish_reason"] == {
                "type": "abort", "message": "Aborted", "status_code": None, "err_type": None,
            }  # fmt: skip
        assert not playing[2].done()
        await client.post("/abort_request", {"abort_all": True})
        await playing[2]
        assert [entry["outcome"] for entry in await client.record()] == ["aborted"] * 3


async def test_a_client_that_hangs_up_aborts_its_request() -> None:
    async with engine(first_token_s=30) as client:
        leaving = asyncio.create_task(client.generate(PROMPT))
        await client.until_running()
        leaving.cancel()
        while (await client.record())[0]["outcome"] == "running":  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        assert (await client.record())[0]["outcome"] == "aborted"


async def test_a_request_aborted_in_the_queue_has_no_counts_and_one_too_many_gets_503() -> None:
    async with engine(first_token_s=30, max_running=1, max_queued=1) as client:
        running = asyncio.create_task(client.generate(PROMPT, rid="running"))
        await client.until_running(1)
        queued = asyncio.create_task(client.generate(PROMPT, rid="queued"))
        await client.until_running(2)
        status, body = await client.refused(PROMPT, rid="one too many")
        assert status == 503
        assert body == {
            "object": "error", "message": "The request queue is full.", "type": "503", "param": None, "code": 503,
        }  # fmt: skip
        (chunk,) = await client.stream(PROMPT)
        assert chunk["meta_info"]["finish_reason"]["status_code"] == 503
        await client.post("/abort_request", {"rid": "queued"})
        meta = (await queued)["meta_info"]
        assert meta["finish_reason"] == {"type": "abort", "message": "Abort in waiting queue"}
        assert {"prompt_tokens", "cached_tokens", "num_retractions"}.isdisjoint(meta)
        await client.post("/abort_request", {"rid": "running"})
        await running


async def test_a_slot_that_becomes_free_goes_to_the_queue() -> None:
    async with engine(first_token_s=0.05, max_running=1, max_queued=5) as client:
        replies = await asyncio.gather(*(client.generate(PROMPT) for _ in range(4)))
    assert all(reply["meta_info"]["finish_reason"]["type"] == "stop" for reply in replies)


async def test_a_pause_ends_what_runs_and_holds_what_comes_until_it_is_over() -> None:
    async with engine(first_token_s=0.3) as client:
        running = asyncio.create_task(client.generate(PROMPT))
        await client.until_running()
        assert await client.post("/pause_generation", {}) == (
            200, {"message": "Generation paused successfully.", "status": "ok"},
        )  # fmt: skip
        assert (await running)["meta_info"]["finish_reason"]["type"] == "abort"
        held = asyncio.create_task(client.generate(PROMPT))
        await asyncio.sleep(0.4)
        assert not held.done()
        assert (await client.get("/health"))[0] == 200
        await client.post("/continue_generation", {})
        assert (await held)["meta_info"]["finish_reason"]["type"] == "stop"


async def test_weights_updated_within_a_generation_show_as_spans() -> None:
    async with engine(version="0.5.23", per_token_s=0.02, weight_version="v1") as client:
        playing = asyncio.create_task(client.generate(PROMPT))
        await client.until_running()
        await asyncio.sleep(0.1)
        status, body = await client.post("/update_weight_version", {"new_version": "v2", "abort_all_requests": False})
        assert (status, body["new_version"]) == (200, "v2")
        meta = (await playing)["meta_info"]
        first, second = meta["weight_versions"]
        assert (first["version"], second["version"], meta["weight_version"]) == ("v1", "v2", "v2")
        assert 0 == first["start"] < first["end"] == second["start"] < second["end"] == meta["completion_tokens"]
        assert (await client.get("/model_info"))[1]["weight_version"] == "v2"


async def test_a_weight_update_aborts_everything_unless_told_otherwise() -> None:
    async with engine(first_token_s=30) as client:
        playing = asyncio.create_task(client.generate(PROMPT))
        await client.until_running()
        await client.post("/update_weight_version", {"new_version": "v2"})
        assert (await playing)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_the_cache_is_not_flushed_while_requests_run() -> None:
    async with engine(first_token_s=0.3) as client:
        playing = asyncio.create_task(client.generate(PROMPT))
        await client.until_running()
        assert (await client.post("/flush_cache", {}))[0] == 400
        await playing
        status, text = await client.get("/flush_cache")
        assert status == 200
        assert text.startswith("Cache flushed.")


# Keys, facts, tokenizer.


async def test_a_key_guards_everything_but_health() -> None:
    async with engine(api_key="sesame", version="0.5.23") as client:
        for path in ("/v1/models", "/server_info", "/model_info"):
            assert await client.get(path) == (401, {"error": "Unauthorized"})
            assert (await client.get(path, authorization="Bearer wrong"))[0] == 401
            assert (await client.get(path, authorization="Bearer sesame"))[0] == 200
        assert (await client.refused(PROMPT))[0] == 401
        assert (await client.post("/abort_request", {"rid": "x"}, authorization="bearer sesame"))[0] == 200
        assert [(await client.get(path))[0] for path in ("/health", "/health_generate", "/ready")] == [200] * 3


async def test_with_an_admin_key_the_plain_one_does_not_open_admin_routes() -> None:
    async with engine(api_key="sesame", admin_api_key="root") as client:
        assert (await client.post("/pause_generation", {}, authorization="Bearer sesame"))[0] == 401
        assert (await client.post("/flush_cache", {}, authorization="Bearer root"))[0] == 200


async def test_the_engine_says_what_it_is() -> None:
    async with engine(context_length=4096, model="tiny") as client:
        _, info = await client.get("/server_info")
        assert info == (await client.get("/get_server_info"))[1]
        assert (info["context_length"], info["max_req_input_len"], info["version"]) == (4096, 4090, "0.5.13")
        _, models = await client.get("/v1/models")
        assert (models["data"][0]["id"], models["data"][0]["max_model_len"]) == ("tiny", 4096)
        assert (await client.get("/get_weight_version"))[1] == {"weight_version": "default"}


async def test_its_tokenizer_answers_over_http() -> None:
    text = "<|im_start|>user\nnaïve 🙂<|im_end|>"
    async with engine() as client:
        status, body = await client.post("/tokenize", {"prompt": text, "add_special_tokens": False})
        assert (status, body["tokens"], body["count"]) == (200, vocabulary().encode(text), len(body["tokens"]))
        both = await client.post("/v1/tokenize", {"prompt": ["a", "b c"]})
        assert both[1]["count"] == [1, 2]
        whole = {"tokens": body["tokens"], "skip_special_tokens": False}
        assert (await client.post("/detokenize", whole))[1] == {"text": text}
        assert (await client.post("/detokenize", {"tokens": [body["tokens"]]}))[1] == {"text": ["user\nnaïve 🙂"]}
        assert (await client.post("/tokenize", {"messages": []}))[0] == 400


# The record.


async def test_the_record_tells_every_request_and_what_became_of_it() -> None:
    async with engine() as client:
        await client.generate(PROMPT, rid="first")
        await client.refused(PROMPT, sampling={"temperature": -1})
        one, two = await client.record()
        assert (one["n"], one["rid"], one["outcome"], one["input_ids"]) == (1, "first", "answered", PROMPT)
        assert one["text"] == vocabulary().decode(one["output_ids"])
        assert one["prompt_tail"].endswith("assistant\n")
        assert "user-agent" in one["headers"]
        assert (two["n"], two["outcome"]) == (2, "failed")
        assert [entry["n"] for entry in await client.record(since=1)] == [2]
        await client.post("/sim/reset", {})
        assert await client.record() == []


async def test_a_record_kept_in_a_file_outlives_the_engine(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    async with engine(record_path=path) as client:
        first = await client.generate(PROMPT)
    with path.open("ab") as file:
        file.write(b'{"n": 2, "torn')
    async with engine(record_path=path) as client:
        second = await client.generate(PROMPT)
        entries = await client.record()
    assert [entry["n"] for entry in entries] == [1, 2]
    assert [entry["output_ids"] for entry in entries] == [first["output_ids"], second["output_ids"]]
    assert first["output_ids"] != second["output_ids"]
    assert len(path.read_bytes().splitlines()) == 2


# For benchmarks.


async def test_in_bench_mode_answers_are_valid_short_work_and_unrecorded() -> None:
    async with engine(bench=True, bench_tokens=64) as client:
        reply = await client.generate(PROMPT, rid="abc")
        meta = reply["meta_info"]
        assert len(reply["output_ids"]) == meta["completion_tokens"] == 64
        assert [token for _, token, _ in meta["output_token_logprobs"]] == reply["output_ids"]
        assert (meta["id"], meta["prompt_tokens"]) == ("abc", len(PROMPT))
        assert meta["finish_reason"] == {"type": "stop", "matched": reply["output_ids"][-1]}
        assert vocabulary().decode(reply["output_ids"][:-1]) == reply["text"]
        assert len((await client.generate(PROMPT, sampling={"max_new_tokens": 9}))["output_ids"]) == 9
        assert await client.record() == []


async def test_the_command_line_serves_a_free_port() -> None:
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "api.demo.engine_sim", "--port", "0", "--tokenizer", str(qwen3_directory())),
        stdout=asyncio.subprocess.PIPE,
    )
    assert process.stdout is not None
    url = (await process.stdout.readline()).decode().strip()
    async with aiohttp.ClientSession() as session:
        reply = await Client(session, url).generate(chat("Hello", TOOLS))
        assert reply["output_ids"]
    process.terminate()
    assert await process.wait() == 0
