"""Liveness, readiness with named checks, and Prometheus."""

from __future__ import annotations

from typing import Any

import msgspec
from litestar import Response, get
from litestar.datastructures import State

from api.app import Worker
from api.metrics import CONTENT_TYPE


@get("/healthz", sync_to_thread=False)
def healthz() -> dict[str, str]:
    """The process answers."""
    return {"status": "ok"}


@get("/readyz", sync_to_thread=False)
def readyz(state: State) -> Response[dict[str, Any]]:
    """200 when turns can be served, else 503; each check by name with its detail."""
    worker: Worker = state.worker
    readiness = worker.readiness
    body = {
        "ready": readiness.ready,
        "draining": readiness.draining,
        "durability": worker.settings.durability,
        "template": msgspec.to_builtins(readiness.template),
        "checks": {name: {"ok": c.ok, "detail": c.detail} for name, c in readiness.checks.items()},
    }
    return Response(body, status_code=200 if readiness.ready else 503)


@get("/metrics", sync_to_thread=False)
def metrics(state: State) -> Response[bytes]:
    """Prometheus exposition."""
    worker: Worker = state.worker
    return Response(worker.metrics.exposition(), headers={"content-type": CONTENT_TYPE})
