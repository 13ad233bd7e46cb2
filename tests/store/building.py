"""Turns made up for the store's tests: their content is random, their hashes are what the core would compute."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np

from api.ids import new_turn_id
from splice.identity import chain_hashes, extend_chain, ids_digest
from splice.types import Finish, IdArray, Message, Origin, Rendering, TokenRun, ToolCall, Turn, WeightSpan
from store.views import FindQuery, SessionKey

SIGNATURE = "a" * 32
VOCABULARY = 151_936


def request_hash_of(messages: Sequence[Message], signature: str) -> bytes:
    return blake2b(repr((messages, signature)).encode(), digest_size=16).digest()


def sampled(rng: random.Random, count: int) -> TokenRun:
    """Ids with log probs as engines send them: single floats."""
    ids = np.array([rng.randrange(VOCABULARY) for _ in range(count)], np.uint32)
    return TokenRun(ids, np.array([-rng.expovariate(2) for _ in range(count)], np.float32))


def context(rng: random.Random, count: int) -> TokenRun:
    return TokenRun(np.array([rng.randrange(VOCABULARY) for _ in range(count)], np.uint32))


@dataclass(frozen=True)
class Conversation:
    """A lineage as the client sees it (messages) and as the engine does (tokens)."""

    turns: tuple[Turn, ...] = ()
    messages: tuple[Message, ...] = ()
    tokens: IdArray = field(default_factory=lambda: np.empty(0, np.uint32))

    @property
    def head(self) -> Turn:
        return self.turns[-1]

    def chain(self) -> tuple[bytes, ...]:
        """The chain hash at each assistant message."""
        hashes = chain_hashes(self.messages)
        return tuple(h for h, m in zip(hashes, self.messages, strict=True) if m.role == "assistant")

    def then(
        self,
        rng: random.Random,
        *,
        said: str = "",
        reply: Message | None = None,
        signature: str = SIGNATURE,
        sizes: tuple[int, int] = (12, 9),
        **changed: Any,
    ) -> Conversation:
        """One more turn: the user says something, the model answers."""
        request = (*self.messages, Message("user", said or f"question {rng.random()}"))
        reply = reply or Message("assistant", f"answer {rng.random()}")
        delta, generation = context(rng, sizes[0]), sampled(rng, sizes[1])
        turn_id = new_turn_id()
        turn = Turn(
            turn_id=turn_id,
            parent_id=self.head.turn_id if self.turns else "",
            root_id=self.head.root_id if self.turns else turn_id,
            rendering_signature=signature,
            clock=self.head.clock if self.turns else 1_700_000_000.25,
            origin=Origin("spliced") if self.turns else Origin("fresh", "first_turn"),
            prompt_length=len(self.tokens) + len(delta),
            delta=delta,
            generation=generation,
            messages=request[len(self.messages) :],
            reply=reply,
            chain_hash=extend_chain(chain_hashes(request), reply),
            request_hash=request_hash_of(request, signature),
            finish=Finish("stop", 151_645),
            finish_reason="stop",
            created_at=1_700_000_001.5,
            log_prob_kind="raw",
            sampling_params={"temperature": 1.0, "top_p": 0.95, "max_tokens": 512},
            rendering=Rendering() if self.turns else RENDERING,
            model="Qwen/Qwen3-4B",
            engine="http://127.0.0.1:30000",
        )
        turn = replace(turn, **changed)
        return Conversation(
            (*self.turns, turn),
            (*request, turn.reply),
            np.concatenate([self.tokens, turn.delta.ids, turn.generation.ids]),
        )

    def query(self, key: SessionKey, *, signature: str = SIGNATURE, said: str = "next", **more: Any) -> FindQuery:
        """What the next request of this conversation asks the store."""
        request = (*self.messages, Message("user", said))
        return FindQuery(key, self.chain(), signature, request_hash_of(request, signature), **more)

    def same_query(self, key: SessionKey, **more: Any) -> FindQuery:
        """What the request that led to the last turn asks the store."""
        before = replace(self, turns=self.turns[:-1], messages=self.messages[:-2])
        return FindQuery(key, before.chain(), self.head.rendering_signature, self.head.request_hash, **more)


RENDERING = Rendering(
    tools=({"type": "function", "function": {"name": "ls", "parameters": {"z": 1, "a": {"type": "string"}}}},),
    kwargs={"enable_thinking": True},
)


def rich_turn(rng: random.Random, conversation: Conversation) -> Conversation:
    """A turn that uses every field."""
    reply = Message(
        "assistant",
        "Ich sehe nach \u2013 \U0001f600",
        reasoning="think",
        tool_calls=(ToolCall("ls", '{"path": "/tmp"}', "call_x_0"),),
    )
    return conversation.then(
        rng,
        reply=reply,
        origin=Origin("spliced", "history_edited", ambiguous=True),
        finish=Finish("stop", "</s>"),
        finish_reason="tool_calls",
        model_call_ids=("call_9f", ""),
        weight_versions=(WeightSpan("v1", 0, 4), WeightSpan("v2", 4, 9)),
        sampling_params={"seed": 2**80, "stop": ["a", "b"]},
        engine_facts={"cached_tokens": 17, "nested": {"a": [1, None]}},
        client_facts={"retry_count": 2},
    )


def digest_of(turn: Turn) -> bytes:
    return ids_digest(turn.generation.ids)


def grown(rng: random.Random, turns: int, **options: Any) -> Conversation:
    conversation = Conversation()
    for _ in range(turns):
        conversation = conversation.then(rng, **options)
    return conversation


Fields = Mapping[bytes, bytes]
