"""Wire shapes of the session routes: structs in, plain JSON out."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal

import msgspec
import numpy as np

from splice.samples import Sample
from splice.types import Message, Turn
from store.views import SessionView

MOST_TTL_S = 10 * 365 * 86_400


class OpenSession(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /sessions`."""

    session_id: str | None = None
    run_id: str | None = None
    group_id: str | None = None
    group_size: Annotated[int, msgspec.Meta(ge=0, le=2**31)] | None = None
    metadata: dict[str, Any] | None = None
    sampling_params: dict[str, Any] | None = None
    ttl_s: Annotated[int, msgspec.Meta(ge=0, le=MOST_TTL_S)] | None = None  # 0: the server's default
    on_rendering_change: Literal["error", "fork"] | None = None
    on_overflow: Literal["length", "error"] | None = None
    thinking: Literal["keep"] | None = None
    parent_session_id: str | None = None


class Reward(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /sessions/{id}/reward`."""

    reward: float
    turn_id: str | None = None
    source: str | None = None


class Finish(msgspec.Struct, forbid_unknown_fields=True):
    """Body of `POST /sessions/{id}/finish`."""

    reward: float | None = None
    status: str | None = None


def session_json(view: SessionView, *, durability: str) -> dict[str, Any]:
    """A session's summary."""
    opening = view.opening
    return {
        "session_id": view.key.session_id,
        "state": view.state,
        "status": view.status,
        "run_id": opening.run_id,
        "group_id": opening.group_id,
        "group_size": opening.group_size,
        "metadata": dict(opening.metadata),
        "sampling_params": dict(opening.sampling_params),
        "parent_session_id": opening.parent_session_id,
        "on_rendering_change": opening.on_rendering_change,
        "on_overflow": opening.on_overflow,
        "thinking": opening.thinking,
        "ttl_s": opening.ttl_s,
        "model": view.model,
        "turns": view.turns,
        "roots": dict(view.roots),
        "tokens": view.tokens,
        "sampled_tokens": view.sampled_tokens,
        "last_turn_id": view.last_turn_id,
        "reward": view.reward,
        "created_at": _iso(view.created_at),
        "updated_at": _iso(view.updated_at),
        "durability": durability,
    }


def turn_json(turn: Turn, *, delivered: bool | None) -> dict[str, Any]:
    """A turn with its ids, log probs and provenance. Arrays are numpy: encode with orjson."""
    return {
        "turn_id": turn.turn_id,
        "parent_turn_id": turn.parent_id or None,
        "root_turn_id": turn.root_id,
        "origin": origin_json(turn),
        "prompt_token_ids_length": turn.prompt_length,
        "delta_token_ids": turn.delta.ids,
        "generation_token_ids": turn.generation.ids,
        "generation_log_probs": _doubles(turn.generation.log_probs),
        "finish_reason": turn.finish_reason,
        "matched_stop": turn.finish.matched,
        "weight_versions": [msgspec.to_builtins(span) for span in turn.weight_versions],
        "log_prob_kind": turn.log_prob_kind,
        "sampling_params": dict(turn.sampling_params),
        "rendering_signature": turn.rendering_signature,
        "delivered": delivered,
        "created_at": _iso(turn.created_at),
        "model": turn.model,
        "engine": turn.engine,
        "engine_facts": dict(turn.engine_facts),
        "messages": [message_json(m) for m in (*turn.messages, turn.reply)],
    }


def origin_json(turn: Turn) -> dict[str, Any]:
    """How a turn's prompt was made."""
    return {
        "kind": turn.origin.kind,
        "reason": turn.origin.reason or None,
        "ambiguous_parent": turn.origin.ambiguous,
        **turn.client_facts,  # why the template refused a splice, what the boundary noticed
    }


def message_json(message: Message) -> dict[str, Any]:
    """A canonical message in OpenAI's chat shape."""
    wire: dict[str, Any] = {"role": message.role, "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = calls_json(message)
    if message.tool_call_id:
        wire["tool_call_id"] = message.tool_call_id
    if message.name:
        wire["name"] = message.name
    return wire


def calls_json(message: Message) -> list[dict[str, Any]]:
    """A message's tool calls in OpenAI's chat shape."""
    return [
        {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
        for call in message.tool_calls
    ]


def trajectory_json(view: SessionView, samples: list[Sample]) -> dict[str, Any]:
    """A session's samples for a trainer."""
    return {
        "session_id": view.key.session_id,
        "run_id": view.opening.run_id,
        "group_id": view.opening.group_id,
        "metadata": dict(view.opening.metadata),
        "reward": view.reward,
        "samples": [_sample_json(sample, view.reward) for sample in samples],
    }


def _sample_json(sample: Sample, reward: float | None) -> dict[str, Any]:
    return {
        "sample_id": sample.sample_id,
        "token_ids": sample.token_ids,
        "loss_mask": sample.loss_mask,
        "log_probs": sample.log_probs,
        "weight_versions": [msgspec.to_builtins(span) for span in sample.weight_versions],
        "turns": [
            {
                "turn_id": placed.turn.turn_id,
                "prompt_start": placed.prompt_start,
                "generation_start": placed.generation_start,
                "generation_end": placed.generation_end,
                "finish_reason": placed.turn.finish_reason,
                "origin": origin_json(placed.turn),
                "reward": None,
                "trains": placed.trains,
            }
            for placed in sample.turns
        ],
        "messages": [message_json(m) for m in sample.messages],
        "finish_reason": sample.turns[-1].turn.finish_reason,
        "reward": reward,
    }


def _doubles(values: Any) -> Any:
    return None if values is None else np.asarray(values, dtype=np.float64)


def _iso(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat(timespec="milliseconds")
