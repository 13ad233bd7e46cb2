"""`/generate` from the wire to the reply, with everything a script can do to it."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator, Mapping
from http import HTTPStatus
from typing import Any

import numpy as np
from aiohttp import web

from api.demo.sim.config import SimConfig
from api.demo.sim.generation import Batch, Generation
from api.demo.sim.record import Entry, Record
from api.demo.sim.replies import ABORTED, Progress, Reply, delta, encode, queue_abort, reply, sabotage, status_abort
from api.demo.sim.requests import (
    Call,
    Refusal,
    check_length,
    check_values,
    crashed,
    http_error,
    read_call,
    too_long,
    value_error,
)
from api.demo.sim.sampling import Sampled, Sampler
from api.demo.sim.script import Directive, Script
from api.demo.sim.vocabulary import load_vocabulary

_TAIL_TOKENS = 256
# More chunks than this are coalesced: cumulative ones add up to the square of their number.
_MAX_CHUNKS = 64
_QUEUE_FULL = "The request queue is full."
# Which of an abort's statuses become the HTTP status, by whether the release passes any.
_ERROR_STATUSES = {False: (500, 503), True: range(400, 600)}
_DONE = b"data: [DONE]\n\n"
_NOTHING_SAMPLED = Sampled([], [], {}, "")


class Dropped(Exception):
    """The script closed the connection."""


class Engine:
    """What the simulated engine knows: its vocabulary, its batch, its script and its record."""

    def __init__(self, config: SimConfig) -> None:
        self.config = config
        self.vocabulary = load_vocabulary(config.tokenizer, config.stop_tokens)
        self.batch = Batch(config)
        self.script = Script(config.script)
        self.record = Record(config.record_path)
        self._sampler = Sampler(config, self.vocabulary)
        self._calls = 0
        for entry in self.record.entries:
            # After a restart a prompt seen before is answered anew, under a new nonce.
            if entry.nonce:
                self._sampler.remember(entry.input_ids, entry.nonce)

    def reset(self) -> None:
        """Forget everything but the requests in flight."""
        self.script.clear()
        self.record.clear()
        self._sampler.forget()
        self._calls = 0
        self.batch.resume()
        self.batch.set_weight_version(self.config.weight_version)

    async def generate(self, request: web.Request) -> web.StreamResponse:
        """Serve one request, and put on record what became of it."""
        call = read_call(await request.read(), self.config.release)
        prompt = call.input_ids if call.text is None else np.array(self.vocabulary.encode(call.text), np.int64)
        entry = self.record.open(
            rid=call.rid,
            input_ids=prompt,
            headers=_headers(request),
            sampling_params=call.sampling_params,
            stream=call.stream,
            prompt_tail=self.vocabulary.decode(prompt[-_TAIL_TOKENS:].tolist()),
        )
        try:
            with self.batch.flight(call.rid) as generation:
                return await Exchange(self, request, call, entry, generation).run()
        except Refusal as refusal:
            entry.outcome, entry.problem = "failed", refusal.message
            if not call.stream or refusal.stage == "gate":
                raise
            return await _send_events(request, [_error_event(refusal, self.config)])
        except Dropped:
            entry.outcome, entry.problem = "failed", "connection dropped by the script"
            return web.Response()
        except (asyncio.CancelledError, ConnectionError):
            entry.outcome, entry.problem = "aborted", "client disconnected"
            raise
        finally:
            self.record.settle(entry)

    def draw(self, call: Call, entry: Entry) -> tuple[Directive, Sampled]:
        """What the script wants of this generation, and the generation."""
        self._calls += 1
        directive = self.script.take(self._calls, lambda: self.vocabulary.decode(entry.input_ids.tolist()))
        return directive, self._sampler.sample(call, entry.input_ids, directive)


class Exchange:
    """One request on its way through the engine."""

    def __init__(self, engine: Engine, request: web.Request, call: Call, entry: Entry, generation: Generation) -> None:
        self._engine = engine
        self._config = engine.config
        self._vocabulary = engine.vocabulary
        self._request = request
        self._call = call
        self._entry = entry
        self._generation = generation
        self._prompt = entry.input_ids

    async def run(self) -> web.StreamResponse:
        """Admit, sample, answer. Raises Refusal, Dropped."""
        batch = self._engine.batch
        await batch.resumed()
        try:
            self._admit()
        except Refusal as refusal:
            if refusal.stage != "scheduler":
                raise
            return await self._status_abort(refusal.status, refusal.message)
        if batch.full:
            return await self._status_abort(503, _QUEUE_FULL)
        async with batch.slot(self._generation) as held:
            if not held:
                return await self._queue_abort()
            directive, sampled = self._engine.draw(self._call, self._entry)
            self._note(directive, sampled)
            return await self._act(directive, sampled)

    def _admit(self) -> None:
        """Raises Refusal, or cuts the prompt silently where the server was started to do so."""
        if self._config.allow_auto_truncate:
            self._prompt = self._prompt[: self._config.max_prompt_length - 1]
        check_length(len(self._prompt), self._call, self._config)
        check_values(self._call, self._vocabulary.size)

    def _note(self, directive: Directive, sampled: Sampled) -> None:
        entry = self._entry
        entry.fault = directive.fault
        entry.output_ids, entry.log_probs = sampled.ids, sampled.log_probs
        entry.text = self._vocabulary.decode(sampled.ids)
        entry.nonce, entry.finish_reason = sampled.nonce, sampled.finish

    async def _act(self, directive: Directive, sampled: Sampled) -> web.StreamResponse:
        fault = directive.fault
        if fault in _INSTEAD_OF_SAMPLING:
            await asyncio.sleep(directive.delay_s)
        match fault:
            case "crash":
                raise crashed()
            case "too_long":
                raise too_long(len(self._prompt), self._config.context_length)
            case "raw":
                raise _raw(directive)
            case "drop_before":
                raise self._dropped()
            case "garbage":
                return await _send(self._request, b'{"text":"half a rep')
            case "abort_queued":
                return await self._queue_abort()
            case "abort_status" | "busy":
                return await self._status_abort(directive.status, directive.message)
        if self._call.stream:
            return await self._stream(directive, sampled)
        return await self._answer(directive, sampled)

    async def _answer(self, directive: Directive, sampled: Sampled) -> web.StreamResponse:
        async for _ in self._steps(directive, [_total(directive, sampled)]):
            pass
        whole = self._whole(directive, sampled, last=True)
        if directive.fault == "drop_midway":
            await self._send_half(encode(whole))
        return await _send(self._request, encode(whole))

    async def _stream(self, directive: Directive, sampled: Sampled) -> web.StreamResponse:
        response = await _open_events(self._request)
        sent_ids, sent_text = 0, ""
        ends = self._chunk_ends(_total(directive, sampled), directive)
        async for made in self._steps(directive, ends):
            last = made == ends[-1] or self._generation.stopped.is_set()
            if last and directive.fault == "drop_midway":
                raise self._dropped()
            whole = self._whole(directive, sampled, last=last)
            chunk = delta(whole, sent_text, sent_ids) if self._config.incremental_streaming else whole
            sent_ids, sent_text = made, whole["text"]
            await response.write(b"data: " + encode(chunk) + b"\n\n")
        await response.write(_DONE)
        await response.write_eof()
        return response

    def _steps(self, directive: Directive, ends: list[int]) -> AsyncIterator[int]:
        seconds = self._config.first_token_s + self._config.per_token_s * ends[-1] + directive.delay_s
        return self._engine.batch.steps(self._generation, ends, seconds)

    def _chunk_ends(self, total: int, directive: Directive) -> list[int]:
        interval = self._call.sampling.stream_interval or self._config.stream_interval
        if not (self._config.per_token_s or directive.delay_s):
            interval = max(interval, math.ceil(total / _MAX_CHUNKS))
        return [*range(interval, total, interval), total]

    def _whole(self, directive: Directive, sampled: Sampled, *, last: bool) -> Reply:
        """The reply so far; on the last call it is also what the record keeps."""
        if not last:
            return reply(self._progress(sampled, None), self._config, self._vocabulary)
        aborted = directive.fault == "abort" or self._generation.stopped.is_set()
        finish = ABORTED if aborted else sampled.finish
        whole = reply(self._progress(sampled, finish), self._config, self._vocabulary)
        whole["meta_info"] |= directive.meta_info
        self._entry.outcome = "aborted" if aborted else "answered"
        self._entry.finish_reason = finish
        self._entry.output_ids = sampled.ids[: self._generation.made]
        self._entry.log_probs = sampled.log_probs[: self._generation.made]
        return sabotage(whole, directive.fault, self._vocabulary)

    def _progress(self, sampled: Sampled, finish: Mapping[str, Any] | None) -> Progress:
        return Progress(
            call=self._call,
            prompt=self._prompt,
            sampled=sampled,
            made=self._generation.made,
            finish=finish,
            versions=tuple(self._generation.versions),
            latency_s=asyncio.get_running_loop().time() - self._generation.arrived,
            running=self._engine.batch.count("running"),
        )

    async def _queue_abort(self) -> web.StreamResponse:
        whole = queue_abort(self._progress(_NOTHING_SAMPLED, None))
        self._entry.outcome, self._entry.finish_reason = "aborted", whole["meta_info"]["finish_reason"]
        return await self._send_whole(whole)

    async def _status_abort(self, status: int, message: str) -> web.StreamResponse:
        """The scheduler gave up with a status: an HTTP error where this release makes one of it."""
        if not self._call.stream:
            if status == HTTPStatus.BAD_REQUEST:
                raise value_error(message)
            if status in _ERROR_STATUSES[self._config.release.passes_any_error_status]:
                raise http_error(status, message)
        self._entry.outcome, self._entry.problem = "failed", message
        return await self._send_whole(status_abort(self._progress(_NOTHING_SAMPLED, None), status, message))

    async def _send_whole(self, whole: Reply) -> web.StreamResponse:
        body = encode(whole)
        return await (_send_events(self._request, [body]) if self._call.stream else _send(self._request, body))

    async def _send_half(self, body: bytes) -> None:
        response = web.StreamResponse(headers={"content-type": "application/json"})
        response.content_length = len(body)
        await response.prepare(self._request)
        await response.write(body[: len(body) // 2])
        raise self._dropped()

    def _dropped(self) -> Dropped:
        """Cut the connection; raise what this returns."""
        if self._request.transport is not None:
            self._request.transport.abort()
        return Dropped()


_INSTEAD_OF_SAMPLING = frozenset(
    {"crash", "too_long", "raw", "drop_before", "garbage", "abort_queued", "abort_status", "busy"}
)


def _total(directive: Directive, sampled: Sampled) -> int:
    """How many tokens will be made: half of them, where an abort is scripted."""
    return len(sampled.ids) // 2 if directive.fault == "abort" else len(sampled.ids)


def _raw(directive: Directive) -> Refusal:
    refusal = Refusal(directive.status, directive.body)
    refusal.content_type = directive.content_type
    return refusal


def _headers(request: web.Request) -> dict[str, str]:
    """Those that say who asks, in lower case; never the key."""
    named = {name.lower(): value for name, value in request.headers.items()}
    return {name: value for name, value in named.items() if name == "user-agent" or name.startswith("x-")}


async def _send(request: web.Request, body: bytes) -> web.StreamResponse:
    """Send within the handler, so that a client that has gone is noticed."""
    response = web.Response(body=body, content_type="application/json")
    await response.prepare(request)
    await response.write_eof()
    return response


async def _open_events(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream; charset=utf-8"})
    await response.prepare(request)
    return response


async def _send_events(request: web.Request, bodies: list[bytes]) -> web.StreamResponse:
    response = await _open_events(request)
    for body in bodies:
        await response.write(b"data: " + body + b"\n\n")
    await response.write(_DONE)
    await response.write_eof()
    return response


def _error_event(refusal: Refusal, config: SimConfig) -> bytes:
    error: dict[str, Any] = {"message": refusal.message}
    if config.release.details_stream_errors:
        error |= {"type": "invalid_request_error", "code": refusal.status, "retryable": False}
    return encode({"error": error})
