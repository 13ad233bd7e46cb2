"""The bodies that `/generate` answers with: whole replies, stream chunks, and the ways to break them.

Shapes: SGLang's `text`, `output_ids`, `meta_info`, log probs as (log prob, id, text) triples.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from api.demo.sim.config import SimConfig
from api.demo.sim.requests import Call
from api.demo.sim.sampling import Sampled, visible_text
from api.demo.sim.vocabulary import Vocabulary

Reply = dict[str, Any]

ABORTED: Mapping[str, Any] = {"type": "abort", "message": "Aborted", "status_code": None, "err_type": None}
ABORTED_IN_QUEUE: Mapping[str, Any] = {"type": "abort", "message": "Abort in waiting queue"}
# orjson writes NaN as null; this string is exchanged for the bare word afterwards.
_NAN = "\N{REPLACEMENT CHARACTER}NaN"


@dataclass(frozen=True)
class Progress:
    """A generation as it stands: how much of `sampled` is out, under which weights."""

    call: Call
    prompt: npt.NDArray[np.int64]
    sampled: Sampled
    made: int
    finish: Mapping[str, Any] | None  # None: more will come
    versions: tuple[tuple[int, str], ...]  # (first token, weight version), oldest first
    latency_s: float
    running: int = 1


def reply(now: Progress, config: SimConfig, vocabulary: Vocabulary) -> Reply:
    """Everything from the start up to now: a whole reply, or a chunk of a cumulative stream."""
    ids = now.sampled.ids[: now.made]
    finish = None if now.finish is None else dict(now.finish)
    body: Reply = {"text": visible_text(ids, now.call.sampling, vocabulary, finish), "output_ids": ids}
    if now.call.return_prompt_token_ids:
        body["prompt_token_ids"] = now.prompt
    body["meta_info"] = _meta_info(now, finish, config)
    if now.call.return_logprob:
        body["meta_info"] |= _log_prob_fields(now, vocabulary)
    return body


def _meta_info(now: Progress, finish: Mapping[str, Any] | None, config: SimConfig) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": now.call.rid,
        "finish_reason": finish,
        "prompt_tokens": len(now.prompt),
        "weight_version": now.versions[-1][1],
        "num_retractions": 0,
        "reasoning_tokens": 0,
        "completion_tokens": now.made,
        "cached_tokens": 0,
    }
    if config.release.tells_load:
        meta |= {"num_running_reqs": now.running, "num_waiting_reqs": 0}
    if finish is not None:
        meta["e2e_latency"] = now.latency_s
        if config.release.tells_weight_spans:
            meta["weight_versions"] = weight_spans(now.versions, now.made)
    return meta


def weight_spans(versions: Sequence[tuple[int, str]], made: int) -> list[dict[str, Any]]:
    """Which tokens were made under which weights."""
    ends = [start for start, _ in versions[1:]] + [made]
    spans = [(version, start, end) for (start, version), end in zip(versions, ends, strict=True)]
    return [
        {"version": version, "start": start, "end": end} for version, start, end in spans if end > start or made == 0
    ]


def _log_prob_fields(now: Progress, vocabulary: Vocabulary) -> dict[str, Any]:
    call, sampled = now.call, now.sampled

    def triples(ids: Sequence[int], log_probs: Sequence[float | None]) -> list[list[Any]]:
        if not call.return_text_in_logprobs:
            return [[log_prob, token, None] for log_prob, token in zip(log_probs, ids, strict=False)]
        return [[log_prob, token, vocabulary.decode([token])] for log_prob, token in zip(log_probs, ids, strict=False)]

    made = triples(sampled.ids[: now.made], sampled.log_probs[: now.made])
    fields: dict[str, Any] = {
        "input_token_logprobs": _prompt_log_probs(now, triples),
        "output_token_logprobs": made,
        "output_token_logprobs_length": len(made),
    }
    if call.top_logprobs_num > 0:
        fields["input_top_logprobs"] = []
        fields["output_top_logprobs"] = [_alternatives(triple, call.top_logprobs_num, vocabulary) for triple in made]
    return fields


def _prompt_log_probs(now: Progress, triples: Callable[..., list[list[Any]]]) -> list[list[Any]]:
    start = now.call.logprob_start_len
    if start < 0:
        return []
    ids = now.prompt[start:].tolist()
    # The first token has none; the others are equally likely here.
    return triples(ids, [None, *[-1.5] * (len(ids) - 1)])


def _alternatives(sampled: list[Any], count: int, vocabulary: Vocabulary) -> list[list[Any]]:
    """The sampled token and its neighbours in the vocabulary, ever less likely."""
    log_prob, token, _ = sampled
    others = [[(log_prob or 0.0) - rank, (token + rank) % vocabulary.size, None] for rank in range(1, count)]
    return [sampled, *others]


def delta(whole: Reply, sent_text: str, sent_ids: int) -> Reply:
    """What an incremental stream sends of `whole`, `sent_*` having gone before. Counts stay cumulative."""
    meta = dict(whole["meta_info"])
    for name in ("output_token_logprobs", "output_top_logprobs"):
        if name in meta:
            meta[name] = meta[name][sent_ids:]
    text = whole["text"][len(sent_text) :]  # nothing, where a stop string was cut off text already sent
    return whole | {"text": text, "output_ids": whole["output_ids"][sent_ids:], "meta_info": meta}


def queue_abort(now: Progress, finish: Mapping[str, Any] = ABORTED_IN_QUEUE) -> Reply:
    """A request aborted before it ran: its reply lacks most counts."""
    meta: dict[str, Any] = {
        "id": now.call.rid,
        "finish_reason": dict(finish),
        "weight_version": now.versions[-1][1],
        "e2e_latency": now.latency_s,
    }
    if now.call.return_logprob:
        meta |= {"input_token_logprobs": [], "output_token_logprobs": [], "output_token_logprobs_length": 0}
    return {"text": "", "output_ids": [], "meta_info": meta | {"completion_tokens": 0}}


def status_abort(now: Progress, status: int, message: str) -> Reply:
    """An abort with a status code, where it travels as a reply: the prompt was replaced, one junk token came out."""
    finish = {"type": "abort", "message": message, "status_code": status, "err_type": None}
    whole = queue_abort(now, finish)
    whole["output_ids"] = [0]
    whole["meta_info"] |= {"prompt_tokens": 1, "completion_tokens": 1, "cached_tokens": 0}
    if now.call.return_logprob:
        whole["meta_info"] |= {"output_token_logprobs": [[0.0, 0, None]], "output_token_logprobs_length": 1}
    return whole


def encode(body: Reply) -> bytes:
    """The body's JSON."""
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY).replace(orjson.dumps(_NAN), b"NaN")


def sabotage(whole: Reply, fault: str | None, vocabulary: Vocabulary) -> Reply:
    """The reply with its contract broken as the script says."""
    breach = _BREACHES.get(fault or "")
    if breach is not None:
        breach(whole, vocabulary)
    return whole


def _drop_ids(whole: Reply, _: Vocabulary) -> None:
    del whole["output_ids"]


def _drop_log_probs(whole: Reply, _: Vocabulary) -> None:
    whole["meta_info"].pop("output_token_logprobs", None)


def _shorten_log_probs(whole: Reply, _: Vocabulary) -> None:
    whole["meta_info"]["output_token_logprobs"] = whole["meta_info"]["output_token_logprobs"][:-1]


def _miscount(whole: Reply, _: Vocabulary) -> None:
    whole["meta_info"]["completion_tokens"] += 1


def _disagree(whole: Reply, vocabulary: Vocabulary) -> None:
    for triple in _triples(whole)[:1]:
        triple[1] = (triple[1] + 1) % vocabulary.size


def _null(whole: Reply, _: Vocabulary) -> None:
    for triple in _triples(whole)[:1]:
        triple[0] = None


def _nan(whole: Reply, _: Vocabulary) -> None:
    for triple in _triples(whole)[:1]:
        triple[0] = _NAN


def _foreign(whole: Reply, vocabulary: Vocabulary) -> None:
    whole["output_ids"] = [vocabulary.size + 4096, *whole["output_ids"][1:]]
    for triple in _triples(whole)[:1]:
        triple[1] = vocabulary.size + 4096


def _not_a_number_happened(whole: Reply, vocabulary: Vocabulary) -> None:
    whole["output_ids"] = [*whole["output_ids"][:-1], vocabulary.eos]
    whole["meta_info"]["finish_reason"] = {"type": "stop", "matched": "NaN happened"}
    for triple in _triples(whole)[-1:]:
        triple[1] = vocabulary.eos


def _triples(whole: Reply) -> list[list[Any]]:
    triples: list[list[Any]] = whole["meta_info"].get("output_token_logprobs", [])
    return triples


_BREACHES: dict[str, Callable[[Reply, Vocabulary], None]] = {
    "ids_missing": _drop_ids,
    "log_probs_missing": _drop_log_probs,
    "counts_differ": _shorten_log_probs,
    "completion_tokens_differ": _miscount,
    "ids_disagree": _disagree,
    "null_log_prob": _null,
    "nan_log_prob": _nan,
    "id_outside_vocabulary": _foreign,
    "nan_happened": _not_a_number_happened,
}
