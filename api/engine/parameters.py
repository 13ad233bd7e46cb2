"""Sampling parameters: every spelling that clients use, checked, and written as one engine spells it.

InvalidParameter            a parameter whose value has no meaning (400), all of them named at once

A caller's parameter goes through three tables: `SPELLINGS` (OpenAI's, vLLM's, SGLang's and llama.cpp's names to one
name), `CHECKS` (what a value may be) and an engine's own (`SGLANG`, `LLAMA_SERVER`: that name to its wire name).
A name missing from the engine's table is refused with UnsupportedParameter: nothing is dropped in silence, except
what cannot change the sampled ids (`TEXT_ONLY`: it shapes only the engine's text, which is never read).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from types import MappingProxyType
from typing import Any, NamedTuple

import orjson

from api.engine.base import UnsupportedParameter

# How a reply's length is spelled. `Engine.generate` takes it apart from the rest, so the caller picks it out first.
MAX_TOKENS_NAMES = ("max_completion_tokens", "max_tokens", "max_new_tokens", "n_predict")

TEXT_ONLY = frozenset(
    {
        "skip_special_tokens",
        "spaces_between_special_tokens",
        "no_stop_trim",
        "include_stop_str_in_output",
        "detokenize",
        "stream_interval",
    }
)

# SGLang's limits; more would be a 400 of its own in less clear words.
_MAX_STOPS = 32
_MAX_REGEX_BYTES = 256

Check = Callable[[Any], Any]
Wire = str | Callable[[Any], dict[str, Any]]


class InvalidParameter(ValueError):
    """A sampling parameter with a value that has no meaning. `problems` holds each one's (name, problem)."""

    def __init__(self, name: str, problem: str, *more: tuple[str, str]) -> None:
        self.name = name
        self.problem = problem
        self.problems = ((name, problem), *more)
        super().__init__("; ".join(f"{who} {what}" for who, what in self.problems))


class _Unfit(Exception):
    """A value fails its check; the message completes the sentence that the parameter's name begins."""


def _number(least: float = -math.inf, most: float = math.inf, *, above: bool = False) -> Check:
    def check(value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise _Unfit("must be a number")
        if value < least or value > most or (above and value == least):
            raise _Unfit(f"must be {_range(least, most, above=above)}, got {value}")
        return value

    return check


def _range(least: float, most: float, *, above: bool) -> str:
    floor = f"above {least:g}" if above else f"at least {least:g}"
    return floor if most == math.inf else f"{floor} and at most {most:g}"


def _integer(least: int = -(2**63), most: int = 2**63 - 1) -> Check:
    def check(value: Any) -> int:
        # JSON writers turn 1 into 1.0; engines refuse that, so it is mended here.
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if isinstance(value, bool) or not isinstance(value, int):
            raise _Unfit("must be a whole number")
        if not least <= value <= most:
            raise _Unfit(f"must be between {least} and {most}, got {value}")
        return value

    return check


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise _Unfit("must be true or false")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or not value:
        raise _Unfit("must be a string that is not empty")
    return value


def _texts(most_bytes: int = 2**31) -> Check:
    def check(value: Any) -> list[str]:
        texts = [value] if isinstance(value, str) else value
        if not isinstance(texts, list | tuple) or not all(isinstance(text, str) and text for text in texts):
            raise _Unfit("must be a string or a list of strings, none of them empty")
        if len(texts) > _MAX_STOPS:
            raise _Unfit(f"may hold {_MAX_STOPS} strings at most, got {len(texts)}")
        if any(len(text.encode()) > most_bytes for text in texts):
            raise _Unfit(f"may hold strings of {most_bytes} bytes at most")
        return list(texts)

    return check


def _token_ids(value: Any) -> list[int]:
    check = _integer(0, 2**32 - 1)
    if not isinstance(value, list | tuple):
        raise _Unfit("must be a list of token ids")
    return [check(token) for token in value]


def _logit_bias(value: Any) -> dict[str, float]:
    if not isinstance(value, Mapping):
        raise _Unfit("must be an object of token id to bias")
    if not all(str(token).isascii() and str(token).isdigit() for token in value):
        raise _Unfit("must have token ids as its keys")
    bias = _number(-100, 100)
    return {str(token): bias(weight) for token, weight in value.items()}


def _json_text(value: Any) -> str:
    if isinstance(value, str):
        try:
            orjson.loads(value)
        except orjson.JSONDecodeError:
            raise _Unfit("must be JSON") from None
        return value
    if not isinstance(value, Mapping):
        raise _Unfit("must be a JSON object")
    return orjson.dumps(value).decode()


def _object(value: Any) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise _Unfit("must be a JSON object")
    return dict(value)


def _top_k(value: Any) -> int:
    # "No limit" is -1 to SGLang, 0 to vLLM and llama.cpp.
    return int(_integer(-1, 2**31 - 1)(value)) or -1


def _one(value: Any) -> int:
    if _integer()(value) != 1:
        raise _Unfit("must be 1: one request makes one turn; send the request again for another sample")
    return 1


CHECKS: Mapping[str, Check] = MappingProxyType(
    {
        "temperature": _number(0),
        "top_p": _number(0, 1, above=True),
        "top_k": _top_k,
        "min_p": _number(0, 1),
        "frequency_penalty": _number(-2, 2),
        "presence_penalty": _number(-2, 2),
        "repetition_penalty": _number(0, 2, above=True),
        "min_tokens": _integer(0, 2**31 - 1),
        "stop": _texts(),
        "stop_token_ids": _token_ids,
        "stop_regex": _texts(_MAX_REGEX_BYTES),
        "ignore_eos": _boolean,
        "seed": _integer(),
        "logit_bias": _logit_bias,
        "json_schema": _json_text,
        "regex": _text,
        "ebnf": _text,
        "gbnf": _text,
        "structural_tag": _json_text,
        "custom_params": _object,
        "custom_logit_processor": _text,
        "lora_path": _text,
        "priority": _integer(-(2**31), 2**31 - 1),
        "n": _one,
        # llama.cpp's own.
        "typical_p": _number(0, 1),
        "top_n_sigma": _number(),
        "repeat_last_n": _integer(-1, 2**31 - 1),
        "xtc_probability": _number(0, 1),
        "xtc_threshold": _number(0, 1),
        "dynatemp_range": _number(0),
        "dynatemp_exponent": _number(),
        "mirostat": _integer(0, 2),
        "mirostat_tau": _number(0),
        "mirostat_eta": _number(0),
    }
)

SPELLINGS: Mapping[str, str] = MappingProxyType(
    {
        "sampling_seed": "seed",
        "min_new_tokens": "min_tokens",
        "repeat_penalty": "repetition_penalty",
        "guided_json": "json_schema",
        "guided_regex": "regex",
        "guided_grammar": "ebnf",
        "grammar": "gbnf",
    }
)

# Each rules out the others: a token can obey only one grammar.
_GRAMMARS = ("json_schema", "regex", "ebnf", "gbnf", "structural_tag")

SGLANG: Mapping[str, Wire] = MappingProxyType(
    {
        **{
            name: name
            for name in (
                *("temperature", "top_p", "top_k", "min_p", "frequency_penalty", "presence_penalty"),
                *("repetition_penalty", "stop", "stop_token_ids", "stop_regex", "ignore_eos", "logit_bias"),
                *("json_schema", "regex", "ebnf", "structural_tag", "custom_params"),
                *("custom_logit_processor", "lora_path", "priority"),
            )
        },
        "min_tokens": "min_new_tokens",
        "seed": "sampling_seed",
    }
)

LLAMA_SERVER: Mapping[str, Wire] = MappingProxyType(
    {
        **{
            name: name
            for name in (
                *(
                    "temperature",
                    "top_p",
                    "min_p",
                    "frequency_penalty",
                    "presence_penalty",
                    "stop",
                    "ignore_eos",
                    "seed",
                ),
                *("typical_p", "top_n_sigma", "repeat_last_n", "xtc_probability", "xtc_threshold"),
                *("dynatemp_range", "dynatemp_exponent", "mirostat", "mirostat_tau", "mirostat_eta"),
            )
        },
        "top_k": lambda value: {"top_k": max(value, 0)},
        "repetition_penalty": "repeat_penalty",
        "gbnf": "grammar",
        "json_schema": lambda value: {"json_schema": orjson.loads(value)},
        "logit_bias": lambda value: {"logit_bias": [[int(token), weight] for token, weight in value.items()]},
    }
)


class _Given(NamedTuple):
    """One parameter: as the caller wrote its name, the one name it has here, and its value, unchecked."""

    written: str
    name: str
    value: Any


def translate(wanted: Mapping[str, Any], wire: Mapping[str, Wire]) -> dict[str, Any]:
    """`wanted` as the engine of table `wire` spells it. A null is the same as not given.

    Raises UnsupportedParameter or InvalidParameter, each naming every parameter that it is about.
    """
    given = list(_read(wanted))
    unknown = tuple(each.written for each in given if each.name not in wire and each.name != "n")
    if unknown:
        raise UnsupportedParameter(unknown)
    told: dict[str, Any] = {}
    for name, value in _checked(given).items():
        spelled = wire[name]
        told.update({spelled: value} if isinstance(spelled, str) else spelled(value))
    return told


def _read(wanted: Mapping[str, Any]) -> Iterator[_Given]:
    for written, value in wanted.items():
        if value is None or written in TEXT_ONLY:
            continue
        if written == "response_format":
            yield from _response_format(value)
        else:
            yield _Given(written, SPELLINGS.get(written, written), value)


def _response_format(value: Any) -> tuple[_Given, ...]:
    """OpenAI's `response_format` as the grammar that it means; plain text means none."""
    match value:
        case {"type": "text"}:
            return ()
        case {"type": "json_object"}:
            return (_Given("response_format", "json_schema", {"type": "object"}),)
        case {"type": "json_schema", "json_schema": {"schema": dict() as schema}}:
            return (_Given("response_format", "json_schema", schema),)
        case {"type": "structural_tag"}:
            return (_Given("response_format", "structural_tag", value),)
        case _:
            raise InvalidParameter("response_format", "must be of type text, json_object, or json_schema with a schema")


def _checked(given: Iterable[_Given]) -> dict[str, Any]:
    values: dict[str, Any] = {}
    written: dict[str, str] = {}
    problems: list[tuple[str, str]] = []
    for each in given:
        try:
            value = CHECKS[each.name](each.value)
        except _Unfit as problem:
            problems.append((each.written, str(problem)))
            continue
        if each.name in values and values[each.name] != value:
            problems.append((each.written, f"contradicts {written[each.name]}"))
        values[each.name], written[each.name] = value, each.written
    grammars = [written[name] for name in _GRAMMARS if name in values]
    if len(grammars) > 1:
        problems.append((grammars[0], f"cannot be combined with {' and '.join(grammars[1:])}"))
    if problems:
        raise InvalidParameter(*problems[0], *problems[1:])
    return {name: value for name, value in values.items() if name != "n"}
