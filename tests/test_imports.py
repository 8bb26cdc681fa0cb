"""Imports point down, and models know logical axes only: read from the sources."""

import ast
import functools
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first; a module may import its own layer and those before it. The longest
# matching name counts. `meshpar` alone is the public API, which those above it use.
LAYERS = (
    ("meshpar.errors", "meshpar.html"),
    ("meshpar.foreign_files",),
    ("meshpar.collective_kinds", "meshpar.schedules"),
    ("meshpar.layout", "meshpar.hardware", "meshpar.machine"),
    ("meshpar.collectives", "meshpar.distributed"),
    ("meshpar.rules",),
    ("meshpar.trace",),
    ("meshpar.model",),
    ("meshpar.parallel", "meshpar.data"),
    ("meshpar.fft", "meshpar.checks"),
    (
        *("meshpar.planner", "meshpar.audit", "meshpar.train", "meshpar.lint"),
        "meshpar.optimizers",
    ),
    ("meshpar.calibration",),
    ("meshpar",),
    ("meshpar.cli", "meshpar.testing", "meshpar.__main__"),
    ("meshpar.models",),
    ("meshpar.recipes",),
)
HEIGHT = {module: height for height, layer in enumerate(LAYERS) for module in layer}

NEEDS_JAX = {"jax", "jaxlib", "flax", "optax", "orbax"}

# Mesh axes whose names are no English words of a model's own.
MESH_AXIS_NAMES = {"tensor", "fsdp", "stage"}


def sources(*folders):
    paths = [
        path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))
    ]
    return [str(path.relative_to(ROOT)) for path in paths]


def module_of(path):
    """The name it is imported by; models/ and recipes/ are linked into meshpar/."""
    name = path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")
    return name if name.split(".")[0] in ("meshpar", "tests") else f"meshpar.{name}"


@functools.cache
def file_of(module):
    """The source of a module of the library; None if it is a name in one."""
    stem = module.replace(".", "/")
    found = [f"{stem}.py", f"{stem}/__init__.py"]
    return next((path for path in found if (ROOT / path).exists()), None)


@functools.cache
def layer_of(module):
    """The longest name in HEIGHT that `module` is or lies in; None for others' code."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in HEIGHT), None)


def imported_modules(tree, module, *, is_package=False):
    """The modules that a file imports, wherever in it."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in statements(tree.body):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{whole}.{alias.name}"
                yield deeper if deeper in HEIGHT else whole


def statements(body):
    """Those of a body and of all inside; most nodes of a tree are expressions."""
    for node in body:
        yield node
        for part in ("body", "orelse", "finalbody", "handlers", "cases"):
            yield from statements(getattr(node, part, ()))


def higher(imported, module):
    """Those of a module's imports that are of a higher layer than its own."""
    height = HEIGHT[layer_of(module)]
    layers = {name: layer_of(name) for name in imported}
    return {name for name, layer in layers.items() if layer and HEIGHT[layer] > height}


def parse(path):
    return ast.parse((ROOT / path).read_text(), filename=path)


@functools.cache
def imports_of(path):
    """The modules that a file of the library imports."""
    is_package = path.endswith("__init__.py")
    return {*imported_modules(parse(path), module_of(path), is_package=is_package)}


# It warns, and changes nothing, where it does not find what it knows.
PRIVATE_TO_JAX = {"meshpar/machine/collective_channels.py": {"jax._src.interpreters"}}


def test_every_import_points_down_and_none_is_private_to_jax():
    paths = sources("meshpar", "models", "recipes")
    above = {path: higher(imports_of(path), module_of(path)) for path in paths}
    assert {path: names for path, names in above.items() if names} == {}
    private = {
        path: {name for name in imports_of(path) if name.startswith("jax._src")}
        for path in paths
    }
    assert {path: names for path, names in private.items() if names} == PRIVATE_TO_JAX


def test_arithmetic_imports_no_jax():
    """Neither itself nor through the modules of the library that it imports.

    What traces a model for the planner are files of their own, which none reads.
    """
    paths = sources("meshpar/planner", "meshpar/schedules", "meshpar/hardware")
    for traces in ("from_model", "volume_traces"):
        paths.remove(f"meshpar/planner/{traces}.py")
    for first in paths:
        seen, reached = {first}, [first]
        while reached:
            path = reached.pop()
            names = imports_of(path)
            heavy = {name for name in names if name.split(".")[0] in NEEDS_JAX}
            assert not heavy, (first, path)
            own = {file_of(name) for name in names if name.startswith("meshpar.")}
            more = own - seen - {None}
            seen |= more
            reached += more


def test_every_module_of_the_library_has_a_layer():
    paths = {path for path in sources("meshpar") if path.count("/") == 1}
    paths.remove("meshpar/__init__.py")
    assert not [path for path in paths if layer_of(module_of(path)) == "meshpar"]


@pytest.mark.parametrize(
    "module, line, found",
    [
        ("meshpar.rules.rules", "from meshpar.layout import Layout", set()),
        ("meshpar.rules.rules", "from meshpar.machine.mesh import make_mesh", set()),
        ("meshpar.rules.rules", "from meshpar import model", {"meshpar.model"}),
        ("meshpar.rules.rules", "from .. import model", {"meshpar.model"}),
        ("meshpar.rules.rules", "from meshpar import Layout", {"meshpar"}),
        (
            "meshpar.parallel.reduction",
            "import meshpar.train.step",
            {"meshpar.train.step"},
        ),
        ("meshpar.parallel.reduction", "from ..train import step", {"meshpar.train"}),
        (
            "meshpar.lint",
            "def f():\n    import meshpar.models.llama",
            {"meshpar.models.llama"},
        ),
        (
            "meshpar.lint",
            "if 1:\n pass\nelse:\n import meshpar.testing",
            {"meshpar.testing"},
        ),
        (
            "meshpar.lint",
            "try: pass\nexcept E:\n import meshpar.cli",
            {"meshpar.cli"},
        ),
        (
            "meshpar.lint",
            "try: pass\nfinally:\n import meshpar.cli",
            {"meshpar.cli"},
        ),
        (
            "meshpar.lint",
            "match a:\n case 1:\n  import meshpar.models",
            {"meshpar.models"},
        ),
        ("meshpar", "from meshpar.cli.main import main", {"meshpar.cli.main"}),
        ("meshpar.cli.lint", "from meshpar import Layout", set()),
        ("meshpar.models.llama", "from meshpar import Model", set()),
        ("meshpar.models.llama", "import meshpar.recipes", {"meshpar.recipes"}),
        ("meshpar.train.step", "import jax.numpy as jnp", set()),
    ],
)
def test_the_reader_of_imports_finds_those_that_point_up(module, line, found):
    assert higher(imported_modules(ast.parse(line), module), module) == found


def constants(tree):
    """Every string constant that is no docstring."""
    documented = (ast.Module, ast.ClassDef, ast.FunctionDef)
    docstrings = {
        id(node.body[0].value)
        for node in ast.walk(tree)
        if isinstance(node, documented) and ast.get_docstring(node, clean=False)
    }
    return {
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and id(node) not in docstrings
    }


def test_a_model_names_no_mesh_axis():
    named = {
        path: constants(parse(path)) & MESH_AXIS_NAMES for path in sources("models")
    }
    assert named
    assert {path: names for path, names in named.items() if names} == {}


def test_the_reader_of_constants_leaves_docstrings_out():
    code = 'def f():\n    "tensor"\n    return "fsdp", ("stage",)'
    assert constants(ast.parse(code)) == {"fsdp", "stage"}
