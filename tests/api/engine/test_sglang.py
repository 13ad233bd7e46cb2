"""SGLang's native wire: what is sent to the byte, and every reply that it may answer with."""

from __future__ import annotations

import asyncio
import copy
import tracemalloc
from collections.abc import Callable
from typing import Any

import numpy as np
import orjson
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
    UnsupportedParameter,
)
from api.engine.create import create_engine
from api.engine.pool import rendezvous
from api.engine.sglang import request_body
from splice.types import Finish, WeightSpan, id_array
from tests.api.engine.replay import Answer, Handler, ReplayServer, cut, drop, eventually, hang, refusing_url

RID = "0123456789abcdef0123456789abcdef"
PROMPT = id_array([1, 2, 4294967295])


def reply(**changes: Any) -> dict[str, Any]:
    """A reply as 0.5.13 answers; `changes` go into its meta_info, or beside it where they are of the top level."""
    meta = {
        "id": RID,
        "finish_reason": {"type": "stop", "matched": 151645},
        "prompt_tokens": 3,
        "weight_version": "step-7",
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": 3,
        "cached_tokens": 2,
        "cached_tokens_details": None,
        "e2e_latency": 0.25,
        "input_token_logprobs": [],
        "output_token_logprobs": [[-0.5, 9707, None], [-1, 11, None], [-0.125, 151645, None]],
        "output_token_logprobs_length": 3,
    }
    whole: dict[str, Any] = {"text": "Hello,", "output_ids": [9707, 11, 151645], "meta_info": meta}
    for name, value in changes.items():
        (whole if name in {"output_ids", "meta_info", "error"} else meta)[name] = value
    return whole


def without(name: str) -> dict[str, Any]:
    whole = copy.deepcopy(reply())
    whole.pop(name, None)
    whole.get("meta_info", {}).pop(name, None)
    return whole


async def generate(
    handler: Handler, sampling: dict[str, Any] | None = None, *, max_tokens: int = 64, timeout_s: float = 5.0
) -> Completion:
    async with ReplayServer({"POST /generate": handler, "POST /abort_request": Answer(b"")}) as server:
        engine = create_engine("sglang", [server.url], timeout_s=timeout_s)
        try:
            return await engine.generate(
                PROMPT, engine.sampling(sampling or {}), max_tokens=max_tokens, rid=RID, affinity="s"
            )
        finally:
            await engine.close()


# What is sent.


def test_the_request_is_what_the_wire_contract_wants_to_the_byte() -> None:
    sampling = {"temperature": 0.5, "stop": ["END"], "lora_path": "adapter"}
    assert request_body(PROMPT, sampling, max_tokens=7, rid=RID) == (
        b'{"rid":"0123456789abcdef0123456789abcdef","input_ids":[1,2,4294967295],'
        b'"sampling_params":{"temperature":0.5,"stop":["END"],"max_new_tokens":7},"lora_path":"adapter",'
        b'"return_logprob":true,"logprob_start_len":-1,"stream":false}'
    )


def test_ids_are_written_from_any_view_of_an_array() -> None:
    ids = np.arange(100, dtype=np.uint32)
    for view in (ids[::2], ids[10:10], id_array(ids[3:9].tobytes())):
        assert orjson.loads(request_body(view, {}, max_tokens=1, rid=RID))["input_ids"] == view.tolist()


def test_a_prompt_of_100k_ids_is_never_a_list_of_python_ints() -> None:
    prompt = id_array(np.full(100_000, 151_643, dtype=np.uint32))
    tracemalloc.start()
    body = request_body(prompt, {}, max_tokens=1, rid=RID)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    # The list alone would be 0.8 MB of pointers and 2.8 MB of ints; the text is 0.7 MB, in a buffer that doubles.
    assert peak < 2_500_000
    assert len(body) > 700_000


async def test_a_prompt_above_a_megabyte_of_json_arrives_whole() -> None:
    prompt = id_array(np.arange(400_000, dtype=np.uint32))
    async with ReplayServer({"POST /generate": Answer(reply(prompt_tokens=400_000))}) as server:
        engine = create_engine("sglang", [server.url])
        await engine.generate(prompt, {}, max_tokens=1, rid=RID, affinity="s")
        await engine.close()
        assert server.bodies("/generate")[0]["input_ids"] == list(range(400_000))


async def test_routers_are_told_the_session_and_engines_the_key() -> None:
    async with ReplayServer({"POST /generate": Answer(reply())}) as server:
        engine = create_engine("sglang", [server.url + "/v1/"], "sk-engine")
        await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="run/1")
        await engine.close()
        headers = server.seen[0].headers
    assert headers["X-SMG-Routing-Key"] == headers["X-Session-ID"] == "run/1"
    assert headers["Authorization"] == "Bearer sk-engine"
    assert server.seen[0].path == "/generate"


def engine_anywhere() -> Engine:
    return create_engine("sglang", ["http://127.0.0.1:1"])


def test_sampling_always_says_the_temperature() -> None:
    assert engine_anywhere().sampling({}) == {"temperature": 1.0}
    assert engine_anywhere().sampling({"temperature": 0, "seed": 3}) == {"temperature": 0, "sampling_seed": 3}
    with pytest.raises(UnsupportedParameter, match="best_of, mirostat"):
        engine_anywhere().sampling({"best_of": 1, "mirostat": 2})


@pytest.mark.parametrize(
    ("temperature", "kind"), [(None, "raw"), (1, "raw"), (1.0, "raw"), (0, "raw"), (0.7, "tempered"), (1.5, "tempered")]
)
async def test_log_probs_are_marked_as_tempered_where_the_temperature_changed_them(
    temperature: float | None, kind: str
) -> None:
    assert (await generate(Answer(reply()), {"temperature": temperature})).log_prob_kind == kind


# What is answered.


async def test_a_reply_becomes_its_arrays() -> None:
    told = await generate(Answer(reply()))
    assert told.ids.dtype == np.int64
    assert told.ids.tolist() == [9707, 11, 151645]
    assert told.log_probs.dtype == np.float64
    assert told.log_probs.tolist() == [-0.5, -1.0, -0.125]
    assert told.finish == Finish("stop", 151645)
    assert told.weight_versions == (WeightSpan("step-7", 0, 3),)
    assert told.engine.startswith("http://127.0.0.1:")
    assert told.facts == {
        "prompt_tokens": 3,
        "cached_tokens": 2,
        "reasoning_tokens": 0,
        "num_retractions": 0,
        "e2e_latency": 0.25,
    }


EMPTY = {"completion_tokens": 0, "output_ids": [], "output_token_logprobs": []}
LENGTH = {"type": "length", "length": 3}
SPANS = [{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}]

GOOD: dict[str, tuple[dict[str, Any], Callable[[Completion], bool]]] = {
    "cut by length": (reply(finish_reason=LENGTH), lambda told: told.finish == Finish("length")),
    "stopped by a string": (
        reply(finish_reason={"type": "stop", "matched": "END"}),
        lambda told: told.finish == Finish("stop", "END"),
    ),
    "stopped by nothing named": (
        reply(finish_reason={"type": "stop"}),
        lambda told: told.finish == Finish("stop"),
    ),
    "stopped by null": (
        reply(finish_reason={"type": "stop", "matched": None}),
        lambda told: told.finish == Finish("stop"),
    ),
    "weights changed within the turn": (
        reply(weight_versions=SPANS),
        lambda told: told.weight_versions == (WeightSpan("6", 0, 1), WeightSpan("7", 1, 3)),
    ),
    "no spans": (reply(weight_versions=[]), lambda told: told.weight_versions == (WeightSpan("step-7", 0, 3),)),
    "null spans": (reply(weight_versions=None), lambda told: told.weight_versions == (WeightSpan("step-7", 0, 3),)),
    "no weight version": (without("weight_version"), lambda told: told.weight_versions == ()),
    "texts beside the log probs": (
        reply(output_token_logprobs=[[-1, 9707, "Hello"], [-2, 11, ","], [-3, 151645, ""]]),
        lambda told: told.log_probs.tolist() == [-1, -2, -3],
    ),
    "pairs instead of triples": (
        reply(output_token_logprobs=[[-1, 9707], [-2, 11], [-3, 151645]]),
        lambda told: told.log_probs.tolist() == [-1, -2, -3],
    ),
    "a null log prob is told as it is": (
        reply(output_token_logprobs=[[-1, 9707, None], [None, 11, None], [-3, 151645, None]]),
        lambda told: np.isnan(told.log_probs).tolist() == [False, True, False],
    ),
    "ids beyond any vocabulary are told as they are": (
        reply(output_ids=[-1, 2**40, 0], output_token_logprobs=[[-1, -1, None], [-1, 2**40, None], [-1, 0, None]]),
        lambda told: told.ids.tolist() == [-1, 2**40, 0],
    ),
    "no counts": (
        {
            "output_ids": [5],
            "meta_info": {"finish_reason": LENGTH, "output_token_logprobs": [[-1.0, 5, None]]},
        },
        lambda told: told.ids.tolist() == [5] and told.facts == {},
    ),
    "nothing sampled": (
        reply(**EMPTY, weight_versions=[{"version": "7", "start": 0, "end": 0}]),
        lambda told: len(told.ids) == 0 and len(told.log_probs) == 0 and told.log_probs.dtype == np.float64,
    ),
}


@pytest.mark.parametrize("name", GOOD)
async def test_a_good_reply_is_told_whole(name: str) -> None:
    body, holds = GOOD[name]
    assert holds(await generate(Answer(body)))


async def test_the_one_spurious_log_prob_of_a_generation_of_no_tokens_is_left_out() -> None:
    spurious = reply(
        **{**EMPTY, "output_token_logprobs": [[-1.0, 9, None]]}, finish_reason={"type": "length", "length": 0}
    )
    told = await generate(Answer(spurious), max_tokens=0)
    assert (told.ids.tolist(), told.log_probs.tolist(), told.finish) == ([], [], Finish("length"))
    with pytest.raises(EngineContract, match="output_token_logprobs: 1 entries for 0 output_ids"):
        await generate(Answer(spurious), max_tokens=1)


ABORTS: dict[str, Any] = {
    "running": reply(finish_reason={"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}),
    "in the waiting queue": {
        "text": "",
        "output_ids": [],
        "meta_info": {"id": RID, "finish_reason": {"type": "abort", "message": "Abort in waiting queue"}},
    },
    "with a status code and a junk token": reply(
        finish_reason={"type": "abort", "message": "full", "status_code": 503}, output_ids=[0], prompt_tokens=1
    ),
    "without its ids": {"meta_info": {"finish_reason": {"type": "abort"}}},
    "with garbage for ids": reply(finish_reason={"type": "abort", "message": None}, output_ids="?"),
    "as a word": reply(finish_reason="abort"),
}


@pytest.mark.parametrize("name", ABORTS)
async def test_an_abort_is_never_a_turn(name: str) -> None:
    with pytest.raises(EngineAborted):
        await generate(Answer(ABORTS[name]))


TRIPLES = reply()["meta_info"]["output_token_logprobs"]

BREACHES: dict[str, tuple[Any, str]] = {
    "no ids": (without("output_ids"), "output_ids"),
    "null ids": (reply(output_ids=None), "output_ids"),
    "ids of another type": (reply(output_ids=["9707", "11", "151645"]), "output_ids"),
    "an id with a point": (reply(output_ids=[9707.0, 11, 151645]), "output_ids"),
    "an id beyond 64 bits": (orjson.dumps(reply()).replace(b"[9707,11,", b"[18446744073709551616,11,"), "output_ids"),
    "ids in ids": (reply(output_ids=[[9707, 11, 151645]]), "output_ids"),
    "no log probs": (without("output_token_logprobs"), "output_token_logprobs"),
    "null log probs": (reply(output_token_logprobs=None), "output_token_logprobs"),
    "too few log probs": (reply(output_token_logprobs=TRIPLES[:2]), "output_token_logprobs"),
    "too many log probs": (reply(output_token_logprobs=[*TRIPLES, TRIPLES[0]]), "output_token_logprobs"),
    "log probs of other ids": (
        reply(output_token_logprobs=[TRIPLES[0], [-1, 12, None], TRIPLES[2]]),
        "output_token_logprobs",
    ),
    "log probs without ids": (reply(output_token_logprobs=[-1, -2, -3]), "output_token_logprobs"),
    "a log prob of another type": (
        reply(output_token_logprobs=[["-1", 9707, None], *TRIPLES[1:]]),
        "output_token_logprobs",
    ),
    "a bare NaN": (orjson.dumps(reply()).replace(b"-0.5", b"NaN"), "output_token_logprobs"),
    "a bare infinity": (orjson.dumps(reply()).replace(b"-0.5", b"-Infinity"), "output_token_logprobs"),
    "another count of sampled ids": (reply(completion_tokens=4), "completion_tokens"),
    "another count of prompt ids": (reply(prompt_tokens=2), "prompt_tokens"),
    "NaN happened": (reply(finish_reason={"type": "stop", "matched": "NaN happened"}), "finish_reason"),
    "no finish reason": (without("finish_reason"), "finish_reason"),
    "a null finish reason": (reply(finish_reason=None), "finish_reason"),
    "an unknown finish reason": (reply(finish_reason={"type": "paused"}), "finish_reason"),
    "a finish reason of another type": (reply(finish_reason=7), "finish_reason"),
    "a match of another type": (reply(finish_reason={"type": "stop", "matched": [1]}), "finish_reason"),
    "a match that is true": (reply(finish_reason={"type": "stop", "matched": True}), "finish_reason"),
    "no meta_info": (without("meta_info"), "meta_info"),
    "spans that leave a gap": (reply(weight_versions=[SPANS[0], {**SPANS[1], "start": 2}]), "weight_versions"),
    "spans that end early": (reply(weight_versions=SPANS[:1]), "weight_versions"),
    "spans of another type": (reply(weight_versions=[7]), "weight_versions"),
    "a batch": ([reply()], "body"),
    "garbage": (b"<html>hello</html>", "body"),
    "JSON that ends early": (orjson.dumps(reply())[:-9], "body"),
    "nothing": (b"", "body"),
}


@pytest.mark.parametrize("name", BREACHES)
async def test_a_reply_that_breaks_the_contract_is_refused_by_the_name_of_its_field(name: str) -> None:
    body, field = BREACHES[name]
    with pytest.raises(EngineContract) as refused:
        await generate(Answer(body))
    assert refused.value.field == field


FAILURES: dict[str, tuple[Handler, type[EngineError]]] = {
    "over the context": (
        Answer(
            {"error": {"message": "The input (9 tokens) is longer than the model's context length (8 tokens)."}}, 400
        ),
        PromptTooLong,
    ),
    "over the context, told in a 200": (
        Answer({"error": {"message": "Input length (9 tokens) exceeds the maximum allowed length (8 tokens)."}}),
        PromptTooLong,
    ),
    "a bad parameter": (Answer({"error": "unknown field `foo`"}, 400), EngineRejected),
    "a full queue": (
        Answer({"object": "error", "message": "The request queue is full.", "type": "503", "code": 503}, 503),
        EngineUnavailable,
    ),
    "a wrong key": (Answer({"error": "Unauthorized"}, 401), EngineUnavailable),
    "an internal error": (Answer(b"Internal Server Error", 500), EngineUnavailable),
    "another server": (Answer({"detail": "Not Found"}, 404), EngineContract),
    "a closed connection": (drop, EngineUnavailable),
    "half a reply": (cut, EngineUnavailable),
}


@pytest.mark.parametrize("name", FAILURES)
async def test_a_failure_is_told_by_whose_fault_it_is(name: str) -> None:
    handler, meaning = FAILURES[name]
    with pytest.raises(meaning):
        await generate(handler)


# Aborts of ours, and replicas.


async def test_a_caller_who_leaves_closes_the_connection_and_aborts_the_request() -> None:
    async with ReplayServer({"POST /generate": hang, "POST /abort_request": Answer(b"")}) as server:
        engine = create_engine("sglang", [server.url], "sk-engine")
        turn = asyncio.create_task(engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s"))
        await eventually(lambda: bool(server.seen))
        turn.cancel()
        with pytest.raises(asyncio.CancelledError):
            await turn
        await engine.close()

        await eventually(lambda: server.left == ["/generate"])
        assert server.bodies("/abort_request") == [{"rid": RID, "abort_all": False}]
        assert server.seen[-1].headers["Authorization"] == "Bearer sk-engine"


async def test_a_generation_that_takes_too_long_is_aborted() -> None:
    async with ReplayServer({"POST /generate": hang, "POST /abort_request": Answer(b"")}) as server:
        engine = create_engine("sglang", [server.url], timeout_s=0.1)
        with pytest.raises(EngineTimeout):
            await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s")
        await engine.close()
        assert server.bodies("/abort_request") == [{"rid": RID, "abort_all": False}]


@pytest.mark.parametrize("abort", [Answer({"error": "Forbidden"}, 403), drop, Answer(b"", 500)])
async def test_an_abort_that_fails_troubles_nobody(abort: Handler) -> None:
    async with ReplayServer({"POST /generate": hang, "POST /abort_request": abort}) as server:
        engine = create_engine("sglang", [server.url], timeout_s=0.1)
        with pytest.raises(EngineTimeout):
            await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s")
        await engine.close()


async def test_sessions_move_from_a_replica_where_nobody_listens_and_only_from_there() -> None:
    down = refusing_url()
    async with (
        ReplayServer({"POST /generate": Answer(reply())}) as one,
        ReplayServer({"POST /generate": Answer(reply())}) as other,
    ):
        urls = [down, one.url, other.url]
        engine = create_engine("sglang", urls)
        for number in range(30):
            session = f"session-{number}"
            told = await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity=session)
            assert told.engine == next(url for url in rendezvous(urls, session) if url != down)
        await engine.close()
        assert one.seen
        assert other.seen


async def test_a_request_that_a_replica_may_have_read_is_not_sent_to_another() -> None:
    async with ReplayServer({"POST /generate": drop}) as one, ReplayServer({"POST /generate": drop}) as other:
        engine = create_engine("sglang", [one.url, other.url])
        with pytest.raises(EngineUnavailable):
            await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s")
        await engine.close()
        assert len(one.seen) + len(other.seen) == 1


async def test_with_no_replica_listening_the_engine_is_unavailable() -> None:
    engine = create_engine("sglang", [refusing_url(), refusing_url()])
    with pytest.raises(EngineUnavailable, match="no replica"):
        await engine.generate(PROMPT, {}, max_tokens=1, rid=RID, affinity="s")
    await engine.close()
