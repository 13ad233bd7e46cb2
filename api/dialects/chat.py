"""OpenAI Chat Completions: wire body -> TurnRequest, TurnReply -> wire body or events.

Decoding is two passes of msgspec: the top level as raw slices, so that unknown names are seen and a 64k-token
history is never built twice, then each known field by its own type.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple
from urllib.parse import quote

import msgspec
import numpy as np
import orjson

from api.engine.parameters import MAX_TOKENS_NAMES
from api.ids import turn_of_call, turn_of_response
from api.plain import check_plain
from api.request import BadRequest, TurnReply, TurnRequest
from api.schemas import calls_json
from api.transcripts import Transcripts
from splice.identity import NOTHING_SAID, Conversation, ids_digest
from splice.locate import Echo
from splice.types import Message, Rendering, Role, ToolCall, id_array


class _Part(msgspec.Struct):
    type: str
    text: str = ""


class _Function(msgspec.Struct):
    name: str
    arguments: str | dict[str, Any] | None = None


class _Call(msgspec.Struct):
    function: _Function
    id: str | None = None
    type: str | None = None


class _Message(msgspec.Struct):
    role: str
    content: str | list[_Part] | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    tool_calls: list[_Call] | None = None
    tool_call_id: str | None = None
    name: str | None = None
    id: str | None = None
    generation_token_ids: msgspec.Raw = msgspec.Raw()


class _Tool(msgspec.Struct):
    type: str
    function: dict[str, Any]


class _ConversationParams(msgspec.Struct):
    conversation_id: str | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


_MOST_KWARGS = 64
_MOST_MESSAGES = 20_000
_NEAR = 8  # echoed token ids are looked at in the last few replies only: they settle ties, and ties are there

# Percent-encoded in a header is only what a header cannot carry.
_HEADER_SAFE = "".join(chr(c) for c in range(0x21, 0x7F) if chr(c) != "%") + " "

_ROLES: Mapping[str, Role] = {
    "system": "system", "developer": "developer", "user": "user", "assistant": "assistant",
    "tool": "tool", "function": "tool",
}  # fmt: skip

# Fields that change nothing here: OpenAI's bookkeeping, and switches that engines take as hints.
_IGNORED = {
    "user", "store", "service_tier", "safety_identifier", "prompt_cache_key", "prompt_cache_retention",
    "return_meta_info", "return_prompt_token_ids",
}  # fmt: skip

_READ_APART = {"messages", *_IGNORED}

_TYPES: Mapping[str, Any] = {
    "model": str | None,
    "tools": list[_Tool] | None,
    "tool_choice": str | dict[str, Any] | None,
    "stream": bool | None,
    "stream_options": _StreamOptions | None,
    "max_tokens": int | None,
    "max_completion_tokens": int | None,
    "max_new_tokens": int | None,
    "n_predict": int | None,
    "n": int | None,
    "chat_template_kwargs": dict[str, Any] | None,
    "reasoning_effort": str | None,
    "return_token_ids": bool | None,
    "return_tokens_as_token_ids": bool | None,
    "logprobs": bool | None,
    "top_logprobs": int | None,
    "metadata": dict[str, Any] | None,
    "parallel_tool_calls": bool | None,
    "add_generation_prompt": bool | None,
    "continue_final_message": bool | None,
    "conversation_params": _ConversationParams | None,
}

_KNOWN = {*_TYPES, *_IGNORED, "messages"}

# Legal values whose meaning is not kept here: named in a 400, never dropped.
_UNSUPPORTED: Mapping[str, tuple[Callable[[Any], bool], str]] = {
    "n": (lambda v: v not in (None, 1), "only n=1 is served: a turn is one generation; ask again for another sample"),
    "tool_choice": (lambda v: v not in (None, "auto", "none"), "only auto and none are served"),
    "top_logprobs": (lambda v: v not in (None, 0), "alternatives are not kept; leave it out or send 0"),
    "parallel_tool_calls": (lambda v: v is False, "cannot be forbidden; leave it out"),
    "add_generation_prompt": (lambda v: v is False, "a turn always opens the assistant's reply"),
    "continue_final_message": (lambda v: v is True, "a final assistant message is context, not a prefix"),
}


class Transcript(NamedTuple):
    """A request's messages as they were read, with what the client echoed of ours."""

    conversation: Conversation
    echoes: tuple[Echo, ...]


Settled = Callable[[Message], Message]


def _as_it_is(message: Message) -> Message:
    return message


_NO_TRANSCRIPTS: Transcripts[Transcript] = Transcripts(0)


def decode(
    body: bytes,
    settled: Settled = _as_it_is,
    transcripts: Transcripts[Transcript] = _NO_TRANSCRIPTS,
    session: Hashable = None,
) -> TurnRequest:
    """Read a `/v1/chat/completions` body. Raises BadRequest naming every bad or unsupported field.

    settled: brings a message into the form in which messages are compared. What `transcripts` holds of the named
    `session` is not read again.
    """
    try:
        raw = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    except msgspec.DecodeError as error:
        raise BadRequest({"body": f"no JSON object: {error}"}) from None
    except RecursionError:
        raise BadRequest({"body": "is nested too deeply"}) from None
    fields, problems = _typed(raw)
    sampling, unreadable = _sampling(raw)
    problems |= unreadable
    transcript = _transcript(raw.get("messages"), settled, transcripts, session)
    if isinstance(transcript, _Unreadable):
        problems["messages"] = transcript.problem
    if problems or isinstance(transcript, _Unreadable):
        raise BadRequest(problems)
    unsupported = {k: words for k, (bad, words) in _UNSUPPORTED.items() if k in fields and bad(fields[k])}
    if unsupported:
        raise BadRequest(unsupported, code="unsupported_parameter")
    return TurnRequest(
        conversation=transcript.conversation,
        rendering=_rendering(fields),
        sampling=sampling,
        max_tokens=_most_tokens(fields),
        echoes=transcript.echoes,
        model=fields.get("model") or "",
        stream=bool(fields.get("stream")),
        stream_usage=bool(getattr(fields.get("stream_options"), "include_usage", False)),
        token_ids=bool(fields.get("return_token_ids") or fields.get("return_tokens_as_token_ids")),
        log_probs=bool(fields.get("logprobs")),
        tokens_as_ids=bool(fields.get("return_tokens_as_token_ids")),
        parse_calls=fields.get("tool_choice") != "none",
        metadata={k: str(v) for k, v in (fields.get("metadata") or {}).items() if v is not None},
        conversation_id=getattr(fields.get("conversation_params"), "conversation_id", None) or "",
    )


def _typed(raw: Mapping[str, msgspec.Raw]) -> tuple[dict[str, Any], dict[str, str]]:
    fields = {name: _decoded(raw[name], kind) for name, kind in _TYPES.items() if name in raw}
    return fields, {name: value.problem for name, value in fields.items() if isinstance(value, _Unreadable)}


class _Unreadable(NamedTuple):
    problem: str


def _decoded(raw: msgspec.Raw, kind: Any) -> Any:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, ValueError) as error:
        return _Unreadable(str(error))
    except RecursionError:
        return _Unreadable("is nested too deeply")


def _sampling(raw: Mapping[str, msgspec.Raw]) -> tuple[dict[str, Any], dict[str, str]]:
    """Every other field is taken for a sampling parameter: the engine knows it, or it is refused by name."""
    others = {name: _decoded(value, Any) for name, value in raw.items() if name not in _TYPES.keys() | _READ_APART}
    problems = {name: value.problem for name, value in others.items() if isinstance(value, _Unreadable)}
    for name, value in others.items():
        check_plain(value, name)
    return {k: v for k, v in others.items() if v is not None and k not in problems}, problems


def _rendering(fields: Mapping[str, Any]) -> Rendering:
    tools = tuple({"type": tool.type, "function": tool.function} for tool in fields.get("tools") or ())
    kwargs = dict(fields.get("chat_template_kwargs") or {})
    if fields.get("reasoning_effort") is not None:
        kwargs.setdefault("reasoning_effort", fields["reasoning_effort"])
    if len(kwargs) > _MOST_KWARGS:
        raise BadRequest({"chat_template_kwargs": f"holds more than {_MOST_KWARGS} arguments"})
    check_plain(tools, "tools")
    check_plain(kwargs, "chat_template_kwargs")
    return Rendering(tools, kwargs)


def _most_tokens(fields: Mapping[str, Any]) -> int | None:
    """The length wished for, whichever of its names was used; two that disagree are refused."""
    given = {name: fields[name] for name in MAX_TOKENS_NAMES if fields.get(name) is not None}
    if len(set(given.values())) > 1:
        raise BadRequest({", ".join(given): "say different things"})
    for name, value in given.items():
        if value < 0:
            raise BadRequest({name: "must be at least 0"})
    return next(iter(given.values()), None)


def _transcript(
    raw: msgspec.Raw | None, settled: Settled, transcripts: Transcripts[Transcript], session: Hashable
) -> Transcript | _Unreadable:
    if raw is None:
        return _Unreadable("is required")
    text = bytes(raw)
    known = transcripts.known(session, text) if session is not None else None
    before, unread = (known.read, known.rest) if known else (Transcript(NOTHING_SAID, ()), text)
    wire = _decoded(msgspec.Raw(unread), list[_Message])
    if isinstance(wire, _Unreadable):
        return wire
    read = _followed_by(before, wire, settled)
    if not 1 <= len(read.conversation.messages) <= _MOST_MESSAGES:
        return _Unreadable(f"must hold 1 to {_MOST_MESSAGES} messages")
    if session is not None:
        transcripts.keep(session, text, read)
    return read


def _followed_by(before: Transcript, wire: Sequence[_Message], settled: Settled) -> Transcript:
    start, answered = len(before.conversation.messages), len(before.conversation.replies)
    messages = [_message(message, index) for index, message in enumerate(wire, start=start)]
    assistants = [pair for pair in zip(wire, messages, strict=True) if pair[1].role == "assistant"]
    near = answered + len(assistants) - _NEAR
    echoes = (_echo(*pair, depth, near=depth > near) for depth, pair in enumerate(assistants, start=answered + 1))
    return Transcript(
        before.conversation.followed_by(map(settled, messages)),
        (*before.echoes, *(echo for echo in echoes if echo is not None)),
    )


def _message(wire: _Message, index: int) -> Message:
    """Runs once for every message of a history, in every turn: it builds nothing that it does not return."""
    role = _ROLES.get(wire.role)
    if role is None:
        raise BadRequest({f"messages[{index}].role": f"{wire.role!r} is none of {', '.join(sorted(_ROLES))}"})
    content = wire.content if isinstance(wire.content, str) else _text(wire.content or (), index)
    name = wire.name or ""
    if role == "assistant":
        calls = tuple([_call(call) for call in wire.tool_calls]) if wire.tool_calls else ()
        return Message(role, content, wire.reasoning_content or wire.reasoning or "", calls, "", name)
    return Message(role, content, "", (), (wire.tool_call_id or "") if role == "tool" else "", name)


def _text(content: Sequence[_Part], index: int) -> str:
    for n, part in enumerate(content):
        if part.type not in {"text", "input_text", "output_text"}:
            raise BadRequest(
                {f"messages[{index}].content[{n}].type": f"{part.type!r} is not served: text only"},
                code="unsupported_parameter",
            )
    return "".join(part.text for part in content)


def _call(call: _Call) -> ToolCall:
    arguments = call.function.arguments
    text = arguments if isinstance(arguments, str) else json.dumps(arguments or {}, ensure_ascii=False)
    return ToolCall(call.function.name, text, call.id or "")


def _echo(wire: _Message, message: Message, depth: int, *, near: bool) -> Echo | None:
    turn = ""
    for call in message.tool_calls:
        turn = turn or turn_of_call(call.id)
    if wire.id and not turn:
        turn = turn_of_response(wire.id)
    digest = b""
    if near and wire.generation_token_ids:
        try:
            digest = ids_digest(id_array(msgspec.json.decode(wire.generation_token_ids, type=list[int] | None) or []))
        except (msgspec.DecodeError, OverflowError):
            digest = b""  # the field is the client's own affair unless it is what we sent
    return Echo(depth, digest, turn) if turn or digest else None


# What leaves.


def headers(reply: TurnReply) -> dict[str, str]:
    """The reply headers every dialect shares."""
    origin = reply.turn.origin
    splice = f"{origin.kind}; reason={origin.reason}" if origin.reason else origin.kind
    shown = {
        "x-tokensplice-session": quote(reply.session_id, safe=_HEADER_SAFE),
        "x-tokensplice-turn": reply.turn.turn_id,
        "x-tokensplice-splice": splice,
    }
    if reply.turn.parent_id:
        shown["x-tokensplice-parent"] = reply.turn.parent_id
    if reply.replayed:
        shown["x-tokensplice-replayed"] = "1"
    return shown


def encode(reply: TurnReply, request: TurnRequest) -> bytes:
    """The `chat.completion` body."""
    turn = reply.turn
    choice: dict[str, Any] = {
        "index": 0,
        "message": _reply_message(reply, request),
        "finish_reason": turn.finish_reason,
        "logprobs": _log_probs(reply, request),
    }
    body = {
        "id": f"chatcmpl-{turn.turn_id}",
        "object": "chat.completion",
        "created": int(turn.created_at),
        "model": request.model or turn.model,
        "choices": [choice],
        "usage": usage(reply),
    }
    return orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY)


def usage(reply: TurnReply) -> dict[str, Any]:
    """Token counts of one turn."""
    prompt, generated = reply.turn.prompt_length, len(reply.turn.generation)
    return {
        "prompt_tokens": prompt,
        "completion_tokens": generated,
        "total_tokens": prompt + generated,
        "prompt_tokens_details": {"cached_tokens": reply.turn.engine_facts.get("cached_tokens", 0)},
    }


def events(reply: TurnReply, request: TurnRequest) -> Iterator[bytes]:
    """The same reply as `chat.completion.chunk` events, ended by `[DONE]`."""
    turn = reply.turn
    message = _reply_message(reply, request)
    delta = {k: v for k, v in message.items() if k != "tool_calls"}
    yield _chunk(reply, request, {"role": "assistant", "content": ""}, None)
    yield _chunk(reply, request, {k: v for k, v in delta.items() if k != "role"}, None, _log_probs(reply, request))
    for n, call in enumerate(message.get("tool_calls", ())):
        yield _chunk(reply, request, {"tool_calls": [{"index": n, **call}]}, None)
    yield _chunk(reply, request, {}, turn.finish_reason)
    if request.stream_usage:
        yield _event({**_chunk_head(reply, request), "choices": [], "usage": usage(reply)})
    yield b"data: [DONE]\n\n"


def _chunk_head(reply: TurnReply, request: TurnRequest) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{reply.turn.turn_id}",
        "object": "chat.completion.chunk",
        "created": int(reply.turn.created_at),
        "model": request.model or reply.turn.model,
    }


def _chunk(
    reply: TurnReply, request: TurnRequest, delta: dict[str, Any], finish_reason: str | None, log_probs: Any = None
) -> bytes:
    choice = {"index": 0, "delta": delta, "finish_reason": finish_reason, "logprobs": log_probs}
    return _event({**_chunk_head(reply, request), "choices": [choice]})


def _event(body: Mapping[str, Any]) -> bytes:
    return b"data: " + orjson.dumps(body, option=orjson.OPT_SERIALIZE_NUMPY) + b"\n\n"


def _reply_message(reply: TurnReply, request: TurnRequest) -> dict[str, Any]:
    message = reply.turn.reply
    wire: dict[str, Any] = {"role": "assistant", "content": message.content}
    if message.reasoning:
        wire["reasoning_content"] = message.reasoning
    if message.tool_calls:
        wire["tool_calls"] = calls_json(message)
        wire["content"] = message.content or None
    if request.token_ids:
        generation = reply.turn.generation
        wire["prompt_token_ids"] = reply.prompt_ids
        wire["generation_token_ids"] = generation.ids
        wire["generation_log_probs"] = np.asarray(generation.log_probs, dtype=np.float64)
    return wire


def _log_probs(reply: TurnReply, request: TurnRequest) -> dict[str, Any] | None:
    if not request.log_probs:
        return None
    generation = reply.turn.generation
    ids, values = generation.ids.tolist(), np.asarray(generation.log_probs, dtype=np.float64).tolist()
    texts = [f"token_id:{i}" for i in ids] if request.tokens_as_ids else list(reply.token_texts)
    content = [
        {"token": text, "logprob": value, "bytes": list(text.encode()), "top_logprobs": []}
        for text, value in zip(texts, values, strict=True)
    ]
    return {"content": content, "refusal": None}
