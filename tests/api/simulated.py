"""Talks to a simulated engine that runs in this test, as any client would: over HTTP."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from api.assets import qwen3_directory
from api.demo.engine_sim import SimConfig, running
from api.demo.sim.vocabulary import Vocabulary, load_vocabulary

Json = dict[str, Any]

RELEASES = ("0.5.12.post1", "0.5.13", "0.5.23")
STOP_TOKENS = ("<|im_end|>", "<|endoftext|>")
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "description": "Runs a command.",
            "parameters": {
                "type": "object",
                "properties": {"command": {"type": "string"}, "timeout": {"type": "integer"}},
                "required": ["command"],
            },
        },
    },
    {"type": "function", "function": {"name": "stat", "parameters": {"type": "object", "properties": {}}}},
]


def vocabulary() -> Vocabulary:
    return load_vocabulary(qwen3_directory(), STOP_TOKENS)


def chat(user: str, tools: Sequence[Json] = (), *, ending: str = "") -> list[int]:
    """A Qwen3 prompt; written out here, so that no template stands between test and engine."""
    section = ""
    if tools:
        listed = "\n".join(orjson.dumps(tool).decode() for tool in tools)
        section = f"<|im_start|>system\n# Tools\n\n<tools>\n{listed}\n</tools><|im_end|>\n"
    return vocabulary().encode(f"{section}<|im_start|>user\n{user}<|im_end|>\n<|im_start|>assistant\n{ending}")


class Client:
    """One engine, seen from outside."""

    def __init__(self, session: aiohttp.ClientSession, url: str) -> None:
        self.session = session
        self.url = url

    async def post(self, path: str, body: object, **headers: str) -> tuple[int, Any]:
        async with self.session.post(self.url + path, json=body, headers=headers) as response:
            return response.status, await _content(response)

    async def get(self, path: str, **headers: str) -> tuple[int, Any]:
        async with self.session.get(self.url + path, headers=headers) as response:
            return response.status, await _content(response)

    async def generate(self, prompt: Sequence[int], *, sampling: Json | None = None, **fields: Any) -> Json:
        """A reply that has to be 200."""
        status, reply = await self.refused(prompt, sampling=sampling, **fields)
        assert status == 200, reply
        body: Json = reply
        return body

    async def refused(self, prompt: Sequence[int], *, sampling: Json | None = None, **fields: Any) -> tuple[int, Any]:
        params = {"max_new_tokens": 2000} if sampling is None else sampling
        body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True} | fields
        return await self.post("/generate", body)

    async def stream(self, prompt: Sequence[int], *, sampling: Json | None = None, **fields: Any) -> list[Json]:
        """Every event before [DONE]; checks that it comes."""
        params = {"max_new_tokens": 2000} if sampling is None else sampling
        body = {"input_ids": list(prompt), "sampling_params": params, "return_logprob": True, "stream": True} | fields
        async with self.session.post(self.url + "/generate", json=body) as response:
            assert response.status == 200
            assert response.content_type == "text/event-stream"
            events = (await response.read()).decode().split("\n\n")
        assert events[-2:] == ["data: [DONE]", ""]
        return [orjson.loads(event.removeprefix("data: ")) for event in events[:-2]]

    async def script(self, *directives: Json) -> None:
        status, reply = await self.post("/sim/script", list(directives))
        assert status == 200, reply

    async def record(self, since: int = 0) -> list[Json]:
        _, reply = await self.get(f"/sim/record?since={since}")
        entries: list[Json] = reply["entries"]
        return entries

    async def until_running(self, count: int = 1) -> None:
        """Wait until so many requests are in hand."""
        while sum(entry["outcome"] == "running" for entry in await self.record()) < count:  # noqa: ASYNC110
            await asyncio.sleep(0.005)


async def _content(response: aiohttp.ClientResponse) -> Any:
    raw = await response.read()
    return orjson.loads(raw) if response.content_type == "application/json" else raw.decode()


@asynccontextmanager
async def engine(**knobs: Any) -> AsyncIterator[Client]:
    """A simulated engine on a free port."""
    config = SimConfig(**{"tokenizer": qwen3_directory()} | knobs)
    async with running(config) as url, aiohttp.ClientSession() as session:
        yield Client(session, url)
