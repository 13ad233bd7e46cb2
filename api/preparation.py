"""Turns a model's tokenizer and chat template into the few files that every worker loads.

`prepare_model` runs once, in the parent, and is the only place that touches transformers (imported when a model is
really prepared, never for one that is in the cache). It writes a directory named by its content:

    tokenizer.json       the backend tokenizer as transformers set it up, truncation and padding off
    chat_template.jinja  the template that transformers would choose
    manifest.json        `Manifest`: what else a worker must know

`load_manifest` and the structs are cheap to import.
"""

from __future__ import annotations

import hashlib
import importlib.metadata
import json
import logging
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import msgspec

from api.cache import alone, default_cache_dir, folder_aside, settle

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

FORMAT_VERSION = 1
_UNLIMITED = 10**12  # transformers writes 1e30 where a model states no length
_HUB_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "*.py")
_NOT_TOKENIZER = re.compile(r"\.(safetensors|bin|pt|pth|gguf|onnx|msgpack|h5)(\.index\.json)?$")
_GIVE_TEMPLATE = "give one (TOKENSPLICE_CHAT_TEMPLATE, --chat-template)"
_HUB_ID = re.compile(r"[\w.-]+(/[\w.-]+)?")


class PreparationError(Exception):
    """The model cannot be prepared as given; the message says what to do about it."""


class AddedToken(msgspec.Struct, frozen=True):
    """A token recognised before the text is split, with the tokenizer's own flags."""

    id: int
    special: bool
    lstrip: bool
    rstrip: bool
    normalized: bool
    single_word: bool


class Manifest(msgspec.Struct, frozen=True):
    """What a worker knows of the model beside its tokenizer and template.

    `special_tokens` are the variables that transformers hands to the template (`bos_token` and so on).
    `source` and `transformers_version` tell where the directory first came from; nothing depends on them.
    """

    format_version: int
    identity: str
    special_tokens: dict[str, str]
    eos_ids: tuple[int, ...]
    added_tokens: dict[str, AddedToken]
    vocab_size: int
    model_max_length: int | None
    source: str = ""
    transformers_version: str = ""


def load_manifest(directory: Path) -> Manifest:
    """Read a prepared directory's manifest. Raises PreparationError."""
    path = directory / "manifest.json"
    try:
        manifest = msgspec.json.decode(path.read_bytes(), type=Manifest)
    except FileNotFoundError:
        raise PreparationError(f"{directory} is not a prepared model: it has no manifest.json") from None
    except msgspec.DecodeError as error:
        raise PreparationError(f"{path} cannot be read ({error}); delete {directory} and prepare again") from error
    if manifest.format_version != FORMAT_VERSION:
        raise PreparationError(
            f"{path} has format {manifest.format_version}, this version reads {FORMAT_VERSION}: prepare the model again"
        )
    return manifest


def prepare_model(
    source: str, *, cache_dir: Path | None = None, chat_template: Path | None = None, trust_remote_code: bool = False
) -> Path:
    """Prepare a model directory or hub id for the workers and return where.

    Quick when the same files were prepared before. Raises PreparationError.
    """
    origin = _origin(source)
    prepared = (cache_dir or default_cache_dir()) / "prepared"
    fingerprint = _fingerprint(origin, chat_template, trust_remote_code=trust_remote_code)
    known = prepared / "sources" / fingerprint
    if (found := _look_up(known)) is not None:
        return found
    known.parent.mkdir(parents=True, exist_ok=True)
    with alone(known.with_suffix(".lock")):
        if (found := _look_up(known)) is not None:
            return found
        tokenizer = _load_tokenizer(origin, trust_remote_code=trust_remote_code)
        template = _read_text(chat_template) if chat_template else _chosen_template(tokenizer, origin)
        directory = _write(prepared, tokenizer, template, _eos_ids(tokenizer, origin.files), source)
        _remember(known, directory)
    return directory


class _Origin(msgspec.Struct, frozen=True):
    """Where the model is, and the name to load it by: transformers treats some hub ids in ways of their own."""

    name: str
    files: Path
    hub_id: str = ""


def _origin(source: str) -> _Origin:
    path = Path(source).expanduser()
    if path.is_dir():
        return _Origin(str(path), path)
    if path.exists():
        raise PreparationError(f"{source} is a file: give the directory that holds the tokenizer's files")
    if not _HUB_ID.fullmatch(source):
        raise PreparationError(f"there is no directory {source}")
    return _Origin(source, _download(source), hub_id=source)


def _download(hub_id: str) -> Path:
    """The model's small files from the hub, or from its cache when the hub is out of reach."""
    from huggingface_hub import snapshot_download

    try:
        patterns = [*_HUB_FILES, "chat_templates/*"]
        ignored = ["*.index.json"]
        return Path(snapshot_download(hub_id, allow_patterns=patterns, ignore_patterns=ignored))
    except Exception as error:
        raise PreparationError(
            f"{hub_id} is no directory here and could not be had from the hub: {type(error).__name__}: {error}"
        ) from error


def _fingerprint(origin: _Origin, chat_template: Path | None, *, trust_remote_code: bool) -> str:
    """Digest of all that the outcome depends on, cheap enough to take at every start."""
    digest = hashlib.sha256(
        f"{FORMAT_VERSION} {importlib.metadata.version('transformers')} "
        f"{importlib.metadata.version('tokenizers')} {trust_remote_code} {origin.hub_id}".encode()
    )
    for path in [*_tokenizer_files(origin.files), *([chat_template] if chat_template else [])]:
        content = _read_bytes(path)
        digest.update(f"\0{path.name}\0{len(content)}\0".encode())
        digest.update(content)
    return digest.hexdigest()


def _tokenizer_files(files: Path) -> Iterator[Path]:
    found = [*files.glob("*"), *files.glob("chat_templates/*.jinja")]
    for path in sorted(found):
        if (
            path.is_file()
            and any(path.match(pattern) for pattern in _HUB_FILES)
            and not _NOT_TOKENIZER.search(path.name)
        ):
            yield path


def _look_up(known: Path) -> Path | None:
    try:
        directory = known.parent.parent / known.read_text()
        load_manifest(directory)
    except (OSError, PreparationError):
        return None
    return directory


def _remember(known: Path, directory: Path) -> None:
    aside = known.with_suffix(f".{os.getpid()}")
    aside.write_text(directory.name)
    aside.replace(known)


def _load_tokenizer(origin: _Origin, *, trust_remote_code: bool) -> PreTrainedTokenizerFast:
    logging.getLogger("transformers").addFilter(_not_about_torch)
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    bare = (origin.files / "tokenizer.json").exists() and not any(
        (origin.files / name).exists() for name in ("tokenizer_config.json", "config.json")
    )
    try:
        if bare:  # nothing names a class, so transformers' own guess would fail
            tokenizer = PreTrainedTokenizerFast.from_pretrained(origin.name)
        else:
            tokenizer = AutoTokenizer.from_pretrained(origin.name, trust_remote_code=trust_remote_code)
    except Exception as error:
        raise PreparationError(_loading_failed(origin.name, error)) from error
    if not isinstance(tokenizer, PreTrainedTokenizerFast):
        raise PreparationError(
            f"{origin.name} loads as {type(tokenizer).__name__}, which has no tokenizer.json form: give a directory or "
            "repository of the same model that ships tokenizer.json, or convert it once with transformers where the "
            "tokenizer's own library is installed, and save_pretrained it"
        )
    return tokenizer


def _not_about_torch(record: logging.LogRecord) -> bool:
    """Tokenizers need no PyTorch; transformers' advice to install it would only mislead."""
    return "PyTorch was not found" not in record.getMessage()


def _loading_failed(name: str, error: Exception) -> str:
    words = f"transformers cannot load a tokenizer from {name}: {type(error).__name__}: {error}"
    if "trust_remote_code" in str(error):
        return f"{words}\nThe model brings Python code of its own; trust it explicitly if you do (trust_remote_code)"
    return words


def _chosen_template(tokenizer: PreTrainedTokenizerFast, origin: _Origin) -> str:
    templates = tokenizer.chat_template or _processor_template(origin.files)
    if isinstance(templates, str):
        return templates
    if not templates:
        raise PreparationError(
            f"{origin.name} has no chat template: give one (TOKENSPLICE_CHAT_TEMPLATE, --chat-template)"
        )
    if "default" not in templates:
        raise PreparationError(
            f"{origin.name} has the chat templates {sorted(templates)} and none named default: {_GIVE_TEMPLATE}"
        )
    if "tool_use" in templates:
        return _chosen_by_tools(templates["default"], templates["tool_use"])
    return str(templates["default"])


def _processor_template(files: Path) -> str | None:
    """Some multimodal models keep their only template with the processor."""
    template = _read_json(files / "chat_template.json").get("chat_template")
    return template if isinstance(template, str) else None


def _chosen_by_tools(default: str, tool_use: str) -> str:
    """Both templates as one, which chooses as transformers does: `tool_use` for requests with tools.

    The plus signs keep white space beside the tags as it is; Jinja drops one newline from a template's end.
    """
    default, tool_use = default.removesuffix("\n"), tool_use.removesuffix("\n")
    return f"{{%+ if tools +%}}{tool_use}{{%+ else +%}}{default}{{%+ endif +%}}"


def _eos_ids(tokenizer: PreTrainedTokenizerFast, files: Path) -> tuple[int, ...]:
    """Every id that ends a generation: the tokenizer's, and the list of the generation config."""
    ids = set() if tokenizer.eos_token_id is None else {int(tokenizer.eos_token_id)}
    listed = _read_json(files / "generation_config.json").get("eos_token_id")
    ids |= {int(number) for number in (listed if isinstance(listed, list) else [listed]) if number is not None}
    return tuple(sorted(ids))


def _write(
    prepared: Path, tokenizer: PreTrainedTokenizerFast, template: str, eos_ids: tuple[int, ...], source: str
) -> Path:
    from tokenizers import Tokenizer
    from transformers import __version__ as transformers_version

    backend = Tokenizer.from_str(tokenizer.backend_tokenizer.to_str())
    backend.no_truncation()
    backend.no_padding()
    serialised = backend.to_str()
    special_tokens = dict(tokenizer.special_tokens_map)
    limit = tokenizer.model_max_length
    manifest = Manifest(
        format_version=FORMAT_VERSION,
        identity=_digest(serialised, template, json.dumps(special_tokens, sort_keys=True)),
        special_tokens=special_tokens,
        eos_ids=eos_ids,
        added_tokens=_added_tokens(backend),
        vocab_size=max(backend.get_vocab(with_added_tokens=True).values()) + 1,
        model_max_length=int(limit) if limit < _UNLIMITED else None,
    )
    directory = prepared / _digest(msgspec.json.encode(manifest).decode())[:32]
    with folder_aside(prepared) as aside:
        (aside / "tokenizer.json").write_text(serialised, encoding="utf-8")
        (aside / "chat_template.jinja").write_bytes(template.encode())
        origin = msgspec.structs.replace(manifest, source=source, transformers_version=transformers_version)
        (aside / "manifest.json").write_bytes(msgspec.json.format(msgspec.json.encode(origin)))
        settle(aside, directory)
    return directory


def _added_tokens(backend: Tokenizer) -> dict[str, AddedToken]:
    decoder: Mapping[int, Any] = backend.get_added_tokens_decoder()
    return {
        token.content: AddedToken(
            number, token.special, token.lstrip, token.rstrip, token.normalized, token.single_word
        )
        for number, token in sorted(decoder.items())
    }


def _digest(*parts: str) -> str:
    digest = hashlib.sha256()
    for part in parts:
        content = part.encode()
        digest.update(len(content).to_bytes(8, "little"))
        digest.update(content)
    return digest.hexdigest()


def _read_json(path: Path) -> dict[str, Any]:
    """An object from a file of the model's, empty where the model has none."""
    try:
        value = json.loads(_read_bytes(path)) if path.exists() else {}
    except ValueError as error:
        raise PreparationError(f"{path} is not JSON: {error}") from error
    return value if isinstance(value, dict) else {}


def _read_text(path: Path) -> str:
    return _read_bytes(path).decode().replace("\r\n", "\n")  # transformers reads a template so


def _read_bytes(path: Path) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise PreparationError(f"{path} cannot be read: {error.strerror}") from error
