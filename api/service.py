"""The path of one turn: find -> plan -> guard -> generate -> check -> parse -> commit -> reply.

`TurnService.run` is that path, readable in one function; everything it calls either decides (splice),
remembers (store) or talks to the engine. Nothing here outlives a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import msgspec
import numpy as np

from api.engine.base import Completion, Engine, PromptTooLong
from api.errors import IdempotencyMismatch, Overflow, RenderingChangedError
from api.facts import Observer, TurnFact
from api.ids import call_id, new_session_id, new_turn_id
from api.request import Caller, TurnReply, TurnRequest
from api.running import RunningTurns
from splice.boundary import Splicer
from splice.identity import chain_hashes, extend_chain, rendering_digest, request_hash
from splice.locate import Candidate, Located, Parent, RenderingChanged, Root, locate
from splice.parsers import ReplyGrammar
from splice.plan import Plan, Window, parent_index, plan_turn, room
from splice.reasoning import split_reasoning
from splice.turn import checked_generation, checked_spans
from splice.types import Finish, Lineage, Message, Rendering, TokenRun, Turn
from store.errors import AlreadyAnswered, SessionClosed, SessionFinished
from store.redis import RedisStore
from store.views import FindQuery, Found, SessionKey, SessionOpening

_LONG_TEXT = 20_000  # characters: rendering and encoding more than this leaves the event loop
_MOST_SESSIONS = 32  # unnamed conversations of equal text that are told apart in one request


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose, where a session did not choose itself."""

    on_rendering_change: str = "error"
    on_overflow: str = "length"


@dataclass(frozen=True, slots=True)
class Reading:
    """A request as the rules see it. chain: the conversation's hash at each assistant message."""

    request: TurnRequest
    messages: tuple[Message, ...]
    rendering: Rendering
    signature: str
    chain: tuple[bytes, ...]
    full_chain: tuple[bytes, ...]
    sampling: Mapping[str, Any]
    request_hash: bytes

    @property
    def hints(self) -> tuple[str, ...]:
        """Turn ids the client echoed, deepest message first."""
        return tuple(dict.fromkeys(e.turn_id for e in reversed(self.request.echoes) if e.turn_id))


@dataclass(frozen=True, slots=True)
class Place:
    """Where a request belongs: its session, what the store knows, and the parent or the reason for none."""

    key: SessionKey
    found: Found
    located: Parent | Root
    unnamed: bool


@dataclass(frozen=True, slots=True)
class Spoken:
    """A checked generation and the message read out of it, as the client is to be sent it."""

    generation: TokenRun
    message: Message
    model_call_ids: tuple[str, ...]
    finish_reason: str
    sampling: Mapping[str, Any]


class TurnService:
    """Serves turns. Holds collaborators only: any worker serves any turn."""

    def __init__(
        self,
        store: RedisStore,
        engine: Engine,
        splicer: Splicer,
        grammar: ReplyGrammar,
        *,
        window: Callable[[], Window],
        policy: Policy,
        observe: Observer,
        running: RunningTurns,
    ) -> None:
        self._store = store
        self._engine = engine
        self._splicer = splicer
        self._grammar = grammar
        self._window = window
        self._policy = policy
        self._observe = observe
        self._running = running

    async def run(self, request: TurnRequest, caller: Caller) -> TurnReply:
        """Serve one turn: a committed turn's reply, new or replayed. Raises what `api.errors` translates."""
        fact = TurnFact()
        with fact.stage("locate"):
            reading = self._read(request)
            place = await self._locate(reading, caller)
        earlier = _replay_of(place.found, reading, caller)
        if earlier:
            return await self._replay(place, earlier, request, fact)
        with fact.stage("plan"):
            plan = await self._plan(place, reading)
        pinned = place.found.session.opening.sampling_params if place.found.session else {}
        sampling = {**reading.sampling, **pinned}
        wanted = sampling.pop("max_tokens", request.max_tokens)
        turn_id = new_turn_id()
        with fact.stage("generate"):
            completion = await self._generate(place, plan, self._engine.sampling(sampling), wanted, turn_id)
        if completion is None:
            repeated = await self._earlier_overflow(place)
            if repeated:
                return await self._replay(place, repeated, request, fact)
            completion = _nothing_generated()
        spoken = self._spoken(completion, plan, request, sampling)
        turn = _turn(turn_id, reading, plan, completion, spoken)
        with fact.stage("commit"):
            try:
                await self._commit(place, turn, caller, request)
            except AlreadyAnswered as error:
                return await self._replay(place, error.turn_id, request, fact)
        self._observe(fact.done(turn, place.key, refusal=plan.refusal))
        return self._reply(turn, place.key.session_id, request, prompt=plan.prompt, replayed=False)

    # Reading: what the request means.

    def _read(self, request: TurnRequest) -> Reading:
        messages = tuple(
            split_reasoning(m, self._grammar.formats.reasoning) if m.role == "assistant" else m
            for m in request.messages
        )
        full_chain = chain_hashes(messages)
        signature = self._splicer.signature(request.rendering)
        sampling = {k: v for k, v in request.sampling.items() if v is not None}
        self._engine.sampling(sampling)  # refuse by name before anything is looked up
        hashed = {**sampling, "max_tokens": request.max_tokens}
        return Reading(
            request,
            messages,
            request.rendering,
            signature,
            tuple(h for h, m in zip(full_chain, messages, strict=True) if m.role == "assistant"),
            full_chain,
            sampling,
            request_hash(full_chain, rendering_digest("", request.rendering, request.rendering.kwargs), hashed),
        )

    # Locating: which session, which parent.

    async def _locate(self, reading: Reading, caller: Caller) -> Place:
        named = [SessionKey(caller.tenant, caller.session_id)] if caller.session_id else []
        keys = named or await self._unnamed_sessions(reading, caller) or [_fresh_session(caller)]
        queries = [_query(key, reading, caller) for key in keys]
        founds = await asyncio.gather(*(self._store.find(query) for query in queries))
        candidates = [(c, key, found) for key, found in zip(keys, founds, strict=True) for c in found.candidates]
        located = locate(
            [c for c, _, _ in candidates],
            reading.request.echoes,
            rendering_signature=reading.signature,
            depth=len(reading.chain),
            session_has_turns=any(f.session is not None and f.session.turns for f in founds),
            unknown=frozenset.intersection(*(frozenset(f.unknown_hints) for f in founds)),
        )
        chosen = _chosen(located)
        home = next(((key, found) for c, key, found in candidates if c == chosen), None)
        if home is None:
            # A trace may outlive its session; what cannot be continued opens a new one.
            fresh = not named and founds[0].session is not None
            home = (_fresh_session(caller), Found(session=None)) if fresh else (keys[0], founds[0])
        _refuse_sealed(home[1], home[0])
        return Place(*home, self._allowed(located, home[1], caller), unnamed=not named)

    async def _unnamed_sessions(self, reading: Reading, caller: Caller) -> list[SessionKey]:
        """Sessions whose conversation this unnamed request may continue, likeliest first."""
        traces = await self._store.trace(caller.tenant, reading.chain, reading.hints) if reading.chain else ()
        deepest = max((t.depth for t in traces), default=0)
        equal = [t for t in traces if t.depth == deepest]
        digests = {e.generation_digest for e in reading.request.echoes if e.depth == deepest and e.generation_digest}
        for known in (
            [t for t in equal if t.generation_digest in digests],
            [t for t in equal if t.turn_id in reading.hints],
        ):
            equal = known or equal
        sessions = list(dict.fromkeys(t.session_id for t in equal))[:_MOST_SESSIONS]
        return [SessionKey(caller.tenant, session) for session in sessions]

    def _allowed(self, located: Located, found: Found, caller: Caller) -> Parent | Root:
        """Decide a rendering that changed in mid-conversation: refuse, or go on as a new root."""
        if not isinstance(located, RenderingChanged):
            return located
        chosen = found.session.opening.on_rendering_change if found.session else ""
        policy = chosen or ("fork" if caller.native_harness else self._policy.on_rendering_change)
        if policy != "fork":
            raise RenderingChangedError(located.candidate.turn_id)
        return Root("rendering_changed")

    # Planning and generating.

    async def _plan(self, place: Place, reading: Reading) -> Plan:
        lineage = await self._lineage(place)
        new = reading.messages
        if isinstance(place.located, Parent):
            new = new[parent_index(new, place.located.candidate.depth) + 1 :]

        def plan() -> Plan:
            return plan_turn(
                place.located, lineage, reading.messages, reading.rendering, splicer=self._splicer, clock=time.time()
            )

        if sum(len(m.content) for m in new) > _LONG_TEXT:
            return await asyncio.to_thread(plan)
        return plan()

    async def _lineage(self, place: Place) -> Lineage | None:
        if isinstance(place.located, Root):
            return None
        turn_id = place.located.candidate.turn_id
        if place.found.lineage is not None and place.found.lineage.head.turn_id == turn_id:
            return place.found.lineage
        return await self._store.lineage_of(place.key, turn_id)

    async def _generate(
        self, place: Place, plan: Plan, sampling: Mapping[str, Any], wanted: int | None, turn_id: str
    ) -> Completion | None:
        """Ask the engine; None when the prompt fills its window and that is a finished turn here."""
        max_tokens = room(len(plan.prompt), wanted, self._window())
        try:
            if max_tokens is None:
                raise PromptTooLong(f"the prompt has {len(plan.prompt)} tokens")
            with self._running.watch(place.key):
                return await self._engine.generate(
                    plan.prompt, sampling, max_tokens=max_tokens, rid=turn_id, affinity=place.key.session_id
                )
        except PromptTooLong as error:
            chosen = place.found.session.opening.on_overflow if place.found.session else ""
            if (chosen or self._policy.on_overflow) == "error":
                raise Overflow(len(plan.prompt), self._window().context_length) from error
            return None

    async def _earlier_overflow(self, place: Place) -> str:
        """The turn that already said of an equal request that its prompt fills the window."""
        if not place.found.equal_requests:
            return ""
        turn = await self._store.turn(place.key, place.found.equal_requests[-1].turn_id)
        return turn.turn_id if turn.finish.kind == "length" and not len(turn.generation) else ""

    def _spoken(self, completion: Completion, plan: Plan, request: TurnRequest, sampling: Mapping[str, Any]) -> Spoken:
        """Check the engine's ids and log probs, and read the reply out of them."""
        checked_spans(completion.weight_versions, len(completion.ids))
        vocab_size = self._splicer.renderer.vocab_size
        generation = checked_generation(completion.ids, completion.log_probs, vocab_size=vocab_size)
        parsed = self._grammar.parse(
            generation.ids,
            completion.finish,
            tools=request.rendering.tools if request.parse_calls else (),
            reasoning_open=self._grammar.reasoning_open(plan.prompt),
            stop_strings=_stop_strings(sampling),
        )
        finished = "tool_calls" if parsed.message.tool_calls else "stop"
        reason = "length" if completion.finish.kind == "length" else finished
        return Spoken(generation, parsed.message, parsed.model_call_ids, reason, sampling)

    async def _commit(self, place: Place, turn: Turn, caller: Caller, request: TurnRequest) -> None:
        await self._store.commit(
            place.key,
            turn,
            _opening(caller, request, unnamed=place.unnamed),
            idempotency_key=caller.idempotency_key,
            unnamed=place.unnamed,
        )

    # Replying.

    async def _replay(self, place: Place, turn_id: str, request: TurnRequest, fact: TurnFact) -> TurnReply:
        turn = await self._store.turn(place.key, turn_id)
        prompt = None
        if request.token_ids:
            lineage = await self._store.lineage_of(place.key, turn_id)
            prompt = lineage.tokens[: turn.prompt_length]
        self._observe(fact.done(turn, place.key, replayed=True))
        return self._reply(turn, place.key.session_id, request, prompt=prompt, replayed=True)

    def _reply(self, turn: Turn, session_id: str, request: TurnRequest, *, prompt: Any, replayed: bool) -> TurnReply:
        texts: Sequence[str] = ()
        if request.log_probs and not request.tokens_as_ids:
            texts = [self._splicer.renderer.decode([i]) for i in turn.generation.ids.tolist()]
        return TurnReply(
            turn=turn,
            session_id=session_id,
            replayed=replayed,
            prompt_ids=np.ascontiguousarray(prompt) if request.token_ids else None,
            token_texts=tuple(texts),
        )


def _replay_of(found: Found, reading: Reading, caller: Caller) -> str:
    """The committed turn that already answers this request; "" when it is to be generated.

    An `Idempotency-Key` or the SDK's own retry mark says that the client repeats itself; without a mark an
    equal request is another sample. A marked repeat of a turn that was gone on from is a new sample too.
    """
    if found.idempotent is not None:
        turn_id, hashed = found.idempotent
        if hashed != reading.request_hash:
            raise IdempotencyMismatch(caller.idempotency_key)
        return turn_id
    if caller.retry_count > 0 and (caller.session_id or reading.hints) and found.equal_requests:
        last = found.equal_requests[-1]
        return "" if last.extended else last.turn_id
    return ""


def _refuse_sealed(found: Found, key: SessionKey) -> None:
    """The commit refuses too; asking now saves a generation."""
    state = found.session.state if found.session else "open"
    if state == "deleted":
        raise SessionClosed(key.session_id)
    if state == "finished" and not found.equal_requests and found.idempotent is None:
        raise SessionFinished(key.session_id)


def _query(key: SessionKey, reading: Reading, caller: Caller) -> FindQuery:
    return FindQuery(
        key,
        reading.chain,
        reading.signature,
        reading.request_hash,
        hints=reading.hints,
        generation_digests=tuple(e.generation_digest for e in reading.request.echoes if e.generation_digest),
        idempotency_key=caller.idempotency_key,
    )


def _chosen(located: Located) -> Candidate | None:
    return None if isinstance(located, Root) else located.candidate


def _fresh_session(caller: Caller) -> SessionKey:
    """A session for a client that named none; an idempotency key names it, so that a repeat finds it."""
    if caller.idempotency_key:
        digest = blake2b(caller.idempotency_key.encode(), digest_size=15).hexdigest()
        return SessionKey(caller.tenant, f"s-{digest}")
    return SessionKey(caller.tenant, new_session_id())


def _opening(caller: Caller, request: TurnRequest, *, unnamed: bool) -> SessionOpening:
    metadata = dict(request.metadata)
    return SessionOpening(
        run_id=caller.run_id or metadata.pop("run_id", ""),
        group_id=caller.group_id or metadata.pop("group_id", ""),
        metadata=metadata,
        parent_session_id=caller.parent_session_id,
        unnamed=unnamed,
    )


def _nothing_generated() -> Completion:
    """The finished turn of a prompt that fills the window: the engine was not called."""
    return Completion(np.empty(0, np.int64), np.empty(0, np.float64), Finish("length"), "")


def _stop_strings(sampling: Mapping[str, Any]) -> tuple[str, ...]:
    stop = sampling.get("stop") or ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _turn(turn_id: str, reading: Reading, plan: Plan, completion: Completion, spoken: Spoken) -> Turn:
    message = spoken.message
    calls = tuple(msgspec.structs.replace(c, id=call_id(turn_id, n)) for n, c in enumerate(message.tool_calls))
    reply = msgspec.structs.replace(message, tool_calls=calls)
    return Turn(
        turn_id=turn_id,
        parent_id=plan.parent_id,
        root_id=plan.root_id or turn_id,
        rendering_signature=reading.signature,
        clock=plan.clock,
        origin=plan.origin,
        prompt_length=len(plan.prompt),
        delta=TokenRun.context(plan.delta),
        generation=spoken.generation,
        messages=plan.new_messages,
        reply=reply,
        chain_hash=extend_chain(reading.full_chain, reply),
        request_hash=reading.request_hash,
        finish=completion.finish,
        finish_reason=spoken.finish_reason,
        created_at=time.time(),
        model_call_ids=spoken.model_call_ids,
        weight_versions=completion.weight_versions,
        log_prob_kind=completion.log_prob_kind,
        sampling_params=dict(spoken.sampling),
        rendering=reading.rendering if not plan.parent_id else Rendering(),
        model=reading.request.model,
        engine=completion.engine,
        engine_facts=dict(completion.facts),
    )
