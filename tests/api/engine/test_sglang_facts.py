"""What an SGLang server says of itself, whatever its version, and which servers and URLs are refused."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from api.engine.base import EngineContract, EngineFacts
from api.engine.create import create_engine
from tests.api.engine.replay import Answer, ReplayServer

SERVER_INFO = {
    "version": "0.5.23",
    "context_length": 32768,
    "max_req_input_len": 32762,
    "allow_auto_truncate": False,
    "served_model_name": "qwen",
    "internal_states": [{}],
    "tp_size": 1,
}
MODEL_INFO = {"model_path": "/models/qwen", "weight_version": "step-7", "preferred_sampling_params": None}
MODELS = {"object": "list", "data": [{"id": "qwen", "object": "model", "max_model_len": 32768}]}


async def facts(**routes: Any) -> EngineFacts:
    answers = {"GET /" + route.replace("__", "/"): Answer(body) for route, body in routes.items() if body is not None}
    async with ReplayServer(answers) as server:
        engine = create_engine("sglang", [server.url])
        try:
            return await engine.facts()
        finally:
            await engine.close()


async def test_the_facts_are_read_from_the_engine() -> None:
    assert await facts(server_info=SERVER_INFO, model_info=MODEL_INFO) == EngineFacts(
        kind="sglang",
        version="0.5.23",
        model="qwen",
        context_length=32768,
        max_prompt_length=32761,
        vocab_size=None,
        log_prob_kind="tempered",
        weight_version="step-7",
    )


async def test_an_older_engine_is_asked_by_the_older_names() -> None:
    told = await facts(
        get_server_info={**SERVER_INFO, "version": "0.5.12.post1", "context_length": None},
        get_model_info={"model_path": "/models/qwen"},
        get_weight_version={"weight_version": "step-6"},
        v1__models=MODELS,
    )
    assert (told.version, told.context_length, told.weight_version) == ("0.5.12.post1", 32768, "step-6")


async def test_the_largest_prompt_is_the_tightest_of_the_engines_limits() -> None:
    small_pool = {**SERVER_INFO, "max_req_input_len": 994}
    assert (await facts(server_info=small_pool, model_info=MODEL_INFO)).max_prompt_length == 993
    silent = {**SERVER_INFO, "max_req_input_len": None}
    assert (await facts(server_info=silent, model_info=MODEL_INFO)).max_prompt_length == 32761
    drafting = {**SERVER_INFO, "speculative_algorithm": "EAGLE", "speculative_num_draft_tokens": 64}
    assert (await facts(server_info=drafting, model_info=MODEL_INFO)).max_prompt_length == 32768 - 1 - 64


async def test_an_engine_that_truncates_prompts_is_refused_with_the_remedy() -> None:
    with pytest.raises(EngineContract, match="restart it without --allow-auto-truncate"):
        await facts(server_info={**SERVER_INFO, "allow_auto_truncate": True}, model_info=MODEL_INFO)


@pytest.mark.parametrize("server_info", [{**SERVER_INFO, "context_length": "long"}, [], b"hello"])
async def test_facts_that_cannot_be_read_are_a_breach(server_info: Any) -> None:
    with pytest.raises(EngineContract):
        await facts(server_info=server_info, model_info=MODEL_INFO)


async def test_a_context_length_that_nobody_tells_is_a_breach() -> None:
    with pytest.raises(EngineContract, match="context_length"):
        await facts(server_info={**SERVER_INFO, "context_length": None}, model_info=MODEL_INFO, v1__models={"data": []})


async def test_text_is_tokenized_without_special_tokens() -> None:
    async with ReplayServer({"POST /tokenize": Answer({"tokens": [5, 6], "count": 2, "max_model_len": 9})}) as server:
        engine = create_engine("sglang", [server.url])
        ids = await engine.tokenize("hé")
        await engine.close()
        assert ids.dtype == np.uint32
        assert ids.tolist() == [5, 6]
        assert server.bodies("/tokenize") == [{"prompt": "hé", "add_special_tokens": False}]


async def test_models_are_passed_on() -> None:
    async with ReplayServer({"GET /v1/models": Answer(MODELS)}) as server:
        engine = create_engine("sglang", [server.url])
        assert await engine.models() == MODELS["data"]
        await engine.close()


@pytest.mark.parametrize("url", ["engine:30000", "ftp://engine", "http://", "http://e/?a=b", ""])
def test_a_url_that_is_none_is_refused(url: str) -> None:
    with pytest.raises(ValueError, match="engine's URL"):
        create_engine("sglang", [url])


def test_an_unknown_kind_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="known are sglang, llama-server"):
        create_engine("oracle", ["http://e"])
    with pytest.raises(ValueError, match="one URL at least"):
        create_engine("sglang", [])
