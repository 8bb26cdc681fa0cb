"""Imports point down, and models know logical axes only: read from the sources."""

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

# Lowest first; a module may import its own layer and those before it. The longest
# matching name counts. `meshpar` alone is the public API, which those above it use.
LAYERS = (
    ("meshpar.errors",),
    ("meshpar.chunk_bytes", "meshpar.expert_rooms", "meshpar.key_values"),
    ("meshpar.attention_method", "meshpar.attention_tiles"),
    ("meshpar.residual_names", "meshpar.collective_kinds", "meshpar.schedules"),
    ("meshpar.collective_channels",),
    (
        "meshpar.layout",
        "meshpar.hardware",
        "meshpar.topology",
        "meshpar.emulate",
    ),
    ("meshpar.collectives", "meshpar.distributed"),
    ("meshpar.rules", "meshpar.mesh", "meshpar.mesh_order"),
    ("meshpar.model",),
    ("meshpar.parallel", "meshpar.data"),
    ("meshpar.fft",),
    ("meshpar.planner", "meshpar.audit", "meshpar.train", "meshpar.lint"),
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


def file_of(module):
    """The source of a module of the library; None if it is a name in one."""
    stem = module.replace(".", "/")
    found = [f"{stem}.py", f"{stem}/__init__.py"]
    return next((path for path in found if (ROOT / path).exists()), None)


def layer_of(module):
    """The longest name in HEIGHT that `module` is or lies in; None for others' code."""
    parts = module.split(".")
    names = (".".join(parts[:length]) for length in range(len(parts), 0, -1))
    return next((name for name in names if name in HEIGHT), None)


def imported_modules(tree, module, *, is_package=False):
    """The modules that a file imports, wherever in it."""
    package = module.split(".") if is_package else module.split(".")[:-1]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            whole = ".".join([*base, *([node.module] if node.module else [])])
            for alias in node.names:
                deeper = f"{whole}.{alias.name}"
                yield deeper if deeper in HEIGHT else whole


def upward(tree, module, **options):
    """Imports of a higher layer than the module's own."""
    height = HEIGHT[layer_of(module)]
    found = imported_modules(tree, module, **options)
    layers = {name: layer_of(name) for name in found}
    return {name for name, layer in layers.items() if layer and HEIGHT[layer] > height}


def parse(path):
    return ast.parse((ROOT / path).read_text(), filename=path)


# It warns, and changes nothing, where it does not find what it knows.
PRIVATE_TO_JAX = {"meshpar/collective_channels.py": {"jax._src.interpreters"}}


@pytest.mark.parametrize("path", sources("meshpar", "models", "recipes"))
def test_every_import_points_down_and_none_is_private_to_jax(path):
    tree, module = parse(path), module_of(path)
    is_package = path.endswith("__init__.py")
    assert upward(tree, module, is_package=is_package) == set()
    private = {
        name
        for name in imported_modules(tree, module, is_package=is_package)
        if name.startswith("jax._src")
    }
    assert private == PRIVATE_TO_JAX.get(path, set())


@pytest.mark.parametrize(
    "path", sources("meshpar/planner", "meshpar/schedules", "meshpar/hardware")
)
def test_arithmetic_imports_no_jax(path):
    """Neither itself nor through the modules of the library that it imports."""
    seen, reached = set(), [path]
    while reached:
        path = reached.pop()
        is_package = path.endswith("__init__.py")
        names = set(
            imported_modules(parse(path), module_of(path), is_package=is_package)
        )
        assert not {name for name in names if name.split(".")[0] in NEEDS_JAX}, path
        more = {file_of(name) for name in names if name.startswith("meshpar.")} - seen
        seen |= more
        reached += [path for path in more if path]


@pytest.mark.parametrize(
    "path", [path for path in sources("meshpar") if path.count("/") == 1]
)
def test_every_module_of_the_library_has_a_layer(path):
    if path != "meshpar/__init__.py":
        assert layer_of(module_of(path)) != "meshpar"


@pytest.mark.parametrize(
    "module, line, found",
    [
        ("meshpar.rules.rules", "from meshpar.layout import Layout", set()),
        ("meshpar.rules.rules", "from meshpar.mesh import make_mesh", set()),
        ("meshpar.rules.rules", "from meshpar import model", {"meshpar.model"}),
        ("meshpar.rules.rules", "from .. import model", {"meshpar.model"}),
        ("meshpar.rules.rules", "from meshpar import Layout", {"meshpar"}),
        ("meshpar.parallel.norm", "import meshpar.train.step", {"meshpar.train.step"}),
        ("meshpar.parallel.norm", "from ..train import step", {"meshpar.train"}),
        (
            "meshpar.lint",
            "def f():\n    import meshpar.models.llama",
            {"meshpar.models.llama"},
        ),
        ("meshpar", "from meshpar.cli.main import main", {"meshpar.cli.main"}),
        ("meshpar.cli.lint", "from meshpar import Layout", set()),
        ("meshpar.models.llama", "from meshpar import Model", set()),
        ("meshpar.models.llama", "import meshpar.recipes", {"meshpar.recipes"}),
        ("meshpar.train.step", "import jax.numpy as jnp", set()),
    ],
)
def test_the_reader_of_imports_finds_those_that_point_up(module, line, found):
    assert upward(ast.parse(line), module) == found


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


@pytest.mark.parametrize("path", sources("models"))
def test_a_model_names_no_mesh_axis(path):
    assert constants(parse(path)) & MESH_AXIS_NAMES == set()


def test_the_reader_of_constants_leaves_docstrings_out():
    code = 'def f():\n    "tensor"\n    return "fsdp", ("stage",)'
    assert constants(ast.parse(code)) == {"fsdp", "stage"}
