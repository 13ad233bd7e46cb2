"""Answers for benchmarks: a fixed number of random ids at next to no cost, the prompt not even decoded.

Answers come from a small pool made once per length; what is measured is the server in front, not this one.
"""

from __future__ import annotations

import itertools
import uuid

import msgspec
import numpy as np
import orjson
from aiohttp import web

from api.demo.sim.config import SimConfig
from api.demo.sim.vocabulary import Vocabulary

_POOL = 16
_MEAN_LOSS = 0.35


class _Params(msgspec.Struct, frozen=True):
    max_new_tokens: int | None = 128


class _Body(msgspec.Struct, frozen=True):
    input_ids: msgspec.Raw  # only measured
    rid: str = ""
    sampling_params: _Params = _Params()
    return_logprob: bool = False
    stream: bool = False


class _Answer(msgspec.Struct, frozen=True):
    head: bytes  # text and ids
    triples: bytes
    finish: bytes
    count: int


class Bench:
    """A `/generate` that samples from the plain words of the vocabulary and ends with EOS."""

    def __init__(self, config: SimConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._random = np.random.default_rng(config.seed)
        self._words = np.array([token for token in range(vocabulary.size) if _is_word(vocabulary.spell(token))])
        self._pools: dict[int, itertools.cycle[_Answer]] = {}

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Answer from the pool, whatever was asked."""
        body = msgspec.json.decode(await request.read(), type=_Body)
        wanted = body.sampling_params.max_new_tokens
        count = self._config.bench_tokens if wanted is None else min(wanted, self._config.bench_tokens)
        if count not in self._pools:
            self._pools[count] = itertools.cycle([self._answer(count) for _ in range(_POOL)])
        reply = self._reply(body, next(self._pools[count]))
        if not body.stream:
            return web.Response(body=reply, content_type="application/json")
        return web.Response(body=b"data: " + reply + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def _answer(self, count: int) -> _Answer:
        ids = [*self._random.choice(self._words, max(0, count - 1)).tolist(), self._vocabulary.eos][:count]
        losses = (-self._random.exponential(_MEAN_LOSS, count).astype(np.float32)).astype(np.float64).tolist()
        text = orjson.dumps(self._vocabulary.decode(ids, skip_special_tokens=True))
        stop = {"type": "stop", "matched": self._vocabulary.eos}
        triples = [[loss, token, None] for loss, token in zip(losses, ids, strict=True)]
        return _Answer(
            head=b'{"text":%b,"output_ids":%b,"meta_info":{' % (text, orjson.dumps(ids)),
            triples=orjson.dumps(triples),
            finish=orjson.dumps(stop if count else {"type": "length", "length": 0}),
            count=count,
        )

    def _reply(self, body: _Body, answer: _Answer) -> bytes:
        prompt_tokens = bytes(body.input_ids).count(b",") + 1
        log_probs = b""
        if body.return_logprob:
            log_probs = b',"input_token_logprobs":[],"output_token_logprobs":%b,"output_token_logprobs_length":%d' % (
                answer.triples,
                answer.count,
            )
        return (
            b'%b"id":%b,"finish_reason":%b,"prompt_tokens":%d,"completion_tokens":%d,"cached_tokens":0,'
            b'"reasoning_tokens":0,"num_retractions":0,"weight_version":%b,"e2e_latency":0.0%b}}'
        ) % (
            answer.head,
            orjson.dumps(body.rid or uuid.uuid4().hex),
            answer.finish,
            prompt_tokens,
            answer.count,
            orjson.dumps(self._config.weight_version),
            log_probs,
        )


def _is_word(spelled: bytes) -> bool:
    return spelled.startswith(b" ") and spelled[1:].isalpha() and spelled.isascii()
