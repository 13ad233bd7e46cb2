"""`tokensplice template check`: the template report of a model, or of a bare template file, for a person."""

from __future__ import annotations

from pathlib import Path

import msgspec

from api.assets import qwen3_directory
from api.preparation import PreparationError, prepare_model
from api.rendering import ModelRenderer
from splice.boundary import Splicer, TemplateReport


def check(source: str, tokenizer: str | None = None) -> TemplateReport:
    """The report on a model's template, or on a `.jinja` file with another model's tokenizer.

    Raises PreparationError, TemplateRejected.
    """
    path = Path(source)
    if path.suffix == ".jinja" and not path.is_file():
        raise PreparationError(f"{source} is no file")
    if path.is_file():
        directory = prepare_model(tokenizer or str(qwen3_directory()))
        return Splicer(ModelRenderer.from_template_file(path, directory)).report
    return Splicer(ModelRenderer.load(prepare_model(source))).report


def table(report: TemplateReport) -> str:
    """The report as aligned lines: one field each, its parts below one another."""
    width = max(len(name) for name in report.__struct_fields__) + 2
    lines: list[str] = []
    for name, value in msgspec.to_builtins(report).items():
        parts = _lines(value)
        lines += [f"{name if n == 0 else '':<{width}}{part}" for n, part in enumerate(parts)]
    return "\n".join(lines)


def _lines(value: object) -> list[str]:
    if isinstance(value, dict):
        return [f"{'yes' if allowed else 'no':<4}{kind}" for kind, allowed in value.items()]
    if isinstance(value, list | tuple):
        return [item if " " in str(item) else repr(item) for item in value] or ["-"]
    return [repr(value) if isinstance(value, str) else str(value).lower()]
