"""The path of one turn: find -> plan -> guard -> generate -> check -> parse -> commit -> reply.

`TurnService.run` is that path, readable in one function; everything it calls either decides (splice),
remembers (store) or talks to the engine. Nothing here outlives a request.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import msgspec
import numpy as np

from api.engine.base import Completion, Engine, PromptTooLong
from api.errors import IdempotencyMismatch, Overflow, RenderingChangedError
from api.facts import Observer, TurnFact
from api.ids import call_id, new_turn_id
from api.placing import Place, Places, Reading, mark_of
from api.request import Caller, TurnReply, TurnRequest
from api.running import RunningTurns
from splice.boundary import Splicer
from splice.identity import extend_chain, rendering_digest, request_hash
from splice.locate import Parent, RenderingChanged, Root
from splice.parsers import ReplyGrammar
from splice.plan import Plan, Window, parent_index, plan_turn, room
from splice.reasoning import split_reasoning
from splice.turn import checked_generation, checked_spans
from splice.types import Finish, Lineage, Message, Rendering, TokenRun, Turn
from store.errors import AlreadyAnswered, LeaseLost, SessionClosed, SessionFinished
from store.redis import RedisStore
from store.views import Mark, Mismatch, Replay, SessionOpening

_LONG_REPLY = 4_000  # tokens: reading more than this leaves the event loop
_LONG_TEXT = 20_000  # characters: rendering and encoding more than this leaves the event loop


@dataclass(frozen=True, slots=True)
class Policy:
    """What the operator chose, where a session did not choose itself."""

    on_rendering_change: str = "error"
    on_overflow: str = "length"
    join_timeout_s: float = 1800.0


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
        self._places = Places(store, join_timeout_s=policy.join_timeout_s)

    async def run(self, request: TurnRequest, caller: Caller) -> TurnReply:
        """Serve one turn: a committed turn's reply, new or replayed. Raises what `api.errors` translates."""
        reading = self._read(request)
        mark = mark_of(reading, caller)
        while True:
            try:
                return await self._attempt(reading, caller, mark)
            except LeaseLost:
                # Taken for dead and taken over: the winner's turn is the answer, for this client too.
                mark = "key" if caller.idempotency_key else "retry"

    async def _attempt(self, reading: Reading, caller: Caller, mark: Mark) -> TurnReply:
        """The path of one turn. Its id is minted first: it is the lease, the engine's rid and the fence too."""
        fact, request, turn_id = TurnFact(), reading.request, new_turn_id()
        with fact.stage("locate"):
            place = await self._places.find(reading, caller, turn_id, mark)
        if isinstance(place.found.verdict, Replay):
            return await self._replay(place, place.found.verdict.turn_id, request, fact)
        async with self._running.hold(place.lease):
            parent = self._parent(place, caller)
            with fact.stage("plan"):
                plan = await self._plan(place, parent, reading)
            pinned = place.found.session.opening.sampling_params if place.found.session else {}
            sampling = {**reading.sampling, **pinned}
            wanted = sampling.pop("max_tokens", request.max_tokens)
            with fact.stage("generate"):
                completion = await self._generate(place, plan, self._engine.sampling(sampling), wanted)
            repeated = await self._earlier_overflow(place) if completion is None else ""
            said = completion or _nothing_generated()
            read = partial(self._spoken, said, plan, request, sampling)
            spoken = await asyncio.to_thread(read) if len(said.ids) > _LONG_REPLY else read()
            turn = self._turn(turn_id, reading, plan, said, spoken)
        if repeated:
            await self._store.release(place.lease)
            return await self._replay(place, repeated, request, fact)
        with fact.stage("commit"):
            try:
                await self._commit(place, turn, caller, request)
            except AlreadyAnswered as error:
                if error.request_hash != reading.request_hash:
                    raise IdempotencyMismatch(caller.idempotency_key) from None
                return await self._replay(place, error.turn_id, request, fact)
        self._observe(fact.done(turn, place.key, refusal=plan.refusal))
        return self._reply(turn, place, request, prompt=plan.prompt, replayed=False)

    # Reading: what the request means.

    def settled(self, message: Message) -> Message:
        """A client's message, or a reply to it, in the form in which they are compared."""
        return split_reasoning(message, self._grammar.formats.reasoning) if message.role == "assistant" else message

    def _read(self, request: TurnRequest) -> Reading:
        conversation = request.conversation
        sampling = {k: v for k, v in request.sampling.items() if v is not None}
        self._engine.sampling(sampling)  # refuse by name before anything is looked up
        hashed = {**sampling, "max_tokens": request.max_tokens, "parse_calls": request.parse_calls}
        exact = rendering_digest("", request.rendering, request.rendering.kwargs)
        return Reading(
            request,
            self._splicer.signature(request.rendering),
            conversation.replies,
            sampling,
            request_hash(conversation.chain, exact, hashed),
        )

    def _parent(self, place: Place, caller: Caller) -> Parent | Root:
        """What the turn goes on from, or why it may not. The commit refuses too; asking now saves a generation."""
        session = place.found.session
        if session and session.state == "deleted":
            raise SessionClosed(place.key.session_id)
        if isinstance(place.found.verdict, Mismatch):
            raise IdempotencyMismatch(caller.idempotency_key)
        if session and session.state == "finished":
            raise SessionFinished(place.key.session_id)
        if not isinstance(place.located, RenderingChanged):
            return place.located
        chosen = session.opening.on_rendering_change if session else ""
        policy = chosen or ("fork" if caller.native_harness else self._policy.on_rendering_change)
        if policy != "fork":
            raise RenderingChangedError(place.located.candidate.turn_id)
        return Root("rendering_changed")

    # Planning and generating.

    async def _plan(self, place: Place, parent: Parent | Root, reading: Reading) -> Plan:
        lineage = await self._lineage(place, parent)
        conversation, rendering = reading.request.conversation, reading.request.rendering
        new = conversation.messages
        if isinstance(parent, Parent):
            new = new[parent_index(new, parent.candidate.depth) + 1 :]

        def plan() -> Plan:
            return plan_turn(parent, lineage, conversation, rendering, splicer=self._splicer, clock=time.time())

        weight = sum(_weight(message) for message in new)
        if isinstance(parent, Root):
            weight += len(msgspec.json.encode(rendering.tools))
        return await asyncio.to_thread(plan) if weight > _LONG_TEXT else plan()

    async def _lineage(self, place: Place, parent: Parent | Root) -> Lineage | None:
        if isinstance(parent, Root):
            return None
        turn_id = parent.candidate.turn_id
        if place.found.lineage is not None and place.found.lineage.head.turn_id == turn_id:
            return place.found.lineage
        return await self._store.lineage_of(place.key, turn_id)

    async def _generate(
        self, place: Place, plan: Plan, sampling: Mapping[str, Any], wanted: int | None
    ) -> Completion | None:
        """Ask the engine; None when the prompt fills its window and that is a finished turn here."""
        max_tokens = room(len(plan.prompt), wanted, self._window())
        try:
            if max_tokens is None:
                raise PromptTooLong(f"the prompt has {len(plan.prompt)} tokens")
            with self._running.watch(place.key):
                return await self._engine.generate(
                    plan.prompt,
                    sampling,
                    max_tokens=max_tokens,
                    rid=place.lease.attempt_id,
                    affinity=place.key.session_id,
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

    def _turn(self, turn_id: str, reading: Reading, plan: Plan, completion: Completion, spoken: Spoken) -> Turn:
        request, message = reading.request, spoken.message
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
            chain_hash=extend_chain(request.conversation.chain, self.settled(reply)),
            request_hash=reading.request_hash,
            finish=completion.finish,
            finish_reason=spoken.finish_reason,
            created_at=time.time(),
            model_call_ids=spoken.model_call_ids,
            weight_versions=completion.weight_versions,
            log_prob_kind=completion.log_prob_kind,
            sampling_params=dict(spoken.sampling),
            rendering=request.rendering if not plan.parent_id else Rendering(),
            model=request.model,
            engine=completion.engine,
            engine_facts=dict(completion.facts),
            client_facts=_remarks(plan),
        )

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
        await self._store.settled(place.key)
        prompt = None
        if request.token_ids:
            lineage = await self._store.lineage_of(place.key, turn_id)
            prompt = lineage.tokens[: turn.prompt_length]
        self._observe(fact.done(turn, place.key, replayed=True))
        return self._reply(turn, place, request, prompt=prompt, replayed=True)

    def _reply(self, turn: Turn, place: Place, request: TurnRequest, *, prompt: Any, replayed: bool) -> TurnReply:
        texts: Sequence[str] = ()
        if request.log_probs and not request.tokens_as_ids:
            texts = [self._splicer.renderer.decode([i]) for i in turn.generation.ids.tolist()]
        return TurnReply(
            turn=turn,
            key=place.key,
            replayed=replayed,
            prompt_ids=np.ascontiguousarray(prompt) if request.token_ids else None,
            token_texts=tuple(texts),
        )


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


def _remarks(plan: Plan) -> dict[str, Any]:
    """What a reader of the turn should know about its prompt."""
    said = {"notes": list(plan.notes), "refusal": plan.refusal}
    return {name: value for name, value in said.items() if value}


def _weight(message: Message) -> int:
    """Characters that a message adds to a prompt, about."""
    return len(message.content) + len(message.reasoning) + sum(len(call.arguments) for call in message.tool_calls) + 20
