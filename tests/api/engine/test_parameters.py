"""Sampling parameters are translated, or refused by name; nothing is dropped in silence."""

from __future__ import annotations

from typing import Any

import pytest

from api.engine.base import UnsupportedParameter
from api.engine.parameters import CHECKS, LLAMA_SERVER, SGLANG, SPELLINGS, InvalidParameter, translate

TRANSLATIONS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any] | None]] = {
    "nothing": ({}, {}, {}),
    "nulls are not given": ({"temperature": None, "stop": None, "nonsense": None}, {}, {}),
    "OpenAI's own": (
        {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 1, "presence_penalty": -1, "stop": "END", "n": 1},
        {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 1, "presence_penalty": -1, "stop": ["END"]},
        {"temperature": 0.5, "top_p": 0.9, "frequency_penalty": 1, "presence_penalty": -1, "stop": ["END"]},
    ),
    "a seed": ({"seed": 7}, {"sampling_seed": 7}, {"seed": 7}),
    "a seed as SGLang spells it": ({"sampling_seed": 7}, {"sampling_seed": 7}, {"seed": 7}),
    "the same thing twice": ({"sampling_seed": 7, "seed": 7}, {"sampling_seed": 7}, {"seed": 7}),
    "top_k": ({"top_k": 20}, {"top_k": 20}, {"top_k": 20}),
    "no top_k as vLLM spells it": ({"top_k": 0}, {"top_k": -1}, {"top_k": 0}),
    "no top_k as SGLang spells it": ({"top_k": -1}, {"top_k": -1}, {"top_k": 0}),
    "a whole number with a point": ({"top_k": 20.0}, {"top_k": 20}, {"top_k": 20}),
    "min_p and repetition": (
        {"min_p": 0.1, "repetition_penalty": 1.1},
        {"min_p": 0.1, "repetition_penalty": 1.1},
        {"min_p": 0.1, "repeat_penalty": 1.1},
    ),
    "logit bias": (
        {"logit_bias": {"15": -100, "3": 2.5}},
        {"logit_bias": {"15": -100, "3": 2.5}},
        {"logit_bias": [[15, -100], [3, 2.5]]},
    ),
    "min_tokens as vLLM spells it": ({"min_tokens": 3}, {"min_new_tokens": 3}, None),
    "stop tokens": ({"stop_token_ids": [1, 2]}, {"stop_token_ids": [1, 2]}, None),
    "stop by regex": ({"stop_regex": "a+"}, {"stop_regex": ["a+"]}, None),
    "regex": ({"guided_regex": "[0-9]+"}, {"regex": "[0-9]+"}, None),
    "custom": ({"custom_params": {"a": 1}}, {"custom_params": {"a": 1}}, None),
    "an adapter": ({"lora_path": "adapter"}, {"lora_path": "adapter"}, None),
    "a JSON schema": (
        {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "array"}}}},
        {"json_schema": '{"type":"array"}'},
        {"json_schema": {"type": "array"}},
    ),
    "any JSON object": (
        {"response_format": {"type": "json_object"}},
        {"json_schema": '{"type":"object"}'},
        {"json_schema": {"type": "object"}},
    ),
    "a schema as text": ({"json_schema": '{"a":1}'}, {"json_schema": '{"a":1}'}, {"json_schema": {"a": 1}}),
    "plain text": ({"response_format": {"type": "text"}}, {}, {}),
    "what shapes only the text": (
        {"skip_special_tokens": False, "no_stop_trim": True, "spaces_between_special_tokens": False},
        {},
        {},
    ),
}


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_sglang_is_told_in_its_own_words(name: str) -> None:
    wanted, told, _ = TRANSLATIONS[name]
    assert translate(wanted, SGLANG) == told


@pytest.mark.parametrize("name", TRANSLATIONS)
def test_llama_server_is_told_in_its_own_words_or_the_caller_is_refused(name: str) -> None:
    wanted, _, told = TRANSLATIONS[name]
    if told is None:
        with pytest.raises(UnsupportedParameter) as refused:
            translate(wanted, LLAMA_SERVER)
        assert refused.value.names == tuple(wanted)
    else:
        assert translate(wanted, LLAMA_SERVER) == told


def test_every_unknown_parameter_is_named_as_the_caller_spelled_it() -> None:
    with pytest.raises(UnsupportedParameter) as refused:
        translate({"temperature": 1, "best_of": 2, "guided_choice": ["a"], "typical_p": 0.5}, SGLANG)
    assert refused.value.names == ("best_of", "guided_choice", "typical_p")


INVALID: dict[str, dict[str, Any]] = {
    "temperature": {"temperature": -0.1},
    "top_p": {"top_p": 0},
    "min_p": {"min_p": 1.5},
    "top_k": {"top_k": -2},
    "frequency_penalty": {"frequency_penalty": 3},
    "repetition_penalty": {"repetition_penalty": 0},
    "min_new_tokens": {"min_new_tokens": -1},
    "stop": {"stop": [str(number) for number in range(33)]},
    "stop_regex": {"stop_regex": "a" * 257},
    "stop_token_ids": {"stop_token_ids": [1, None]},
    "logit_bias": {"logit_bias": {"hello": 1}},
    "sampling_seed": {"sampling_seed": 1.5},
    "ignore_eos": {"ignore_eos": 1},
    "json_schema": {"json_schema": "{"},
    "n": {"n": 2},
    "response_format": {"response_format": {"type": "yaml"}},
    "seed": {"sampling_seed": 1, "seed": 2},
    "regex": {"regex": "a", "ebnf": "b"},
}


@pytest.mark.parametrize("name", INVALID)
def test_a_value_without_meaning_is_refused_by_name(name: str) -> None:
    with pytest.raises(InvalidParameter) as refused:
        translate(INVALID[name], SGLANG)
    assert refused.value.name == name
    assert refused.value.problem


@pytest.mark.parametrize("value", [True, "1", [1], {}, float("nan"), float("inf")])
def test_a_number_is_nothing_but_a_number(value: Any) -> None:
    with pytest.raises(InvalidParameter, match="temperature must be a number"):
        translate({"temperature": value}, SGLANG)


def test_all_bad_values_are_named_at_once() -> None:
    with pytest.raises(InvalidParameter) as refused:
        translate({"temperature": -1, "top_p": 2, "top_k": 5}, SGLANG)
    assert [name for name, _ in refused.value.problems] == ["temperature", "top_p"]
    assert str(refused.value) == "temperature must be at least 0, got -1; top_p must be above 0 and at most 1, got 2"


def test_every_name_in_the_tables_has_a_check() -> None:
    assert {*SGLANG, *LLAMA_SERVER, *SPELLINGS.values()} <= set(CHECKS)
