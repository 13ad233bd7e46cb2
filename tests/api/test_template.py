"""`template check` reports for a person and for a program, on a model and on a bare file."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from api.assets import qwen3_directory
from api.cli import main

HARMLESS = (
    "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|stop|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def run(*arguments: str) -> tuple[int, str]:
    outcome = CliRunner().invoke(main, ["template", "check", *arguments])
    return outcome.exit_code, outcome.output


def file_with(template: str, folder: Path) -> str:
    path = folder / "some.jinja"
    path.write_text(template)
    return str(path)


def test_a_models_report_as_json_has_the_fields_of_the_interface() -> None:
    code, output = run(str(qwen3_directory()), "--json")
    report = json.loads(output)
    assert code == 0
    assert report["spliceable"] is True
    assert (report["terminator"], report["glue"]) == ("<|im_end|>", "\n")
    assert report["generation_prompt"] == "<|im_start|>assistant\n"
    assert report["appendable"]["tool"] is True
    assert report["rewrites"] == ["drops reasoning from earlier turns", *report["rewrites"][1:]]
    assert report["refusals"] == []


def test_a_report_reads_as_a_table() -> None:
    code, output = run(str(qwen3_directory()))
    assert code == 0
    assert "A turn's end\n  spliceable" in output
    assert "yes tool\n" in output


def test_a_bare_file_is_checked_with_a_stand_in_that_knows_its_markers(tmp_path: Path) -> None:
    code, output = run(file_with(HARMLESS, tmp_path), "--json")
    assert code == 0
    assert json.loads(output)["terminator"] == "<|stop|>"


def test_a_bare_file_takes_its_ids_from_a_named_model(tmp_path: Path) -> None:
    template = HARMLESS.replace("<|start|>", "<|im_start|>").replace("<|stop|>", "<|im_end|>")
    code, output = run(file_with(template, tmp_path), "--tokenizer", str(qwen3_directory()), "--json")
    assert code == 0
    assert set(json.loads(output)["stop_tokens"]) == {"<|im_end|>", "<|endoftext|>"}


@pytest.mark.parametrize(
    ("template", "words"),
    [
        ("{{ raise_exception('not for you') }}", "not for you"),
        ("{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}", "ran for too long"),
        ("{{ messages[0].content.__class__.__mro__ }}" + HARMLESS, "unsafe"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{{ 'a' * 10000000000 }}" + HARMLESS, "wrote too much"),
    ],
)
def test_a_template_that_cannot_be_spliced_is_told_in_its_own_words(template: str, words: str, tmp_path: Path) -> None:
    code, output = run(file_with(template, tmp_path), "--json")
    report = json.loads(output)
    assert code == 1
    assert report["spliceable"] is False
    assert not any(report["appendable"].values())
    assert words in report["refusals"][0]


def test_a_template_that_is_no_template_is_refused_with_its_line(tmp_path: Path) -> None:
    code, output = run(file_with("a\n{% endfor %}", tmp_path))
    assert code == 2
    assert "line 2" in output
