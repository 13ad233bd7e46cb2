"""A model's tokenizer and chat template, as a worker holds them: `splice.renderer.Renderer` on real libraries.

Loads a directory that `api.preparation` wrote, with `tokenizers` and `jinja2` only; transformers is never
imported here. Everything is compiled once and may be used from any thread.
"""

from __future__ import annotations

import copy
import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import numpy as np
from tokenizers import AddedToken, Tokenizer

from api.preparation import AddedToken as ManifestToken
from api.preparation import Manifest, load_manifest
from api.sandbox import CompiledTemplate
from splice.errors import TemplateRejected
from splice.renderer import TokenFlags
from splice.types import IdArray, id_array

# Stands before a text that is encoded as if other text came before it. A noncharacter: no text has use for it.
_ANCHOR = "\U0001fffe\U0010fffe"
# CPU time a rendering may take: some templates look at every message from every message.
_SECONDS = 2.0
_SECONDS_PER_MESSAGE = 0.01
_REASONING_FIELDS = ("reasoning_content", "thinking", "reasoning")


class ModelRenderer:
    """A prepared model directory behind `splice.renderer.Renderer`."""

    def __init__(self, tokenizer: Tokenizer, template: str, manifest: Manifest, identity: str) -> None:
        plain = _without_added_tokens(tokenizer)
        self._live = _Encoder(tokenizer, lambda: _with_anchor(Tokenizer.from_str(tokenizer.to_str())))
        self._plain = _Encoder(plain, lambda: _with_anchor(_without_added_tokens(tokenizer)))
        self._tokenizer = tokenizer
        self._compiled = CompiledTemplate(template)
        self._special_tokens = dict(manifest.special_tokens)
        self._control = {text: token.id for text, token in manifest.added_tokens.items()}
        self._flags = {
            text: TokenFlags(token.lstrip, token.rstrip, token.single_word, token.normalized)
            for text, token in manifest.added_tokens.items()
        }
        self._eos_ids = frozenset(manifest.eos_ids)
        self._vocab_size = manifest.vocab_size
        self._identity = identity
        self._seconds_left: float | None = None

    @classmethod
    def load(cls, directory: Path) -> Self:
        """A directory written by `api.preparation`. Raises PreparationError, TemplateRejected."""
        manifest = load_manifest(directory)
        template = (directory / "chat_template.jinja").read_bytes().decode()
        return cls(_read_tokenizer(directory), template, manifest, manifest.identity)

    @classmethod
    def from_template_file(cls, template: Path, directory: Path) -> Self:
        """A bare template file with a prepared directory's tokenizer: enough to check what can be spliced."""
        return cls.load(directory).with_template(template.read_bytes().decode())

    def with_template(self, text: str) -> Self:
        """The same tokenizer with another template."""
        identity = hashlib.sha256(f"{self._identity}\0{text}".encode()).hexdigest()
        return self._with(_compiled=CompiledTemplate(text), _identity=identity)

    def with_markers(
        self, template: str, markers: Sequence[str], *, special: Mapping[str, str], stops: Sequence[str]
    ) -> Self:
        """Another template, whose markers are added tokens of the same vocabulary; these of them end a generation."""
        tokenizer = _without_added_tokens(self._tokenizer)  # shares the vocabulary, which is what costs
        tokenizer.add_tokens([token for _, token in sorted(self._tokenizer.get_added_tokens_decoder().items())])
        tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
        added = {
            token.content: ManifestToken(
                number, token.special, token.lstrip, token.rstrip, token.normalized, token.single_word
            )
            for number, token in tokenizer.get_added_tokens_decoder().items()
        }
        ends = tuple(added[stop].id for stop in stops if stop in added)
        size = max(token.id for token in added.values()) + 1
        manifest = Manifest(1, self._identity, dict(special), ends, added, size, None)
        identity = hashlib.sha256(f"{self._identity}\0{template}\0{list(stops)}".encode()).hexdigest()
        return type(self)(tokenizer, template, manifest, identity)

    def _with(self, **changes: Any) -> Self:
        twin = copy.copy(self)
        vars(twin).update(changes)
        return twin

    @property
    def identity(self) -> str:
        """Digest of tokenizer and template text."""
        return self._identity

    @property
    def template(self) -> str:
        """The chat template's own text."""
        return self._compiled.text

    @property
    def control_tokens(self) -> Mapping[str, int]:
        """Every added token and its id."""
        return self._control

    @property
    def token_flags(self) -> Mapping[str, TokenFlags]:
        """How each added token takes its surroundings."""
        return self._flags

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a generation."""
        return self._eos_ids

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""
        return self._vocab_size

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] = (),
        kwargs: Mapping[str, Any] = {},
        add_generation_prompt: bool = True,
        clock: float = 0.0,
    ) -> str:
        """Render as transformers would. Raises TemplateRejected with the template's own words."""
        variables = {
            **self._special_tokens,
            **kwargs,
            "messages": [_with_reasoning_aliases(message) for message in messages],
            "tools": list(tools) or None,
            "documents": kwargs.get("documents"),
            "add_generation_prompt": add_generation_prompt,
        }
        seconds = _SECONDS + _SECONDS_PER_MESSAGE * len(messages)
        if self._seconds_left is None:
            return self._compiled.render(variables, clock=clock, seconds=seconds)
        if self._seconds_left <= 0:
            raise TemplateRejected("trying it out took too long", runaway=True)
        started = time.thread_time()
        try:
            return self._compiled.render(variables, clock=clock, seconds=min(seconds, self._seconds_left))
        finally:
            self._seconds_left -= time.thread_time() - started

    def bounded(self, seconds: float) -> Self:
        """The same renderer for one thread's trials, which may together take so much CPU time."""
        return self._with(_seconds_left=seconds)

    def encode(self, text: str, *, continues: bool = False) -> IdArray:
        """Ids of `text`, added tokens recognised."""
        return self._live.encode(text, continues=continues)

    def encode_plain(self, text: str, *, continues: bool = False) -> IdArray:
        """Ids of `text` where a spelled added token is just characters."""
        return self._plain.encode(text, continues=continues)

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        """Text of `ids`, control tokens spelled."""
        return self._live.decode(ids)


class _Encoder:
    """A tokenizer, and what it does at the start of a text.

    SentencePiece-style tokenizers put a marker before a text's first word. A fragment goes on after other
    text, so it must not get one: there it is encoded behind an anchor token, whose id is dropped.
    """

    def __init__(self, tokenizer: Tokenizer, anchored: Callable[[], Tokenizer]) -> None:
        self._tokenizer = tokenizer
        self._anchored = anchored() if _marks_the_start(tokenizer) else None

    def encode(self, text: str, *, continues: bool) -> IdArray:
        if continues and self._anchored is not None and _ANCHOR not in text:
            return _ids(self._anchored, _ANCHOR + text)[1:]
        return _ids(self._tokenizer, text)

    def decode(self, ids: Sequence[int] | IdArray) -> str:
        plain = ids.tolist() if isinstance(ids, np.ndarray) else list(ids)
        return str(self._tokenizer.decode(plain, skip_special_tokens=False))


def _ids(tokenizer: Tokenizer, text: str) -> IdArray:
    """As a batch of one, which lets other threads run meanwhile: `encode` holds the interpreter's lock throughout.

    Half a surrogate pair, which JSON in a call's arguments can spell, is no character: it becomes a question mark.
    """
    whole = text if text.isascii() else text.encode(errors="replace").decode()
    (encoding,) = tokenizer.encode_batch_fast([whole], add_special_tokens=False)
    return id_array(np.array(encoding.ids, dtype=np.uint32))


def _read_tokenizer(directory: Path) -> Tokenizer:
    return Tokenizer.from_file(str(directory / "tokenizer.json"))


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same model and rules without its added tokens. The model is shared, not copied: this is quick."""
    plain = Tokenizer(tokenizer.model)
    for part in ("normalizer", "pre_tokenizer", "decoder"):
        if (value := getattr(tokenizer, part)) is not None:
            setattr(plain, part, value)
    return plain


def _with_anchor(tokenizer: Tokenizer) -> Tokenizer:
    tokenizer.add_tokens([AddedToken(_ANCHOR, normalized=False, special=True)])
    return tokenizer


def _marks_the_start(tokenizer: Tokenizer) -> bool:
    """Whether a word at the start of a text is written otherwise than after a control token."""
    plain = _without_added_tokens(tokenizer)
    anchored = _with_anchor(_without_added_tokens(tokenizer))
    return any(not np.array_equal(_ids(anchored, _ANCHOR + text)[1:], _ids(plain, text)) for text in ("a", " a", "\na"))


def _with_reasoning_aliases(message: Mapping[str, Any]) -> Mapping[str, Any]:
    """Reasoning under the two names that templates read, as transformers does it."""
    reasoning = next((message[key] for key in _REASONING_FIELDS if message.get(key) is not None), None)
    if reasoning is None:
        return message
    return {"thinking": reasoning, **message, "reasoning_content": reasoning}
