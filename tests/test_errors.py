"""Every error of bad input has a key, of a room that the reference documents."""

import ast
import re
from collections.abc import Iterable, Iterator

import pytest

from meshpar import InputError
from tests.test_imports import ROOT, sources

PAGE = ROOT / "docs" / "reference" / "errors.md"
DOCUMENTED = dict(re.findall(r"^\| `(\w+)` \| `([\w.]+)` \|", PAGE.read_text(), re.M))
"""Room -> an example of a key, as in the reference's table."""

KEY = re.compile(r"(\w+)\.[a-z0-9_]+")

TEXTS = {
    path: (ROOT / path).read_text() for path in sources("meshpar", "models", "recipes")
}


@pytest.fixture(scope="module")
def constructions():
    """Where an input error is made -> the call; kinds that make their key need none."""
    nodes = {
        path: [*ast.walk(ast.parse(text))]
        for path, text in TEXTS.items()
        if "Error(" in text
    }
    kinds = error_classes(node for found in nodes.values() for node in found)
    own = {name for name, kind in kinds.items() if makes_its_key(kind)}
    return {
        f"{path}:{node.lineno}": node
        for path, found in nodes.items()
        for node in found
        if isinstance(node, ast.Call) and name_of(node.func) in kinds
        if key_node(node) is not None or name_of(node.func) not in own
    }


def error_classes(nodes: Iterable[ast.AST]) -> dict[str, ast.ClassDef]:
    """`InputError` and all that derives from it, in any file, by name."""
    classes = [node for node in nodes if isinstance(node, ast.ClassDef)]
    found = {one.name: one for one in classes if one.name == "InputError"}
    while more := [
        one
        for one in classes
        if one.name not in found and found.keys() & {*map(name_of, one.bases)}
    ]:
        found |= {one.name: one for one in more}
    return found


def makes_its_key(kind: ast.ClassDef) -> bool:
    """Whether its `__init__` gives `super()` a key that is not an argument's alone."""
    return any(
        key is not None and not isinstance(key, ast.Name)
        for node in ast.walk(kind)
        if isinstance(node, ast.Call) and name_of(node.func) == "__init__"
        for key in [key_node(node)]
    )


def name_of(node: ast.expr) -> str:
    """The last part of a dotted name; empty of anything else."""
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def key_node(call: ast.Call) -> ast.expr | None:
    """What stands after `key=`."""
    return next((word.value for word in call.keywords if word.arg == "key"), None)


def spelled(key: ast.expr | None) -> Iterator[str]:
    """The keys that an expression spells out, `_` for what it puts into one.

    What it takes from another error, an argument or a function is not spelled out.
    """
    if isinstance(key, ast.Constant):
        yield str(key.value)
    elif isinstance(key, ast.JoinedStr):
        parts = [
            one.value if isinstance(one, ast.Constant) else "_" for one in key.values
        ]
        yield "".join(map(str, parts))
    elif isinstance(key, ast.IfExp):
        yield from spelled(key.body)
        yield from spelled(key.orelse)


def test_every_input_error_is_made_with_a_key(constructions):
    assert len(constructions) > 500
    assert [at for at, call in constructions.items() if key_node(call) is None] == []


def test_every_key_is_of_a_documented_room(constructions):
    rooms = {*DOCUMENTED, "_"}
    wrong = [
        (at, key)
        for at, call in constructions.items()
        for key in spelled(key_node(call))
        if (match := KEY.fullmatch(key)) is None or match[1] not in rooms
    ]
    assert wrong == []


REASONS = {"Finding": None, "Problem": 2, "Rejected": 2, "Requirement": 0}
"""Kinds that carry a key -> its position among the arguments; None is `key=`."""


def test_every_finding_and_reason_has_a_key_of_a_documented_room():
    calls = [
        node
        for text in TEXTS.values()
        if any(f"{kind}(" in text for kind in REASONS)
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and name_of(node.func) in REASONS
    ]
    keys = [
        key_node(call) if at is None else call.args[at]
        for call in calls
        for at in [REASONS[name_of(call.func)]]
    ]
    assert len(keys) > 30 and None not in keys
    rooms = {key.partition(".")[0] for one in keys for key in spelled(one)}
    assert rooms <= DOCUMENTED.keys()


def test_every_documented_key_is_of_its_room_and_in_the_sources():
    assert {key.partition(".")[0]: key for key in DOCUMENTED.values()} == DOCUMENTED
    text = "\n".join(TEXTS.values())
    assert [key for key in DOCUMENTED.values() if f'"{key}"' not in text] == []


def test_an_error_of_ones_own_may_have_a_key():
    assert InputError("no").key == "input"
    error = InputError("no", key="batch.missing_array")
    assert (str(error), error.key) == ("no", "batch.missing_array")
