"""The tables in docs/templates.md say what is so, for each template and case."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.splice.template_table import CASES, COLUMNS, read_table, row, templates_by_table

DOCUMENT = (Path(__file__).parents[2] / "docs" / "templates.md").read_text()
TEMPLATES = templates_by_table()
PUBLISHED = 64


@pytest.mark.parametrize(("table", "stem"), [(table, stem) for table, found in TEMPLATES.items() for stem in found])
def test_a_template_does_what_its_row_says(table: str, stem: str) -> None:
    committed = read_table(table, DOCUMENT)
    if table == "folder" and len(TEMPLATES[table]) != PUBLISHED and stem not in committed:
        row(stem, TEMPLATES[table][stem])  # somebody else's folder: right or refused, whatever is written
        return
    assert row(stem, TEMPLATES[table][stem]).cells == committed[stem].cells, "run `make templates`"


def test_every_template_of_the_wheel_has_a_row_and_no_other_has() -> None:
    assert set(read_table("trl", DOCUMENT)) == set(TEMPLATES["trl"])
    assert len(TEMPLATES["trl"]) == 41


def test_at_least_so_many_of_the_published_templates_are_spliced() -> None:
    rows = read_table("folder", DOCUMENT).values()
    assert len(rows) == PUBLISHED
    assert all(set(made.cells) == set(COLUMNS) for made in rows)
    spliced = {case: sum(made.spliced(case) for made in rows) for case in CASES}
    assert spliced["user"] >= 62
    assert spliced["tool"] >= 44
