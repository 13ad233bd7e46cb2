"""Whether a reply was handed to an open connection, for clients that leave at each moment."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from api.delivery import Delivery

CHUNKS = [b"one ", b"two ", b"three"]


class Connection:
    """A client that closes its connection after so many messages, as an ASGI server tells it."""

    def __init__(self, leaves_after: int | None) -> None:
        self._leaves_after = leaves_after
        self._gone = asyncio.Event()
        self.sent: list[dict[str, Any]] = []
        self._notice()

    def _notice(self) -> None:
        if self._leaves_after is not None and len(self.sent) >= self._leaves_after:
            self._gone.set()

    async def receive(self) -> Any:
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def send(self, message: Any) -> None:
        self.sent.append(message)
        self._notice()


async def deliver(connection: Connection, chunks: Any) -> list[bool]:
    told: list[bool] = []
    response = Delivery(chunks, told.append, headers={"x-a": "b"}, media_type="application/json")
    scope: Any = {"type": "http"}
    request: Any = None
    await response.to_asgi_response(None, request)(scope, connection.receive, connection.send)
    return told


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_whole_reply_to_a_client_that_stays_is_delivered(streamed: bool) -> None:  # noqa: FBT001
    connection = Connection(None)
    assert await deliver(connection, iter(CHUNKS) if streamed else CHUNKS) == [True]
    start, *bodies = connection.sent
    headers = dict(start["headers"])
    assert (start["status"], headers[b"x-a"], headers[b"content-type"]) == (200, b"b", b"application/json")
    assert headers.get(b"content-length") == (None if streamed else b"13")
    assert b"".join(body["body"] for body in bodies) == b"one two three"
    assert [body["more_body"] for body in bodies] == [True, True, True, False]


@pytest.mark.parametrize("leaves_after", range(5))
async def test_a_client_that_leaves_before_the_end_is_seen_not_to_have_it(leaves_after: int) -> None:
    connection = Connection(leaves_after)
    assert await deliver(connection, iter(CHUNKS)) == [False]
    assert len(connection.sent) <= 1 + leaves_after + 1


async def test_a_send_that_fails_is_no_delivery() -> None:
    class Broken(Connection):
        async def send(self, message: Any) -> None:
            await super().send(message)
            if len(self.sent) == 3:
                raise ConnectionResetError

    told: list[bool] = []
    response = Delivery(CHUNKS, told.append, headers={}, media_type="text/plain")
    request: Any = None
    connection = Broken(None)
    with pytest.raises(ConnectionResetError):
        await response.to_asgi_response(None, request)({"type": "http"}, connection.receive, connection.send)
    assert told == [False]
