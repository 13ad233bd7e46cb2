"""The engine's own tokenizer: what each id spells, and other ways to spell the same bytes."""

from __future__ import annotations

import functools
import json
import random
import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

_SPLIT_TRIES = 6
_BYTE_TOKEN = re.compile(r"<0x([0-9A-F]{2})>")


class Vocabulary:
    """A `tokenizer.json`, read without transformers.

    `stop_ids` are those of `stop_tokens` that exist, in their order.
    """

    def __init__(self, directory: Path, stop_tokens: Sequence[str]) -> None:
        path = directory / "tokenizer.json"
        self._tokenizer = Tokenizer.from_file(str(path))
        parts = json.loads(path.read_bytes())
        self.size = self._tokenizer.get_vocab_size(with_added_tokens=True)
        added: dict[str, int] = {token["content"]: token["id"] for token in parts["added_tokens"]}
        special = {token["id"] for token in parts["added_tokens"] if token["special"]}
        self.special_ids = frozenset(special)
        self._spelling = _spellings(parts, self._tokenizer.get_vocab(with_added_tokens=False), added)
        self._whole = frozenset(added.values())
        self._by_bytes = {spelled: token for token, spelled in self._spelling.items() if token not in self._whole}
        self.stop_ids = tuple(added[token] for token in stop_tokens if token in added)
        self._added = added
        if not self.stop_ids:
            raise ValueError(f"{path} has none of the stop tokens {', '.join(stop_tokens)}")

    @property
    def eos(self) -> int:
        """The id that the policy ends its turns with."""
        return self.stop_ids[0]

    def has(self, token: str) -> bool:
        """Whether `token` is one id of its own, special or not."""
        return token in self._added

    def encode(self, text: str, *, add_special_tokens: bool = False) -> list[int]:
        """The tokenizer's own ids; control tokens spelled in `text` become single ids."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = False) -> str:
        """Their text. Ids outside the vocabulary spell nothing, as the real detokenizer skips them."""
        known = [token for token in ids if 0 <= token < self.size]
        text: str = self._tokenizer.decode(known, skip_special_tokens=skip_special_tokens)
        return text

    def spell(self, token: int) -> bytes:
        """The bytes that `token` stands for."""
        return self._spelling.get(token, b"")

    def split(self, ids: Sequence[int], rate: float, rng: random.Random) -> list[int]:
        """Replace about `rate` of the ids by two others that together spell the same bytes."""
        spread: list[int] = []
        for token in ids:
            pair = self._pair(token, rng) if rng.random() < rate else None
            spread += pair or (token,)
        return spread

    def _pair(self, token: int, rng: random.Random) -> tuple[int, int] | None:
        spelled = self.spell(token)
        if token in self._whole or len(spelled) <= 1:
            return None
        for _ in range(_SPLIT_TRIES):
            at = rng.randrange(1, len(spelled))
            left, right = self._by_bytes.get(spelled[:at]), self._by_bytes.get(spelled[at:])
            if left is not None and right is not None:
                return left, right
        return None


@functools.lru_cache(maxsize=4)
def load_vocabulary(directory: Path, stop_tokens: tuple[str, ...]) -> Vocabulary:
    """Engines in one process share what never changes; reading it takes most of a second."""
    return Vocabulary(directory, stop_tokens)


def _spellings(parts: dict[str, Any], vocab: dict[str, int], added: dict[str, int]) -> dict[int, bytes]:
    spell = _from_byte_level if _is_byte_level(parts["decoder"]) else _from_sentencepiece
    spellings = spell(vocab)
    spellings.update({token: content.encode() for content, token in added.items()})
    return spellings


def _is_byte_level(decoder: dict[str, Any] | None) -> bool:
    if decoder is None:
        return False
    return decoder["type"] == "ByteLevel" or any(map(_is_byte_level, decoder.get("decoders", ())))


def _from_byte_level(vocab: dict[str, int]) -> dict[int, bytes]:
    """Byte-level vocabularies spell each byte with one printable character; undo that."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    hidden = [byte for byte in range(256) if byte not in printable]
    table = {byte: byte for byte in printable} | {256 + at: byte for at, byte in enumerate(hidden)}
    return {token: spelled.translate(table).encode("latin-1", "ignore") for spelled, token in vocab.items()}


def _from_sentencepiece(vocab: dict[str, int]) -> dict[int, bytes]:
    """SentencePiece vocabularies write a space as U+2581 and single bytes as `<0x0A>`."""

    def spell(piece: str) -> bytes:
        byte = _BYTE_TOKEN.fullmatch(piece)
        return bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()

    return {token: spell(piece) for piece, token in vocab.items()}
