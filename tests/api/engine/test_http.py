"""Every failure of the wire becomes an EngineError that says whose fault it is."""

from __future__ import annotations

import asyncio
import ssl
from typing import Any

import aiohttp
import orjson
import pytest
from multidict import CIMultiDict, CIMultiDictProxy
from yarl import URL

from api.engine.base import (
    EngineContract,
    EngineError,
    EngineRejected,
    EngineTimeout,
    EngineUnavailable,
    PromptTooLong,
)
from api.engine.http import Http, NeverSent, RouteMissing, error_inside, refusal, translated
from tests.api.engine.replay import Answer, Handler, ReplayServer, cut, drop, hang, refusing_url

# What aiohttp may raise at a client, and what it means. A new version's new exception fails the test below.
MEANINGS: dict[str, type[EngineError]] = {
    "ClientConnectionError": EngineUnavailable,
    "ClientConnectionResetError": EngineUnavailable,
    "ClientConnectorCertificateError": NeverSent,
    "ClientConnectorDNSError": NeverSent,
    "ClientConnectorError": NeverSent,
    "ClientConnectorSSLError": NeverSent,
    "ClientError": EngineUnavailable,
    "ClientHttpProxyError": EngineContract,
    "ClientOSError": EngineUnavailable,
    "ClientPayloadError": EngineUnavailable,
    "ClientProxyConnectionError": NeverSent,
    "ClientResponseError": EngineContract,
    "ClientSSLError": NeverSent,
    "ConnectionTimeoutError": NeverSent,
    "ContentTypeError": EngineContract,
    "InvalidURL": NeverSent,
    "InvalidUrlClientError": NeverSent,
    "InvalidUrlRedirectClientError": NeverSent,
    "NonHttpUrlClientError": EngineUnavailable,
    "NonHttpUrlRedirectClientError": EngineUnavailable,
    "RedirectClientError": EngineUnavailable,
    "ServerConnectionError": EngineUnavailable,
    "ServerDisconnectedError": EngineUnavailable,
    "ServerFingerprintMismatch": EngineUnavailable,
    "ServerTimeoutError": EngineTimeout,
    "SocketTimeoutError": EngineTimeout,
    "TooManyRedirects": EngineContract,
    "UploadAbortedError": EngineUnavailable,
    "WSServerHandshakeError": EngineContract,
}
# Of its server side, of websockets and of reading multipart bodies: never raised by a plain request.
ELSEWHERE = {
    "BadContentDispositionHeader",
    "BadContentDispositionParam",
    "EofStream",
    "WSMessageTypeError",
    "WebSocketError",
}

REQUEST_INFO = aiohttp.RequestInfo(URL("http://e"), "POST", CIMultiDictProxy(CIMultiDict()), URL("http://e"))
CONNECTION_KEY = aiohttp.client_reqrep.ConnectionKey("e", 80, False, True, None, None, None)


def raised(kind: type[Exception]) -> Exception:
    """An exception of aiohttp as aiohttp makes it."""
    if issubclass(kind, aiohttp.ClientConnectorCertificateError):
        return kind(CONNECTION_KEY, ssl.CertificateError("expired"))
    if issubclass(kind, aiohttp.ClientConnectorError):
        return kind(CONNECTION_KEY, OSError(111, "refused"))
    if issubclass(kind, aiohttp.ClientResponseError):
        return kind(REQUEST_INFO, ())
    if issubclass(kind, aiohttp.ServerFingerprintMismatch):
        return kind(b"a", b"b", "e", 443)
    if issubclass(kind, aiohttp.InvalidURL):
        return kind("nonsense")
    return kind("words")


def exceptions_of_aiohttp() -> set[str]:
    named = {name: getattr(aiohttp, name) for name in aiohttp.__all__}
    return {name for name, kind in named.items() if isinstance(kind, type) and issubclass(kind, Exception)}


def test_the_list_of_aiohttps_exceptions_is_whole() -> None:
    assert exceptions_of_aiohttp() - ELSEWHERE == set(MEANINGS)


@pytest.mark.parametrize("name", MEANINGS)
def test_each_exception_of_aiohttp_has_its_meaning(name: str) -> None:
    assert type(translated(raised(getattr(aiohttp, name)), "http://e")) is MEANINGS[name]


@pytest.mark.parametrize(
    ("error", "meaning"),
    [
        (TimeoutError(), EngineTimeout),
        (ConnectionResetError("reset"), EngineUnavailable),
        (BrokenPipeError(), EngineUnavailable),
        (OSError(24, "too many open files"), EngineUnavailable),
    ],
)
def test_the_sockets_own_exceptions_have_theirs(error: Exception, meaning: type[EngineError]) -> None:
    told = translated(error, "http://e")
    assert type(told) is meaning
    assert "http://e" in str(told)


TOO_LONG = (
    "The input (9000 tokens) is longer than the model's context length (8192 tokens).",
    "Requested token count exceeds the model's maximum context length of 8192 tokens. You requested a total of 9000.",
    "Input length (8190 tokens) exceeds the maximum allowed length (8185 tokens). Use a shorter input.",
)

# The five shapes of SGLang's native interface, and those of its neighbours; WORDS and 999 stand for what is said.
SHAPES: dict[str, Any] = {
    "an object with a message": {"error": {"message": "WORDS"}},
    "the contract gate's bare string": {"error": "WORDS"},
    "FastAPI's validation": {"object": "error", "message": "WORDS", "type": "Bad Request", "param": None, "code": 999},
    "the scheduler's abort": {"object": "error", "message": "WORDS", "type": "999", "param": None, "code": 999},
    "plain text": "WORDS",
    "FastAPI's own": {"detail": "WORDS"},
    "llama.cpp's": {"error": {"code": 999, "message": "WORDS", "type": "invalid_request_error"}},
}


def body(shape: str, words: str, status: int) -> bytes:
    made = SHAPES[shape]
    text = made if isinstance(made, str) else orjson.dumps(made).decode()
    return text.replace("WORDS", words).replace("999", str(status)).encode()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("words", TOO_LONG)
def test_the_engines_length_limit_is_known_in_every_shape(shape: str, words: str) -> None:
    told = refusal(400, body(shape, words, 400))
    assert type(told) is PromptTooLong
    assert str(told) == words


def test_llama_servers_length_limit_is_known_by_its_type() -> None:
    shape = b'{"error":{"code":400,"message":"no room","type":"exceed_context_size_error","n_ctx":1024}}'
    assert type(refusal(400, shape)) is PromptTooLong


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [400, 413, 422])
def test_another_refusal_is_the_callers_fault_in_the_engines_words(shape: str, status: int) -> None:
    words = "unknown field `foo`, expected one of `max_new_tokens`"
    told = refusal(status, body(shape, words, status))
    assert type(told) is EngineRejected
    assert str(told) == words


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("status", [429, 503])
def test_a_full_engine_says_when_to_come_back(shape: str, status: int) -> None:
    told = refusal(status, body(shape, "The request queue is full.", status), retry_after="2.5")
    assert isinstance(told, EngineUnavailable)
    assert (told.overloaded, told.retry_after_s) == (True, 2.5)
    assert "The request queue is full." in str(told)


@pytest.mark.parametrize("retry_after", [None, "", "soon", "-1", "nan", "inf", "Wed, 21 Oct 2026 07:28:00 GMT"])
def test_a_useless_retry_after_is_left_out(retry_after: str | None) -> None:
    told = refusal(503, b"", retry_after=retry_after)
    assert isinstance(told, EngineUnavailable)
    assert (told.overloaded, told.retry_after_s) == (True, None)


@pytest.mark.parametrize(("status", "words"), [(401, "Unauthorized"), (403, "Forbidden")])
def test_a_wrong_key_is_said_to_be_wrong(status: int, words: str) -> None:
    told = refusal(status, b'{"error":"%s"}' % words.encode())
    assert type(told) is EngineUnavailable
    assert not told.overloaded
    assert "API key" in str(told)
    assert words in str(told)


@pytest.mark.parametrize(
    ("status", "meaning"),
    [
        (301, EngineContract),
        (404, RouteMissing),
        (405, RouteMissing),
        (501, RouteMissing),
        (408, EngineTimeout),
        (504, EngineTimeout),
        (500, EngineUnavailable),
        (502, EngineUnavailable),
    ],
)
@pytest.mark.parametrize("content", [b"", b"Internal Server Error", b'{"error": {}}', b"\xff\xfe", b"[1]", b'"x"'])
def test_every_status_has_a_meaning_whatever_the_body(status: int, meaning: type, content: bytes) -> None:
    told = refusal(status, content)
    assert type(told) is meaning
    assert not getattr(told, "overloaded", False)


def test_an_endless_explanation_is_cut() -> None:
    assert len(str(refusal(400, b"x" * 100_000))) < 3000


def test_an_error_inside_a_200_is_the_refusal_that_it_stands_for() -> None:
    assert type(error_inside({"error": {"message": TOO_LONG[0]}})) is PromptTooLong
    assert type(error_inside({"error": {"message": "bad", "code": 400, "type": "x"}})) is EngineRejected
    assert type(error_inside({"error": {"message": "full", "code": 503}})) is EngineUnavailable
    assert error_inside({"error": None}) is None
    assert error_inside({"text": ""}) is None


async def exchange(url: str, *, timeout_s: float = 5.0, api_key: str | None = None, size: int = 10) -> bytes:
    http = Http(api_key=api_key, connect_timeout_s=1.0)
    try:
        return await http.exchange("POST", f"{url}/generate", body=b"x" * size, timeout_s=timeout_s)
    finally:
        await http.close()


async def asked(handler: Handler, **how: Any) -> bytes:
    async with ReplayServer({"POST /generate": handler}) as server:
        return await exchange(server.url, **how)


async def not_http(request: Any) -> Any:
    request.transport.write(b"\x00\x01 hello\r\n\r\n")
    request.transport.close()


async def bad_encoding(request: Any) -> Any:
    return await Answer(b"not gzip", headers={"Content-Encoding": "gzip"})(request)


WIRE_FAULTS: dict[str, tuple[Handler, type[EngineError], str]] = {
    "the connection is closed without a word": (drop, EngineUnavailable, "disconnected"),
    "the connection drops in the middle of the reply": (cut, EngineUnavailable, "middle of the reply"),
    "the answer is not HTTP": (not_http, EngineContract, "http"),
    "the answer is not encoded as it says": (bad_encoding, EngineUnavailable, "middle of the reply"),
    "the answer is a redirect": (Answer(b"", 307, {"Location": "http://127.0.0.1:1/"}), EngineContract, "status"),
}


@pytest.mark.parametrize("name", WIRE_FAULTS)
async def test_a_fault_of_the_wire_is_told(name: str) -> None:
    handler, meaning, words = WIRE_FAULTS[name]
    with pytest.raises(meaning, match=words) as told:
        await asked(handler)
    assert type(told.value) is meaning


async def test_no_answer_in_time_is_a_timeout() -> None:
    with pytest.raises(EngineTimeout):
        await asked(hang, timeout_s=0.1)


async def test_a_port_where_nobody_listens_was_never_sent_anything() -> None:
    with pytest.raises(NeverSent):
        await exchange(refusing_url())


async def test_the_key_is_sent_and_never_told() -> None:
    async with ReplayServer({"POST /generate": Answer({"error": "Forbidden"}, 403)}) as server:
        with pytest.raises(EngineUnavailable) as told:
            await exchange(server.url, api_key="sk-secret")
        assert server.seen[0].headers["Authorization"] == "Bearer sk-secret"
    assert "sk-secret" not in str(told.value)


async def test_a_body_of_many_megabytes_goes_whole_and_unchunked() -> None:
    async with ReplayServer({"POST /generate": Answer({})}) as server:
        await exchange(server.url, size=5_000_000)
        assert len(server.seen[0].body) == 5_000_000
        assert server.seen[0].headers["Content-Length"] == "5000000"
        assert server.seen[0].headers["Content-Type"] == "application/json"


async def test_a_connection_that_the_engine_closed_while_idle_is_not_used_again() -> None:
    async with ReplayServer({"POST /generate": Answer({})}) as server:
        http = Http(api_key=None, connect_timeout_s=1.0)
        for _ in range(3):
            await http.exchange("POST", f"{server.url}/generate", body=b"{}", timeout_s=5)
            server.close_connections()
            await asyncio.sleep(0.01)
        await http.close()
        assert len(server.seen) == 3
