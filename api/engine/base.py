"""What the service asks of any inference engine, and what can go wrong, by whose fault.

EngineError                 nothing was committed
 ├─ EngineUnavailable       could not be reached, refused, overloaded or failed (502; 429 when it says so)
 ├─ EngineTimeout           no answer in time (504)
 ├─ EngineAborted           the engine aborted the generation: a fragment, never a turn (502)
 ├─ EngineContract          the answer cannot be trusted; `field` names what (502)
 ├─ PromptTooLong           the engine's own length limit: the service turns it into a finished turn
 └─ EngineRejected          the engine refused a parameter (400); its own words included
UnsupportedParameter        this engine does not know these sampling parameters (400), all named at once
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import msgspec
import numpy as np
import numpy.typing as npt

from splice.types import Finish, IdArray, WeightSpan


class EngineError(Exception):
    """Root of what engines do wrong."""


class EngineUnavailable(EngineError):
    """The engine could not be reached or failed; nothing is known to have been sampled."""

    def __init__(self, words: str, *, overloaded: bool = False, retry_after_s: float | None = None) -> None:
        super().__init__(words)
        self.overloaded = overloaded
        self.retry_after_s = retry_after_s


class EngineTimeout(EngineError):
    """No answer within the bound."""


class EngineAborted(EngineError):
    """The engine stopped the generation before it finished."""


class EngineContract(EngineError):
    """The engine's answer breaks its wire contract."""

    def __init__(self, field: str, problem: str) -> None:
        super().__init__(f"{field}: {problem}")
        self.field = field
        self.problem = problem


class PromptTooLong(EngineError):
    """The prompt does not fit the engine's window, by the engine's own word."""


class EngineRejected(EngineError):
    """The engine refused the request as the caller's fault."""


class UnsupportedParameter(Exception):
    """Sampling parameters that this engine does not know. `names` are the caller's spellings."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__("unsupported parameters: " + ", ".join(names))
        self.names = names


class EngineFacts(msgspec.Struct, frozen=True):
    """What an engine said of itself at start-up."""

    kind: str
    version: str
    model: str
    context_length: int  # prompt and generation together, in tokens
    max_prompt_length: int  # the largest prompt it accepts, in tokens
    vocab_size: int | None
    log_prob_kind: str  # "tempered", "raw" or "unknown"
    weight_version: str = ""


class Completion(msgspec.Struct, frozen=True):
    """One finished generation as the wire told it, not yet checked by `splice.turn`.

    ids: shape (n,) int64, log_probs: shape (n,) float64, NaN where the engine sent null: the raw values, so
    that the one checker sees what was really sent.
    """

    ids: npt.NDArray[np.int64]
    log_probs: npt.NDArray[np.float64]
    finish: Finish
    log_prob_kind: str
    weight_versions: tuple[WeightSpan, ...] = ()
    engine: str = ""  # URL of the replica
    facts: Mapping[str, Any] = {}  # cached tokens, latency: kept with the turn, never acted on


class Engine(Protocol):
    """An inference engine, possibly several replicas of it."""

    def sampling(self, wanted: Mapping[str, Any]) -> dict[str, Any]:
        """Translate the caller's sampling parameters (OpenAI's and common engine names) to this engine's.

        Raises UnsupportedParameter naming every one it does not know.
        """

    async def generate(
        self, prompt: IdArray, sampling: Mapping[str, Any], *, max_tokens: int, rid: str, affinity: str
    ) -> Completion:
        """Sample once. `sampling` as `sampling()` gave it; `max_tokens` is already clamped to the window.

        `rid` has a fixed length (SGLang aborts by prefix); `affinity` (the session) picks the replica.
        Cancelling the call aborts the generation on the engine.
        Raises EngineError.
        """

    async def facts(self) -> EngineFacts:
        """Ask the engine what it is. Raises EngineError."""

    async def tokenize(self, text: str) -> IdArray:
        """The engine's own ids of `text`, no special tokens added. Raises EngineError."""

    async def models(self) -> list[dict[str, Any]]:
        """The engine's `/v1/models` data."""

    async def close(self) -> None:
        """Release connections."""
