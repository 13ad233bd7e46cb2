"""What stops a start, with the fix in its words; and that a worker is cheap to start."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import aiohttp
import psutil
import pytest

from api.demo.processes import Child, free_port, module
from store.embedded import EmbeddedRedis
from tests.conftest import RedisServer
from tests.e2e.stack import Stack

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def _serve(*arguments: str, timeout_s: float = 60.0) -> tuple[int, str]:
    """Run `serve` until it ends; its exit status and what it said."""
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", "api", "serve", "--port", "0", *arguments,
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT,
    )  # fmt: skip
    try:
        output, _ = await asyncio.wait_for(process.communicate(), timeout_s)
    except TimeoutError:
        process.kill()
        await process.wait()
        raise
    assert process.returncode is not None
    return process.returncode, output.decode()


async def _refused_by_engine(
    start_engine: Callable[..., Child], redis_url: str, tokenizer: Path, *engine_arguments: str
) -> str:
    engine = start_engine(*engine_arguments)
    await engine.start()
    try:
        async with aiohttp.ClientSession() as client:
            await engine.ready(client, 60)
        status, said = await _serve("--redis-url", redis_url, "--engine-url", engine.url, "--tokenizer", str(tokenizer))
    finally:
        await engine.stop()
    assert status == 2
    return said


async def test_an_engine_that_truncates_prompts_silently_is_refused(
    start_engine: Callable[..., Child], redis_url: str, qwen3: Path
) -> None:
    said = await _refused_by_engine(start_engine, redis_url, qwen3, "--allow-auto-truncate")
    assert "allow-auto-truncate" in said or "allow_auto_truncate" in said


async def test_a_tokenizer_that_differs_from_the_engines_is_refused_and_says_where(
    start_engine: Callable[..., Child], redis_url: str, smollm2: Path
) -> None:
    said = await _refused_by_engine(start_engine, redis_url, smollm2)
    assert "the local tokenizer differs from the engine's" in said
    assert "TOKENSPLICE_TOKENIZER" in said


async def test_a_redis_that_may_evict_sessions_is_refused(stack: Stack, qwen3: Path, tmp_path: Path) -> None:
    evicting = EmbeddedRedis(tmp_path, arguments=("--maxmemory-policy", "volatile-lru", "--maxmemory", "100mb"))
    with evicting:
        status, said = await _serve(
            "--redis-url", evicting.url, "--engine-url", stack.engine.url, "--tokenizer", str(qwen3)
        )
    assert status == 2
    assert "noeviction" in said


async def test_a_redis_without_an_append_only_file_is_refused_unless_memory_is_meant(
    stack: Stack, qwen3: Path, tmp_path: Path
) -> None:
    with EmbeddedRedis(tmp_path, arguments=("--appendonly", "no")) as forgetful:
        status, said = await _serve(
            "--redis-url", forgetful.url, "--engine-url", stack.engine.url, "--tokenizer", str(qwen3)
        )
    assert status == 2
    assert "appendonly yes" in said
    assert "TOKENSPLICE_DURABILITY=memory" in said


async def test_an_open_server_binds_loopback_only(redis_url: str, qwen3: Path) -> None:
    status, said = await _serve("--host", "0.0.0.0", "--redis-url", redis_url, "--tokenizer", str(qwen3))
    assert status == 2
    assert "TOKENSPLICE_API_KEYS" in said


async def test_all_bad_settings_are_named_at_once() -> None:
    status, said = await _serve("--engine", "ollama", "--redis-url", "http://x", "--session-ttl-s", "-1")
    assert status == 2
    for name in ("TOKENSPLICE_ENGINE", "TOKENSPLICE_REDIS_URL", "TOKENSPLICE_SESSION_TTL_S"):
        assert name in said


async def test_a_tokenizer_is_required_and_a_missing_one_is_said_so(redis_url: str) -> None:
    status, said = await _serve("--redis-url", redis_url)
    assert status == 2
    assert "TOKENSPLICE_TOKENIZER" in said
    status, said = await _serve("--redis-url", redis_url, "--tokenizer", "/no/such/model")
    assert status == 2
    assert "/no/such/model" in said


async def test_a_worker_serves_when_its_engine_comes_later(
    start_engine: Callable[..., Child],
    start_worker: Callable[..., Child],
    redis_server: RedisServer,
) -> None:
    engine = start_engine()
    worker = start_worker(redis_server.url, engine.url)
    await worker.start()
    try:
        async with aiohttp.ClientSession() as client:
            await _until_answering(client, worker.url)
            checks = await _checks_once_redis_is_seen(client, worker.url)
            assert not checks["engine"]["ok"]
            early = Stack(client, engine, [worker], redis_server.url)
            refused = await early.chat([{"role": "user", "content": "Hello."}], session="early")
            assert (refused.status, refused.code) == (502, "engine_error")
            await engine.start()
            await engine.ready(client, 60)
            await worker.ready(client, 60)
            served = await early.chat([{"role": "user", "content": "Hello."}], session="early")
            assert served.splice == "fresh; reason=first_turn"
    finally:
        await worker.stop()
        await engine.stop()


async def _checks_once_redis_is_seen(client: aiohttp.ClientSession, url: str) -> dict[str, Any]:
    for _ in range(100):
        async with client.get(f"{url}/readyz") as answer:
            assert answer.status == 503
            checks: dict[str, Any] = (await answer.json())["checks"]
        if checks["redis"]["ok"]:
            return checks
        await asyncio.sleep(0.1)
    raise AssertionError("Redis was not seen")


async def _until_answering(client: aiohttp.ClientSession, url: str) -> None:
    for _ in range(300):
        try:
            async with client.get(f"{url}/healthz"):
                return
        except aiohttp.ClientError:
            await asyncio.sleep(0.2)
    raise AssertionError("no worker")


async def test_a_worker_process_is_built_within_two_cpu_seconds(qwen3: Path, redis_url: str) -> None:
    """Loading the prepared model, not transformers. Bounded at twice the promise: machines are noisy."""
    from api.preparation import prepare_model

    code = (
        "import os, resource, time\n"
        "from api.worker import app\n"
        "app()\n"
        "used = resource.getrusage(resource.RUSAGE_SELF)\n"
        "import sys; assert 'transformers' not in sys.modules\n"
        "print(used.ru_utime + used.ru_stime)\n"
    )
    environment = {
        **os.environ,
        "TOKENSPLICE_PREPARED_MODEL": str(prepare_model(str(qwen3))),
        "TOKENSPLICE_REDIS_URL": redis_url,
    }
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE, env=environment
    )
    output, _ = await process.communicate()
    assert process.returncode == 0
    assert float(output) < 4.0


async def test_a_stopped_server_stops_its_own_redis(
    start_engine: Callable[..., Child], qwen3: Path, tmp_path: Path
) -> None:
    server = Child(
        "server",
        module(
            "api", "serve", "--port", str(port := free_port()), "--tokenizer", str(qwen3),
            "--embedded-redis", str(tmp_path / "data"), "--engine-url", "http://127.0.0.1:9",
        ),
        url=f"http://127.0.0.1:{port}", ready_path="/healthz", log=tmp_path / "log",
    )  # fmt: skip
    await server.start()
    async with aiohttp.ClientSession() as client:
        await server.ready(client, 60)
    redis = [p for p in psutil.process_iter(["cmdline"]) if str(tmp_path / "data") in " ".join(p.info["cmdline"] or ())]
    redis = [p for p in redis if "redis" in p.name() or "valkey" in p.name()]
    assert len(redis) == 1
    assert server.pid is not None
    os.kill(server.pid, signal.SIGTERM)
    gone, alive = await asyncio.to_thread(psutil.wait_procs, redis, 15)
    assert (len(gone), alive) == (1, [])
    await server.stop()


async def test_a_port_in_use_is_said_so(stack: Stack, qwen3: Path) -> None:
    port = stack.workers[0].url.rpartition(":")[2]
    status, said = await _serve("--port", port, "--tokenizer", str(qwen3), "--redis-url", stack.redis_url)
    assert status == 2
    assert f"port {port}" in said
    assert "--port" in said


async def test_a_worker_whose_engine_turns_out_to_be_another_serves_no_turn(
    start_engine: Callable[..., Child], start_worker: Callable[..., Child], redis_server: RedisServer, smollm2: Path
) -> None:
    engine = start_engine("--tokenizer", str(smollm2))
    worker = start_worker(redis_server.url, engine.url)
    await worker.start()
    try:
        async with aiohttp.ClientSession() as client:
            await _until_answering(client, worker.url)
            await engine.start()
            await engine.ready(client, 60)
            other = Stack(client, engine, [worker], redis_server.url)
            for _ in range(100):
                refused = await other.chat([{"role": "user", "content": "Hello."}], session="other-engine")
                assert refused.status in {502, 503}
                if refused.status == 503:
                    break
                await asyncio.sleep(0.2)
        assert refused.code == "not_ready"
        assert "differs from the engine's" in refused.body["error"]["message"]
    finally:
        await worker.stop()
        await engine.stop()
