"""Runs the simulated engine: inside a test or a demo, or as a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import AsyncIterator, Callable

from aiohttp import web

from api.demo.sim.app import create_sim
from api.demo.sim.config import SimConfig


@contextlib.asynccontextmanager
async def running(config: SimConfig, host: str = "127.0.0.1", port: int = 0) -> AsyncIterator[str]:
    """Serve while the context lasts; yields the base URL (port 0: a free one)."""
    # A client that hangs up cancels its handler: that is how the engine notices.
    runner = web.AppRunner(create_sim(config), handler_cancellation=True, access_log=None, shutdown_timeout=1.0)
    await runner.setup()
    try:
        await web.TCPSite(runner, host, port).start()
        yield f"http://{host}:{runner.addresses[0][1]}"
    finally:
        await runner.cleanup()


async def serve(
    config: SimConfig, host: str = "127.0.0.1", port: int = 0, *, ready: Callable[[str], None] | None = None
) -> None:
    """Serve until SIGTERM or SIGINT. `ready` is told the base URL once connections are accepted."""
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stop.set)
    async with running(config, host, port) as url:
        if ready is not None:
            ready(url)
        await stop.wait()


def run(
    config: SimConfig, host: str = "127.0.0.1", port: int = 0, *, ready: Callable[[str], None] | None = None
) -> None:
    """`serve`, for those without an event loop."""
    asyncio.run(serve(config, host, port, ready=ready))
