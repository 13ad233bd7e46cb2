"""What a server without memory would send the engine: the whole conversation, rendered and tokenised again.

It follows the servers in use: content parts joined, tool arguments parsed, the template run by jinja2 as
transformers runs it, control tokens in content taken for control tokens. Shares no code with the product.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import jinja2
import jinja2.ext
from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import Tokenizer

from api.demo.evidence import Json


class Rerenderer:
    """A model's tokenizer and chat template, read from a directory in the Hugging Face layout."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
        self._tokenizer.no_truncation()
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = time.strftime
        self._template = environment.from_string(_template_text(directory))
        self._special = _special_tokens(directory)

    def decode(self, ids: tuple[int, ...]) -> str:
        """Text of `ids`, control tokens spelled."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def rerender(self, messages: Sequence[Json], tools: Sequence[Json]) -> tuple[int, ...]:
        """Prompt ids of a whole conversation; none when the template refuses it."""
        try:
            text = self._template.render(
                messages=[_as_templates_want(message) for message in messages],
                tools=list(tools) or None,
                add_generation_prompt=True,
                **self._special,
            )
        except jinja2.TemplateError:
            return ()
        return tuple(self._tokenizer.encode(text, add_special_tokens=False).ids)


def _template_text(directory: Path) -> str:
    stands_alone = directory / "chat_template.jinja"
    if stands_alone.exists():
        return stands_alone.read_text()
    return str(_config(directory)["chat_template"])


def _config(directory: Path) -> dict[str, Any]:
    path = directory / "tokenizer_config.json"
    return dict(json.loads(path.read_text())) if path.exists() else {}


def _special_tokens(directory: Path) -> dict[str, str]:
    found = {name: token for name, token in _config(directory).items() if name in ("bos_token", "eos_token")}
    spelled = {name: token["content"] if isinstance(token, dict) else token for name, token in found.items()}
    return {name: token for name, token in spelled.items() if token}


def _as_templates_want(message: Json) -> Json:
    shaped = {name: value for name, value in message.items() if value is not None}
    content = shaped.get("content", "")
    if isinstance(content, list):
        content = "\n".join(part["text"] for part in content)
    shaped["content"] = content
    if shaped.get("tool_calls"):
        shaped["tool_calls"] = [_with_parsed_arguments(call) for call in shaped["tool_calls"]]
    return shaped


def _with_parsed_arguments(call: Json) -> Json:
    function = dict(call["function"])
    with contextlib.suppress(ValueError):  # no JSON: servers hand the template the text
        function["arguments"] = json.loads(function["arguments"])
    return call | {"function": function}


def _to_json(value: Any, ensure_ascii: bool = False, indent: int | None = None) -> str:  # noqa: FBT001, FBT002 - a filter's shape
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent)


def _raise(words: str) -> NoReturn:
    raise jinja2.TemplateError(words)
