"""A plan and a completion become a turn, with everything checked and nothing guessed."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from splice.errors import GenerationInvalid
from splice.types import TokenRun, WeightSpan, id_array

_UINT32_LIMIT = 2**32
_ROUNDING = 1e-3  # a softmax in half precision may end a hair above zero


def checked_generation(ids: npt.NDArray[np.int64], log_probs: npt.NDArray[np.float64], *, vocab_size: int) -> TokenRun:
    """The engine's raw ids and log probs as a sampled run.

    ids, log_probs: shape (n,), as the wire gave them; an empty generation is legitimate. Log probs are
    natural logs; they are kept as float32 when that loses nothing. Raises GenerationInvalid.
    """
    if len(ids) != len(log_probs):
        raise GenerationInvalid("log_probs", f"{len(ids)} ids but {len(log_probs)} log probs")
    outside = (ids < 0) | (ids >= min(vocab_size, _UINT32_LIMIT))
    if outside.any():
        at = int(np.argmax(outside))
        raise GenerationInvalid("ids", f"id {ids[at]} at position {at} is outside the vocabulary of {vocab_size}")
    unusable = ~np.isfinite(log_probs) | (log_probs > _ROUNDING)
    if unusable.any():
        at = int(np.argmax(unusable))
        raise GenerationInvalid("log_probs", f"log prob {log_probs[at]} at position {at} is no log prob")
    with np.errstate(over="ignore"):  # beyond a float's range is one more value that it does not keep
        narrow = log_probs.astype(np.float32)
    exact = np.array_equal(narrow.astype(np.float64), log_probs)
    return TokenRun(id_array(ids.astype(np.uint32)), narrow if exact else log_probs)


def checked_spans(spans: tuple[WeightSpan, ...], length: int) -> tuple[WeightSpan, ...]:
    """Weight-version spans that cover the generation from start to end without gap or overlap.

    Raises GenerationInvalid. An engine that reports none leaves them empty.
    """
    position = 0
    for span in spans:
        if span.start != position or span.end < span.start:
            raise GenerationInvalid("weight_versions", f"span {span.start}..{span.end} does not follow {position}")
        position = span.end
    if spans and position != length:
        raise GenerationInvalid("weight_versions", f"spans end at {position}, the generation at {length}")
    return spans
