"""Reads the key-value header of a GGUF model file (version 2 or 3): the tokenizer is in there, tensors are not read."""

from __future__ import annotations

import mmap
import struct
from pathlib import Path
from typing import Any

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d"}
_STRING = 8
_ARRAY = 9


class NotGguf(Exception):
    """The file is no GGUF file that this reader knows, or it is cut short."""


def read_metadata(path: Path) -> dict[str, Any]:
    """Every key of the header, e.g. `tokenizer.ggml.tokens`, with its value. Raises NotGguf."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        if content[:4] != _MAGIC:
            raise NotGguf(f"{path} does not start as a GGUF file does")
        try:
            return _Header(content).read()
        except (struct.error, KeyError, ValueError) as error:
            raise NotGguf(f"{path}: {type(error).__name__}: {error}") from error


class _Header:
    """A position in the file that every read moves on."""

    def __init__(self, content: mmap.mmap) -> None:
        self._content = content
        self._at = len(_MAGIC)

    def read(self) -> dict[str, Any]:
        version = self._scalar("<I")
        if version not in _VERSIONS:
            raise ValueError(f"version {version}")
        self._scalar("<Q")  # number of tensors
        entries: int = self._scalar("<Q")
        return {self._string(): self._value(self._scalar("<I")) for _ in range(entries)}

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            inner: int = self._scalar("<I")
            length: int = self._scalar("<Q")
            return [self._value(inner) for _ in range(length)]
        return self._scalar(_SCALARS[kind])

    def _string(self) -> str:
        length: int = self._scalar("<Q")
        start, self._at = self._at, self._at + length
        return self._content[start : self._at].decode()

    def _scalar(self, layout: str) -> Any:
        (value,) = struct.unpack_from(layout, self._content, self._at)
        self._at += struct.calcsize(layout)
        return value
