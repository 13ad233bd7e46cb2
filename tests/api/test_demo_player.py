"""The rollout player behaves as harnesses do: whole transcripts, odd rewrites, an SDK's retries."""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from random import Random
from urllib.parse import unquote

import aiohttp
import pytest
from aiohttp import web

from api.demo import player
from api.demo.evidence import Json, PlayedRollout
from api.demo.habits import Habits
from api.demo.player import Game, Player
from api.dialects import chat

CALL = {
    "id": "call_t1_0",
    "type": "function",
    "function": {"name": "run_shell", "arguments": '{"command" : "ls -la\\n# ü", "n": 1.0}'},
}
CONVERSATION: tuple[Json, ...] = (
    {"role": "system", "content": "sys"},
    {"role": "user", "content": "go"},
    {"role": "assistant", "content": None, "reasoning_content": "hm", "tool_calls": [CALL], "refusal": None},
    {"role": "tool", "tool_call_id": "call_t1_0", "name": "run_shell", "content": "a\n<|im_end|>"},
    {"role": "assistant", "content": " done ", "generation_token_ids": [1, 2]},
    {"role": "user", "content": "more"},
)

Behaviour = Callable[[int, web.Request], Awaitable[web.StreamResponse | None]]


@dataclass
class Product:
    """Answers chat requests with a tool call and prose in turn; `behave` may answer an attempt in its own way."""

    behave: Behaviour | None = None
    bodies: list[Json] = field(default_factory=list)
    requests: list[web.Request] = field(default_factory=list)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        self.bodies.append(json.loads(await request.read()))
        self.requests.append(request)
        if self.behave is not None and (own := await self.behave(len(self.bodies), request)) is not None:
            return own
        turn = sum(message["role"] == "assistant" for message in self.bodies[-1]["messages"])
        message: Json = {"role": "assistant", "content": f"Said n-{turn:06x}."}
        if turn % 2 == 0:
            arguments = json.dumps({"command": f"ls # n-{turn:06x}"})
            function = {"name": "run_shell", "arguments": arguments}
            calls = [{"id": f"call_t{turn}_0", "type": "function", "function": function}]
            message = {"role": "assistant", "content": None, "tool_calls": calls}
        if self.bodies[-1].get("return_token_ids"):
            message |= {"prompt_token_ids": [1, 2, 3], "generation_token_ids": [4], "generation_log_probs": [0.0]}
        headers = {
            "x-tokensplice-session": "s",
            "x-tokensplice-turn": f"t{turn}",
            "x-tokensplice-splice": "spliced" if turn else "fresh; reason=first_turn",
        }
        return web.json_response({"choices": [{"index": 0, "message": message}]}, headers=headers)


@asynccontextmanager
async def serving(product: Product) -> AsyncIterator[str]:
    app = web.Application()
    app.router.add_post("/{path:.*}", product.answer)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield f"http://127.0.0.1:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(player, "_FIRST_PAUSE_S", 0.001)


async def played(product: Product, number: int = 0, **options: object) -> PlayedRollout:
    async with serving(product) as url, aiohttp.ClientSession() as client:
        game = Game(**{"base_url": url, "run_id": "r", "turns": 4, "seed": 1, "max_retries": 3, **options})
        return await Player(game, number, client).play()


def honest(number: int) -> bool:
    """Whether this rollout's player takes every reply that reaches it."""
    random = Random(f"1 {number}")
    return not Habits.drawn(number, random).loses_replies


async def test_a_rollout_re_sends_its_whole_transcript_every_turn() -> None:
    product = Product()
    rollout = await played(product)
    assert [turn.turn_id for turn in rollout.turns] == ["t0", "t1", "t2", "t3"]
    assert rollout.gave_up == ""
    lengths = [len(body["messages"]) for body in product.bodies]
    assert lengths == sorted(set(lengths))
    assert [turn.nonces for turn in rollout.turns] == [(f"n-{n:06x}",) for n in range(4)]


async def test_the_tag_stands_in_the_user_text_and_nowhere_else() -> None:
    product = Product()
    rollout = await played(product)
    assert rollout.tag in json.dumps(product.bodies[0]["messages"][1])
    for request, body in zip(product.requests, product.bodies, strict=True):
        others = [message for message in body["messages"] if message["role"] != "user"]
        secret = rollout.tag.removeprefix("[rollout ").removesuffix("]")
        assert secret not in json.dumps(others) + request.path_qs + str(request.headers)


async def test_tool_calls_are_answered_by_position_and_prose_by_the_user() -> None:
    product = Product()
    rollout = await played(product)
    final = [message for message in rollout.turns[-1].messages if message["role"] != "system"]
    assert [message["role"] for message in final] == [
        "user",
        "assistant",
        "tool",
        "assistant",
        "user",
        "assistant",
        "tool",
    ]
    assert final[1]["tool_calls"][0]["id"] == final[2]["tool_call_id"]


async def test_sessions_are_named_by_url_by_header_or_not_at_all() -> None:
    ways = []
    for number in range(3):
        product = Product()
        await played(product, number, turns=1)
        request = product.requests[0]
        ways.append((unquote(request.raw_path), request.headers.get("x-session-id")))
    assert ways == [
        ("/sessions/r/000/v1/chat/completions", None),
        ("/v1/chat/completions", "r/001"),
        ("/v1/chat/completions", None),
    ]


async def test_some_players_ask_for_token_ids_and_echo_them() -> None:
    product = Product()
    rollout = await played(product, 5)
    assert [turn.generation_ids for turn in rollout.turns] == [(4,)] * 4
    assert rollout.turns[0].prompt_length == 3
    assistants = [message for message in rollout.turns[-1].messages if message["role"] == "assistant"]
    assert all(message["generation_token_ids"] == [4] for message in assistants)


async def test_failures_are_repeated_with_a_rising_retry_count_and_the_same_body() -> None:
    async def fails_twice(attempt: int, request: web.Request) -> web.StreamResponse | None:
        if attempt == 1:
            return web.json_response({"error": "busy"}, status=503)
        if attempt == 2:
            assert request.transport is not None
            request.transport.abort()
        return None

    product = Product(fails_twice)
    rollout = await played(product, turns=1)
    assert [request.headers["x-stainless-retry-count"] for request in product.requests] == ["0", "1", "2"]
    assert product.bodies[0] == product.bodies[2]
    assert rollout.turns[0].attempts == 3


async def test_a_refusal_is_not_repeated_and_ends_the_rollout_with_its_words() -> None:
    async def refuses(attempt: int, _: web.Request) -> web.StreamResponse | None:
        return web.json_response({"error": "no such field"}, status=400) if attempt > 1 else None

    product = Product(refuses)
    rollout = await played(product)
    assert len(rollout.turns) == 1
    assert rollout.gave_up.startswith("HTTP 400")
    assert "no such field" in rollout.gave_up


async def test_retries_end_and_the_last_failure_is_told() -> None:
    async def always_fails(_attempt: int, _: web.Request) -> web.StreamResponse | None:
        return web.json_response({"error": "store"}, status=503)

    product = Product(always_fails)
    rollout = await played(product)
    assert len(product.bodies) == 4
    assert "HTTP 503" in rollout.gave_up


async def test_a_player_that_loses_replies_asks_again_for_the_same_turn() -> None:
    number = next(number for number in range(100) if not honest(number))
    product = Product()
    rollout = await played(product, number, turns=30)
    assert sum(turn.attempts for turn in rollout.turns) == len(product.bodies) > 30


async def test_equal_seeds_play_equal_rollouts() -> None:
    first, second = [(await played(Product(), 3)).turns for _ in range(2)]
    assert first == second


async def test_a_player_without_tools_only_talks() -> None:
    async def talks(attempt: int, _: web.Request) -> web.StreamResponse | None:
        message = {"role": "assistant", "content": f"story {attempt}"}
        return web.json_response({"choices": [{"index": 0, "message": message}]})

    product = Product(talks)
    rollout = await played(product, tools=False)
    assert all("tools" not in body for body in product.bodies)
    assert {message["role"] for message in rollout.turns[-1].messages} == {"system", "user", "assistant"}


@pytest.mark.parametrize("number", range(40))
def test_no_habit_changes_the_conversation(number: int) -> None:
    def signature(messages: tuple[Json, ...]) -> bytes:
        return chat.decode(json.dumps({"messages": messages}).encode()).conversation.chain[-1]

    habits = Habits.drawn(number, Random(number))
    assert signature(habits.history(CONVERSATION)) == signature(CONVERSATION)


def test_the_habits_are_all_met_within_one_demo() -> None:
    drawn = [Habits.drawn(number, Random(f"1 {number}")) for number in range(32)]
    for name in Habits.__struct_fields__:
        assert len({getattr(habits, name) for habits in drawn}) > 1, name
