"""The values that everything else speaks in.

A *turn* is one generation. A *lineage* is the path from a root turn to a turn; its tokens are the
concatenation of every `delta + generation` on it. `TokenRun` keeps ids and log probs aligned by
construction, as packed arrays: no list of boxed ints is ever made of a history.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Self

import msgspec
import numpy as np
import numpy.typing as npt

IdArray = npt.NDArray[np.uint32]
LogProbArray = npt.NDArray[np.float32] | npt.NDArray[np.float64]

Role = Literal["system", "developer", "user", "assistant", "tool"]


class ToolCall(msgspec.Struct, frozen=True, omit_defaults=True):
    """One call of a tool. `arguments` is JSON text as its writer spelled it, or whatever was there."""

    name: str
    arguments: str = "{}"
    id: str = ""


class Message(msgspec.Struct, frozen=True, omit_defaults=True):
    """One message in canonical form: text only, absent and empty are the same."""

    role: Role
    content: str = ""
    reasoning: str = ""
    tool_calls: tuple[ToolCall, ...] = ()
    tool_call_id: str = ""
    name: str = ""


class Rendering(msgspec.Struct, frozen=True):
    """What the head of a prompt is rendered from, beside its messages.

    `tools` are JSON objects in the caller's order, exactly as sent (key order kept);
    `kwargs` are the chat template's keyword arguments.
    """

    tools: tuple[Mapping[str, Any], ...] = ()
    kwargs: Mapping[str, Any] = msgspec.field(default_factory=dict)


def id_array(ids: Iterable[int] | IdArray | bytes) -> IdArray:
    """Token ids as a read-only uint32 array; bytes are read as little-endian u32 without a copy."""
    if isinstance(ids, bytes | bytearray | memoryview):
        array = np.frombuffer(ids, dtype="<u4")
    elif isinstance(ids, np.ndarray):
        array = ids.astype(np.uint32, copy=False)
    else:
        array = np.fromiter(ids, dtype=np.uint32)
    if array.flags.writeable:
        array = array.view()
        array.setflags(write=False)
    return array


@dataclass(frozen=True, slots=True, eq=False)
class TokenRun:
    """A run of token ids; sampled ones carry one log prob each, context ones carry none.

    ids: shape (n,), uint32. log_probs: shape (n,), float32 or float64, natural log; None for context.
    Raises ValueError when the shapes differ.
    """

    ids: IdArray
    log_probs: LogProbArray | None = None

    def __post_init__(self) -> None:
        if self.ids.ndim != 1 or self.ids.dtype != np.uint32:
            raise ValueError(f"ids must be a flat uint32 array, got {self.ids.dtype}{self.ids.shape}")
        if self.log_probs is not None and self.log_probs.shape != self.ids.shape:
            raise ValueError(f"{len(self.ids)} ids but {self.log_probs.shape} log probs")

    @classmethod
    def context(cls, ids: Iterable[int] | IdArray | bytes) -> Self:
        """Ids that nobody sampled: prompt, glue, tool output."""
        return cls(id_array(ids))

    @property
    def sampled(self) -> bool:
        """Whether the engine sampled these ids."""
        return self.log_probs is not None

    def __len__(self) -> int:
        return len(self.ids)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, TokenRun):
            return NotImplemented
        if self.sampled != other.sampled or not np.array_equal(self.ids, other.ids):
            return False
        return self.log_probs is None or bool(np.array_equal(self.log_probs, other.log_probs))  # type: ignore[arg-type]

    __hash__ = None  # type: ignore[assignment]


class Finish(msgspec.Struct, frozen=True, omit_defaults=True):
    """Why the engine stopped. `matched` is the stop token's id or the stop string, where there was one."""

    kind: Literal["stop", "length"]
    matched: int | str | None = None


class WeightSpan(msgspec.Struct, frozen=True):
    """Generated tokens [start, end) were sampled under this weight version."""

    version: str
    start: int
    end: int


FreshReason = Literal[
    "first_turn",
    "unknown_history",
    "history_diverged",
    "rendering_changed",
    "turn_lost",
    "template_unsupported",
    "template_rewrites_history",
]


class Origin(msgspec.Struct, frozen=True, omit_defaults=True):
    """How a turn's prompt was made: spliced onto its parent, or rendered whole for a reason."""

    kind: Literal["spliced", "fresh"]
    reason: str = ""
    ambiguous: bool = False  # several equal parents stood, and nothing the client echoed chose one


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One generation, immutable once committed.

    `delta` is what the prompt adds to the parent's tokens (the whole prompt on a root), `generation` what
    the engine sampled. `messages` are the request's messages since the parent, `reply` the assistant
    message as the client was sent; `model_call_ids` are the tool-call ids that the model itself wrote, by
    position ("" where its format has none).
    """

    turn_id: str
    parent_id: str  # "" on a root
    root_id: str
    rendering_signature: str
    clock: float  # the root's frozen template clock, seconds since the epoch
    origin: Origin
    prompt_length: int  # delta included
    delta: TokenRun
    generation: TokenRun
    messages: tuple[Message, ...]
    reply: Message
    chain_hash: bytes  # of the conversation up to and including the reply
    request_hash: bytes
    finish: Finish
    finish_reason: str  # as the client was told: stop, length, tool_calls
    created_at: float
    model_call_ids: tuple[str, ...] = ()
    weight_versions: tuple[WeightSpan, ...] = ()
    log_prob_kind: str = ""
    sampling_params: Mapping[str, Any] = field(default_factory=dict)
    rendering: Rendering = field(default_factory=Rendering)  # kept on roots
    model: str = ""
    engine: str = ""
    engine_facts: Mapping[str, Any] = field(default_factory=dict)
    client_facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Head:
    """The turn that a prompt is spliced onto, as far as the boundary needs to know it."""

    turn_id: str
    root_id: str
    clock: float
    finish: Finish
    generation_length: int
    model_call_ids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Lineage:
    """A head and every token up to and including its generation. tokens: shape (n,), uint32."""

    head: Head
    tokens: IdArray

    @property
    def generation(self) -> IdArray:
        """The head's sampled ids."""
        return self.tokens[len(self.tokens) - self.head.generation_length :]
