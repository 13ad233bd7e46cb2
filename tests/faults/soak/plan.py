"""What a soak is asked for, as a value."""

from __future__ import annotations

from dataclasses import dataclass

# Redis as each mode of durability wants it. Later options win over the embedded server's own.
REDIS_ARGUMENTS = {
    "memory": ("--appendonly", "no"),
    "aof": ("--appendfsync", "everysec"),
    "sync": ("--appendfsync", "always"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Load, harm and length of one soak. Every `_every_s` is a pause between two harms; 0 does none."""

    seconds: float = 600.0
    sessions: int = 300  # open at once
    rate: float = 45.0  # turns asked for a second, all sessions together
    workers: int = 5  # the first is never killed: its memory shows what leaks
    durability: str = "sync"
    seed: int = 0
    worker_every_s: float = 3.0
    redis_every_s: float = 60.0
    redis_down_s: float = 0.3
    cut_every_s: float = 5.0
    engine_every_s: float = 15.0
    hangs_up: float = 0.03  # share of asks whose client leaves before it is answered
    longest_pause_s: float = 8.0  # of a client between two attempts; 8 is OpenAI's own
    expiry_ttl_s: int = 10
    expiring_sessions: int = 60  # 0 leaves the last phase out
