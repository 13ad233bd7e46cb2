"""What the demo's witnesses say, as values: the engine's record, the players' transcripts, the product's turns.

The judge reads nothing else. `Json` objects are messages exactly as they went over the wire.
"""

from __future__ import annotations

from typing import Any

import msgspec

Json = dict[str, Any]


class Generation(msgspec.Struct, frozen=True):
    """One request that reached the engine, by its own record, in order of arrival (`n`)."""

    n: int
    input_ids: tuple[int, ...]
    output_ids: tuple[int, ...]
    outcome: str  # answered, aborted or failed
    rid: str = ""
    nonce: str = ""  # a word that no other generation holds; "" where the engine cannot plant one
    text: str = ""


class AnsweredTurn(msgspec.Struct, frozen=True, kw_only=True):
    """One turn as the player lived it: what it sent in the end, and what the reply told."""

    messages: tuple[Json, ...]
    nonces: tuple[str, ...]
    generation_ids: tuple[int, ...] | None  # where the player asked for ids
    prompt_length: int | None
    session_id: str
    turn_id: str
    splice: str  # the reply's x-tokensplice-splice header
    replayed: bool
    attempts: int


class PlayedRollout(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout. `tag` stands in its user text, and nowhere else that the product could tell it by."""

    tag: str
    tools: tuple[Json, ...]
    turns: tuple[AnsweredTurn, ...]
    wanted: int  # turns that it set out to play
    gave_up: str = ""  # why it stopped early


class StoredTurn(msgspec.Struct, frozen=True):
    """One turn as the product's `GET /sessions/{id}/turns` lists it."""

    turn_id: str
    delta_token_ids: tuple[int, ...]
    generation_token_ids: tuple[int, ...]
    prompt_token_ids_length: int
    parent_turn_id: str | None = None
