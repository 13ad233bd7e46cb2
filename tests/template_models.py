"""Chat templates to test with, and a tokenizer for each.

The templates come from the folder in TOKENSPLICE_TEMPLATES, else from the PyPI wheel `trl`. Their own
tokenizers are not at hand, so each gets Qwen3's with the markers that its text spells as added tokens: what
matters here is where control tokens stand, not their numbers.
"""

from __future__ import annotations

import functools
import os
import zipfile
from pathlib import Path

from api.assets import qwen3_directory
from api.cache import default_cache_dir, made_once
from api.preparation import prepare_model
from api.rendering import ModelRenderer
from api.template import stand_in
from api.wheels import _client, _run

_TRL = "trl==1.16.0"
_BAR = "\uff5c"  # DeepSeek's wide bar
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
# A generation that ends with one of these has opened the next message with it.
OPENING_STOPS = ("<|user|>", "<|observation|>", "<|tool_response>")


def chat_templates() -> dict[str, str]:
    """Every template's text by its file's stem: those of the named folder, else TRL's."""
    return folder_templates() or trl_templates()


def folder_templates() -> dict[str, str]:
    """The templates in the folder that TOKENSPLICE_TEMPLATES names."""
    folder = os.environ.get("TOKENSPLICE_TEMPLATES")
    return _read(Path(folder)) if folder else {}


@functools.cache
def trl_templates() -> dict[str, str]:
    """The templates in TRL's wheel."""
    return _read(_from_trl())


def trl_template_file(stem: str) -> Path:
    """One of the wheel's templates as a file."""
    return _from_trl() / f"{stem}.jinja"


def _read(folder: Path) -> dict[str, str]:
    files = sorted(folder.glob("*.jinja"))
    return {file.stem: file.read_text() for file in files if not file.stem.endswith("_training")}


@functools.cache
def qwen3_prepared() -> Path:
    """Qwen3's tokenizer and template, prepared."""
    return prepare_model(str(qwen3_directory()))


@functools.cache
def qwen3_renderer() -> ModelRenderer:
    """Qwen3 as a worker loads it."""
    return ModelRenderer.load(qwen3_prepared())


def renderer_for(template: str, *, stops: tuple[str, ...] = ()) -> ModelRenderer:
    """A model for this template alone. stops: more tokens that end its generations."""
    return stand_in(template, qwen3_renderer(), stops=(*stop_tokens(template), *stops))


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
