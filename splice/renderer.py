"""What the core needs of a tokenizer and its chat template; `api/rendering.py` provides it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, Self

from splice.types import IdArray


class TokenFlags(NamedTuple):
    """How an added token takes its surroundings.

    lstrip, rstrip: white space before or after it is swallowed. single_word: it must stand alone.
    normalized: it is looked for in the text as the tokenizer normalises it, so other spellings match too.
    """

    lstrip: bool = False
    rstrip: bool = False
    single_word: bool = False
    normalized: bool = False


class Renderer(Protocol):
    """A model's tokenizer and chat template. Every method is pure and safe to call from any thread."""

    @property
    def identity(self) -> str:
        """Digest of tokenizer and template text: equal exactly when every rendering is equal."""

    @property
    def template(self) -> str:
        """The chat template's own text."""

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Every *added* token, flagged special or not, and its id."""

    @property
    def token_flags(self) -> Mapping[str, TokenFlags]:
        """The flags of those added tokens."""

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation, by tokenizer and generation config."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id the model may be sent or may sample."""

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = {},
        add_generation_prompt: bool = True,
        clock: float = 0.0,
    ) -> str:
        """Render through the template, as transformers would. `messages` are in the template's own shape.

        `clock` is what `strftime_now` tells. Raises TemplateRejected with the template's own words.
        """

    def bounded(self, seconds: float) -> Self:
        """The same renderer, whose renderings may together take so much CPU time.

        Past it they raise TemplateRejected, `runaway`.
        """

    def encode(self, text: str, *, continues: bool = False) -> IdArray:
        """Ids of `text`, added tokens recognised, nothing put before or after it.

        `continues`: the text goes on after a control token, so nothing marks its first word as a text's first.
        """

    def encode_plain(self, text: str, *, continues: bool = False) -> IdArray:
        """Ids of `text` where a spelled added token is just characters."""

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """Text of `ids`, control tokens spelled, no clean-up."""
