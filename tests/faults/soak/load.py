"""The load: rollouts as tool-using harnesses play them, with every habit that makes retries hard.

Each client plays one rollout after another. It repeats what failed as OpenAI's client library does, marks its repeats
or not, now and then hangs up or throws a reply away, and keeps account of every attempt for the checker.
"""

from __future__ import annotations

import asyncio
import itertools
import time
import uuid
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any
from urllib.parse import quote, unquote

import aiohttp
import orjson
from yarl import URL

from api.demo import world
from api.demo.habits import Habits
from tests.faults.records import Ask, Attempt, Rollout, pack
from tests.faults.soak import wire

Json = dict[str, Any]

_REPEATED = frozenset({408, 409, 429})
_FIRST_PAUSE_S = 0.5
_TIMEOUT = aiohttp.ClientTimeout(total=20.0)
_GRACE_S = 45.0  # after the run's end: an ask without an answer then is stuck
_MOST_ATTEMPTS = 16
_LONGEST_OUTPUT = 200  # characters of a tool's output: the engine's and the client's work is not what is measured
_MARKS = ("stainless", "stainless", "key", "none")
_TURNS = (4, 12)  # a rollout's
_THROWS_AWAY = 0.02  # of replies to first attempts
_LEFT_OPEN = 0.1  # of rollouts
_STREAMS, _ASKS_IDS = 0.25, 0.25  # of rollouts


class Pace:
    """Hands out starts, evenly: `rate` a second over all clients."""

    def __init__(self, rate: float) -> None:
        self._step = 1.0 / rate
        self._next = time.monotonic()

    async def start(self) -> None:
        """Wait for the next one."""
        now = time.monotonic()
        self._next = max(self._next + self._step, now - self._step)
        if self._next > now:
            await asyncio.sleep(self._next - now)


@dataclass(slots=True, kw_only=True)
class Load:
    """What all clients of a run share, and what they have done so far."""

    base_url: str
    http: aiohttp.ClientSession
    run_id: str
    seed: int
    pace: Pace
    until: float  # by time.monotonic(): no rollout begins after it, and rollouts end at their next turn
    longest_pause_s: float
    hangs_up: float
    turns: tuple[int, int] = _TURNS
    rollouts: list[Rollout] = field(default_factory=list)
    statuses: Counter[str] = field(default_factory=Counter)
    answered: int = 0
    open: int = 0
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _words: itertools.count[int] = field(default_factory=lambda: itertools.count(1))

    @property
    def over(self) -> bool:
        """Whether it is time to come to an end."""
        return time.monotonic() > self.until

    @property
    def hopeless(self) -> bool:
        """Whether all harm is long over: who has no answer yet gets none."""
        return time.monotonic() > self.until + _GRACE_S

    def word(self) -> str:
        """The next ask's."""
        return wire.word(next(self._words))

    async def play(self, clients: int) -> None:
        """Keep `clients` rollouts open until the time is up; each is ended properly."""
        await asyncio.gather(*(self._client() for _ in range(clients)))

    async def play_each(self, rollouts: int) -> None:
        """Play so many rollouts, all at once."""
        self.rollouts += await asyncio.gather(*(Client(self, next(self._numbers)).play() for _ in range(rollouts)))

    async def _client(self) -> None:
        while not self.over:
            self.open += 1
            self.rollouts.append(await Client(self, next(self._numbers)).play())
            self.open -= 1


class Client:
    """Plays rollout `number`."""

    def __init__(self, load: Load, number: int) -> None:
        self._load = load
        self._random = Random(f"{load.seed} {number}")
        self._habits = Habits.drawn(number, self._random)
        self._mark = self._random.choice(_MARKS)
        self._streams = self._random.random() < _STREAMS
        self._asks_ids = self._habits.echoes_ids or self._random.random() < _ASKS_IDS
        self._tag = f"[rollout {load.run_id}-{number}]"
        self._number = number
        self._named = f"{load.run_id}/{number:05}" if self._habits.session != "none" else ""
        self._session = self._named

    async def play(self) -> Rollout:
        """Play to the end, to the run's end, or to the turn that cannot be had."""
        history = list(world.opening(self._tag, self._number, tools=True))
        new: Sequence[Json] = history
        asks: list[Ask] = []
        stuck = ""
        for turn in range(self._random.randint(*self._load.turns)):
            await self._load.pace.start()
            if self._load.over and asks:
                break
            word = self._load.word()
            history = [*history[: len(history) - len(new)], *_worded(new, word)]
            ask, message = await self._ask(word, self._habits.history(history))
            asks.append(ask)
            if message is None:
                told = " ".join(one.words or one.outcome for one in ask.attempts)
                stuck = f"ask {word}: no answer in {len(ask.attempts)} attempts: {told or 'none made in time'}"
                break
            self._load.answered += 1
            new = self._reaction(message, turn)
            history += [message, *new]
        ended = not stuck and self._random.random() >= _LEFT_OPEN
        trouble = await self._finish() if ended else ""
        return Rollout(tag=self._tag, asks=tuple(asks), finished=ended and not trouble, stuck=stuck or trouble)

    def _reaction(self, message: Json, turn: int) -> tuple[Json, ...]:
        calls = message.get("tool_calls")
        if not calls:
            return world.follow_up(turn, self._random, tools=True)
        results = world.tool_results(calls, self._random)
        return tuple(one | {"content": one["content"][:_LONGEST_OUTPUT]} for one in results)

    async def _ask(self, word: str, messages: tuple[Json, ...]) -> tuple[Ask, Json | None]:
        """One turn, repeated until it is answered."""
        body = orjson.dumps(self._request(messages))
        key = f"key-{uuid.uuid4().hex}" if self._mark == "key" else ""
        once = bool(key) or (self._mark == "stainless" and bool(self._named))
        whim = self._random.random()
        attempts: list[Attempt] = []
        message: Json | None = None
        while message is None and len(attempts) < _MOST_ATTEMPTS and not self._load.hopeless:
            if attempts:
                await asyncio.sleep(self._pause_s(len(attempts)))
            told, message = await self._attempt(body, key, len(attempts), whim)
            attempts.append(told)
            self._load.statuses[told.words or told.outcome] += 1
            if told.outcome == "failed" and not _repeatable(told.status):
                break
        return Ask(word=word, once=once, attempts=tuple(attempts), key=key), message

    async def _attempt(self, body: bytes, key: str, number: int, whim: float) -> tuple[Attempt, Json | None]:
        first = number == 0
        patience = self._random.uniform(0.01, 0.3) if first and whim < self._load.hangs_up else None
        try:
            async with asyncio.timeout(patience):
                status, headers, content = await self._post(body, self._headers(key, number))
        except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
            left = patience is not None and isinstance(error, TimeoutError)
            return Attempt(outcome="left" if left else "failed", words="" if left else type(error).__name__), None
        if status != 200:
            return Attempt(outcome="failed", status=status, words=_words(status, content)), None
        message = _message(content, streamed=self._streams)
        if message is None:
            return Attempt(outcome="failed", status=0, words="cut reply"), None
        discards = first and whim > 1 - _THROWS_AWAY
        told = _told(headers, message, "discarded" if discards else "answered")
        if discards:
            return told, None
        self._session = told.session_id or self._session
        return told, message

    async def _post(self, body: bytes, headers: Mapping[str, str]) -> tuple[int, Mapping[str, str], bytes]:
        named = f"/sessions/{quote(self._named, safe='')}" if self._habits.session == "url" else ""
        url = URL(f"{self._load.base_url}{named}/v1/chat/completions", encoded=True)
        async with self._load.http.post(url, data=body, headers=headers, timeout=_TIMEOUT) as reply:
            return reply.status, reply.headers, await reply.read()

    def _request(self, messages: tuple[Json, ...]) -> Json:
        request: Json = {"model": "soak", "messages": messages, "tools": world.TOOLS, "max_tokens": 400}
        if self._streams:
            request["stream"] = True
        if self._asks_ids:
            request["return_token_ids"] = True
        return request

    def _headers(self, key: str, attempt: int) -> dict[str, str]:
        headers = {"content-type": "application/json", "x-tokensplice-run": self._load.run_id}
        if self._mark != "none":
            headers["x-stainless-retry-count"] = str(attempt)
        if key:
            headers["Idempotency-Key"] = key
        if self._habits.session == "header":
            headers["x-session-id"] = self._named
        return headers

    def _pause_s(self, attempts: int) -> float:
        longest = min(_FIRST_PAUSE_S * 2.0 ** (attempts - 1), self._load.longest_pause_s)
        return longest * (1 - 0.25 * self._random.random())

    async def _finish(self) -> str:
        """Seal the session; why it could not be done, or ""."""
        url = URL(f"{self._load.base_url}/sessions/{quote(self._session, safe='')}/finish", encoded=True)
        problem = ""
        for attempt in range(_MOST_ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._pause_s(attempt))
            try:
                async with self._load.http.post(url, json={"reward": 1.0}, timeout=_TIMEOUT) as reply:
                    content = await reply.read()
                    if reply.status == 200:
                        return ""
                    problem = _words(reply.status, content)
                    if not _repeatable(reply.status):
                        break
            except (aiohttp.ClientError, TimeoutError, ConnectionError) as error:
                problem = type(error).__name__
        return f"session {self._session} cannot be finished: {problem}"


def _worded(new: Sequence[Json], word: str) -> list[Json]:
    """New messages, the last of which says the ask's word at its end."""
    return [*new[:-1], new[-1] | {"content": f"{new[-1]['content']}\n({word})"}]


def _repeatable(status: int) -> bool:
    return status == 0 or status in _REPEATED or status >= 500


def _words(status: int, content: bytes) -> str:
    """The status and its code; what is not to be repeated with its own words."""
    try:
        error = orjson.loads(content)["error"]
        code = error["code"] if _repeatable(status) else f"{error['code']}: {error['message']}"
    except (orjson.JSONDecodeError, KeyError, TypeError):
        code = content[:100].decode(errors="replace")
    return f"HTTP {status} {code}"


def _message(content: bytes, *, streamed: bool) -> Json | None:
    if streamed:
        return wire.assembled(content)
    message: Json = orjson.loads(content)["choices"][0]["message"]
    return message


def _told(headers: Mapping[str, str], message: Json, outcome: Any) -> Attempt:
    ids = message.get("generation_token_ids")
    return Attempt(
        outcome=outcome,
        status=200,
        session_id=unquote(headers.get("x-tokensplice-session", "")),
        turn_id=headers.get("x-tokensplice-turn", ""),
        splice=headers.get("x-tokensplice-splice", ""),
        replayed=headers.get("x-tokensplice-replayed") == "1",
        reply=wire.spelled(message),
        nonces=wire.nonces(message),
        generation=None if ids is None else pack(ids),
    )
