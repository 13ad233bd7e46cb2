"""Hostile and broken requests: always a clear refusal, never a 500, and the worker serves on."""

from __future__ import annotations

import json
from typing import Any

import pytest

from tests.e2e.stack import TOOLS, Stack, Talk

pytestmark = pytest.mark.asyncio(loop_scope="session")

HELLO = [{"role": "user", "content": "Hello."}]


def _deep(depth: int) -> Any:
    value: Any = 1
    for _ in range(depth):
        value = [value]
    return value


@pytest.mark.parametrize(
    ("extra", "named"),
    [
        ({"temperature": 1e999}, "temperature"),
        ({"custom_params": _deep(300)}, "custom_params"),
        ({"custom_params": {"n": 2**70}}, "custom_params"),
        ({"json_schema": _deep(300)}, "json_schema"),
        ({"chat_template_kwargs": {"x": _deep(100)}}, "chat_template_kwargs"),
        ({"chat_template_kwargs": {f"k{n}": 1 for n in range(10_000)}}, "chat_template_kwargs"),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": _deep(100)}}]}, "tools"),
        ({"max_tokens": 5, "max_completion_tokens": 6}, "max_tokens"),
        ({"messages": [{"role": "assistant"}] * 30_000}, "messages"),
        ({"messages": []}, "messages"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_a_field_that_cannot_be_used_is_named(stack: Stack, extra: dict[str, Any], named: str) -> None:
    body = json.dumps({"messages": HELLO, **extra}).replace("Infinity", "1e999").encode()
    reply = await stack.call("POST", "/v1/chat/completions", data=body)
    assert (reply.status, reply.code) == (400, "invalid_request"), reply.body
    assert named in reply.body["error"]["param"]


async def test_json_nested_beyond_all_bounds_is_a_bad_request(stack: Stack) -> None:
    for path in ("/v1/chat/completions", "/sessions"):
        body = b'{"messages": ' + b"[" * 5_000 + b"]" * 5_000 + b', "metadata": ' + b"[" * 5_000 + b"]" * 5_000 + b"}"
        assert (await stack.call("POST", path, data=body)).status == 400


@pytest.mark.parametrize(
    "body",
    [
        {"sampling_params": {"max_tokens": "abc"}},
        {"sampling_params": {"temprature": 1}},
        {"metadata": {"n": 2**70}},
        {"metadata": {"n": _deep(100)}},
        {"ttl_s": 10**17},
        {"ttl_s": -1},
        {"group_size": -1},
        {"thinking": "template"},
        {"session_id": "x" * 300},
    ],
)
async def test_a_session_that_could_not_work_is_not_opened(stack: Stack, body: dict[str, Any]) -> None:
    reply = await stack.call("POST", "/sessions", json=body)
    assert reply.status == 400, reply.body


async def test_opening_a_session_again_is_harmless_unless_it_asks_for_something_else(stack: Stack) -> None:
    body = {"session_id": "twice", "run_id": "r", "metadata": {"a": 1}}
    assert (await stack.call("POST", "/sessions", json=body)).status == 201
    assert (await stack.call("POST", "/sessions", json=body)).status == 201
    other = await stack.call("POST", "/sessions", json={**body, "run_id": "other"})
    assert (other.status, other.code) == (409, "session_exists")
    assert "run_id" in other.body["error"]["message"]


@pytest.mark.parametrize(
    "path", ["/sessions?cursor=abc", "/sessions?limit=" + "9" * 5000, "/sessions/%FF", "/%73essions/%FF"]
)
async def test_a_bad_query_or_id_is_a_bad_request(stack: Stack, path: str) -> None:
    assert (await stack.call("GET", path)).status == 400


async def test_odd_headers_are_no_accidents(stack: Stack) -> None:
    long = await stack.chat(HELLO, session="odd", headers={"x-stainless-retry-count": "9" * 5000})
    assert long.status == 200
    refused = await stack.chat(HELLO, session="odd", headers={"Idempotency-Key": "k" * 300})
    assert (refused.status, refused.code) == (400, "invalid_request")
    forged = await stack.chat(HELLO, headers={"authorization": "Bearer tss_YQ.\u00e9"})
    assert forged.status == 401


async def test_arguments_with_half_a_surrogate_pair_are_rendered_not_tripped_over(stack: Stack) -> None:
    messages = [
        *HELLO,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "bash", "arguments": '{"command": "\\ud800"}'}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "x"},
    ]
    assert (await stack.chat(messages, session="surrogate", tools=TOOLS)).status == 200
    messages[1]["tool_calls"][0]["function"]["arguments"] = "[" * 1100 + "]" * 1100
    assert (await stack.chat(messages, session="deep-arguments", tools=TOOLS)).status == 200


async def test_error_bodies_name_no_address(stack: Stack) -> None:
    talk = Talk(stack)
    await stack.script({"fault": "crash"})
    failed = await talk.say("Hello.")
    assert failed.status == 502
    assert "127.0.0.1" not in failed.body["error"]["message"]
