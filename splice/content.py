"""Content is text: a control token that somebody spelled reaches the model as ordinary characters.

A tool result that holds `<|im_end|>` must not end the turn. So before rendering, every added token spelled in
messages and tools is replaced by a placeholder, a string of digits that templates pass through unchanged;
after rendering, the text is cut at the control tokens that the template itself wrote, the placeholders are put
back, and those segments are encoded against a vocabulary without added tokens.

Where nothing was spelled, which is nearly always, the rendered text is encoded whole, exactly as the engine
would encode it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from splice.errors import TemplateRejected
from splice.renderer import Renderer, TokenFlags
from splice.types import IdArray

_INDEX_DIGITS = 6


class Lexicon:
    """A tokenizer's added tokens: finds them in text, and tells which of them need masking."""

    def __init__(self, renderer: Renderer) -> None:
        self.ids = dict(renderer.control_tokens)
        self.flags = dict(renderer.token_flags)
        self._renderer = renderer
        self.every = _any_of(self.ids)
        # What the plain vocabulary makes the same id of is no control token: Gemma lists runs of newlines.
        self.spelled = _any_of(t for t, i in self.ids.items() if renderer.encode_plain(t).tolist() != [i])
        self._loose = any(flags.normalized for flags in self.flags.values())

    def tokens(self, text: str) -> Iterator[re.Match[str]]:
        """The control tokens in a text, as the tokenizer finds them: leftmost, the longest first."""
        for match in self.every.finditer(text):
            if not self.flag(match[0]).single_word or _alone(text, match):
                yield match

    def flag(self, token: str) -> TokenFlags:
        """The token's flags."""
        return self.flags.get(token, TokenFlags())

    def encode(self, text: str, mask: Mask, *, after: str = "") -> IdArray:
        """Ids of rendered text. after: the control token that stands before it, "" at a prompt's start.

        The token is encoded with the text, so that it swallows white space as it would, and then dropped.
        """
        ids = self._encode(after + text, mask)
        if not after:
            return ids
        return ids[1:] if len(ids) and ids[0] == self.ids[after] else self.encode_continuing(text, mask)

    def encode_continuing(self, text: str, mask: Mask) -> IdArray:
        """Ids of rendered text that goes on after sampled text."""
        return self._encode(text, mask, continues=True)

    def _encode(self, text: str, mask: Mask, *, continues: bool = False) -> IdArray:
        if mask.spelled:
            return self._encode_apart(text, mask, continues=continues)
        return self._encode_run(text, continues=continues)

    def _encode_run(self, text: str, *, continues: bool) -> IdArray:
        """Ids of text without placeholders, as the engine would make them."""
        ids = self._renderer.encode(text, continues=continues)
        if not self._loose or self._as_seen(text, ids):
            return ids
        return self._encode_apart(text, NOTHING_SPELLED, continues=continues, distrust=True)

    def _as_seen(self, text: str, ids: IdArray) -> bool:
        """Whether the tokenizer found no control token but those that stand in the text.

        A token looked for in normalised text has other spellings, which no mask foresees.
        """
        known = np.fromiter(self.ids.values(), dtype=np.uint32)
        return int(np.isin(ids, known).sum()) == sum(1 for _ in self.tokens(text))

    def _encode_apart(self, text: str, mask: Mask, *, continues: bool, distrust: bool = False) -> IdArray:
        """Encode segment by segment: those that carry placeholders, or all in distrust, as plain characters."""
        encode = self._renderer.encode if distrust else self._encode_run
        parts: list[IdArray] = []
        run_start, position, left = 0, 0, ""

        def flush(end: int) -> None:
            if end > run_start:
                parts.append(encode(text[run_start:end], continues=continues or run_start > 0))

        for start, stop, token in self._cuts(text):
            segment = text[position:start]
            if distrust or mask.touches(segment):
                flush(position)
                if bare := self._bare(segment, left, token):
                    plain = mask.restore(bare)
                    parts.append(self._renderer.encode_plain(plain, continues=continues or position > 0))
                run_start = start
            position, left = stop, token
        flush(len(text))
        return np.concatenate(parts) if parts else self._renderer.encode("")

    def _cuts(self, text: str) -> Iterator[tuple[int, int, str]]:
        for match in self.tokens(text):
            yield match.start(), match.end(), match[0]
        yield len(text), len(text), ""

    def _bare(self, segment: str, left: str, right: str) -> str:
        """The segment without the white space that its neighbours swallow."""
        if self.flag(left).rstrip:
            segment = segment.lstrip()
        return segment.rstrip() if self.flag(right).lstrip else segment


@dataclass(frozen=True, slots=True)
class Mask:
    """Placeholders and what they stand for. Empty where nothing was spelled."""

    nonce: str = ""
    spelled: Mapping[str, str] = field(default_factory=dict)  # placeholder -> the characters

    def touches(self, text: str) -> bool:
        """Whether the text carries a placeholder."""
        return bool(self.spelled) and self.nonce in text

    def restore(self, text: str) -> str:
        """The text with the spelled characters back in place."""
        if not self.touches(text):
            return text
        pattern = re.compile(re.escape(self.nonce) + rf"\d{{{_INDEX_DIGITS}}}")
        return pattern.sub(lambda match: self.spelled[match[0]], text)

    def check(self, rendered: str) -> None:
        """Raise TemplateRejected where the template cut a placeholder apart."""
        if not self.spelled:
            return
        whole = rendered.count(self.nonce)
        half = len(self.nonce) // 2
        if rendered.count(self.nonce[:half]) != whole or rendered.count(self.nonce[half:]) != whole:
            raise TemplateRejected("it cuts apart a text that spells a control token")


NOTHING_SPELLED = Mask()


def masked(values: Sequence[Any], lexicon: Lexicon) -> tuple[list[Any], Mask]:
    """JSON values in which every spelled control token is a placeholder, and what the placeholders mean.

    Keys of objects are masked too: a schema's property names are content. Where nothing is spelled the values
    come back as they are.
    """
    tokens: dict[str, None] = {}
    digest = hashlib.sha256()
    for text in _texts(values):
        digest.update(text.encode("utf-8", "surrogatepass"))
        tokens.update(dict.fromkeys(lexicon.spelled.findall(text)))
    if not tokens:
        return list(values), NOTHING_SPELLED
    nonce = _nonce(digest.digest())
    placeholders = {token: f"{nonce}{number:0{_INDEX_DIGITS}d}" for number, token in enumerate(tokens)}

    def hide(text: str) -> str:
        return lexicon.spelled.sub(lambda match: placeholders[match[0]], text)

    return [_mapped(value, hide) for value in values], Mask(nonce, {v: k for k, v in placeholders.items()})


def _nonce(digest: bytes) -> str:
    """Twenty digits that begin with the only 9 among them, so that no two occurrences overlap.

    Taken from a hash of all the content: content that contained its own nonce would be a fixed point of it.
    """
    number = int.from_bytes(digest[:16], "big")
    digits = []
    for _ in range(19):
        number, digit = divmod(number, 9)
        digits.append(str(digit))
    return "9" + "".join(digits)


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        for key, item in value.items():
            yield from _texts(key)
            yield from _texts(item)
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _texts(item)


def _mapped(value: Any, change: Callable[[str], str]) -> Any:
    if isinstance(value, str):
        return change(value)
    if isinstance(value, Mapping):
        return {_mapped(key, change): _mapped(item, change) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_mapped(item, change) for item in value]
    return value


def _alone(text: str, match: re.Match[str]) -> bool:
    before, after = text[max(match.start() - 1, 0) : match.start()], text[match.end() : match.end() + 1]
    return not (_is_word(before) or _is_word(after))


def _is_word(character: str) -> bool:
    return bool(character) and re.match(r"\w", character) is not None


def _any_of(words: Iterable[str]) -> re.Pattern[str]:
    """A pattern that finds the longest of the words at each place.

    A tree of shared beginnings: with thousands of added tokens a plain alternation would try each of them.
    """
    tree: dict[str, Any] = {}
    for word in words:
        if not word:
            continue
        node = tree
        for character in word:
            node = node.setdefault(character, {})
        node[""] = {}
    return re.compile(_branch(tree) if tree else r"(?!)")


def _branch(node: Mapping[str, Any]) -> str:
    head = ""
    while len(node) == 1 and "" not in node:  # an unforked stretch, kept flat so that depth stays small
        character, node = next(iter(node.items()))
        head += re.escape(character)
    branches = [re.escape(character) + _branch(below) for character, below in node.items() if character]
    if not branches:
        return head
    group = f"(?:{'|'.join(branches)})"
    return head + (f"{group}?" if "" in node else group)
