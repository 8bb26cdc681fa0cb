"""The shape of the library, read from its sources: what keeps it easy to read."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.test_imports import ROOT, file_of, imported_modules, module_of, sources

FIRST_WORDS = {"Of", "What", "Whether", "That", "Those", "As", "By", "Its"}
"""Words that no docstring begins with: they say what comes back in its body only."""

NAMED_BY_RELATION = re.compile(r"(_of$|^_?of_|_of_|^_?of$)")

LIBRARY = [Path(path) for path in sources("meshpar") if "__pycache__" not in path]
LIBRARY = [path for path in LIBRARY if path.parts[1] not in ("models", "recipes")]
ALL = [*LIBRARY, *map(Path, sources("models", "recipes"))]


def tree_of(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text(), str(path))


def docstrings(body: list[ast.stmt]) -> Iterator[ast.Constant]:
    """Yield the docstrings of a body: of modules, classes, functions and constants."""
    for node in body:
        constant = node.value if isinstance(node, ast.Expr) else None
        if isinstance(constant, ast.Constant) and isinstance(constant.value, str):
            yield constant
        yield from docstrings(getattr(node, "body", []))


def test_docstrings_begin_with_a_verb_or_with_what_comes_back():
    found = [
        f"{path}:{text.lineno}: {text.value.splitlines()[0]}"
        for path in ALL
        for text in docstrings(tree_of(path).body)
        if text.value.split()[0].strip(".,:") in FIRST_WORDS
    ]
    assert found == []


def test_functions_are_named_after_what_they_return():
    found = [
        f"{path}:{node.lineno}: {node.name}"
        for path in LIBRARY
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.FunctionDef) and NAMED_BY_RELATION.search(node.name)
    ]
    assert len(found) <= 15, found


def test_a_folder_has_as_many_files_as_a_reader_takes_in():
    counts = Counter(path.parent for path in LIBRARY)
    assert {str(folder): n for folder, n in counts.items() if n > 22} == {}


def test_few_files_are_short():
    found = [
        str(path)
        for path in LIBRARY
        if path.name != "__init__.py"
        and len((ROOT / path).read_text().splitlines()) < 60
    ]
    assert len(found) <= 25, found


def imported_files(path: str) -> set[str | None]:
    """Return the files that a file imports when it runs, in its functions too."""
    tree = tree_of(Path(path))
    tree.body = [
        node
        for node in tree.body
        if not (isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test))
    ]
    return set(map(file_of, imported_modules(tree, module_of(path))))


def test_no_files_import_each_other_in_a_circle():
    files = [str(path) for path in LIBRARY if path.name != "__init__.py"]
    edges = {
        (path, to)
        for path in files
        for to in imported_files(path)
        if to in files and to != path
    }
    while edges:  # Those to files that import none, and from files that none imports.
        ends = [{edge[side] for edge in edges} for side in (0, 1)]
        kept = {edge for edge in edges if edge[1] in ends[0] and edge[0] in ends[1]}
        if kept == edges:
            break
        edges = kept
    assert sorted(edges) == []
