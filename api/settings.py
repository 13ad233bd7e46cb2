"""Settings: the one reader of the environment, and the one table that `serve`'s flags are made from.

A bad value stops the start, and all bad values are named at once.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from store.address import parse_address
from store.durability import parse_durability
from store.replication import MOST_WAIT_S

PREFIX = "TOKENSPLICE_"
ENGINES = ("sglang", "llama-server")


class BadSettings(Exception):
    """Values that cannot be used; `problems` has one line for each."""

    def __init__(self, problems: list[str]) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def _text(value: str) -> str:
    return value


def _urls(value: str) -> tuple[str, ...]:
    urls = tuple(part.strip().rstrip("/") for part in value.split(",") if part.strip())
    for url in urls:
        if not url.startswith(("http://", "https://")):
            raise ValueError(f"{url!r} is no http:// or https:// URL")
    return urls


def _redis_url(value: str) -> str:
    parse_address(value)
    return value


def _durability(value: str) -> str:
    parse_durability(value)
    return value


def _number(low: int, high: int = 2**53) -> Callable[[str], int]:
    def parse(value: str) -> int:
        number = int(value)
        if not low <= number <= high:
            raise ValueError(f"must be between {low} and {high}")
        return number

    return parse


def _replication_s(value: str) -> float:
    """Below the longest wait for an answer of Redis, or a connection in good order would be given up."""
    number = float(value)
    if not 0.01 <= number <= MOST_WAIT_S:
        raise ValueError(f"must be between 0.01 and {MOST_WAIT_S:g}")
    return number


def _seconds(value: str) -> float:
    number = float(value)
    if number <= 0:
        raise ValueError("must be above 0")
    return number


def _one_of(*choices: str) -> Callable[[str], str]:
    def parse(value: str) -> str:
        if value not in choices:
            raise ValueError("must be one of " + ", ".join(choices))
        return value

    return parse


def _flag(value: str) -> bool:
    known = {"1": True, "true": True, "yes": True, "on": True, "0": False, "false": False, "no": False, "off": False}
    if value.lower() not in known:
        raise ValueError("must be true or false")
    return known[value.lower()]


def _keys(value: str) -> Mapping[str, str]:
    """API key -> tenant, from a list (`key` or `tenant:key`, by comma) or a file with one of these a line."""
    path = Path(value)
    lines = path.read_text().splitlines() if "/" in value and path.is_file() else value.split(",")
    tenants: dict[str, str] = {}
    for line in (part.strip() for part in lines):
        if line and not line.startswith("#"):
            tenant, _, key = line.rpartition(":")
            tenants[key] = tenant or "default"
    if not tenants:
        raise ValueError("holds no key")
    return tenants


def _path(value: str) -> str:
    if not Path(value).is_file():
        raise ValueError(f"{value} is no file")
    return value


def _setting(help_text: str, parse: Callable[[str], Any], default: Any) -> Any:
    return field(default=default, metadata={"help": help_text, "parse": parse})


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Everything a worker is told. Each field is `TOKENSPLICE_<NAME>` and `--<name>` on `serve`."""

    redis_url: str = _setting(
        "Redis: redis://, rediss:// or unix://; redis+sentinel://host,host/service/db or redis+cluster://host,host.",
        _redis_url,
        "redis://127.0.0.1:6379/0",
    )
    engine_url: tuple[str, ...] = _setting("Engine replicas, by comma.", _urls, ("http://127.0.0.1:30000",))
    engine: str = _setting(f"Engine's wire: {', '.join(ENGINES)}.", _one_of(*ENGINES), "sglang")
    engine_api_key: str = _setting("Bearer key sent to the engine.", _text, "")
    engine_timeout_s: float = _setting("Longest wait for one generation, in seconds.", _seconds, 1800.0)
    join_timeout_s: float | None = _setting(
        "Longest wait of a retry for the attempt it joins, in seconds; default: the engine's.", _seconds, None
    )
    tokenizer: str = _setting("Tokenizer: a directory, or a hub id.", _text, "")
    chat_template: str = _setting("Chat template file, instead of the tokenizer's own.", _path, "")
    trust_remote_code: bool = _setting("Let the tokenizer's repository run its own code.", _flag, default=False)
    context_length: int = _setting("Context window in tokens; 0 asks the engine.", _number(0), 0)
    tool_parser: str = _setting("Tool-call format, or none; empty chooses from the template.", _text, "")
    reasoning_parser: str = _setting("Reasoning format, or none; empty chooses from the template.", _text, "")
    api_keys: Mapping[str, str] = _setting("Keys (`key` or `tenant:key`, by comma) or a file of them.", _keys, None)
    durability: str = _setting(
        "What an acknowledged turn survives: memory, aof, sync, replicated or replicated:<replicas>.",
        _durability,
        "aof",
    )
    replication_timeout_s: float = _setting(
        "Longest wait for replicas, in seconds, before a commit is answered replication_unknown.", _replication_s, 1.0
    )
    session_ttl_s: int = _setting("Seconds an unused session is kept; 0 keeps it for ever.", _number(0), 86_400)
    reply_token_ids: str = _setting(
        "Token ids in replies: on_request, always, never.", _one_of("on_request", "always", "never"), "on_request"
    )
    on_rendering_change: str = _setting(
        "Tools or template arguments change in mid-session: error or fork.", _one_of("error", "fork"), "error"
    )
    on_overflow: str = _setting(
        "Prompt fills the window: length (a finished turn) or error.", _one_of("length", "error"), "length"
    )
    control_tokens_in_content: str = _setting(
        "Control tokens spelled in content: text, or engine (as the engine itself would).",
        _one_of("text", "engine"),
        "text",
    )
    max_body_bytes: int = _setting("Largest request body accepted, in bytes.", _number(1024), 64 * 2**20)
    max_in_flight: int = _setting("Turns one worker runs at once before it answers 429.", _number(1), 2048)
    drain_s: float = _setting("Longest wait for running turns when told to stop, in seconds.", _seconds, 600.0)
    lineage_cache_bytes: int = _setting("Memory a worker spends on cached token lineages.", _number(0), 256 * 2**20)
    transcript_cache_bytes: int = _setting(
        "Memory a worker spends on transcripts it has read, so as to read only what is new.", _number(0), 256 * 2**20
    )
    log_level: str = _setting("debug, info, warning or error.", _one_of("debug", "info", "warning", "error"), "info")

    @classmethod
    def from_env(cls, environment: Mapping[str, str], **flags: str | None) -> Settings:
        """Read `TOKENSPLICE_*`, overridden by flags. Raises BadSettings with every problem."""
        known = {f.name: f for f in fields(cls)}
        raw = {n: environment[PREFIX + n.upper()] for n in known if environment.get(PREFIX + n.upper(), "") != ""}
        raw |= {name: value for name, value in flags.items() if value is not None}
        values: dict[str, Any] = {}
        problems: list[str] = []
        for name, text in raw.items():
            try:
                values[name] = known[name].metadata["parse"](text)
            except ValueError as error:
                problems.append(f"{PREFIX}{name.upper()}={text!r}: {error}")
        if problems:
            raise BadSettings(problems)
        return cls(**values)
