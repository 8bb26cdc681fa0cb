"""The public names: imported when asked for, and what type checkers see of them."""

import ast
import functools
import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

import meshpar

ROOT = Path(__file__).parents[1]
TREE = ast.parse(Path(meshpar.__file__).read_text())


def names_for_type_checkers():
    """Public name -> the module that it is imported from under `TYPE_CHECKING`."""
    guarded = next(
        node
        for node in TREE.body
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    )
    return {
        alias.name: node.module
        for node in guarded.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }


def test_the_three_lists_of_public_names_agree():
    assert names_for_type_checkers() == meshpar._HOMES
    assert meshpar.__all__ == sorted({*meshpar._HOMES, "InputError", "emulate"})


@pytest.mark.parametrize("name, home", meshpar._HOMES.items())
def test_each_public_name_is_what_its_module_has(name, home):
    assert getattr(meshpar, name) is getattr(importlib.import_module(home), name)
    assert name in dir(meshpar)


# A fork for each statement, of a Python that has imported JAX and nothing of meshpar.
FORKS = """
import json, os, sys
import jax, flax.nnx, optax, orbax.checkpoint

assert "meshpar" not in sys.modules
for first in json.loads(sys.argv[1]):
    if not os.fork():
        exec(first)
        import meshpar
        functions = meshpar.audit, meshpar.lint, meshpar.emulate
        print(json.dumps([first, all(map(callable, functions))]), flush=True)
        os._exit(0)
    assert os.wait()[1] == 0, first
"""
FIRST = [
    "import meshpar.audit.report, meshpar.lint.findings, meshpar.emulate",
    "from meshpar.cli import audit, lint, fuzz",
    "from meshpar import *",
    "pass",
]
PARTS = "import meshpar; meshpar.testing.check_layouts, meshpar.layout.Layout"


@functools.cache
def callable_after():
    """Statement -> whether functions are what their names are bound to behind it."""
    command = [sys.executable, "-c", FORKS, json.dumps([*FIRST, PARTS])]
    child = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert child.returncode == 0, child.stderr
    return dict(map(json.loads, child.stdout.splitlines()))


@pytest.mark.slow
@pytest.mark.parametrize("first", FIRST)
def test_functions_keep_their_names_from_parts_of_the_same_names(first):
    """Importing a part of a package binds the package's name to it."""
    assert callable_after()[first] is True


def test_parts_are_found_as_attributes():
    assert callable_after()[PARTS] is True


@pytest.mark.parametrize("former, new", meshpar._FORMER_MODULES.items())
def test_a_module_that_moved_is_found_by_its_former_name_for_one_release(former, new):
    sys.modules.pop(former, None)
    with pytest.warns(DeprecationWarning, match=f"{former} is now {new};"):
        assert importlib.import_module(former) is importlib.import_module(new)


def test_a_misspelt_name_is_told_with_the_nearest():
    with pytest.raises(AttributeError, match="'make_train_step'"):
        meshpar.make_trainstep  # noqa: B018
    with pytest.raises(ImportError, match="'make_trainstep'"):
        from meshpar import make_trainstep  # noqa: F401
