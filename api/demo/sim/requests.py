"""Reads `/generate` bodies as each SGLang release does: what is accepted, what is refused and in which shape."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import orjson

from api.demo.sim.config import Release, SimConfig

Stage = Literal["gate", "manager", "scheduler"]


class Refusal(Exception):
    """An answer other than a generation.

    body: a string is sent as `content_type`, anything else as JSON.
    stage: who refused. What the gate refuses has its HTTP status even for streams; of what the manager refuses a
    stream learns by an error event, and of what the scheduler refuses by an abort chunk, both under status 200.
    """

    def __init__(self, status: int, body: object, message: str = "", stage: Stage = "gate") -> None:
        super().__init__(message)
        self.status = status
        self.body = body
        self.message = message or str(body)
        self.stage = stage
        self.content_type = "text/plain"


def value_error(message: str, stage: Stage = "manager") -> Refusal:
    """What the engine raises about a request's values."""
    return Refusal(400, {"error": {"message": message}}, message, stage)


def http_error(status: int, message: str, kind: str | None = None, stage: Stage = "gate") -> Refusal:
    """The OpenAI-like shape of the web framework's own errors."""
    body = {"object": "error", "message": message, "type": kind or str(status), "param": None, "code": status}
    return Refusal(status, body, message, stage)


def crashed() -> Refusal:
    """What an exception that nobody catches looks like from outside."""
    return Refusal(500, "Internal Server Error")


@dataclass(frozen=True)
class Sampling:
    """The sampling parameters that the simulation acts on."""

    max_new_tokens: int | None
    min_new_tokens: int
    stop: tuple[str, ...]
    stop_regex: tuple[str, ...]
    stop_token_ids: frozenset[int]
    ignore_eos: bool
    skip_special_tokens: bool
    no_stop_trim: bool
    stream_interval: int | None


@dataclass(frozen=True)
class Call:
    """One accepted `/generate` body."""

    rid: str
    input_ids: npt.NDArray[np.int64]
    text: str | None  # a text prompt, not yet tokenised
    sampling: Sampling
    sampling_params: Mapping[str, Any]  # as sent
    stream: bool
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    return_text_in_logprobs: bool
    return_prompt_token_ids: bool


def read_call(raw: bytes, release: Release) -> Call:
    """Decode and check one body. Raises Refusal."""
    try:
        body = orjson.loads(raw)
    except orjson.JSONDecodeError as error:
        raise http_error(400, f"JSON decode error: {error}", "Bad Request") from None
    if not isinstance(body, dict):
        raise http_error(400, "Input should be a valid dictionary", "Bad Request")
    _check_kinds(body, _TOP_LEVEL if release.returns_prompt_ids else _TOP_LEVEL_OLD, release)
    for name in _TOP_LEVEL.keys() - {"input_ids"} | {"sampling_params"}:
        if isinstance(body.get(name), list):
            raise value_error(f"the simulated engine serves one prompt a request: {name} must not be a list")
    params = body.get("sampling_params") or {}
    _check_sampling(params, release)
    return Call(
        rid=body.get("rid") or uuid.uuid4().hex,
        input_ids=_input_ids(body, release),
        text=body.get("text") if body.get("input_ids") is None else None,
        sampling=_sampling(params),
        sampling_params=params,
        stream=bool(body.get("stream")),
        return_logprob=bool(body.get("return_logprob")),
        logprob_start_len=_default(body, "logprob_start_len", -1),
        top_logprobs_num=_default(body, "top_logprobs_num", 0),
        return_text_in_logprobs=bool(body.get("return_text_in_logprobs")),
        return_prompt_token_ids=release.returns_prompt_ids and bool(body.get("return_prompt_token_ids")),
    )


def _input_ids(body: Mapping[str, Any], release: Release) -> npt.NDArray[np.int64]:
    ids = body.get("input_ids")
    if ids is None:
        if body.get("text") is None:
            raise value_error("Either text, input_ids or input_embeds should be provided.")
        return np.empty(0, np.int64)
    if not ids:
        raise value_error("input_ids cannot be empty.")
    if isinstance(ids[0], list):
        raise value_error("the simulated engine serves one prompt a request: input_ids must be a flat list")
    # One pass over the prompt; numpy's own kind tells whether anything but an int was in it.
    numbers = np.array(ids)
    if numbers.dtype.kind != "i" or any(isinstance(token, bool) for token in ids[:1]):
        odd = next(token for token in ids if not _is_int(token))
        raise _wrong_type("input_ids", odd, "i64", release)
    return numbers.astype(np.int64, copy=False)


def _sampling(params: Mapping[str, Any]) -> Sampling:
    limit = params.get("max_new_tokens", 128)
    return Sampling(
        max_new_tokens=None if limit is None else int(limit),
        min_new_tokens=int(_default(params, "min_new_tokens", 0)),
        stop=_strings(params.get("stop")),
        stop_regex=_strings(params.get("stop_regex")),
        stop_token_ids=frozenset(params.get("stop_token_ids") or ()),
        ignore_eos=_default(params, "ignore_eos", False),
        skip_special_tokens=_default(params, "skip_special_tokens", True),
        no_stop_trim=_default(params, "no_stop_trim", False),
        stream_interval=params.get("stream_interval"),
    )


def _default(values: Mapping[str, Any], name: str, default: Any) -> Any:
    """A field's value; null is the same as absent."""
    value = values.get(name)
    return default if value is None else value


def _strings(value: str | list[str] | None) -> tuple[str, ...]:
    return (value,) if isinstance(value, str) else tuple(value or ())


def check_values(call: Call, vocabulary_size: int) -> None:
    """The ranges that the engine verifies once the request is admitted. Raises Refusal."""
    params = call.sampling_params
    for name, fits, words in _RANGES:
        value = params.get(name)
        if value is not None and not fits(value):
            raise value_error(f"{name} must be {words}, got {value}.")
    limit, least = call.sampling.max_new_tokens, call.sampling.min_new_tokens
    if limit is not None and least > limit:
        raise value_error(f"min_new_tokens must be in [0, max_new_tokens({limit})], got {least}.")
    if (n := params.get("n")) not in (None, 1):
        raise value_error(f"the simulated engine serves one answer a request, got n={n}.")
    if sum(params.get(name) is not None for name in ("json_schema", "regex", "ebnf")) > 1:
        raise value_error("Only one of regex, json_schema, or ebnf can be set.")
    for token in params.get("logit_bias") or ():
        if not 0 <= int(token) < vocabulary_size:
            raise value_error(f"logit_bias must has keys in [0, {vocabulary_size - 1}], got {token}.")


def check_length(prompt_length: int, call: Call, config: SimConfig) -> None:
    """The length limits in the order in which the engine meets them. Raises Refusal."""
    window, wanted = config.context_length, call.sampling.max_new_tokens
    if prompt_length >= window:
        raise too_long(prompt_length, window)
    if wanted is not None and prompt_length + wanted > window:
        raise value_error(
            f"Requested token count exceeds the model's maximum context length of {window} tokens. You requested a "
            f"total of {prompt_length + wanted} tokens: {prompt_length} tokens from the input messages and {wanted} "
            "tokens for the completion. Please reduce the number of tokens in the input messages or the completion "
            "to fit within the limit."
        )
    if prompt_length >= config.max_prompt_length:
        raise value_error(
            f"Input length ({prompt_length} tokens) exceeds the maximum allowed length ({config.max_prompt_length} "
            "tokens). Use a shorter input or enable --allow-auto-truncate.",
            "scheduler",
        )
    if call.logprob_start_len > prompt_length:
        raise value_error(
            f"logprob_start_len ({call.logprob_start_len}) exceeds the prompt's length ({prompt_length}).", "scheduler"
        )


def too_long(prompt_length: int, window: int) -> Refusal:
    """The error for a prompt that the window cannot hold."""
    return value_error(
        f"The input ({prompt_length} tokens) is longer than the model's context length ({window} tokens)."
    )


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is(kind: type) -> Callable[[object], bool]:
    return lambda value: isinstance(value, kind)


# What does not fit, and what the contract calls what would have fitted.
Misfit = tuple[object, str]
Kind = Callable[[Any], Misfit | None]


def _scalar(fits: Callable[[object], bool], expected: str) -> Kind:
    return lambda value: None if fits(value) else (value, expected)


def _sequence(fits: Callable[[object], bool], expected: str) -> Kind:
    def check(value: Any) -> Misfit | None:
        if not isinstance(value, list):
            return value, "a sequence"
        return next(((each, expected) for each in value if not fits(each)), None)

    return check


def _one_or_many(fits: Callable[[object], bool], expected: str, name: str) -> Kind:
    one, many = _scalar(fits, f"a value or an array of values for {name}"), _sequence(fits, expected)
    return lambda value: (many if isinstance(value, list) else one)(value)


_KINDS: dict[str, Kind] = {
    "int": _scalar(_is_int, "i64"),
    "float": _scalar(_is_number, "f64"),
    "bool": _scalar(_is(bool), "a boolean"),
    "str": _scalar(_is(str), "a string"),
    "map": _scalar(_is(dict), "a map"),
    "any": lambda _: None,
    "ids": _scalar(_is(list), "a value or an array of values for TokenIdsOrList"),
    "ints": _sequence(_is_int, "i64"),
    "strs": _sequence(_is(str), "a string"),
    "int or more": _one_or_many(_is_int, "i64", "Int64OrList"),
    "bool or more": _one_or_many(_is(bool), "a boolean", "BoolOrList"),
    "str or more": _one_or_many(_is(str), "a string", "StringOrList"),
}
_TOP_LEVEL = {
    "rid": "str or more",
    "text": "str or more",
    "input_ids": "ids",
    "stream": "bool",
    "return_logprob": "bool or more",
    "logprob_start_len": "int or more",
    "top_logprobs_num": "int or more",
    "return_text_in_logprobs": "bool",
    "return_prompt_token_ids": "bool",
}
_NOT_NULL = frozenset({"return_prompt_token_ids"})
_TOP_LEVEL_OLD = {name: kind for name, kind in _TOP_LEVEL.items() if name not in _NOT_NULL}
# In the contract's order: its error lists them.
_SAMPLING = {
    "max_new_tokens": "int",
    "stop": "str or more",
    "stop_token_ids": "ints",
    "stop_regex": "str or more",
    "temperature": "float",
    "top_p": "float",
    "top_k": "int",
    "min_p": "float",
    "frequency_penalty": "float",
    "presence_penalty": "float",
    "repetition_penalty": "float",
    "min_new_tokens": "int",
    "n": "int",
    "json_schema": "str",
    "regex": "str",
    "ebnf": "str",
    "structural_tag": "str",
    "ignore_eos": "bool",
    "skip_special_tokens": "bool",
    "spaces_between_special_tokens": "bool",
    "no_stop_trim": "bool",
    "stream_interval": "int",
    "logit_bias": "map",
    "sampling_seed": "int",
    "custom_params": "any",
    "beam_width": "int",
    "watermark": "map",
    "choice": "strs",
}
_ONLY_STRICT = frozenset({"beam_width", "watermark", "choice"})


def _between(low: float, high: float) -> Callable[[Any], bool]:
    return lambda value: low <= value <= high


_RANGES: tuple[tuple[str, Callable[[Any], bool], str], ...] = (
    ("temperature", lambda value: value >= 0, "non-negative"),
    ("top_p", _between(1e-9, 1), "in (0, 1]"),
    ("min_p", _between(0, 1), "in [0, 1]"),
    ("top_k", lambda value: value == -1 or value >= 1, "-1 (disable) or at least 1"),
    ("frequency_penalty", _between(-2, 2), "in [-2, 2]"),
    ("presence_penalty", _between(-2, 2), "in [-2, 2]"),
    ("repetition_penalty", _between(1e-9, 2), "in (0, 2] (1.0 = no penalty)"),
    ("min_new_tokens", lambda value: value >= 0, "in [0, max_new_tokens]"),
    ("max_new_tokens", lambda value: value >= 0, "at least 0"),
)


def _check_sampling(params: object, release: Release) -> None:
    if not isinstance(params, dict):
        raise _wrong_type("sampling_params", params, "a value or an array of values for SamplingParamsOrList", release)
    known = [name for name in _SAMPLING if release.checks_contract or name not in _ONLY_STRICT]
    for name in params:
        if name not in known:
            if not release.checks_contract:
                raise crashed()  # the constructor's TypeError, which nothing catches
            listed = ", ".join(f"`{each}`" for each in known)
            raise Refusal(400, {"error": f"unknown field `{name}`, expected one of {listed}"})
    _check_kinds(params, _SAMPLING, release)


def _check_kinds(values: Mapping[str, Any], kinds: Mapping[str, str], release: Release) -> None:
    for name, value in values.items():
        if name not in kinds or (value is None and name not in _NOT_NULL):
            continue
        misfit = _KINDS[kinds[name]](value)
        # Older releases take any number for an integer.
        if misfit is None or (not release.checks_contract and kinds[name].startswith("int") and _is_number(value)):
            continue
        raise _wrong_type(name, *misfit, release, sampling=kinds is _SAMPLING)


def _wrong_type(name: str, value: object, expected: str, release: Release, *, sampling: bool = False) -> Refusal:
    if release.checks_contract:
        return Refusal(400, {"error": f"invalid type: {_describe(value)}, expected {expected}"})
    # Older releases compare the value with numbers later on, outside any handler; the top level is validated.
    return crashed() if sampling else http_error(400, f"{name}: Input should be {expected}", "Bad Request")


def _describe(value: object) -> str:
    for kind, words in _DESCRIPTIONS:
        if isinstance(value, kind):
            return words.format(value)
    if isinstance(value, int) and not isinstance(value, bool):
        return f"integer `{value}`"
    return "null" if value is None else f"boolean `{str(value).lower()}`"


_DESCRIPTIONS: tuple[tuple[Any, str], ...] = (
    (str, 'string "{}"'),
    (list, "sequence"),
    (dict, "map"),
    (float, "floating point `{}`"),
)
