"""Notebooks of the documentation: they run, and their pages show what they print."""

from __future__ import annotations

import importlib.util
import json

import pytest

from tests.notebooks import ran, shown
from tests.test_imports import ROOT

NOTEBOOKS = sorted((ROOT / "docs" / "notebooks").glob("*.ipynb"))
each_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def cells(path):
    return json.loads(path.read_text())["cells"]


@each_notebook
def test_a_notebook_is_stored_as_it_ran(path):
    code = [cell for cell in cells(path) if cell["cell_type"] == "code"]
    assert [cell["execution_count"] for cell in code] == [*range(1, len(code) + 1)]
    outputs = [*shown(code)]
    assert [kind for kind, _ in outputs].count("text/html") >= 5
    text = "".join(text for _, text in outputs)
    assert "Error" not in text and "Warning" not in text


@each_notebook
def test_the_page_of_a_notebook_has_every_cell_and_picture(path):
    spec = importlib.util.spec_from_file_location("h", ROOT / "docs/mkdocs_hooks.py")
    hooks = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(hooks)
    page = hooks.notebook_page(path)
    assert all("".join(cell["source"]) in page for cell in cells(path))
    assert page.count('<div class="meshpar">') >= 5
    assert f"notebooks/{path.stem}.md" in (ROOT / ".mkdocs.yml").read_text()


@pytest.mark.slow
@each_notebook
def test_a_notebook_runs_and_shows_what_is_stored(path):
    """If it shows something else, `make notebooks` stores that: look at it."""
    pytest.importorskip("nbclient", reason="pip install 'meshpar[test]'")
    assert [*shown(ran(path).cells)] == [*shown(cells(path))]
