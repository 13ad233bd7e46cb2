"""Plays one rollout as a tool-using harness does, through the OpenAI chat API and nothing else.

It re-sends the whole transcript on every turn, runs what the model calls, and repeats a failed request as
OpenAI's own client library does. It knows no more of the product than a base URL; beside the reply it only
notes the `x-tokensplice-*` headers, for the judge.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Mapping
from http import HTTPStatus
from random import Random
from urllib.parse import quote, unquote

import aiohttp
import msgspec
import orjson

from api.demo import world
from api.demo.evidence import AnsweredTurn, Json, PlayedRollout
from api.demo.habits import Habits

# What OpenAI's client library repeats, and how long it waits.
_REPEATED = frozenset({408, 409, 429})
_FIRST_PAUSE_S = 0.5
_LONGEST_PAUSE_S = 8.0
_LOST_REPLIES = 0.2  # of the turns of a player that loses replies
_NONCE = re.compile(r"\bn-[0-9a-f]{6}\b")


class Game(msgspec.Struct, frozen=True, kw_only=True):
    """What every rollout of a run has in common."""

    base_url: str
    run_id: str
    turns: int
    seed: int
    tools: bool = True  # False: users only talk, for a model too small to call tools
    asks_ids: bool = False  # for an engine that cannot plant nonces: the reply's ids tell the generation
    max_tokens: int = 512
    max_retries: int = 8
    timeout_s: float = 60.0


class _ChatChoice(msgspec.Struct, frozen=True):
    message: Json


class _ChatReply(msgspec.Struct, frozen=True):
    choices: tuple[_ChatChoice]


class _Answer(msgspec.Struct, frozen=True):
    message: Json
    headers: Mapping[str, str]
    attempts: int


class GaveUp(Exception):
    """A turn that could not be had; the rollout ends there."""


class Player:
    """Plays rollout `number`. `answered` is called after each turn."""

    def __init__(
        self, game: Game, number: int, client: aiohttp.ClientSession, answered: Callable[[], None] = lambda: None
    ) -> None:
        self._game = game
        self._client = client
        self._answered = answered
        self._random = Random(f"{game.seed} {number}")
        self._jitter = Random(number)  # its own: retries leave the conversation what it was
        self._habits = Habits.drawn(number, self._random)
        self._number = number
        self._tag = f"[rollout {self._random.randbytes(6).hex()}]"
        self._tools = world.TOOLS if game.tools else ()

    async def play(self) -> PlayedRollout:
        """Play to the end, or to the turn that cannot be had."""
        history = list(world.opening(self._tag, self._number, tools=self._game.tools))
        turns: list[AnsweredTurn] = []
        gave_up = ""
        while len(turns) < self._game.turns and not gave_up:
            sent = self._habits.history(history)
            try:
                answer = await self._ask(sent)
            except GaveUp as reason:
                gave_up = str(reason)
                continue
            turns.append(_noted(sent, answer))
            history += [answer.message, *self._reaction(answer.message, len(turns))]
            self._answered()
        return PlayedRollout(
            tag=self._tag, tools=self._tools, turns=tuple(turns), wanted=self._game.turns, gave_up=gave_up
        )

    def _reaction(self, message: Json, turn: int) -> tuple[Json, ...]:
        calls = message.get("tool_calls")
        if calls:
            return world.tool_results(calls, self._random)
        return world.follow_up(turn, self._random, tools=self._game.tools)

    async def _ask(self, messages: tuple[Json, ...]) -> _Answer:
        """One turn, repeated until it is answered."""
        body = orjson.dumps(self._request(messages))
        loses_next = self._habits.loses_replies and self._random.random() < _LOST_REPLIES
        problem = ""
        for attempt in range(self._game.max_retries + 1):
            if attempt:
                await asyncio.sleep(self._pause_s(attempt))
            try:
                headers, reply = await self._post(body, attempt)
            except _Repeatable as reason:
                problem = str(reason)
                continue
            if loses_next:
                loses_next, problem = False, "the reply was lost on its way"
                continue
            return _Answer(_message(reply), headers, attempt + 1)
        raise GaveUp(f"no answer in {self._game.max_retries + 1} attempts; the last: {problem}")

    async def _post(self, body: bytes, attempt: int) -> tuple[Mapping[str, str], bytes]:
        try:
            async with self._client.post(
                self._url(), data=body, headers=self._headers(attempt), timeout=self._timeout()
            ) as reply:
                content = await reply.read()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise _Repeatable(f"{type(error).__name__}: {error}") from error
        words = f"HTTP {reply.status}: {content[:500].decode(errors='replace')}"
        if reply.status in _REPEATED or reply.status >= HTTPStatus.INTERNAL_SERVER_ERROR:
            raise _Repeatable(words)
        if reply.status != HTTPStatus.OK:
            raise GaveUp(words)
        return reply.headers, content

    def _request(self, messages: tuple[Json, ...]) -> Json:
        request: Json = {
            "model": "demo",
            "messages": messages,
            "temperature": 1.0,
            "max_tokens": self._game.max_tokens,
        }
        if self._tools:
            request["tools"] = self._tools
        if self._game.asks_ids or self._habits.echoes_ids:
            request["return_token_ids"] = True
        return request

    def _url(self) -> str:
        named = f"/sessions/{quote(self._session_id, safe='')}" if self._habits.session == "url" else ""
        return f"{self._game.base_url}{named}/v1/chat/completions"

    def _headers(self, attempt: int) -> dict[str, str]:
        headers = {
            "content-type": "application/json",
            "x-stainless-retry-count": str(attempt),
            "x-tokensplice-run": self._game.run_id,
        }
        if self._habits.session == "header":
            headers["x-session-id"] = self._session_id
        return headers

    @property
    def _session_id(self) -> str:
        # A slash, as some frameworks' ids have: such an id comes percent-encoded in the path.
        return f"{self._game.run_id}/{self._number:03}"

    def _timeout(self) -> aiohttp.ClientTimeout:
        return aiohttp.ClientTimeout(total=self._game.timeout_s)

    def _pause_s(self, attempt: int) -> float:
        longest = min(_FIRST_PAUSE_S * 2.0 ** (attempt - 1), _LONGEST_PAUSE_S)
        return longest * (1 - 0.25 * self._jitter.random())


class _Repeatable(Exception):
    """An attempt that failed in a way that clients repeat."""


def _message(reply: bytes) -> Json:
    try:
        return msgspec.json.decode(reply, type=_ChatReply).choices[0].message
    except msgspec.DecodeError as error:
        raise GaveUp(f"the reply is no chat completion: {error}") from error


def _noted(sent: tuple[Json, ...], answer: _Answer) -> AnsweredTurn:
    message, headers = answer.message, answer.headers
    ids = message.get("generation_token_ids")
    prompt = message.get("prompt_token_ids")
    return AnsweredTurn(
        messages=sent,
        nonces=_nonces(message),
        generation_ids=None if ids is None else tuple(ids),
        prompt_length=None if prompt is None else len(prompt),
        session_id=unquote(headers.get("x-tokensplice-session", "")),  # told as a URL spells it
        turn_id=headers.get("x-tokensplice-turn", ""),
        splice=headers.get("x-tokensplice-splice", ""),
        replayed=headers.get("x-tokensplice-replayed") == "1",
        attempts=answer.attempts,
    )


def _nonces(message: Json) -> tuple[str, ...]:
    """The nonces in everything that a reply shows: text, reasoning, call arguments."""
    calls = message.get("tool_calls") or ()
    shown = [message.get("content"), message.get("reasoning_content"), *(_arguments(call) for call in calls)]
    return tuple(dict.fromkeys(_NONCE.findall("\n".join(text for text in shown if text))))


def _arguments(call: Json) -> str:
    return str(call["function"]["arguments"])
