"""The SGLang client against the simulated engine, in each of the versions that it plays."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest

from api.engine.base import (
    Completion,
    Engine,
    EngineAborted,
    EngineContract,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    PromptTooLong,
)
from api.engine.create import create_engine
from splice.types import IdArray, WeightSpan, id_array
from tests.api import simulated

VERSIONS = ("0.5.12.post1", "0.5.13", "0.5.23")
CONTEXT_LENGTH = 512


@asynccontextmanager
async def engine(*, timeout_s: float = 20.0, key: str | None = None, **knobs: Any) -> AsyncIterator[Any]:
    """A client of ours, and the simulated engine seen from outside."""
    async with simulated.engine(**{"context_length": CONTEXT_LENGTH, **knobs}) as outside:
        client = create_engine("sglang", [outside.url], key, timeout_s=timeout_s)
        try:
            yield client, outside
        finally:
            await client.close()


def prompt(text: str = "Say hello.") -> IdArray:
    return id_array(simulated.chat(text))


async def generate(
    client: Engine, ids: IdArray, *, max_tokens: int = 100, rid: str = "a" * 32, **wanted: Any
) -> Completion:
    return await client.generate(ids, client.sampling(wanted), max_tokens=max_tokens, rid=rid, affinity="s")


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_generation_is_exactly_what_the_engine_recorded(version: str) -> None:
    async with engine(version=version) as (client, outside):
        told = await generate(client, prompt(), max_tokens=400, temperature=0.7)
        (recorded,) = await outside.record()
    assert recorded["input_ids"] == prompt().tolist()
    assert recorded["output_ids"] == told.ids.tolist()
    assert recorded["log_probs"] == told.log_probs.tolist()
    assert recorded["outcome"] == "answered"
    assert recorded["headers"]["x-smg-routing-key"] == "s"
    assert told.finish.kind == "stop"
    assert told.log_prob_kind == "tempered"
    assert told.weight_versions == (WeightSpan("default", 0, len(told.ids)),)


@pytest.mark.parametrize("version", VERSIONS)
async def test_the_facts_and_the_limits_agree(version: str) -> None:
    async with engine(version=version) as (client, outside):
        told = await client.facts()
        assert (told.version, told.context_length) == (version, CONTEXT_LENGTH)
        largest = id_array(np.full(told.max_prompt_length, 1000, np.uint32))
        assert len((await generate(client, largest, max_tokens=1)).ids) <= 1
        with pytest.raises(PromptTooLong):
            await generate(client, id_array(np.full(told.max_prompt_length + 1, 1000, np.uint32)), max_tokens=1)
        with pytest.raises(PromptTooLong):
            await generate(client, prompt(), max_tokens=CONTEXT_LENGTH)
        assert len(await outside.record()) == 3


@pytest.mark.parametrize("version", VERSIONS)
async def test_a_generation_of_no_tokens_is_empty(version: str) -> None:
    async with engine(version=version) as (client, _):
        told = await generate(client, prompt(), max_tokens=0)
    assert (told.ids.tolist(), told.log_probs.tolist(), told.finish.kind) == ([], [], "length")


FAULTS: dict[str, tuple[dict[str, Any], type[EngineError], str]] = {
    "abort": ({}, EngineAborted, ""),
    "abort_queued": ({}, EngineAborted, ""),
    "abort_status": ({"status": 503}, EngineUnavailable, ""),
    "ids_missing": ({}, EngineContract, "output_ids"),
    "log_probs_missing": ({}, EngineContract, "output_token_logprobs"),
    "counts_differ": ({}, EngineContract, "output_token_logprobs"),
    "completion_tokens_differ": ({}, EngineContract, "completion_tokens"),
    "ids_disagree": ({}, EngineContract, "output_token_logprobs"),
    "nan_log_prob": ({}, EngineContract, "output_token_logprobs"),
    "nan_happened": ({}, EngineContract, "finish_reason"),
    "busy": ({}, EngineUnavailable, ""),
    "crash": ({}, EngineUnavailable, ""),
    "too_long": ({}, PromptTooLong, ""),
    "garbage": ({}, EngineContract, "body"),
    "drop_before": ({}, EngineUnavailable, ""),
    "drop_midway": ({}, EngineUnavailable, ""),
    "raw": ({"status": 502, "body": "<html>Bad Gateway</html>"}, EngineUnavailable, ""),
}


@pytest.mark.parametrize("version", VERSIONS)
async def test_every_fault_is_refused_as_what_it_is(version: str) -> None:
    async with engine(version=version) as (client, outside):
        for fault, (how, meaning, field) in FAULTS.items():
            await outside.script({"fault": fault, **how})
            with pytest.raises(EngineError) as refused:
                await generate(client, prompt(fault))
            assert type(refused.value) is meaning, fault
            assert getattr(refused.value, "field", "") == field, fault
        assert len((await generate(client, prompt())).ids) > 0


async def test_what_only_the_checker_can_judge_is_told_as_it_was() -> None:
    async with engine() as (client, outside):
        await outside.script({"fault": "null_log_prob"}, {"fault": "id_outside_vocabulary"})
        assert np.isnan((await generate(client, prompt())).log_probs).sum() == 1
        assert (await generate(client, prompt())).ids[0] > 151_936


@pytest.mark.parametrize("version", VERSIONS)
async def test_everything_that_sampling_lets_through_the_engine_takes(version: str) -> None:
    wanted: dict[str, Any] = {
        "top_p": 0.9,
        "top_k": 0,
        "min_p": 0.0,
        "frequency_penalty": 0.1,
        "presence_penalty": 0.1,
        "repetition_penalty": 1.1,
        "min_tokens": 0,
        "stop": ["\nEND\n"],
        "stop_token_ids": [151_643],
        "seed": 3,
        "logit_bias": {"9": -1},
        "skip_special_tokens": False,
        "custom_params": {"a": 1},
        "priority": 1,
        "response_format": {"type": "text"},
    }
    async with engine(version=version) as (client, _):
        assert len((await generate(client, prompt(), **wanted)).ids) > 0


async def test_weights_that_change_within_a_turn_are_told_by_span() -> None:
    async with engine(version="0.5.23", per_token_s=0.02) as (client, outside):
        turn = asyncio.create_task(generate(client, prompt(), max_tokens=60, ignore_eos=True))
        await outside.until_running()
        await asyncio.sleep(0.2)
        await outside.post("/update_weight_version", {"new_version": "step-8", "abort_all_requests": False})
        spans = (await turn).weight_versions
    assert [span.version for span in spans] == ["default", "step-8"]
    assert spans[0].end == spans[1].start > 0


async def test_a_caller_who_leaves_ends_the_generation() -> None:
    async with engine(per_token_s=1.0) as (client, outside):
        turn = asyncio.create_task(generate(client, prompt(), rid="b" * 32))
        await outside.until_running()
        turn.cancel()
        await asyncio.gather(turn, return_exceptions=True)
        await client.close()
        outcomes: list[str] = []

        async def ended() -> None:
            while not outcomes or "running" in outcomes:
                outcomes[:] = [entry["outcome"] for entry in await outside.record()]

        await asyncio.wait_for(ended(), 5)
        assert outcomes == ["aborted"]


async def test_a_generation_that_takes_too_long_is_a_timeout() -> None:
    async with engine(per_token_s=5.0, timeout_s=0.2) as (client, _):
        with pytest.raises(EngineTimeout):
            await generate(client, prompt())


async def test_the_engines_key_is_needed_and_said_to_be_wrong() -> None:
    async with engine(api_key="sk-right", key="sk-right") as (client, _):
        assert (await client.facts()).kind == "sglang"
        assert len((await generate(client, prompt())).ids) > 0
    async with engine(api_key="sk-right", key="sk-wrong") as (client, _):
        with pytest.raises(EngineUnavailable, match="API key"):
            await client.facts()


async def test_an_engine_that_truncates_is_refused_at_start() -> None:
    async with engine(allow_auto_truncate=True) as (client, _):
        with pytest.raises(EngineContract, match="allow_auto_truncate"):
            await client.facts()


async def test_the_engines_tokenizer_is_the_vocabularys() -> None:
    async with engine() as (client, _):
        text = "<|im_start|>user\nhé 漢😀<|im_end|>\n"
        assert (await client.tokenize(text)).tolist() == simulated.vocabulary().encode(text)
        assert (await client.models())[0]["max_model_len"] == CONTEXT_LENGTH


async def test_a_request_id_in_flight_is_refused_a_second_time() -> None:
    async with engine(first_token_s=0.5) as (client, outside):
        first = asyncio.create_task(generate(client, prompt()))
        await outside.until_running()
        with pytest.raises(EngineRejected, match="Duplicate request ID"):
            await generate(client, prompt())
        assert len((await first).ids) > 0
