"""One HTTP exchange with an engine: connections, time limits, the key, and what every failure means.

Every exception that aiohttp raises and every shape of error body that engines send leaves here as an EngineError.
Two of them are this file's own, so that callers need no status codes:

NeverSent     (EngineUnavailable)  no connection was made: the request was never sent, another replica may be asked
RouteMissing  (EngineContract)     the engine has no such route: an older or a newer version of it may
"""

from __future__ import annotations

import io
import math
import re
from collections.abc import Mapping

import aiohttp
import msgspec

from api.engine.base import (
    EngineContract,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    PromptTooLong,
)

# uvicorn and llama.cpp close an idle connection after 5 s. A request written onto a connection that is just being
# closed fails, and could not be repeated: it may have been read. So idle ones are dropped well before.
_KEEP_ALIVE_S = 3.0

# The engines' own words are all that tells these from other refusals: SGLang gives them no code.
_TOO_LONG = (
    re.compile(r"longer than the model's context length"),
    re.compile(r"exceeds? the model's maximum context length"),
    re.compile(r"exceeds? the maximum allowed length"),
    re.compile(r"maximum context length is \d+"),
    re.compile(r"exceeds? the available context size"),
)
_TOO_LONG_TYPE = "exceed_context_size_error"

_MOST_WORDS = 2000  # characters of an engine's own words that an error repeats


class NeverSent(EngineUnavailable):
    """No connection was made, so nothing can have been sampled."""


class RouteMissing(EngineContract):
    """The engine does not have this route."""


class Http:
    """A pool of connections to the replicas of one engine. Made inside the event loop, at the first exchange."""

    def __init__(self, *, api_key: str | None, connect_timeout_s: float) -> None:
        self._api_key = api_key
        self._connect_timeout_s = connect_timeout_s
        self._session: aiohttp.ClientSession | None = None

    async def exchange(
        self,
        method: str,
        url: str,
        *,
        body: bytes | None = None,
        headers: Mapping[str, str] | None = None,
        timeout_s: float,
    ) -> bytes:
        """Send one request, return the body of its 200. Raises EngineError.

        Cancelling it closes the connection.
        """
        try:
            async with self._open().request(
                method,
                url,
                # Wrapped, because aiohttp warns of bytes above 1 MB, which a long prompt is.
                data=None if body is None else io.BytesIO(body),
                headers={"Content-Type": "application/json", **(headers or {})},
                # A redirected POST would be sent twice.
                allow_redirects=False,
                timeout=aiohttp.ClientTimeout(total=timeout_s, sock_connect=self._connect_timeout_s),
            ) as answer:
                content = await answer.read()
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise translated(error, url) from error
        if answer.status != 200:
            raise refusal(
                answer.status, content, where=f"{method} {url}", retry_after=answer.headers.get("Retry-After")
            )
        return content

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            self._session = aiohttp.ClientSession(
                # The service bounds what runs at once; a second, silent queue here would only hide it.
                connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=_KEEP_ALIVE_S),
                headers={"Authorization": f"Bearer {self._api_key}"} if self._api_key else {},
            )
        return self._session

    async def close(self) -> None:
        """Close every connection."""
        if self._session is not None:
            await self._session.close()
            self._session = None


def translated(error: Exception, url: str) -> EngineError:
    """What an exception of aiohttp, or of the socket below it, means."""
    words = f"{url}: {str(error) or type(error).__name__}"
    match error:
        # A time limit on the connect is a ServerTimeoutError too, so it stands first.
        case aiohttp.ConnectionTimeoutError() | aiohttp.ClientConnectorError() | aiohttp.InvalidURL():
            return NeverSent(words)
        case TimeoutError():
            return EngineTimeout(f"{url}: no answer in time")
        case aiohttp.ClientPayloadError():
            return EngineUnavailable(f"{url}: the connection dropped in the middle of the reply: {error}")
        case aiohttp.ClientResponseError():
            return EngineContract("http", words)
        case _:
            return EngineUnavailable(words)


def refusal(status: int, body: bytes, *, where: str = "", retry_after: str | None = None) -> EngineError:
    """What an answer other than 200 means, whichever of its error shapes the engine chose."""
    words, kind = _explained(body)
    words = words or "no explanation"
    told = f"{where} answered {status}: {words}".strip()
    match status:
        case 401 | 403:
            return EngineUnavailable(f"the engine refused the API key: {told}")
        case 404 | 405 | 501:
            return RouteMissing("route", told)
        case 408 | 504:
            return EngineTimeout(told)
        case _ if status == 429 or status >= 500:
            return EngineUnavailable(told, overloaded=status in (429, 503), retry_after_s=_seconds(retry_after))
        case _ if status >= 400:
            too_long = kind == _TOO_LONG_TYPE or any(pattern.search(words) for pattern in _TOO_LONG)
            return PromptTooLong(words) if too_long else EngineRejected(words)
        case _:
            return EngineContract("status", f"{told}; is its URL right?")


def error_inside(told: object) -> EngineError | None:
    """The refusal that a body of a 200 may hold: SGLang's streams and some routers answer so."""
    match told:
        case {"error": {"code": int() as status} as error} if 400 <= status < 600:
            return refusal(status, msgspec.json.encode({"error": error}))
        case {"error": error} if error:
            return refusal(400, msgspec.json.encode({"error": error}))
        case _:
            return None


def _explained(body: bytes) -> tuple[str, str]:
    """The engine's words and its error type, "" where it names none."""
    try:
        told = msgspec.json.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError):
        return body.decode("utf-8", "replace")[:_MOST_WORDS].strip(), ""
    match told:
        case {"error": {"message": str(words)} as error}:
            return words[:_MOST_WORDS], str(error.get("type", ""))
        case {"error": str(words)} | {"detail": str(words)}:
            return words[:_MOST_WORDS], ""
        case {"message": str(words)}:
            return words[:_MOST_WORDS], str(told.get("type", ""))
        case _:
            return body.decode("utf-8", "replace")[:_MOST_WORDS], ""


def _seconds(retry_after: str | None) -> float | None:
    """A Retry-After header in seconds. Its other form, a date, needs a clock that agrees: it is left out."""
    try:
        seconds = float(retry_after or "")
    except ValueError:
        return None
    return seconds if 0 <= seconds < math.inf else None
