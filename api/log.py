"""Structured logs on stderr: one JSON object a line, one line a turn. Ids, never secrets or message text."""

from __future__ import annotations

import json
import logging
import time

from api.facts import TurnDone

_logger = logging.getLogger("tokensplice")


class _JsonFormatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        line = {"time": round(time.time(), 3), "level": record.levelname.lower(), "message": record.getMessage()}
        line |= getattr(record, "facts", {})
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False)


def configure(level: str) -> None:
    """Send our own log, and other libraries' warnings, to stderr as JSON lines."""
    handler = logging.StreamHandler()
    handler.setFormatter(_JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(logging.WARNING)
    _logger.setLevel(level.upper())


def event(message: str, *, level: int = logging.INFO, exc: BaseException | None = None, **facts: object) -> None:
    """Log one event with its facts."""
    _logger.log(level, message, extra={"facts": facts}, exc_info=exc)


def turn(fact: TurnDone) -> None:
    """Log one answered turn; fresh renders of a known history and refusals stand out as warnings."""
    done = fact.turn
    surprising = done.origin.kind == "fresh" and done.origin.reason not in {"first_turn", ""}
    level = logging.WARNING if surprising else logging.INFO
    if not _logger.isEnabledFor(level):
        return
    event(
        "turn",
        level=level,
        tenant=fact.key.tenant,
        session=fact.key.session_id,
        turn=done.turn_id,
        parent=done.parent_id,
        splice=done.origin.kind,
        reason=done.origin.reason,
        refusal=fact.refusal,
        replayed=fact.replayed,
        prompt=done.prompt_length,
        delta=len(done.delta),
        generated=len(done.generation),
        finish=done.finish_reason,
        engine=done.engine,
        ms={name: round(seconds * 1000, 2) for name, seconds in fact.stages_s.items()},
    )
