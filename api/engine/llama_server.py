"""llama.cpp's server: `/completion` with a token array in, `tokens` and their log probs out.

Its log probs are of the raw logits, whatever the temperature, the penalties and the filters. It leaves some out: of
a token that ends inside a UTF-8 character, and of the tokens that spelled a stop string. The ids are all there, so the
missing ones are scored: the engine is asked for its distribution after the same ids (a cached prompt, one token) and
the id's log prob is read from it. The completion's facts say how many (`rescored_log_probs`); against the log probs
of the generation itself they differ by less than 1e-4 on SmolLM2.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from api.engine.base import Completion, EngineContract, EngineFacts
from api.engine.http import Http, error_inside
from api.engine.parameters import LLAMA_SERVER, translate
from api.engine.pool import Replicas, routing_headers
from api.engine.reply import decoded, token_ids
from splice.types import Finish, IdArray, id_array

# llama.cpp samples with temperature 0.8, top-k 40, top-p 0.95 and min-p 0.05 unless told otherwise: a policy that
# no trainer scores. The caller's own values replace these.
_UNFILTERED = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}

# Without the prompt's text, which the server would write back in full.
_FIELDS = (
    "content",
    "stop",
    "tokens",
    "completion_probabilities",
    "stop_type",
    "stopping_word",
    "tokens_evaluated",
    "tokens_predicted",
    "timings",
)

# How many of the likeliest tokens to ask for when scoring; the last is more than any vocabulary has.
_SCORED_WIDTHS = (128, 4096, 1 << 24)

# A UTF-8 character has 4 bytes at most, so the token that completes one is at most 3 after the one that began it.
_REACH = 3


class LlamaServerEngine:
    """One llama.cpp server, or several replicas of one."""

    def __init__(self, urls: Sequence[str], *, http: Http, timeout_s: float, info_timeout_s: float) -> None:
        self._replicas = Replicas(urls)
        self._http = http
        self._timeout_s = timeout_s
        self._info_timeout_s = info_timeout_s

    def sampling(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Engine.sampling`."""
        return {**_UNFILTERED, **translate(wanted, LLAMA_SERVER)}

    async def generate(
        self, prompt: IdArray, sampling: Mapping[str, Any], *, max_tokens: int, rid: str, affinity: str
    ) -> Completion:
        """See `Engine.generate`.

        The server aborts nothing by id: a closed connection is what stops it. The id goes along for the records of
        whatever stands between.
        """
        if max_tokens == 0:
            return _nothing()  # asked for 0 tokens, llama.cpp samples one
        body = request_body(prompt, sampling, max_tokens=max_tokens)
        headers = routing_headers(affinity)

        async def send(url: str) -> tuple[str, bytes]:
            return url, await self._complete(url, body, {**headers, "X-Request-Id": rid})

        url, answer = await self._replicas.ask(affinity, send)
        reply = read_reply(answer, prompt_length=len(prompt))
        log_probs = reply.log_probs.copy()
        for position in np.flatnonzero(reply.unscored):
            before = np.concatenate([prompt, reply.ids[:position].astype(np.uint32)])
            log_probs[position] = await self._score(url, before, int(reply.ids[position]), headers)
        return Completion(
            ids=reply.ids,
            log_probs=log_probs,
            finish=reply.finish,
            log_prob_kind="raw",
            engine=url,
            facts={**reply.facts, "rescored_log_probs": int(reply.unscored.sum())},
        )

    async def _complete(self, url: str, body: bytes, headers: Mapping[str, str]) -> bytes:
        return await self._http.exchange(
            "POST", f"{url}/completion", body=body, headers=headers, timeout_s=self._timeout_s
        )

    async def _score(self, url: str, before: IdArray, token: int, headers: Mapping[str, str]) -> float:
        """The log prob of `token` after `before`."""
        for width in _SCORED_WIDTHS:
            answer = await self._complete(url, score_body(before, width), headers)
            (first,) = decoded(answer, _Scored, "body").completion_probabilities
            for likely in first.top_logprobs:
                if likely.id == token:
                    return likely.logprob
        raise EngineContract("completion_probabilities", f"no log prob of id {token}, however many were asked for")

    async def facts(self) -> EngineFacts:
        """See `Engine.facts`."""
        return await self._replicas.agreed_facts(self._facts_of)

    async def _facts_of(self, url: str) -> EngineFacts:
        props = decoded(await self._get(url, "/props"), _Props, "props")
        sizes = [model.meta for model in decoded(await self._get(url, "/v1/models"), _Models, "models").data]
        context_length = props.default_generation_settings.n_ctx
        return EngineFacts(
            kind="llama-server",
            version=props.build_info,
            model=props.model_alias or props.model_path,
            context_length=context_length,
            max_prompt_length=context_length - 1,
            vocab_size=next((meta.n_vocab for meta in sizes if meta and meta.n_vocab), None),
            log_prob_kind="raw",
        )

    async def _get(self, url: str, route: str) -> bytes:
        return await self._http.exchange("GET", url + route, timeout_s=self._info_timeout_s)

    async def tokenize(self, text: str) -> IdArray:
        """See `Engine.tokenize`. Control tokens that `text` spells are read as such."""
        body = orjson.dumps({"content": text, "add_special": False, "parse_special": True})

        async def send(url: str) -> bytes:
            return await self._http.exchange("POST", f"{url}/tokenize", body=body, timeout_s=self._info_timeout_s)

        return id_array(decoded(await self._replicas.ask("", send), _Tokens, "tokenize").tokens)

    async def models(self) -> list[dict[str, Any]]:
        """See `Engine.models`."""
        answer = await self._replicas.ask("", lambda url: self._get(url, "/v1/models"))
        return decoded(answer, _ModelList, "models").data

    async def close(self) -> None:
        """See `Engine.close`."""
        await self._http.close()


def _nothing() -> Completion:
    return Completion(
        ids=np.empty(0, np.int64), log_probs=np.empty(0, np.float64), finish=Finish("length"), log_prob_kind="raw"
    )


def request_body(prompt: IdArray, sampling: Mapping[str, Any], *, max_tokens: int) -> bytes:
    """The body of `/completion`, the ids written straight from the array."""
    return orjson.dumps(
        {
            **sampling,
            "prompt": np.ascontiguousarray(prompt),
            "n_predict": max_tokens,
            "return_tokens": True,
            "n_probs": 1,
            "post_sampling_probs": False,
            "cache_prompt": True,
            "stream": False,
            "response_fields": _FIELDS,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def score_body(before: IdArray, width: int) -> bytes:
    """Ask for the `width` likeliest tokens after `before`.

    The one token sampled for it must end a character, or this log prob too would be left out: a grammar sees to it,
    and does not touch the raw logits that are read.
    """
    return orjson.dumps(
        {
            "prompt": before,
            "n_predict": 1,
            "n_probs": width,
            "grammar": 'root ::= "a"',
            "cache_prompt": True,
            "response_fields": ("completion_probabilities",),
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


class _Settings(msgspec.Struct):
    n_ctx: int  # of one slot


class _Props(msgspec.Struct):
    default_generation_settings: _Settings
    build_info: str = ""
    model_alias: str = ""
    model_path: str = ""


class _ModelMeta(msgspec.Struct):
    n_vocab: int | None = None


class _Model(msgspec.Struct):
    meta: _ModelMeta | None = None


class _Models(msgspec.Struct):
    data: list[_Model]


class _ModelList(msgspec.Struct):
    data: list[dict[str, Any]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


class _Entry(msgspec.Struct):
    id: int
    logprob: float | None


class _Likely(msgspec.Struct):
    id: int
    logprob: float


class _Distribution(msgspec.Struct):
    top_logprobs: list[_Likely]


class _Scored(msgspec.Struct):
    completion_probabilities: tuple[_Distribution]


class _Wire(msgspec.Struct):
    """The reply of `/completion`. Raw parts are read after the stop type."""

    tokens: msgspec.Raw = msgspec.Raw()
    completion_probabilities: msgspec.Raw = msgspec.Raw()
    stop: Any = None
    stop_type: Any = None
    stopping_word: Any = ""
    tokens_evaluated: Any = None
    tokens_predicted: Any = None
    timings: Any = None
    error: Any = None


class Reply(msgspec.Struct, frozen=True):
    """One reply. ids, log_probs, unscored: shape (n,); `unscored` marks ids whose log prob is yet to be asked for."""

    ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64]
    unscored: npt.NDArray[np.bool_]
    finish: Finish
    facts: Mapping[str, Any]


def read_reply(body: bytes, *, prompt_length: int) -> Reply:
    """A reply of `/completion`. Raises EngineContract, or what an error inside the 200 means."""
    told = decoded(body, _Wire, "body", numbers="completion_probabilities")
    if refused := error_inside({"error": told.error}):
        raise refused
    ids = token_ids(told.tokens, "tokens")
    finish = _finish(told, ids)
    if told.stop not in (None, True):
        raise EngineContract("stop", f"{told.stop!r}: the generation had not finished")
    if told.tokens_evaluated not in (None, prompt_length):
        raise EngineContract("tokens_evaluated", f"the engine read {told.tokens_evaluated!r}, sent {prompt_length}")
    if told.tokens_predicted not in (None, len(ids)):
        raise EngineContract("tokens_predicted", f"the engine says {told.tokens_predicted!r}, counted {len(ids)}")
    entries: Sequence[_Entry] = ()
    if len(ids):
        entries = decoded(told.completion_probabilities, list[_Entry], "completion_probabilities")
    log_probs, unscored = aligned(ids, entries)
    return Reply(ids, log_probs, unscored, finish, {"timings": told.timings} if told.timings else {})


def _finish(told: _Wire, ids: npt.NDArray[np.int64]) -> Finish:
    match told.stop_type:
        case "eos" if len(ids):
            return Finish("stop", int(ids[-1]))
        case "word" if isinstance(told.stopping_word, str):
            return Finish("stop", told.stopping_word)
        case "limit":
            return Finish("length")
        case unknown:
            raise EngineContract("stop_type", f"unknown: {unknown!r}"[:200])


def aligned(
    ids: npt.NDArray[np.int64], entries: Sequence[_Entry]
) -> tuple[npt.NDArray[np.float64], npt.NDArray[np.bool_]]:
    """The log probs of `entries`, each at its id's place, and which places have none.

    Entries are in order but may lack some ids. An entry whose id also stands unmatched within the reach of one
    character could belong to either place: both are left for scoring rather than guessed.
    Raises EngineContract where an entry fits nowhere.
    """
    log_probs = np.full(len(ids), np.nan)
    unscored = np.ones(len(ids), np.bool_)
    upcoming = iter(entries)
    entry = next(upcoming, None)
    for position, token in enumerate(ids):
        if entry is not None and entry.id == token:
            log_probs[position] = np.nan if entry.logprob is None else entry.logprob
            unscored[position] = False
            entry = next(upcoming, None)
    if entry is not None:
        raise EngineContract("completion_probabilities", f"an entry of id {entry.id} fits none of the tokens")
    doubtful = _spread(ids, unscored)
    log_probs[doubtful] = np.nan
    return log_probs, doubtful


def _spread(ids: npt.NDArray[np.int64], unscored: npt.NDArray[np.bool_]) -> npt.NDArray[np.bool_]:
    """`unscored`, with every place of the same id within reach of an unscored one, until nothing is added."""
    marked, before = unscored.copy(), -1
    while before != (before := int(marked.sum())):
        for step in range(1, min(_REACH, len(ids) - 1) + 1):
            same = ids[step:] == ids[:-step]
            marked[step:] |= same & marked[:-step]
            marked[:-step] |= same & marked[step:]
    return marked
