"""What a reply is read into: the events that leave while it is generated, and the whole of it afterwards."""

from __future__ import annotations

import msgspec

from splice.types import Message, ToolCall


class ReasoningText(msgspec.Struct, frozen=True):
    """The next piece of the model's reasoning."""

    text: str


class ContentText(msgspec.Struct, frozen=True):
    """The next piece of what the client sees as the answer."""

    text: str


class CallMade(msgspec.Struct, frozen=True):
    """A complete tool call. `model_id` is the id that the model itself wrote, "" where its format has none."""

    call: ToolCall
    model_id: str = ""


Event = ReasoningText | ContentText | CallMade


class ParsedReply(msgspec.Struct, frozen=True):
    """A whole reply. The calls in `message` carry no ids; `model_call_ids` has the model's own, by position."""

    message: Message
    model_call_ids: tuple[str, ...] = ()


def assemble(events: list[Event]) -> ParsedReply:
    """Put a reply's events together: however they were cut, the same reply."""
    made = [event for event in events if isinstance(event, CallMade)]
    message = Message(
        role="assistant",
        content="".join(event.text for event in events if isinstance(event, ContentText)),
        reasoning="".join(event.text for event in events if isinstance(event, ReasoningText)),
        tool_calls=tuple(event.call for event in made),
    )
    return ParsedReply(message, tuple(event.model_id for event in made))
