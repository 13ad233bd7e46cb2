"""Samples one generation: the policy's text, spelled non-canonically, cut where the engine would stop.

Deterministic: the same seed and the n-th time that the same prompt is seen give the same answer, whatever the
request's id; equal prompts give different answers, as at temperature 1.
"""

from __future__ import annotations

import hashlib
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from api.demo.sim.config import SimConfig
from api.demo.sim.policy import Scene, prose, read_scene, write_turn
from api.demo.sim.requests import Call, Sampling
from api.demo.sim.script import Directive
from api.demo.sim.vocabulary import Vocabulary

# Enough of the prompt to find the tools and what was said last, however long it is.
_HEAD_TOKENS = 4096
_TAIL_TOKENS = 1024
_MEAN_LOSS = 0.35


@dataclass(frozen=True)
class Sampled:
    """What the model made of one prompt. `ids` and `log_probs` are the truth that the record keeps."""

    ids: list[int]
    log_probs: list[float | None]
    finish: dict[str, Any]
    nonce: str


class Sampler:
    """The imagined model. Remembers only how often it saw each prompt, and which nonces are taken."""

    def __init__(self, config: SimConfig, vocabulary: Vocabulary) -> None:
        self._config = config
        self._vocabulary = vocabulary
        self._seen: dict[bytes, int] = {}
        self._nonces: set[str] = set()
        self._thinks = vocabulary.has("<think>") and vocabulary.has("</think>")
        self._calls = vocabulary.has("<tool_call>") and vocabulary.has("</tool_call>")

    def forget(self) -> None:
        """As if no prompt had been seen."""
        self._seen.clear()
        self._nonces.clear()

    def remember(self, prompt: npt.NDArray[np.int64], nonce: str) -> None:
        """Take note of a generation made before this process began."""
        self._sight(prompt)
        self._nonces.add(nonce)

    def _sight(self, prompt: npt.NDArray[np.int64]) -> str:
        """Count one more sight of `prompt`; names prompt and count."""
        digest = hashlib.blake2b(prompt.tobytes(), digest_size=16).digest()
        self._seen[digest] = times = self._seen.get(digest, 0) + 1
        return f"{digest.hex()}:{times}"

    def sample(self, call: Call, prompt: npt.NDArray[np.int64], directive: Directive) -> Sampled:
        """One generation, as the directive wants it or as the policy writes it."""
        rng = random.Random(f"{self._config.seed}:{self._sight(prompt)}")
        nonce = self._fresh_nonce(rng)
        ids, finish = self._ids(call, prompt, directive, nonce, rng)
        log_probs = _log_probs(len(ids), rng) if directive.log_probs is None else directive.log_probs
        return Sampled(ids, log_probs, directive.finish or finish, nonce)

    def _fresh_nonce(self, rng: random.Random) -> str:
        while (nonce := f"n-{rng.getrandbits(24):06x}") in self._nonces:
            pass
        self._nonces.add(nonce)
        return nonce

    def _ids(
        self, call: Call, prompt: npt.NDArray[np.int64], directive: Directive, nonce: str, rng: random.Random
    ) -> tuple[list[int], dict[str, Any]]:
        if directive.ids is not None:
            return directive.ids, self._finish_of_given(directive.ids)
        limit = _limit(len(prompt), call.sampling, self._config)
        rate = 0.0 if directive.canonical else self._config.split_rate
        if directive.text is not None:
            ids = self._vocabulary.split(self._vocabulary.encode(directive.text), rate, rng)
            ids += [self._vocabulary.eos] if directive.eos else []
        else:
            ids = self._written(self._scene(prompt), call.sampling, limit, nonce, rng)
        stop_ids = frozenset(self._vocabulary.stop_ids)
        kept, finish = cut(ids, call.sampling, limit, self._vocabulary, stop_ids, self._config)
        return ids[:kept], finish

    def _finish_of_given(self, ids: Sequence[int]) -> dict[str, Any]:
        if ids and ids[-1] in self._vocabulary.stop_ids:
            return {"type": "stop", "matched": ids[-1]}
        return {"type": "length", "length": len(ids)}

    def _written(self, scene: Scene, sampling: Sampling, limit: int, nonce: str, rng: random.Random) -> list[int]:
        """A turn, and more text as long as the request does not let the model stop."""
        eos = self._vocabulary.eos
        ids = self._spelled(write_turn(scene, nonce, rng), rng)
        least = limit if sampling.ignore_eos else min(sampling.min_new_tokens, limit)
        while len(ids) < least:
            ids += [eos] if sampling.ignore_eos else []
            ids += self._spelled("\n" + prose(scene.last, nonce, rng), rng)
        return [*ids, eos]

    def _spelled(self, text: str, rng: random.Random) -> list[int]:
        return self._vocabulary.split(self._vocabulary.encode(text), self._config.split_rate, rng)

    def _scene(self, prompt: npt.NDArray[np.int64]) -> Scene:
        head = self._vocabulary.decode(prompt[:_HEAD_TOKENS].tolist())
        segments = list(self._segments(prompt[-_TAIL_TOKENS:].tolist()))
        return read_scene(head, segments, thinks=self._thinks, calls=self._calls)

    def _segments(self, ids: Sequence[int]) -> Iterator[str]:
        """The texts between special tokens; told by id, since content may spell a special token as text."""
        start = 0
        for at, token in enumerate(ids):
            if token in self._vocabulary.special_ids:
                yield self._vocabulary.decode(ids[start:at])
                start = at + 1
        yield self._vocabulary.decode(ids[start:])


def _limit(prompt_length: int, sampling: Sampling, config: SimConfig) -> int:
    """SGLang clamps silently to what its request table holds, one or two short of the window."""
    room = max(0, config.max_request_length - prompt_length - 1)
    return room if sampling.max_new_tokens is None else min(sampling.max_new_tokens, room)


def _log_probs(count: int, rng: random.Random) -> list[float | None]:
    """float32 values, as the engine's sampler has them; JSON then shows them as doubles."""
    source = np.random.Generator(np.random.PCG64(rng.getrandbits(64)))
    losses: list[float | None] = (-source.exponential(_MEAN_LOSS, count).astype(np.float32)).astype(np.float64).tolist()
    return losses


def cut(
    ids: Sequence[int],
    sampling: Sampling,
    limit: int,
    vocabulary: Vocabulary,
    stop_ids: frozenset[int],
    config: SimConfig,
) -> tuple[int, dict[str, Any]]:
    """How many of `ids` the engine would have sampled, and why it stopped there.

    Of several reasons the earliest counts; at the same token the release's order of checks decides.
    """
    length_rank = 9 if config.release.stops_before_length else 0
    ends: list[tuple[int, int, dict[str, Any]]] = []
    if limit <= len(ids):
        ends.append((limit, length_rank, {"type": "length", "length": limit}))
    # With ignore_eos SGLang disables the request's own stop tokens too.
    stopping = frozenset() if sampling.ignore_eos else stop_ids | sampling.stop_token_ids
    first = sampling.min_new_tokens
    for at, token in enumerate(ids[first:], start=first + 1):
        if token in stopping:
            ends.append((at, 2, {"type": "stop", "matched": token}))
            break
    ends += _stop_strings(ids, sampling, vocabulary, rank=1 if config.release.stops_before_length else 3)
    if not ends:
        return len(ids), {"type": "length", "length": len(ids)}
    kept, _, finish = min(ends, key=lambda end: end[:2])
    return kept, finish


def _stop_strings(
    ids: Sequence[int], sampling: Sampling, vocabulary: Vocabulary, rank: int
) -> Iterator[tuple[int, int, dict[str, Any]]]:
    if not sampling.stop and not sampling.stop_regex:
        return
    spelled = [vocabulary.spell(token) for token in ids]
    ends = np.cumsum([len(each) for each in spelled])
    text = b"".join(spelled)
    patterns = [(stop, re.escape(stop)) for stop in sampling.stop] + [(regex, regex) for regex in sampling.stop_regex]
    for told, pattern in patterns:
        found = re.search(pattern.encode(), text)
        if found is not None and found.end() > 0:
            yield int(np.searchsorted(ends, found.end())) + 1, rank, {"type": "stop", "matched": told}


def visible_text(
    ids: Sequence[int], sampling: Sampling, vocabulary: Vocabulary, finish: dict[str, Any] | None = None
) -> str:
    """The reply's `text`: special tokens skipped and the stop trimmed, unless asked otherwise."""
    matched = None if finish is None or sampling.no_stop_trim else finish.get("matched")
    if isinstance(matched, int) and ids and ids[-1] == matched:
        ids = ids[:-1]
    text = vocabulary.decode(ids, skip_special_tokens=sampling.skip_special_tokens)
    if isinstance(matched, str) and matched in text:
        return text[: text.index(matched)]
    # A character whose bytes are not all there yet is held back while more may come.
    return text if finish is not None else text.rstrip("\N{REPLACEMENT CHARACTER}")
