"""Chat templates to test with, and a tokenizer for each.

The templates come from the folder in TOKENSPLICE_TEMPLATES, else from the PyPI wheel `trl`. Their own
tokenizers are not at hand, so each gets Qwen3's with the markers that its text spells as added tokens: what
matters here is where control tokens stand, not their numbers.
"""

from __future__ import annotations

import functools
import os
import re
import zipfile
from pathlib import Path

from tokenizers import AddedToken, Tokenizer

from api.assets import qwen3_directory
from api.cache import default_cache_dir, made_once
from api.preparation import AddedToken as ManifestToken
from api.preparation import Manifest, prepare_model
from api.rendering import ModelRenderer, _without_added_tokens
from api.wheels import _client, _run

_TRL = "trl==1.16.0"
_BAR = "\uff5c"  # DeepSeek's wide bar
_MARKER = re.compile(
    rf"<\|?/?[A-Za-z_|][^<>\s'\"{{}}=$]{{0,40}}>|<{_BAR}[^{_BAR}<>]{{1,40}}{_BAR}>|</{_BAR}[^<>]{{1,40}}>"
    r"|\[/?[A-Z_]{3,}\]|\[e~\[|\]~b\]|\]~!b\[|〈\|EOS\|〉"
)
# What the models' generation configs would name, by their spelling.
_STOPS = (
    "<end_of_utterance>",
    "<|eot|>",
    "<|im_end|>",
    "<|eot_id|>",
    "<|eom_id|>",
    "<|end|>",
    "<|return|>",
    "<|call|>",
    "</s>",
    "<EOS>",
    f"<{_BAR}end▁of▁sentence{_BAR}>",
    "<end_of_turn>",
    "<turn|>",
    "<|tool_response>",
    "<|END_OF_TURN_TOKEN|>",
    "<|end_of_text|>",
    "<|assistant_end|>",
    "<|tools_suffix|>",
    "[e~[",
    "<end_of_sentence>",
    "<|message_sep|>",
    "<SPECIAL_12>",
    "</assistant>",
    "〈|EOS|〉",
)
_GLM_STOPS = ("<|user|>", "<|observation|>", "<|endoftext|>")


def chat_templates() -> dict[str, str]:
    """Every template's text by its file's stem."""
    folder = os.environ.get("TOKENSPLICE_TEMPLATES")
    files = sorted((Path(folder) if folder else _from_trl()).glob("*.jinja"))
    return {file.stem: file.read_text() for file in files if not file.stem.endswith("_training")}


@functools.cache
def qwen3_prepared() -> Path:
    """Qwen3's tokenizer and template, prepared."""
    return prepare_model(str(qwen3_directory()))


@functools.cache
def qwen3_renderer() -> ModelRenderer:
    """Qwen3 as a worker loads it."""
    return ModelRenderer.load(qwen3_prepared())


@functools.cache
def _base_tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(qwen3_prepared() / "tokenizer.json"))


def renderer_for(template: str, *, stops: tuple[str, ...] = ()) -> ModelRenderer:
    """A model for this template alone. stops: more tokens that end its generations."""
    base = _base_tokenizer()
    tokenizer = _without_added_tokens(base)  # shares the vocabulary: sixty of these cost little
    tokenizer.add_tokens([token for _, token in sorted(base.get_added_tokens_decoder().items())])
    markers = sorted({*_MARKER.findall(template), "<BOS>", "<EOS>", *stops})
    tokenizer.add_tokens([AddedToken(marker, normalized=False, special=True) for marker in markers])
    added = {
        token.content: ManifestToken(
            number, token.special, token.lstrip, token.rstrip, token.normalized, token.single_word
        )
        for number, token in tokenizer.get_added_tokens_decoder().items()
    }
    ends = [stop for stop in stop_tokens(template) + list(stops) if stop in added]
    manifest = Manifest(
        format_version=1,
        identity="test",
        special_tokens={"bos_token": "<BOS>", "eos_token": "<EOS>"},
        eos_ids=tuple(added[stop].id for stop in ends),
        added_tokens=added,
        vocab_size=max(token.id for token in added.values()) + 1,
        model_max_length=None,
    )
    return ModelRenderer(tokenizer, template, manifest, "test")


def stop_tokens(template: str) -> list[str]:
    """What ends a generation of the template's model."""
    if "[gMASK]" in template:
        return list(_GLM_STOPS)
    return [stop for stop in _STOPS if stop in template or stop == "<EOS>"]


def _from_trl() -> Path:
    def fetch(folder: Path) -> None:
        with _client(folder, lambda _line: None) as client:
            problem = _run(client(_TRL))
        assert problem is None, problem
        _unpack(folder)

    return made_once(default_cache_dir() / "assets" / "test-templates-trl-1.16.0", fetch)


def _unpack(folder: Path) -> None:
    """Keep the templates of the wheel, or of the package that uv unpacked."""
    for wheel in list(folder.glob("*.whl")):
        with zipfile.ZipFile(wheel) as archive:
            for name in archive.namelist():
                if name.startswith("trl/chat_templates/") and name.endswith(".jinja"):
                    (folder / Path(name).name).write_bytes(archive.read(name))
        wheel.unlink()
    for file in folder.glob("trl/chat_templates/*.jinja"):
        file.rename(folder / file.name)
