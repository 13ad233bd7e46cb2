"""llama.cpp's wire: what is sent, and log probs found for every id, however the server leaves some out."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pytest
from aiohttp import web

from api.engine.base import (
    Completion,
    EngineContract,
    EngineFacts,
    EngineRejected,
    EngineUnavailable,
    PromptTooLong,
    UnsupportedParameter,
)
from api.engine.create import create_engine
from api.engine.http import refusal
from api.engine.llama_server import _Entry, aligned, read_reply, request_body
from splice.types import Finish, id_array
from tests.api.engine.replay import Answer, Handler, ReplayServer, cut, eventually, hang

RID = "0123456789abcdef0123456789abcdef"
PROMPT = id_array([1, 4093, 198])


def entry(token: int, log_prob: float | None) -> dict[str, Any]:
    return {
        "id": token,
        "token": "?",
        "bytes": [63],
        "logprob": log_prob,
        "top_logprobs": [{"id": 905, "token": " world", "bytes": [32], "logprob": -0.75}],
    }


def reply(**changes: Any) -> dict[str, Any]:
    """A reply as the server wrote it to `response_fields`, the sampled token not the likeliest one."""
    return {
        "content": "Hello,",
        "stop": True,
        "tokens": [19556, 28, 2],
        "completion_probabilities": [entry(19556, -1.5), entry(28, -2), entry(2, -0.25)],
        "stop_type": "eos",
        "stopping_word": "",
        "tokens_evaluated": 3,
        "tokens_predicted": 3,
        "timings": {"cache_n": 1, "predicted_ms": 2.5},
        **changes,
    }


class Scoring:
    """Answers the first request with `first`; scores later ones with `log_prob(position)`, position in the reply.

    The scored id is among the likeliest only when more than `hidden` of them are asked for.
    """

    def __init__(self, first: dict[str, Any], *, hidden: int = 0) -> None:
        self.first = first
        self.hidden = hidden
        self.scored: list[int] = []
        self.widths: list[int] = []

    async def __call__(self, request: web.Request) -> web.StreamResponse:
        body = orjson.loads(await request.read())
        if "grammar" not in body:
            return await Answer(self.first)(request)
        position = len(body["prompt"]) - len(PROMPT)
        assert body["prompt"] == [*PROMPT.tolist(), *self.first["tokens"][:position]]
        self.scored.append(position)
        self.widths.append(body["n_probs"])
        likely = [{"id": 0, "logprob": -0.1}]
        if body["n_probs"] > self.hidden:
            likely.append({"id": self.first["tokens"][position], "logprob": -100.0 - position})
        return await Answer({"completion_probabilities": [{"id": 81, "top_logprobs": likely}]})(request)


async def generate(handler: Handler, wanted: dict[str, Any] | None = None, *, max_tokens: int = 9) -> Completion:
    async with ReplayServer({"POST /completion": handler}) as server:
        engine = create_engine("llama-server", [server.url], timeout_s=5.0)
        try:
            return await engine.generate(
                PROMPT, engine.sampling(wanted or {}), max_tokens=max_tokens, rid=RID, affinity="s"
            )
        finally:
            await engine.close()


def test_the_request_is_what_the_server_wants_to_the_byte() -> None:
    assert request_body(PROMPT, {"temperature": 1.0, "stop": ["END"]}, max_tokens=7) == (
        b'{"temperature":1.0,"stop":["END"],"prompt":[1,4093,198],"n_predict":7,"return_tokens":true,"n_probs":1,'
        b'"post_sampling_probs":false,"cache_prompt":true,"stream":false,"response_fields":["content","stop","tokens",'
        b'"completion_probabilities","stop_type","stopping_word","tokens_evaluated","tokens_predicted","timings"]}'
    )


def test_the_servers_own_filters_are_switched_off_unless_the_caller_sets_them() -> None:
    engine = create_engine("llama-server", ["http://127.0.0.1:1"])
    assert engine.sampling({}) == {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    assert engine.sampling({"top_k": 40, "temperature": 0.2}) == {
        "temperature": 0.2,
        "top_k": 40,
        "top_p": 1.0,
        "min_p": 0.0,
    }
    with pytest.raises(UnsupportedParameter, match="regex, stop_token_ids"):
        engine.sampling({"regex": "a", "stop_token_ids": [1]})


async def test_the_sampled_tokens_log_prob_is_told_not_the_likeliest_ones() -> None:
    told = await generate(Answer(reply()), {"temperature": 0.5})
    assert told.ids.tolist() == [19556, 28, 2]
    assert told.log_probs.tolist() == [-1.5, -2.0, -0.25]
    assert told.finish == Finish("stop", 2)
    assert told.log_prob_kind == "raw"
    assert told.weight_versions == ()
    assert told.facts == {"timings": {"cache_n": 1, "predicted_ms": 2.5}, "rescored_log_probs": 0}


async def test_the_request_id_goes_along() -> None:
    async with ReplayServer({"POST /completion": Answer(reply())}) as server:
        engine = create_engine("llama-server", [server.url], "sk-engine")
        await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s")
        await engine.close()
        headers = server.seen[0].headers
    assert headers["X-Request-Id"] == RID
    assert headers["Authorization"] == "Bearer sk-engine"


async def test_each_stop_type_has_its_finish() -> None:
    assert (await generate(Answer(reply(stop_type="limit")))).finish == Finish("length")
    assert (await generate(Answer(reply(stop_type="word", stopping_word="END")))).finish == Finish("stop", "END")


async def test_asked_for_no_tokens_nothing_is_sampled() -> None:
    told = await generate(Answer({}, 500), max_tokens=0)
    assert (told.ids.tolist(), told.log_probs.tolist(), told.finish) == ([], [], Finish("length"))


async def test_an_empty_generation_needs_no_log_probs() -> None:
    told = await generate(Answer({"tokens": [], "stop_type": "limit"}))
    assert (told.ids.tolist(), told.log_probs.tolist()) == ([], [])


async def test_tokens_inside_a_character_are_scored_by_the_engine() -> None:
    # As captured: "a" + an emoji of three tokens + "b", the first two of the emoji without a log prob.
    tokens = [81, 10813, 242, 218, 82]
    scoring = Scoring(
        reply(
            tokens=tokens,
            tokens_predicted=5,
            stop_type="limit",
            completion_probabilities=[entry(81, -7.5), entry(218, -2.25), entry(82, -7.25)],
        )
    )
    told = await generate(scoring)
    assert told.ids.tolist() == tokens
    assert told.log_probs.tolist() == [-7.5, -101.0, -102.0, -2.25, -7.25]
    assert told.facts["rescored_log_probs"] == 2


async def test_the_tokens_of_a_stop_string_are_scored_by_the_engine() -> None:
    scoring = Scoring(
        reply(
            tokens=[19556, 28, 400, 1565],
            tokens_predicted=4,
            stop_type="word",
            stopping_word="ldots",
            completion_probabilities=[entry(19556, -1.5), entry(28, -2)],
        )
    )
    told = await generate(scoring)
    assert told.log_probs.tolist() == [-1.5, -2.0, -102.0, -103.0]
    assert scoring.scored == [2, 3]


async def test_an_unlikely_token_is_looked_for_ever_further() -> None:
    first = reply(tokens=[7], tokens_predicted=1, stop_type="limit", completion_probabilities=[])
    scoring = Scoring(first, hidden=5000)
    assert (await generate(scoring)).log_probs.tolist() == [-100.0]
    assert scoring.widths == [128, 4096, 1 << 24]
    with pytest.raises(EngineContract, match="completion_probabilities"):
        await generate(Scoring(first, hidden=1 << 30))


def places(ids: list[int], entries: list[int]) -> list[bool]:
    _, unscored = aligned(np.array(ids), [_Entry(token, -1.0) for token in entries])
    return [bool(place) for place in unscored]


def test_entries_find_their_places_and_doubtful_ones_are_left_for_scoring() -> None:
    assert places([1, 2, 3], [1, 2, 3]) == [False, False, False]
    assert places([1, 2, 3], [1, 3]) == [False, True, False]
    assert places([1, 2, 3], [1, 2]) == [False, False, True]
    assert places([1, 2, 3], []) == [True, True, True]
    # After the opening byte 9 either 5 may have completed the character.
    assert places([9, 5, 5, 1], [5, 1]) == [True, True, True, False]
    assert places([9, 5, 6, 5, 1], [5, 1]) == [True, True, True, True, False]
    assert places([9, 5, 5, 5, 5, 1], [5, 5, 1]) == [True, True, True, True, True, False]


def test_an_entry_that_fits_nowhere_is_a_breach() -> None:
    for ids, entries in (([1, 2], [3]), ([1, 2], [2, 1]), ([1], [1, 1]), ([], [1])):
        with pytest.raises(EngineContract, match="fits none"):
            aligned(np.array(ids, np.int64), [_Entry(token, -1.0) for token in entries])


BREACHES: dict[str, tuple[Any, str]] = {
    "no tokens": ({**reply(), "tokens": None}, "tokens"),
    "tokens as text": (reply(tokens="Hello"), "tokens"),
    "no log probs": (reply(completion_probabilities=None), "completion_probabilities"),
    "probabilities after sampling": (
        reply(completion_probabilities=[{"id": 19556, "prob": 0.5, "top_probs": []}]),
        "completion_probabilities",
    ),
    "too many log probs": (
        reply(completion_probabilities=[entry(token, -1) for token in (19556, 28, 2, 2)]),
        "completion_probabilities",
    ),
    "a bare NaN": (orjson.dumps(reply()).replace(b"-1.5", b"NaN"), "completion_probabilities"),
    "unfinished": (reply(stop=False), "stop"),
    "no stop type": (reply(stop_type="none"), "stop_type"),
    "an unknown stop type": (reply(stop_type=3), "stop_type"),
    "a stop by nothing": ({**reply(), "tokens": [], "completion_probabilities": []}, "stop_type"),
    "another prompt": (reply(tokens_evaluated=2), "tokens_evaluated"),
    "another count": (reply(tokens_predicted=4), "tokens_predicted"),
    "garbage": (b"hello", "body"),
    "a list": ([], "body"),
}


@pytest.mark.parametrize("name", BREACHES)
async def test_a_reply_that_breaks_the_contract_is_refused_by_the_name_of_its_field(name: str) -> None:
    body, field = BREACHES[name]
    with pytest.raises(EngineContract) as refused:
        await generate(Answer(body))
    assert refused.value.field == field


async def test_a_null_log_prob_is_told_as_it_is() -> None:
    body = reply(completion_probabilities=[entry(19556, -1.5), entry(28, None), entry(2, -0.25)])
    assert np.isnan((await generate(Answer(body))).log_probs).tolist() == [False, True, False]


async def test_failures_are_told_by_whose_fault_they_are() -> None:
    too_long = {
        "code": 400,
        "message": "request (3000 tokens) exceeds the available context size (1024 tokens), try increasing it",
        "type": "exceed_context_size_error",
        "n_prompt_tokens": 3000,
        "n_ctx": 1024,
    }
    with pytest.raises(PromptTooLong, match="3000 tokens"):
        await generate(Answer({"error": too_long}, 400))
    with pytest.raises(EngineRejected, match="invalid tokens"):
        await generate(Answer({"error": {"code": 400, "message": "Prompt contains invalid tokens", "type": "x"}}, 400))
    with pytest.raises(EngineUnavailable, match="Loading model") as loading:
        await generate(Answer({"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}}, 503))
    assert loading.value.overloaded
    with pytest.raises(EngineUnavailable):
        await generate(cut)


async def test_a_caller_who_leaves_closes_the_connection() -> None:
    async with ReplayServer({"POST /completion": hang}) as server:
        engine = create_engine("llama-server", [server.url])
        turn = asyncio.create_task(engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s"))
        await eventually(lambda: bool(server.seen))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await eventually(lambda: server.left == ["/completion"])
        await engine.close()


CAPTURED = Path(__file__).parents[2] / "fixtures" / "llama_server"


@pytest.mark.parametrize("path", sorted(CAPTURED.glob("completion_[!s]*.json")), ids=lambda path: path.stem)
def test_what_the_real_server_answered_is_read(path: Path) -> None:
    exchange = orjson.loads(path.read_bytes())
    answered = exchange["body"]
    told = read_reply(orjson.dumps(answered), prompt_length=len(exchange["request"]["body"]["prompt"]))
    scored = answered["completion_probabilities"]
    assert told.ids.tolist() == answered["tokens"]
    assert told.log_probs[: len(scored)].tolist() == [each["logprob"] for each in scored]
    assert not told.unscored.any()


def test_the_real_servers_stop_string_leaves_its_last_token_to_be_scored() -> None:
    exchange = orjson.loads((CAPTURED / "completion_stop_word.json").read_bytes())
    told = read_reply(orjson.dumps(exchange["body"]), prompt_length=len(exchange["request"]["body"]["prompt"]))
    assert told.unscored.tolist() == [False, False, False, False, True]
    assert told.finish == Finish("stop", ",")


@pytest.mark.parametrize(
    ("name", "meaning"),
    [
        ("error_empty_prompt", EngineRejected),
        ("error_invalid_token", EngineRejected),
        ("error_wrong_type", EngineRejected),
        ("error_prompt_too_long", PromptTooLong),
        ("health_loading", EngineUnavailable),
        ("not_found", EngineContract),
    ],
)
def test_what_the_real_server_refused_is_told_by_whose_fault_it_was(name: str, meaning: type) -> None:
    exchange = orjson.loads((CAPTURED / f"{name}.json").read_bytes())
    assert isinstance(refusal(exchange["status"], orjson.dumps(exchange["body"])), meaning)


PROPS = {
    "default_generation_settings": {"params": {"temperature": 0.8}, "n_ctx": 1024},
    "total_slots": 2,
    "model_alias": "smol",
    "model_path": "/models/smol.gguf",
    "build_info": "b0-unknown",
}
MODELS = {"object": "list", "data": [{"id": "smol", "meta": {"n_vocab": 49152, "n_ctx": 1024}}]}


async def test_the_facts_are_read_from_the_server() -> None:
    async with ReplayServer({"GET /props": Answer(PROPS), "GET /v1/models": Answer(MODELS)}) as server:
        engine = create_engine("llama-server", [server.url])
        assert await engine.facts() == EngineFacts(
            kind="llama-server",
            version="b0-unknown",
            model="smol",
            context_length=1024,
            max_prompt_length=1023,
            vocab_size=49152,
            log_prob_kind="raw",
        )
        assert await engine.models() == MODELS["data"]
        await engine.close()


async def test_text_is_tokenized_without_special_tokens() -> None:
    async with ReplayServer({"POST /tokenize": Answer({"tokens": [5, 6]})}) as server:
        engine = create_engine("llama-server", [server.url])
        assert (await engine.tokenize("hé")).tolist() == [5, 6]
        await engine.close()
        assert server.bodies("/tokenize") == [{"content": "hé", "add_special": False, "parse_special": True}]
