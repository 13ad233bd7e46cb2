"""Routes: decode, one call, encode."""

from __future__ import annotations

from api.routes import health, sessions, turns

HANDLERS = [
    turns.chat_completions,
    turns.models,
    sessions.open_session,
    sessions.list_sessions,
    sessions.show_session,
    sessions.delete_session,
    sessions.list_turns,
    sessions.show_turn,
    sessions.trajectory,
    sessions.reward,
    sessions.finish,
    health.healthz,
    health.readyz,
    health.metrics,
]
