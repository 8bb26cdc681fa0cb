"""The map of the library is true: its rooms, the names in them, and its pictures."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs/how_it_works.md"
PACKAGES = sorted(
    path.parent.relative_to(ROOT / "meshpar")
    for path in (ROOT / "meshpar").glob("**/__init__.py")
    if path.parent != ROOT / "meshpar"
)
ROOMS = [str(room) for room in PACKAGES if room.parts[0] not in ("models", "recipes")]


def docstring(room):
    source = (ROOT / "meshpar" / room / "__init__.py").read_text()
    return ast.get_docstring(ast.parse(source))


def defined_names(path):
    """The names at the top level of a file, those that it imports among them."""
    names = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            names.add(node.name)
        elif isinstance(node, ast.Assign | ast.AnnAssign):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            names |= {
                name.id
                for target in targets
                for name in ast.walk(target)
                if isinstance(name, ast.Name)
            }
        elif isinstance(node, ast.ImportFrom):
            names |= {alias.asname or alias.name for alias in node.names}
    return names


def is_there(room, word):
    """Return True if a folder, file, `file.name` or name is in the room or above it."""
    if word.endswith(".json") or "=" in word:
        return True
    folder = ROOT / "meshpar" / room
    words = word.removeprefix("meshpar").strip(" ./").replace("/", ".").split(".")
    for base in (folder, folder.parent, ROOT / "meshpar"):
        whole = base.joinpath(*words)
        if whole.is_dir() or whole.with_suffix(".py").exists():
            return True
        file = base.joinpath(*words[:-1]).with_suffix(".py")
        if len(words) > 1 and file.exists() and words[-1] in defined_names(file):
            return True
    return any(word in defined_names(path) for path in folder.glob("*.py"))


@pytest.mark.parametrize("room", ROOMS)
def test_the_names_in_a_rooms_docstring_are_in_the_room(room):
    words = re.findall(r"`([^`]+)`", docstring(room).replace("\n", " "))
    assert [word for word in words if not is_there(room, word)] == []


def test_the_page_has_every_room_with_the_first_sentence_of_its_docstring():
    rows = re.findall(r"^\| `([\w/]+)` \| (.+?) \|$", PAGE.read_text(), re.M)
    assert dict(rows) == {room: docstring(room).splitlines()[0] for room in ROOMS}


def test_every_file_that_the_page_names_is_there():
    paths = re.findall(r"`((?:meshpar|tests|models)/[\w/]+\.py)`", PAGE.read_text())
    assert paths and [path for path in paths if not (ROOT / path).exists()] == []
