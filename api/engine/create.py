"""From the settings' engine kind and URLs to an engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from urllib.parse import urlsplit

from api.engine.base import Engine
from api.engine.http import Http
from api.engine.llama_server import LlamaServerEngine
from api.engine.sglang import SglangEngine

_KINDS: Mapping[str, type[SglangEngine | LlamaServerEngine]] = {
    "sglang": SglangEngine,
    "llama-server": LlamaServerEngine,
}

ENGINE_KINDS = tuple(_KINDS)


def create_engine(
    kind: str,
    urls: Sequence[str],
    api_key: str | None = None,
    *,
    timeout_s: float = 600.0,
    connect_timeout_s: float = 5.0,
    info_timeout_s: float = 15.0,
) -> Engine:
    """An engine of `kind` at `urls`, its replicas. Connects at its first use, so any event loop may own it.

    timeout_s bounds one generation, connect_timeout_s one connect, info_timeout_s every other question.
    Raises ValueError for an unknown kind or a URL that is none.
    """
    if kind not in _KINDS:
        raise ValueError(f"unknown engine kind {kind!r}; known are {', '.join(_KINDS)}")
    replicas = [_base(url) for url in urls]
    if not replicas:
        raise ValueError("an engine needs one URL at least")
    http = Http(api_key=api_key, connect_timeout_s=connect_timeout_s)
    return _KINDS[kind](replicas, http=http, timeout_s=timeout_s, info_timeout_s=info_timeout_s)


def _base(url: str) -> str:
    """`url` without what people copy along from an OpenAI client: the last slash, and `/v1`."""
    parts = urlsplit(url.strip())
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.query or parts.fragment:
        raise ValueError(f"{url!r} is not an engine's URL; it looks like http://host:30000")
    return url.strip().rstrip("/").removesuffix("/v1")
