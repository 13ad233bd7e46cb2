"""The simulated engine against SGLang's own typed contract, `sglang/api/v1/api_types.py` of its 0.5.23 wheel.

That one module needs neither torch nor a GPU. It is fetched once into the cache folder (`TOKENSPLICE_CACHE_DIR`, else
the user's), verified by its digest, and never skipped: without it nothing says that the simulation is faithful.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from api.cache import default_cache_dir, made_once
from api.wheels import WheelFile, take
from tests.api.simulated import RELEASES, TOOLS, Json, chat, engine

API_TYPES = WheelFile(
    package="sglang",
    version="0.5.23",
    member="sglang/api/v1/api_types.py",
    sha256="60fd8b7b61b1b88424139f57879e16b4b756473b26f20e214314b74dec52352b",
)
PROMPT = chat("Find the bug", TOOLS)


@pytest.fixture(scope="module")
def contract() -> ModuleType:
    """The generated module, loaded under a name of its own."""

    def fetch(folder: Path) -> None:
        take(API_TYPES, folder / "api_types.py", progress=lambda _: None)

    folder = made_once(default_cache_dir() / "assets" / f"sglang-{API_TYPES.version}-{API_TYPES.sha256[:12]}", fetch)
    spec = importlib.util.spec_from_file_location("sglang_api_types", folder / "api_types.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # msgspec resolves the structs' annotations through it
    spec.loader.exec_module(module)
    return module


def check_reply(contract: ModuleType, reply: Json) -> None:
    """The reply decodes, as the kinds that it should be, and encodes to what was sent."""
    decoded = contract.GenerateResponse.from_json_value(reply)
    assert decoded.output_ids == reply["output_ids"]
    meta = decoded.meta_info
    assert meta.completion_tokens == len(decoded.output_ids)
    encoded = decoded.to_json_value()["meta_info"]
    finish = reply["meta_info"]["finish_reason"]
    if finish is not None:
        assert finish.items() <= encoded.pop("finish_reason").items()  # the encoder spells absent fields out as null
        kinds = {"stop": contract.FinishStop, "length": contract.FinishLength, "abort": contract.FinishAbort}
        assert isinstance(meta.finish_reason, kinds[finish["type"]])
    for name in encoded.keys() & reply["meta_info"].keys():
        assert encoded[name] == reply["meta_info"][name], name


@pytest.mark.parametrize(
    ("sampling", "directive"),
    [
        ({"max_new_tokens": 2000, "temperature": 1.0, "top_p": 1.0, "top_k": -1}, {}),
        ({"max_new_tokens": 7}, {}),
        ({"max_new_tokens": 0}, {}),
        ({"max_new_tokens": None, "stop": ["e"], "stop_token_ids": [11]}, {}),
        ({}, {"fault": "abort"}),
        ({}, {"fault": "abort_queued"}),
        ({}, {"fault": "nan_happened"}),
        ({}, {"fault": "abort_status", "status": 399, "message": "odd"}),
    ],
)
async def test_requests_and_replies_keep_the_contract(contract: ModuleType, sampling: Json, directive: Json) -> None:
    body = {
        "rid": "r1",
        "input_ids": PROMPT,
        "sampling_params": sampling,
        "return_logprob": True,
        "return_prompt_token_ids": True,
        "logprob_start_len": 0,
        "top_logprobs_num": 2,
        "return_text_in_logprobs": True,
    }
    async with engine(version="0.5.23") as client:
        await client.script({"times": 2} | directive)
        assert contract.GenerateRequest.from_json_value(body).input_ids == PROMPT
        status, reply = await client.post("/generate", body)
        assert status == 200
        check_reply(contract, reply)
        for chunk in await client.stream(PROMPT, sampling=sampling, top_logprobs_num=2):
            check_reply(contract, chunk)


async def test_log_probs_are_the_contracts_triples_and_spans_cover_the_generation(contract: ModuleType) -> None:
    async with engine(version="0.5.23", weight_version="step-9") as client:
        reply = await client.generate(PROMPT)
    meta = contract.GenerateResponse.from_json_value(reply).meta_info
    assert [entry.token_id for entry in meta.output_token_logprobs] == reply["output_ids"]
    assert meta.output_token_logprobs_length == meta.completion_tokens
    (span,) = meta.weight_versions
    assert (span.version, span.start, span.end) == ("step-9", 0, meta.completion_tokens)


BAD_BODIES: list[Json] = [
    {"sampling_params": {"max_tokens": 5}},
    {"sampling_params": {"foo": None}},
    {"sampling_params": {"temperature": "hot"}},
    {"sampling_params": {"top_k": 1.0}},
    {"sampling_params": {"ignore_eos": 1}},
    {"sampling_params": {"max_new_tokens": True}},
    {"sampling_params": {"stop_token_ids": [None]}},
    {"sampling_params": {"stop": 5}},
    {"sampling_params": {"stop": ["a", 5]}},
    {"sampling_params": {"logit_bias": [1]}},
    {"sampling_params": {"choice": [5]}},
    {"sampling_params": 5},
    {"input_ids": [1, 2.0]},
    {"input_ids": [1, "2"]},
    {"input_ids": "12"},
    {"rid": 5},
    {"stream": "no"},
    {"return_logprob": "true"},
    {"return_prompt_token_ids": None},
    {"logprob_start_len": 0.5},
]
GOOD_BODIES: list[Json] = [
    {"sampling_params": None},
    {"sampling_params": {"temperature": None, "stop": None, "max_new_tokens": 3}},
    {"sampling_params": {"temperature": 1, "logit_bias": {"5": 1}, "custom_params": [1], "sampling_seed": 3}},
    {"stream": None, "logprob_start_len": None, "model": "ignored", "unknown": {"x": 1}},
    {"input_ids": [-1, 10**6]},
    {"return_logprob": None, "rid": None},
]


@pytest.mark.parametrize("change", [*BAD_BODIES, *GOOD_BODIES], ids=str)
async def test_a_body_is_refused_exactly_when_the_contract_refuses_it(contract: ModuleType, change: Json) -> None:
    body = {"input_ids": PROMPT, "sampling_params": {"max_new_tokens": 3}} | change
    complaint: Any = None
    try:
        contract.GenerateRequest.from_json_value(body)
    except contract.JsonContractError as error:
        complaint = str(error)
    assert (complaint is None) == (change in GOOD_BODIES)
    async with engine(version="0.5.23") as client:
        status, reply = await client.post("/generate", body)
    if complaint is None:
        assert status == 200
    else:
        assert (status, reply) == (400, {"error": complaint})


@pytest.mark.parametrize("release", RELEASES[:2])
async def test_older_releases_crash_on_an_unknown_sampling_parameter(release: str) -> None:
    async with engine(version=release) as client:
        for sampling in ({"max_tokens": 5}, {"temperature": "hot"}):
            assert await client.refused(PROMPT, sampling=sampling) == (500, "Internal Server Error")
        assert (await client.refused(PROMPT, sampling={"top_k": 1.0}))[0] == 200


@pytest.mark.parametrize("release", RELEASES)
async def test_values_out_of_range_are_refused_in_words(release: str) -> None:
    async with engine(version=release) as client:
        assert await client.refused(PROMPT, sampling={"max_new_tokens": -1}) == (
            400, {"error": {"message": "max_new_tokens must be at least 0, got -1."}},
        )  # fmt: skip
        for sampling in ({"temperature": -0.1}, {"top_p": 0}, {"min_new_tokens": 5, "max_new_tokens": 4}):
            assert (await client.refused(PROMPT, sampling=sampling))[0] == 400
        assert await client.refused([]) == (400, {"error": {"message": "input_ids cannot be empty."}})
        assert (await client.post("/generate", [1]))[1]["object"] == "error"


async def test_prompt_ids_come_back_from_0513_on() -> None:
    for release, expected in (("0.5.12.post1", None), ("0.5.13", PROMPT), ("0.5.23", PROMPT)):
        async with engine(version=release) as client:
            reply = await client.generate(PROMPT, return_prompt_token_ids=True)
            assert reply.get("prompt_token_ids") == expected


async def test_what_the_engine_says_of_itself_keeps_the_contract(contract: ModuleType) -> None:
    async with engine(version="0.5.23", model="tiny") as client:
        _, info = await client.get("/server_info")
        _, model = await client.get("/model_info")
        _, models = await client.get("/v1/models")
    assert contract.GetServerInfoResponse.from_json_value(info).version == "0.5.23"
    assert contract.GetModelInfoResponse.from_json_value(model).is_generation
    assert contract.ModelCard.from_json_value(models["data"][0]).id == "tiny"
