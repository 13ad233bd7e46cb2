"""SGLang's native HTTP interface: `/generate` with token ids in and out, never text.

Not streamed: a stream's chunks are cumulative or deltas by a server flag that no chunk shows, and an abort repeats
ids in some versions; one whole reply is exact in all of them (0.5.12, 0.5.13, 0.5.23).
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson

from api.engine.base import Completion, EngineAborted, EngineContract, EngineError, EngineFacts, EngineTimeout
from api.engine.http import Http, RouteMissing, error_inside
from api.engine.parameters import SGLANG, translate
from api.engine.pool import Replicas, routing_headers
from api.engine.reply import decoded, id_values, token_ids
from splice.types import Finish, IdArray, WeightSpan, id_array

_ABORT_TIMEOUT_S = 5.0

# Beside `sampling_params`, not in it: an unknown key there is a 400 (0.5.23) or a 500 (before).
_TOP_LEVEL = frozenset({"custom_logit_processor", "lora_path", "priority"})

# Below this SGLang samples greedily, at temperature 1.
_GREEDY_BELOW = 1e-6

# The scheduler takes a prompt of fewer tokens than `max_req_input_len`, which is 6 less than the context when the
# key-value pool is no smaller.
_LARGEST_PROMPT_BELOW_CONTEXT = 7


class SglangEngine:
    """One SGLang server, or several replicas of one."""

    def __init__(self, urls: Sequence[str], *, http: Http, timeout_s: float, info_timeout_s: float) -> None:
        self._replicas = Replicas(urls)
        self._http = http
        self._timeout_s = timeout_s
        self._info_timeout_s = info_timeout_s
        self._aborts: set[asyncio.Task[None]] = set()

    def sampling(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """See `Engine.sampling`.

        The temperature is always said: the meaning of the log probs hangs on it, and a server's
        `--preferred-sampling-params` would otherwise choose it unseen.
        """
        return {"temperature": 1.0, **translate(wanted, SGLANG)}

    async def generate(
        self, prompt: IdArray, sampling: Mapping[str, Any], *, max_tokens: int, rid: str, affinity: str
    ) -> Completion:
        """See `Engine.generate`."""
        body = request_body(prompt, sampling, max_tokens=max_tokens, rid=rid)
        headers = routing_headers(affinity)

        async def send(url: str) -> tuple[str, bytes]:
            try:
                return url, await self._http.exchange(
                    "POST", f"{url}/generate", body=body, headers=headers, timeout_s=self._timeout_s
                )
            except (asyncio.CancelledError, EngineTimeout):
                # Closing the connection tells the engine too, but only when it next polls, and not through a router.
                self._abort_soon(url, rid)
                raise

        url, answer = await self._replicas.ask(affinity, send)
        return read_completion(
            answer,
            prompt_length=len(prompt),
            max_tokens=max_tokens,
            log_prob_kind=log_prob_kind(sampling),
            engine=url,
        )

    def _abort_soon(self, url: str, rid: str) -> None:
        task = asyncio.get_running_loop().create_task(self._abort(url, rid))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    async def _abort(self, url: str, rid: str) -> None:
        body = orjson.dumps({"rid": rid, "abort_all": False})
        # A courtesy: the closed connection is what counts, and nobody is left to be told of a failure.
        with contextlib.suppress(EngineError):
            await self._http.exchange("POST", f"{url}/abort_request", body=body, timeout_s=_ABORT_TIMEOUT_S)

    async def facts(self) -> EngineFacts:
        """See `Engine.facts`. Every replica is asked; the tightest limits of those that answer hold for all."""
        return await self._replicas.agreed_facts(self._facts_of)

    async def _facts_of(self, url: str) -> EngineFacts:
        server = decoded(await self._get(url, "/server_info", "/get_server_info"), _ServerInfo, "server_info")
        model = decoded(await self._get(url, "/model_info", "/get_model_info"), _ModelInfo, "model_info")
        context_length = server.context_length or await self._context_length(url)
        if not model.weight_version:
            model.weight_version = await self._weight_version(url)
        return engine_facts(server, model, context_length)

    async def _get(self, url: str, *routes: str) -> bytes:
        """The first of `routes` that this version has; a newer one refuses the old names and the other way round."""
        for route in routes[:-1]:
            try:
                return await self._http.exchange("GET", url + route, timeout_s=self._info_timeout_s)
            except RouteMissing:
                continue
        return await self._http.exchange("GET", url + routes[-1], timeout_s=self._info_timeout_s)

    async def _context_length(self, url: str) -> int:
        models = decoded(await self._get(url, "/v1/models"), _Models, "models")
        lengths = [length for model in models.data if isinstance(length := model.get("max_model_len"), int)]
        if not lengths:
            raise EngineContract("context_length", "neither /server_info nor /v1/models tells it")
        return min(lengths)

    async def _weight_version(self, url: str) -> str:
        try:
            told = decoded(await self._get(url, "/get_weight_version", "/weight_version"), _ModelInfo, "weight_version")
        except EngineContract:
            return ""
        return told.weight_version or ""

    async def tokenize(self, text: str) -> IdArray:
        """See `Engine.tokenize`. Control tokens that `text` spells are read as such."""
        body = orjson.dumps({"prompt": text, "add_special_tokens": False})

        async def send(url: str) -> bytes:
            return await self._http.exchange("POST", f"{url}/tokenize", body=body, timeout_s=self._info_timeout_s)

        return id_array(decoded(await self._replicas.ask("", send), _Tokens, "tokenize").tokens)

    async def models(self) -> list[dict[str, Any]]:
        """See `Engine.models`."""
        answer = await self._replicas.ask("", lambda url: self._get(url, "/v1/models"))
        return decoded(answer, _Models, "models").data

    async def close(self) -> None:
        """See `Engine.close`. Waits, bounded, for the aborts that are under way."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=_ABORT_TIMEOUT_S)
        await self._http.close()


def request_body(prompt: IdArray, sampling: Mapping[str, Any], *, max_tokens: int, rid: str) -> bytes:
    """The body of `/generate`, the ids written straight from the array."""
    return orjson.dumps(
        {
            "rid": rid,
            "input_ids": np.ascontiguousarray(prompt),
            "sampling_params": {
                **{name: value for name, value in sampling.items() if name not in _TOP_LEVEL},
                "max_new_tokens": max_tokens,
            },
            **{name: value for name, value in sampling.items() if name in _TOP_LEVEL},
            "return_logprob": True,
            "logprob_start_len": -1,
            "stream": False,
        },
        option=orjson.OPT_SERIALIZE_NUMPY,
    )


def log_prob_kind(sampling: Mapping[str, Any]) -> str:
    """SGLang's log probs are of the logits divided by the temperature; at 1, or greedy, that changes nothing."""
    temperature = sampling.get("temperature", 1.0)
    return "raw" if temperature == 1 or temperature < _GREEDY_BELOW else "tempered"


class _ServerInfo(msgspec.Struct):
    """What of `/server_info` matters here; it holds every argument of the server besides."""

    version: str = ""
    context_length: int | None = None
    max_req_input_len: int | None = None
    allow_auto_truncate: bool | None = False
    served_model_name: str | None = None
    speculative_algorithm: str | None = None
    speculative_num_draft_tokens: int | None = None


class _ModelInfo(msgspec.Struct):
    model_path: str = ""
    weight_version: str | None = None
    vocab_size: int | None = None


class _Models(msgspec.Struct):
    data: list[dict[str, Any]]


class _Tokens(msgspec.Struct):
    tokens: list[int]


def engine_facts(server: _ServerInfo, model: _ModelInfo, context_length: int) -> EngineFacts:
    """What the service needs to know, or EngineContract where the server would change prompts."""
    if server.allow_auto_truncate:
        raise EngineContract(
            "allow_auto_truncate",
            "this server cuts long prompts without saying so; restart it without --allow-auto-truncate",
        )
    reserved = (server.speculative_num_draft_tokens or 0) if server.speculative_algorithm else 0
    largest = context_length - _LARGEST_PROMPT_BELOW_CONTEXT
    if server.max_req_input_len is not None:
        largest = server.max_req_input_len - 1
    return EngineFacts(
        kind="sglang",
        version=server.version,
        model=server.served_model_name or model.model_path,
        context_length=context_length,
        max_prompt_length=max(min(largest, context_length - 1 - reserved), 0),
        vocab_size=model.vocab_size,
        log_prob_kind="tempered",
        weight_version=model.weight_version or "",
    )


class _Meta(msgspec.Struct):
    """`meta_info`. Raw parts are read after the finish reason: an abort is one whatever else is broken."""

    finish_reason: Any = None
    output_token_logprobs: msgspec.Raw = msgspec.Raw()
    prompt_tokens: Any = None
    completion_tokens: Any = None
    weight_version: Any = None
    weight_versions: msgspec.Raw = msgspec.Raw()
    cached_tokens: Any = None
    reasoning_tokens: Any = None
    num_retractions: Any = None
    e2e_latency: Any = None


class _Reply(msgspec.Struct):
    output_ids: msgspec.Raw = msgspec.Raw()
    meta_info: _Meta | None = None
    error: Any = None


class _Sampled(msgspec.Struct, array_like=True):
    """`[log prob or null, id, text or null]`."""

    log_prob: float | None
    id: int


class _Span(msgspec.Struct):
    version: str
    start: int
    end: int


_KEPT_FACTS = ("prompt_tokens", "cached_tokens", "reasoning_tokens", "num_retractions", "e2e_latency")


def read_completion(body: bytes, *, prompt_length: int, max_tokens: int, log_prob_kind: str, engine: str) -> Completion:
    """A reply of `/generate`, as the arrays that it holds.

    Raises EngineAborted, EngineContract, or what an error inside the 200 means.
    """
    reply = decoded(body, _Reply, "body", numbers="output_token_logprobs")
    if refused := error_inside({"error": reply.error}):
        raise refused
    meta = reply.meta_info
    if meta is None:
        raise EngineContract("meta_info", "missing")
    finish = read_finish(meta.finish_reason)
    ids = token_ids(reply.output_ids, "output_ids")
    log_probs = _log_probs(meta.output_token_logprobs, ids, max_tokens=max_tokens)
    _expect_count("prompt_tokens", meta.prompt_tokens, prompt_length)
    _expect_count("completion_tokens", meta.completion_tokens, len(ids))
    return Completion(
        ids=ids,
        log_probs=log_probs,
        finish=finish,
        log_prob_kind=log_prob_kind,
        weight_versions=_weight_spans(meta, len(ids)),
        engine=engine,
        facts={name: value for name in _KEPT_FACTS if (value := getattr(meta, name)) is not None},
    )


def read_finish(told: Any) -> Finish:
    """`finish_reason` of a finished reply. Raises EngineAborted or EngineContract."""
    match told:
        case "abort" | {"type": "abort"}:
            words = told.get("message") if isinstance(told, dict) else None
            raise EngineAborted(f"the engine aborted the generation: {words or 'no reason given'}")
        case {"type": "stop", "matched": "NaN happened"}:
            # The sampler chose an id outside the vocabulary and the engine wrote a stop token over it.
            raise EngineContract("finish_reason", "NaN happened: the engine overwrote a token that it could not sample")
        case {"type": "stop", "matched": bool()}:
            raise EngineContract("finish_reason", f"unknown: {told!r}")
        case {"type": "stop", "matched": int() | str() | None as matched}:
            return Finish("stop", matched)
        case {"type": "stop"} if "matched" not in told:
            return Finish("stop")
        case {"type": "length"}:
            return Finish("length")
        case None:
            raise EngineContract("finish_reason", "missing: the generation had not finished")
        case _:
            raise EngineContract("finish_reason", f"unknown: {told!r}"[:200])


def _log_probs(raw: msgspec.Raw, ids: npt.NDArray[np.int64], *, max_tokens: int) -> npt.NDArray[np.float64]:
    field = "output_token_logprobs"
    sampled = decoded(raw, list[_Sampled], field)
    if max_tokens == 0 and not len(ids) and len(sampled) == 1:
        return np.empty(0)  # SGLang always sends one entry at least
    if len(sampled) != len(ids):
        raise EngineContract(field, f"{len(sampled)} entries for {len(ids)} output_ids")
    repeated = id_values([each.id for each in sampled], field)
    differing = np.flatnonzero(repeated != ids)
    if len(differing):
        at = int(differing[0])
        raise EngineContract(field, f"entry {at} is of id {repeated[at]}, output_ids has {ids[at]}")
    return np.array([np.nan if each.log_prob is None else each.log_prob for each in sampled], dtype=np.float64)


def _expect_count(field: str, told: Any, counted: int) -> None:
    # Absent is allowed: some finished replies lack these, and the ids themselves are what counts.
    if told is not None and told != counted:
        raise EngineContract(field, f"the engine says {told!r}, counted {counted}")


def _weight_spans(meta: _Meta, length: int) -> tuple[WeightSpan, ...]:
    """0.5.23 tells which tokens were sampled under which weights; older versions only the last version."""
    if bytes(meta.weight_versions) not in (b"", b"null", b"[]"):
        spans = decoded(meta.weight_versions, list[_Span], "weight_versions")
        starts, ends = [span.start for span in spans], [span.end for span in spans]
        if starts != [0, *ends[:-1]] or ends[-1] != length or sorted(ends) != ends:
            raise EngineContract("weight_versions", f"the spans do not cover the {length} sampled tokens in order")
        return tuple(WeightSpan(span.version, span.start, span.end) for span in spans)
    if meta.weight_version is None:
        return ()
    return (WeightSpan(str(meta.weight_version), 0, length),)
