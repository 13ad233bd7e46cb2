"""`tokensplice doctor`: the start-up checks, once, without serving."""

from __future__ import annotations

from pathlib import Path

from api.preparation import PreparationError, prepare_model
from api.readiness import Check, Readiness
from api.settings import Settings
from api.worker import build_engine, build_grammar, build_splicer, build_store
from splice.errors import TemplateRejected


async def examine(settings: Settings) -> dict[str, Check]:
    """Every check by name: Redis, engine, tokenizer agreement, template."""
    if not settings.tokenizer:
        return {"tokenizer": Check(ok=False, detail="set TOKENSPLICE_TOKENIZER to the model's directory or hub id")}
    try:
        splicer = build_splicer(settings, prepared(settings))
        build_grammar(settings, splicer)
    except (PreparationError, TemplateRejected, ValueError) as error:
        return {"tokenizer": Check(ok=False, detail=str(error), fatal=True)}
    store, engine = build_store(settings), build_engine(settings)
    readiness = Readiness(store, engine, splicer, settings)
    try:
        await readiness.check()
    finally:
        await engine.close()
        await store.close()
    return readiness.checks


def prepared(settings: Settings) -> Path:
    """The settings' model, prepared for workers. Raises PreparationError."""
    return prepare_model(
        settings.tokenizer,
        chat_template=Path(settings.chat_template) if settings.chat_template else None,
        trust_remote_code=settings.trust_remote_code,
    )
