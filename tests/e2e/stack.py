"""A small deployment under test: private Redis, the simulated engine, two workers; and a client that checks prompts.

What the engine received is read from the engine's own record, never from the product.
"""

from __future__ import annotations

import asyncio
import itertools
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import quote

import aiohttp
from yarl import URL

from api.demo.processes import Child

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Run a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    }
]

CALL = (
    "<think>\nI look first.\n</think>\n\nLet me look.\n<tool_call>\n"
    '{"name": "bash",  "arguments": {"timeout": 3, "command": "ls -la\\ncat a.txt"}}\n</tool_call>'
)


@dataclass(frozen=True)
class Reply:
    """An HTTP answer; `message` and `turn_id` are of a chat reply."""

    status: int
    body: Any
    headers: Mapping[str, str]

    @property
    def message(self) -> dict[str, Any]:
        assert self.status == 200, self.body
        return dict(self.body["choices"][0]["message"])

    @property
    def finish_reason(self) -> str:
        return str(self.body["choices"][0]["finish_reason"])

    @property
    def turn_id(self) -> str:
        assert self.status == 200, self.body
        return self.headers["x-tokensplice-turn"]

    @property
    def splice(self) -> str:
        return self.headers["x-tokensplice-splice"]

    @property
    def parent(self) -> str | None:
        return self.headers.get("x-tokensplice-parent")

    @property
    def session(self) -> str:
        return self.headers["x-tokensplice-session"]

    @property
    def replayed(self) -> bool:
        return "x-tokensplice-replayed" in self.headers

    @property
    def code(self) -> str:
        return str(self.body["error"]["code"])


@dataclass
class Stack:
    """The running deployment."""

    client: aiohttp.ClientSession
    engine: Child
    workers: Sequence[Child]
    redis_url: str
    _turns: Any = field(default_factory=itertools.count)

    def next_worker(self) -> str:
        return self.workers[next(self._turns) % len(self.workers)].url

    async def call(self, method: str, path: str, *, worker: str | None = None, **options: Any) -> Reply:
        url = (worker or self.next_worker()) + path
        async with self.client.request(method, URL(url, encoded=True), **options) as answer:
            json = answer.content_type == "application/json"
            return Reply(answer.status, await (answer.json() if json else answer.text()), answer.headers)

    async def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        session: str | None = None,
        headers: Mapping[str, str] | None = None,
        worker: str | None = None,
        **body: Any,
    ) -> Reply:
        """One turn, on the next worker unless one is named."""
        prefix = f"/sessions/{quote(session, safe='')}" if session else ""
        path = f"{prefix}/v1/chat/completions"
        return await self.call(
            "POST", path, worker=worker, headers=headers or {}, json={"model": "m", "messages": messages, **body}
        )

    async def script(self, *directives: Mapping[str, Any]) -> None:
        """Tell the engine what to do next."""
        async with self.client.post(f"{self.engine.url}/sim/script", json=list(directives)) as answer:
            assert answer.status == 200, await answer.text()

    async def record(self) -> dict[str, dict[str, Any]]:
        """What the engine saw and said, by rid; the rid of a turn is its turn id."""
        async with self.client.get(f"{self.engine.url}/sim/record") as answer:
            return {entry["rid"]: entry for entry in (await answer.json())["entries"]}

    async def turns(self, session: str, worker: str | None = None) -> list[dict[str, Any]]:
        reply = await self.call("GET", f"/sessions/{quote(session, safe='')}/turns", worker=worker)
        assert reply.status == 200, reply.body
        return list(reply.body["turns"])

    async def assert_contiguous(self, turn_id: str, parent_id: str) -> None:
        """The engine received, for the turn, the parent's prompt and sampled ids first."""
        record = await self.record()
        before = record[parent_id]["input_ids"] + record[parent_id]["output_ids"]
        assert record[turn_id]["input_ids"][: len(before)] == before
        assert len(record[turn_id]["input_ids"]) > len(before)

    async def assert_last_aborted(self) -> None:
        """The engine's latest generation is aborted, at once or within moments."""
        for _ in range(50):
            last = list((await self.record()).values())[-1]
            if last["outcome"] == "aborted":
                return
            await asyncio.sleep(0.1)
        raise AssertionError(last["outcome"])

    async def rendered(self, turn_id: str) -> str:
        """The prompt the engine received, as text."""
        entry = (await self.record())[turn_id]
        async with self.client.post(
            f"{self.engine.url}/detokenize", json={"tokens": entry["input_ids"], "skip_special_tokens": False}
        ) as answer:
            return str((await answer.json())["text"])


class Talk:
    """One rollout by a well-behaved harness: resends its transcript, another worker each turn."""

    def __init__(self, stack: Stack, *, named: bool = True, system: str = "You are an agent.", **body: Any) -> None:
        self.stack = stack
        self.session = f"talk-{uuid.uuid4().hex[:12]}" if named else None
        self.messages: list[dict[str, Any]] = [{"role": "system", "content": system}]
        self.body = body
        self.replies: list[Reply] = []

    async def say(self, content: str, **options: Any) -> Reply:
        """A user message and the turn that answers it."""
        self.messages.append({"role": "user", "content": content})
        return await self.turn(**options)

    async def answer_tools(self, *contents: str, **options: Any) -> Reply:
        """Results for the last reply's calls, in order, and the next turn."""
        for call, content in zip(self.messages[-1]["tool_calls"], contents, strict=True):
            self.messages.append({"role": "tool", "tool_call_id": call["id"], "content": content})
        return await self.turn(**options)

    async def turn(self, **options: Any) -> Reply:
        """The next turn; its prompt must extend the last one's tokens when it was spliced onto it."""
        reply = await self.stack.chat(self.messages, session=self.session, **{**self.body, **options})
        if reply.status == 200:
            self.messages.append(reply.message)
            self.replies.append(reply)
        return reply

    async def assert_all_contiguous(self) -> None:
        """Every turn after the first extends the one before it."""
        for before, after in itertools.pairwise(self.replies):
            await self.stack.assert_contiguous(after.turn_id, before.turn_id)
