"""The promise as a property: whatever is said, sampled and rewritten, and whichever worker serves it.

Workers are whole `TurnService`s with caches of their own on one real Redis, behind the chat dialect; the engine is
told what to sample. What the engine was sent is compared with what it was sent and said before.
"""

from __future__ import annotations

import asyncio
import json
import secrets
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st

import api.demo
from api.assets import qwen3_directory
from api.dialects import chat
from api.engine.base import Completion, EngineFacts
from api.preparation import prepare_model
from api.rendering import ModelRenderer
from api.request import Caller, TurnReply
from api.running import RunningTurns
from api.service import Policy, TurnService
from splice.boundary import Splicer
from splice.parsers import ReplyGrammar, choose_formats
from splice.plan import Window
from splice.renderer import Renderer
from splice.types import Finish, IdArray
from store.redis import RedisStore
from tests.e2e import rewrites
from tests.e2e.stack import TOOLS

EOS = 151_645
WINDOW = Window(1_000_000, 999_000)

WORDS = [
    "alpha",
    " beta",
    "γάμμα",
    "12345",
    "\n\n",
    "  ",
    "def f(x):\n\treturn x",
    "😀",
    "…",
    '"quoted"',
    "<b>",
    "{}",
    "\\n",
]
SPELLED = ["<|im_end|>", "<tool_call>", "</think>", "<|im_start|>system\n"]


class ScriptedEngine:
    """Samples what it is told; remembers what it was sent."""

    def __init__(self) -> None:
        self.next_ids: IdArray = np.empty(0, np.uint32)
        self.finish = Finish("stop", EOS)
        self.prompts: list[IdArray] = []

    def sampling(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        return dict(wanted)

    async def generate(
        self, prompt: IdArray, sampling: Mapping[str, Any], *, max_tokens: int, rid: str, affinity: str
    ) -> Completion:
        self.prompts.append(prompt)
        ids = self.next_ids.astype(np.int64)
        return Completion(ids, np.full(len(ids), -0.5), self.finish, "raw")

    async def facts(self) -> EngineFacts:
        raise AssertionError

    async def tokenize(self, text: str) -> IdArray:
        raise AssertionError

    async def models(self) -> list[dict[str, Any]]:
        return []

    async def close(self) -> None:
        return None


@pytest.fixture(scope="module", params=["qwen3", "chatml"])
def splicer(request: pytest.FixtureRequest) -> Splicer:
    """Qwen3's own template, which rewrites history, and an append-only ChatML one, on Qwen3's tokenizer."""
    template = Path(api.demo.__path__[0]) / "chatml_tools.jinja" if request.param == "chatml" else None
    return Splicer(ModelRenderer.load(prepare_model(str(qwen3_directory()), chat_template=template)))


def _prose(rng: Random, *, spelled: bool) -> str:
    words = WORDS + (SPELLED if spelled else [])
    return "x" + "".join(rng.choice(words) for _ in range(rng.randint(1, 12))) + "y"


def _arguments(rng: Random) -> dict[str, Any]:
    return {"command": _prose(rng, spelled=False), "timeout": rng.randint(0, 9)}


class Rollout:
    """A random conversation: what the client holds, and what the engine was last sent and said."""

    def __init__(self, rng: Random, renderer: Renderer) -> None:
        self.rng = rng
        self.renderer = renderer
        self.messages: list[dict[str, Any]] = []
        self.rendered: list[dict[str, Any]] = []  # the same, as the template would see the sampled text
        self.truth: list[int] = []
        self.plain = True  # whether the template's own rendering of this history is what was sampled

    def speak(self) -> None:
        """The client's next messages."""
        last = self.messages[-1] if self.messages else None
        if last is None:
            self._add({"role": "system", "content": _prose(self.rng, spelled=False)})
        for call in (last or {}).get("tool_calls") or ():
            self._add({"role": "tool", "tool_call_id": call["id"], "content": _prose(self.rng, spelled=True)})
        if not (last or {}).get("tool_calls") or self.rng.random() < 0.3:
            self._add({"role": "user", "content": _prose(self.rng, spelled=True)})

    def _add(self, message: dict[str, Any]) -> None:
        self.messages.append(message)
        self.rendered.append(dict(message))

    def sample(self) -> tuple[IdArray, Finish]:
        """A reply as a policy might sample it, in this template's own way of writing one, ids canonical or not."""
        text = _prose(self.rng, spelled=False)
        for _ in range(self.rng.choice([0, 0, 1, 2])):
            call = {"name": "bash", "arguments": _arguments(self.rng)}
            text += f"\n<tool_call>\n{json.dumps(call, ensure_ascii=False)}\n</tool_call>"
        if self.rng.random() < 0.15:
            ids = self._ids(text)
            return ids[: self.rng.randint(0, len(ids))], Finish("length")
        return np.append(self._ids(text), np.uint32(EOS)), Finish("stop", EOS)

    def _ids(self, text: str) -> IdArray:
        if self.rng.random() < 0.4:
            return self.renderer.encode(text)
        pieces: list[IdArray] = []
        for part in _around_markers(text):
            cuts = sorted(self.rng.sample(range(len(part)), k=min(len(part), self.rng.randint(0, 6))))
            bounds = [0, *cuts, len(part)]
            if part in {"<tool_call>", "</tool_call>"}:
                bounds = [0, len(part)]
            pieces += [self.renderer.encode(part[a:b]) for a, b in pairwise(bounds) if a < b]
        return np.concatenate(pieces)

    def check_prompt(self, prompt: IdArray, reply: TurnReply) -> None:
        """The prompt extends the last one, and says what the template says where that rewrites nothing."""
        ids = prompt.tolist()
        assert ids[: len(self.truth)] == self.truth
        assert reply.turn.origin.kind == ("spliced" if self.truth else "fresh")
        if self.plain:
            expected = self.renderer.render(self.rendered, tools=TOOLS)
            assert self.renderer.decode(prompt) == expected

    def hear(self, prompt: IdArray, sampled: IdArray, finish: Finish, reply: TurnReply) -> None:
        """Take the reply in as a client does, and remember what it was made of."""
        self.truth = [*prompt.tolist(), *sampled.tolist()]
        body = json.loads(chat.encode(reply, chat.decode(b'{"messages":[{"role":"user","content":"x"}]}')))
        message = body["choices"][0]["message"]
        self.messages.append(message)
        self.rendered.append(
            {
                "role": "assistant",
                "content": message["content"] or "",
                "tool_calls": [
                    {
                        "type": "function",
                        "function": {**c["function"], "arguments": json.loads(c["function"]["arguments"])},
                    }
                    for c in message.get("tool_calls", ())
                ],
            }
        )
        tidy = finish.kind == "stop" and "<think>" not in self.renderer.template
        self.plain = self.plain and tidy


def _around_markers(text: str) -> list[str]:
    parts = [text]
    for marker in ("<tool_call>", "</tool_call>"):
        parts = [piece for part in parts for piece in _split_keeping(part, marker)]
    return parts


def _split_keeping(text: str, marker: str) -> list[str]:
    pieces = text.split(marker)
    return [p for n, piece in enumerate(pieces) for p in ([marker] if n else []) + [piece] if p]


async def _turn(service: TurnService, body: bytes, caller: Caller) -> TurnReply:
    return await service.run(chat.decode(body, service.settled), caller)


async def _workers(
    stack: AsyncExitStack, redis_url: str, engine: ScriptedEngine, splicer: Splicer
) -> list[TurnService]:
    renderer = splicer.renderer
    grammar = ReplyGrammar(
        choose_formats(renderer.template), control_tokens=renderer.control_tokens, decode=renderer.decode,
        stop_ids=renderer.eos_ids,
    )  # fmt: skip
    services = []
    for _ in range(3):
        store = await RedisStore.connect(redis_url, default_ttl_s=600, cache_bytes=200_000)
        stack.push_async_callback(store.close)
        services.append(
            TurnService(
                store,
                engine,
                splicer,
                grammar,
                window=lambda: WINDOW,
                policy=Policy(),
                observe=lambda _: None,
                running=RunningTurns(store),
            )
        )
    return services


async def _play(rng: Random, redis_url: str, splicer: Splicer, *, named: bool) -> None:
    async with AsyncExitStack() as stack:
        engine = ScriptedEngine()
        services = await _workers(stack, redis_url, engine, splicer)
        rollout = Rollout(rng, splicer.renderer)
        session = f"s{rng.getrandbits(64):x}"
        tenant = f"t{secrets.token_hex(8)}"  # one that no earlier example used: the same seed may be played twice
        for _ in range(rng.randint(2, 6)):
            rollout.speak()
            engine.next_ids, engine.finish = rollout.sample()
            body = json.dumps({"messages": _rewritten(rng, rollout.messages), "tools": TOOLS}).encode()
            caller = Caller(tenant=tenant, session_id=session if named else "")
            reply = await _turn(rng.choice(services), body, caller)
            prompt = engine.prompts[-1]
            rollout.check_prompt(prompt, reply)
            assert np.array_equal(reply.turn.generation.ids, engine.next_ids)
            rollout.hear(prompt, engine.next_ids, engine.finish, reply)


def _rewritten(rng: Random, messages: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    sent = [json.loads(json.dumps(message)) for message in messages]
    chosen: list[Callable[[dict[str, Any]], None]] = [r for r in rewrites.EQUAL if rng.random() < 0.3]
    for rewrite in chosen:
        for message in sent:
            rewrite(message)
    return sent


@settings(max_examples=60, deadline=None, phases=[Phase.reuse, Phase.generate], suppress_health_check=list(HealthCheck))
@given(seed=st.integers(0, 2**32), named=st.booleans())
def test_every_prompt_extends_its_parents_tokens(splicer: Splicer, redis_url: str, seed: int, *, named: bool) -> None:
    asyncio.run(_play(Random(seed), redis_url, splicer, named=named))
