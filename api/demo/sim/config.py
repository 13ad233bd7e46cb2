"""What a simulated engine is started with, and how the imitated SGLang releases differ on the wire."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from pathlib import Path

from api.demo.sim.script import Directive

_STRICT = (0, 5, 23)
_TOKEN_IN_TOKEN_OUT = (0, 5, 13)


@dataclass(frozen=True)
class Release:
    """One SGLang version, seen through what a client can notice."""

    name: str

    @property
    def number(self) -> tuple[int, ...]:
        """Its first three numbers, to compare by."""
        return tuple(int(part) for part in re.findall(r"\d+", self.name)[:3])

    @property
    def checks_contract(self) -> bool:
        """Bodies pass the generated JSON contract first; its refusals carry a bare string."""
        return self.number >= _STRICT

    @property
    def returns_prompt_ids(self) -> bool:
        """Whether `return_prompt_token_ids` is known."""
        return self.number >= _TOKEN_IN_TOKEN_OUT

    @property
    def details_stream_errors(self) -> bool:
        """Whether a stream's error event says more than a message."""
        return self.number >= _TOKEN_IN_TOKEN_OUT

    @property
    def tells_load(self) -> bool:
        """Whether replies count the running and waiting requests."""
        return _TOKEN_IN_TOKEN_OUT <= self.number < _STRICT

    @property
    def tells_weight_spans(self) -> bool:
        """Whether the last reply says which tokens came from which weights."""
        return self.number >= _STRICT

    @property
    def stops_before_length(self) -> bool:
        """A stop on the last allowed token: "stop" from 0.5.23 on, "length" before."""
        return self.number >= _STRICT

    @property
    def passes_any_error_status(self) -> bool:
        """From 0.5.23 an abort's 4xx or 5xx becomes the HTTP status; before, only 400, 500 and 503 did."""
        return self.number >= _STRICT


@dataclass(frozen=True)
class SimConfig:
    """Every knob of the simulated engine. Equal values and equal request order give equal answers.

    Two replicas want different seeds: with one seed they would give equal answers, nonces included.
    """

    tokenizer: Path  # a directory with tokenizer.json
    seed: int = 0
    version: str = "0.5.13"
    model: str = "simulated"
    context_length: int = 32768
    # The first that the vocabulary has is what the policy ends its turns with; all of them stop.
    stop_tokens: tuple[str, ...] = ("<|im_end|>", "<|endoftext|>")
    api_key: str | None = None
    admin_api_key: str | None = None
    weight_version: str = "default"
    first_token_s: float = 0.0
    per_token_s: float = 0.0
    split_rate: float = 0.15  # share of sampled tokens replaced by two that spell the same bytes
    incremental_streaming: bool = False
    stream_interval: int = 1
    max_running: int | None = None  # requests generating at once; None: as many as come
    max_queued: int = 0  # requests waiting for a slot; one more is refused with 503
    allow_auto_truncate: bool = False
    bench: bool = False  # answer `bench_tokens` random ids, read no prompt, keep no record
    bench_tokens: int = 128
    script: tuple[Directive, ...] = ()
    record_path: Path | None = None  # a JSON-lines file that the record is read from and appended to
    release: Release = field(init=False)

    def __post_init__(self) -> None:
        """Name the release once; every rule that depends on the version asks it."""
        object.__setattr__(self, "release", Release(self.version))

    @property
    def max_total_tokens(self) -> int:
        """Tokens that the imagined KV pool holds."""
        return self.context_length * 8

    @property
    def max_request_length(self) -> int:
        """Prompt and generation together, in tokens."""
        return min(self.context_length - 1, self.max_total_tokens - 1)

    @property
    def max_prompt_length(self) -> int:
        """SGLang's `max_req_input_len`: prompts of this length and longer are refused."""
        return self.max_request_length - 5
