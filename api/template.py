"""`tokensplice template check`: the template report of a model, or of a bare template file, for a person."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import msgspec

from api.assets import qwen3_directory
from api.preparation import prepare_model
from api.rendering import ModelRenderer
from splice.boundary import Splicer, TemplateReport

_BAR = "\uff5c"  # DeepSeek's wide bar
# How published templates spell their control tokens.
_MARKER = re.compile(
    rf"<\|?/?[A-Za-z_|][^<>\s'\"{{}}=$]{{0,40}}>|<{_BAR}[^{_BAR}<>]{{1,40}}{_BAR}>|</{_BAR}[^<>]{{1,40}}>"
    r"|\[/?[A-Z_]{3,}\]|\[e~\[|\]~b\]|\]~!b\[|\u3008\|EOS\|\u3009"
)
_STAND_IN_TOKENS = {"bos_token": "<BOS>", "eos_token": "<EOS>"}
_SECTIONS = {
    "A turn's end": ("spliceable", "terminator", "tool_terminator", "glue", "stop_tokens"),
    "A reply's beginning": (
        "generation_prompt",
        "generation_prompt_after_tools",
        "thinking",
        "thinking_markers",
        "generation_only_kwargs",
    ),
    "What may follow a reply": ("appendable", "refusals"),
    "What the template does": ("rewrites", "tools_in_fragment", "outline_needed", "call_arguments"),
}


def check(source: str, tokenizer: str | None = None) -> TemplateReport:
    """The report on a model's template, or on a `.jinja` file with another model's tokenizer or a stand-in.

    Raises PreparationError, TemplateRejected.
    """
    path = Path(source)
    if not path.is_file():
        return Splicer(ModelRenderer.load(prepare_model(source))).report
    if tokenizer is not None:
        return Splicer(ModelRenderer.from_template_file(path, prepare_model(tokenizer))).report
    base = ModelRenderer.load(prepare_model(str(qwen3_directory())))
    return Splicer(stand_in(path.read_bytes().decode(), base)).report


def stand_in(template: str, base: ModelRenderer, *, stops: Sequence[str] = ()) -> ModelRenderer:
    """A model for a bare template: another's vocabulary, in which every marker that the template spells is one token.

    stops: the tokens that end its generations, beside `<EOS>`.
    """
    markers = sorted({*_MARKER.findall(template), *_STAND_IN_TOKENS.values(), *stops})
    return base.with_markers(template, markers, special=_STAND_IN_TOKENS, stops=(*stops, _STAND_IN_TOKENS["eos_token"]))


def table(report: TemplateReport) -> str:
    """The report as aligned lines under headings: one field each, its parts below one another."""
    width = max(len(name) for name in report.__struct_fields__) + 2
    fields = msgspec.to_builtins(report)
    lines: list[str] = []
    for heading, names in _SECTIONS.items():
        lines += ["", heading] if lines else [heading]
        for name in names:
            parts = _lines(fields[name])
            lines += [f"  {name.replace('_', ' ') if n == 0 else '':<{width}}{part}" for n, part in enumerate(parts)]
    return "\n".join(lines)


def _lines(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{'yes' if allowed else 'no':<4}{kind}" for kind, allowed in value.items()]
    if isinstance(value, list | tuple):
        return [item if " " in str(item) else repr(item) for item in value] or ["-"]
    if isinstance(value, bool):
        return ["yes" if value else "no"]
    return [repr(value)]
