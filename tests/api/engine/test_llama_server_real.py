"""llama.cpp itself, with a real small model: the wire is what the client believes it to be."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator

import aiohttp
import numpy as np
import pytest
import pytest_asyncio

from api.assets import smollm2_gguf
from api.demo import real_engine
from api.engine.base import Completion, Engine, EngineRejected, PromptTooLong
from api.engine.create import create_engine
from splice.types import Finish, IdArray, id_array

pytestmark = pytest.mark.real_engine

CONTEXT_LENGTH = 512
QUESTION = "<|im_start|>user\nSay hello to the world<|im_end|>\n<|im_start|>assistant\n"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    pytest.importorskip("xllamacpp")
    with real_engine.running(smollm2_gguf(), context_length=CONTEXT_LENGTH, parallel=2) as address:
        yield address


@pytest_asyncio.fixture
async def engine(url: str) -> AsyncIterator[Engine]:
    engine = create_engine("llama-server", [url], timeout_s=60.0)
    yield engine
    await engine.close()


async def sampled(engine: Engine, prompt: IdArray, max_tokens: int, **wanted: object) -> Completion:
    return await engine.generate(prompt, engine.sampling(wanted), max_tokens=max_tokens, rid="r" * 32, affinity="s")


async def test_the_facts_are_the_servers(engine: Engine) -> None:
    told = await engine.facts()
    assert (told.kind, told.context_length, told.vocab_size) == ("llama-server", CONTEXT_LENGTH, 49152)
    assert told.max_prompt_length == CONTEXT_LENGTH - 1
    assert await engine.models()


async def test_control_tokens_are_one_id_each(engine: Engine) -> None:
    ids = await engine.tokenize(QUESTION)
    assert ids[0] == 1
    assert (ids == 1).sum() == 2


async def test_a_generation_has_a_log_prob_for_each_id(engine: Engine) -> None:
    told = await sampled(engine, await engine.tokenize(QUESTION), 24, seed=7)
    assert 0 < len(told.ids) <= 24
    assert np.isfinite(told.log_probs).all()
    assert (told.log_probs <= 0).all()
    assert told.log_prob_kind == "raw"


async def test_the_end_token_is_among_the_ids(engine: Engine) -> None:
    prompt = await engine.tokenize("<|im_start|>user\nSay yes<|im_end|>\n<|im_start|>assistant\nYes.")
    told = await sampled(engine, prompt, 8, logit_bias={"2": 100})
    assert told.ids.tolist() == [2]
    assert told.finish == Finish("stop", 2)


async def test_log_probs_are_the_same_at_every_temperature(engine: Engine) -> None:
    prompt = await engine.tokenize(QUESTION)
    greedy = await sampled(engine, prompt, 6, temperature=0)
    cold = await sampled(engine, prompt, 6, temperature=0.01, seed=1)
    assert cold.ids.tolist() == greedy.ids.tolist()
    assert np.allclose(cold.log_probs, greedy.log_probs, atol=1e-3)


async def test_the_log_probs_that_the_server_leaves_out_are_scored_by_it(engine: Engine) -> None:
    prompt = await engine.tokenize(QUESTION)
    told = await sampled(engine, prompt, 20, grammar='root ::= "a😀é漢b"')
    assert told.facts["rescored_log_probs"] > 0
    assert np.isfinite(told.log_probs).all()


async def test_scoring_agrees_with_the_log_probs_of_the_generation(engine: Engine) -> None:
    prompt = await engine.tokenize(QUESTION)
    grammar = 'root ::= "Hello wide world" .*'  # both say it, and the stop string's tokens lack their log probs
    plain = await sampled(engine, prompt, 8, temperature=0, grammar=grammar)
    stopped = await sampled(engine, prompt, 8, temperature=0, grammar=grammar, stop="wide")
    assert stopped.finish == Finish("stop", "wide")
    assert stopped.facts["rescored_log_probs"] > 0
    assert stopped.ids.tolist() == plain.ids.tolist()[: len(stopped.ids)]
    assert np.allclose(stopped.log_probs, plain.log_probs[: len(stopped.ids)], atol=1e-3)


async def test_the_window_is_where_the_facts_say(engine: Engine) -> None:
    fits = id_array(np.full(CONTEXT_LENGTH - 1, 5, np.uint32))
    told = await sampled(engine, fits, 1, ignore_eos=True)
    assert (len(told.ids), told.finish) == (1, Finish("length"))
    with pytest.raises(PromptTooLong):
        await sampled(engine, id_array(np.full(CONTEXT_LENGTH, 5, np.uint32)), 1)


async def test_an_id_outside_the_vocabulary_is_refused(engine: Engine) -> None:
    with pytest.raises(EngineRejected, match="invalid tokens"):
        await sampled(engine, id_array([49152]), 1)


async def test_a_turn_continues_on_the_very_ids_that_were_sampled(engine: Engine) -> None:
    history = await engine.tokenize(QUESTION)
    for seed in range(3):
        told = await sampled(engine, history, 16, seed=seed)
        history = id_array(np.concatenate([history, told.ids.astype(np.uint32)]))
    assert told.facts["timings"]["cache_n"] > 0


async def test_a_caller_who_leaves_is_seen_to_leave(engine: Engine, url: str) -> None:
    prompt = await engine.tokenize(QUESTION)
    turn = asyncio.create_task(engine.generate(prompt, {"ignore_eos": True}, max_tokens=400, rid="left", affinity="s"))
    await asyncio.sleep(0.3)
    turn.cancel()
    await asyncio.gather(turn, return_exceptions=True)

    async def outcomes() -> list[str]:
        async with aiohttp.ClientSession() as session, session.get(f"{url}/sim/record") as record:
            return [entry["outcome"] for entry in (await record.json())["entries"] if entry["rid"] == "left"]

    async with asyncio.timeout(10):
        while not (ended := await outcomes()):  # noqa: ASYNC110  another process tells nobody
            await asyncio.sleep(0.05)
    assert ended == ["aborted"]
