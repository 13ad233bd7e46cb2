"""Answers for benchmarks: a fixed number of random ids at next to no cost, the prompt not even decoded.

Answers come from a small pool made once per length; what is measured is the server in front, not this one. Where
the vocabulary has hermes' markers, every second answer that is long enough ends in a tool call.
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
_COMMAND_TOKENS = 64
_MARKERS = ("<tool_call>", "</tool_call>")


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
            self._pools[count] = itertools.cycle(
                [self._answer(count, calls=bool(number % 2)) for number in range(_POOL)]
            )
        reply = self._reply(body, next(self._pools[count]))
        if not body.stream:
            return web.Response(body=reply, content_type="application/json")
        return web.Response(body=b"data: " + reply + b"\n\ndata: [DONE]\n\n", content_type="text/event-stream")

    def _answer(self, count: int, *, calls: bool) -> _Answer:
        call = self._call() if calls and all(map(self._vocabulary.has, _MARKERS)) else []
        call = call if len(call) < count else []
        ids = [*self._some_words(max(0, count - 1 - len(call))), *call, self._vocabulary.eos][:count]
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

    def _some_words(self, count: int) -> list[int]:
        chosen: list[int] = self._random.choice(self._words, count).tolist()
        return chosen

    def _call(self) -> list[int]:
        command = self._vocabulary.decode(self._some_words(_COMMAND_TOKENS)).strip()
        written = orjson.dumps({"name": "run_shell", "arguments": {"command": command}}).decode()
        return self._vocabulary.encode(f"\n\n{_MARKERS[0]}\n{written}\n{_MARKERS[1]}")

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
