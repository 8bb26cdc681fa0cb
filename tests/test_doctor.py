"""`meshpar doctor`, and the one way in which messages name an extra."""

from __future__ import annotations

import ast
import importlib.metadata
import itertools
import json
import re
import tomllib

import jax
import pytest
from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from meshpar.cli import doctor
from meshpar.cli.main import main
from tests.test_imports import ROOT, sources

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
EXTRAS = PROJECT["optional-dependencies"]


def without(monkeypatch, *names, versions=()):
    """Let distributions be missing, or of other versions."""
    known, versions = importlib.metadata.version, dict(versions)

    def version(name):
        if name in names:
            raise importlib.metadata.PackageNotFoundError(name)
        return versions.get(name) or known(name)

    monkeypatch.setattr(importlib.metadata, "version", version)


def as_checkout(monkeypatch):
    """Let meshpar be a checkout that is not installed."""
    known = importlib.metadata.requires

    def requires(name):
        if name == "meshpar":
            raise importlib.metadata.PackageNotFoundError(name)
        return known(name)

    monkeypatch.setattr(importlib.metadata, "requires", requires)


@pytest.fixture(autouse=True)
def own_environment(monkeypatch):
    monkeypatch.setenv("XLA_PYTHON_CLIENT_PREALLOCATE", "false")


def told(capsys, *options):
    """Status, and what is printed."""
    status = main(["doctor", *options])
    return status, capsys.readouterr().out


def test_every_extra_has_words():
    assert doctor.EXTRAS.keys() == EXTRAS.keys()


def test_json_has_versions_devices_and_extras(capsys, monkeypatch):
    monkeypatch.setenv("JAX_NO_SUCH_OPTION", "1")
    as_checkout(monkeypatch)
    status, out = told(capsys, "--json")
    found = json.loads(out)
    assert status == (1 if found["problems"] else 0)
    packages = {each["name"]: each for each in found["packages"]}
    assert {"jax", "jaxlib", "flax", "optax", "orbax-checkpoint"} <= packages.keys()
    assert packages["jax"]["version"] == jax.__version__
    assert found["backend"] == "cpu"
    assert found["devices"] == [{"kind": "cpu", "number": 8}]
    assert found["targets"]["cpu"] == {"can_compile": True, "missing": []}
    assert found["environment"]["JAX_NO_SUCH_OPTION"] == "1"


def test_a_missing_extra_is_no_problem_and_says_how_to_get_it(capsys, monkeypatch):
    as_checkout(monkeypatch)
    without(monkeypatch, "grain")
    status, out = told(capsys)
    assert status == 0, out
    assert re.search(r"train +missing", out)
    assert "grain: pip install 'meshpar[train]'" in out


def test_an_extra_of_an_extra_counts(monkeypatch):
    as_checkout(monkeypatch)
    without(monkeypatch, "libtpu")
    extras = {each["name"]: each for each in doctor.report()["extras"]}
    assert extras["aot"]["missing"] == ["libtpu"]
    assert "aot" not in EXTRAS["test"] and "libtpu" not in extras["test"]["missing"]


def test_a_missing_package_of_the_core_is_a_problem(capsys, monkeypatch):
    as_checkout(monkeypatch)
    without(monkeypatch, "flax")
    status, out = told(capsys)
    assert status == 1 and "problem: flax is missing" in out


@pytest.mark.parametrize("name", ["optax", "grain"])
def test_an_unsupported_version_is_a_problem(name, capsys, monkeypatch):
    as_checkout(monkeypatch)
    without(monkeypatch, versions=[(name, "0.0.1")])
    status, out = told(capsys)
    assert status == 1
    assert re.search(rf"problem: {name} 0\.0\.1 is installed; >=0\.2", out)


def test_jax_without_devices_is_a_problem(capsys, monkeypatch):
    def fail():
        raise RuntimeError("no backend\nand more")

    monkeypatch.setattr(jax, "default_backend", fail)
    status, out = told(capsys)
    assert status == 1 and "JAX finds no devices: RuntimeError: no backend\n" in out


def test_requirements_are_read_as_packaging_reads_them(monkeypatch):
    as_checkout(monkeypatch)
    lines = [*PROJECT["dependencies"], *itertools.chain(*EXTRAS.values())]
    read = doctor.requirements("meshpar")
    for line, one in zip(lines, read, strict=True):
        wanted = Requirement(line)
        assert (one.name, {*one.extras}) == (wanted.name, wanted.extras)
        assert SpecifierSet(one.versions) == wanted.specifier


@pytest.mark.parametrize("needs", [">=0.10,<0.13", ">=5", "==0.0.40", "!=1.2,>1", ""])
def test_versions_are_compared_as_packaging_compares_them(needs):
    for version in (
        "0.9.9",
        "0.10",
        "0.10.0",
        "0.12.11",
        "0.13",
        "0.13.0",
        "1.2.0",
        "5",
    ):
        wanted = SpecifierSet(needs).contains(version)
        assert doctor.satisfies(version, needs) == wanted, version


def test_every_message_names_an_extra_in_one_way():
    """Messages call `install_extra` with extras that exist; docstrings spell it out."""
    written = []
    for path in sources("meshpar", "models", "recipes"):
        text = (ROOT / path).read_text()
        assert "pip install '.[" not in text, path
        for extras in re.findall(r"meshpar\[([\w,-]+)\]", text):
            assert {*extras.split(",")} <= EXTRAS.keys(), path
        for node in ast.walk(ast.parse(text)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "install_extra":
                constants = (isinstance(each, ast.Constant) for each in node.args)
                # These two ask for an extra by a name of a table.
                tables = "meshpar/cli/doctor.py", "recipes/trackers.py"
                assert all(constants) or path in tables
                written += [each.value for each in node.args if hasattr(each, "value")]
    assert {*written} <= EXTRAS.keys() and len(written) > 10
