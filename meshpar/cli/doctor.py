"""Print versions, devices, and extras: what is installed, and whether it fits.

For a report of a fault, and to find why something is missing. Versions are compared
here, as `packaging` is no dependency of the core: the ranges of `pyproject.toml` have
numbers, commas and comparisons alone.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import operator
import os
import platform
import re
import sysconfig
import tomllib
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import meshpar
from meshpar.errors import install_extra, printable
from meshpar.hardware.platforms import PLATFORMS

EXAMPLE = "meshpar doctor --json"
STATUSES = "0 done, 1 something does not work or is unsupported, 2 bad input"

EXTRAS = {
    "train": "`meshpar train`: order of the data, checkpoints",
    "aot": "audits and `plan --confirm` for absent GPUs and TPUs: their compilers",
    "convert": "weights of other projects: safetensors, GGUF, tokenizers, templates",
    "quantized": "generation with weights of 8 bits",
    "tokenizers": "`meshpar train --tokenizer`",
    "parquet": "`meshpar train --data` with Parquet files",
    "images": "`recipes.diffusion`: digits, a classifier, folders of images",
    "tensorboard": "`meshpar train --tracker tensorboard`",
    "wandb": "`meshpar train --tracker wandb`",
    "mlflow": "`meshpar train --tracker mlflow`",
    "volumes": "`recipes.segment_volume`: the MNI152 template, NIfTI files",
    "plots": "pictures and pages of `schedule`, `show`, `plan` and `audit`",
    "convert-test": "development: comparisons with Transformers",
    "browser": "development: tests that open pages in Chromium",
    "docs": "development: `make docs`",
    "test": "development: the tests",
}
"""Extra -> what it gives."""

_BROUGHT = {"jaxlib": "jax", "orbax-checkpoint": "flax"}
"""Package -> the package of the core that needs it."""

_REQUIREMENT = re.compile(
    r"([\w.-]+)\s*(?:\[([^]]*)\])?\s*\(?([^;)]*)\)?\s*(?:;(.*))?", re.ASCII
)
_EXTRA = re.compile(r"""extra\s*==\s*['"]([\w.-]+)['"]""")
_CLAUSE = re.compile(r"\s*(>=|<=|==|!=|>|<)\s*(\d+(?:\.\d+)*)\s*")
_COMPARED = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    ">": operator.gt,
    "<": operator.lt,
}


class PackageRequirement(NamedTuple):
    """A line of a distribution's requirements.

    Args:
        name: Distribution that is needed.
        extras: Extras of it that are needed.
        versions: Range such as `>=0.10,<0.13`; empty for any.
        extra: Extra that needs it; empty if the core does.
    """

    name: str
    extras: tuple[str, ...]
    versions: str
    extra: str


class Package(NamedTuple):
    """An installed or missing distribution.

    Args:
        name: Its name.
        version: The installed version; None if it is missing.
        needs: Range of supported versions; empty for any.
    """

    name: str
    version: str | None
    needs: str

    @property
    def status(self) -> str:
        """`ok`, `missing` or `unsupported`."""
        if self.version is None:
            return "missing"
        return "ok" if satisfies(self.version, self.needs) else "unsupported"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the subcommand."""
    parser.add_argument(
        "--json", action="store_true", help="print one JSON object on stdout"
    )


def run(args: argparse.Namespace) -> int:
    """Print the findings; return 1 if there are problems."""
    found = report()
    if args.json:
        print(json.dumps(found))
    else:
        print("\n".join(printable(line) for line in _lines(found)))
    return 1 if found["problems"] else 0


def report() -> dict[str, Any]:
    """Return what `meshpar doctor --json` prints."""
    needed = requirements("meshpar")
    brought = [  # By others, and they decide how JAX runs.
        Package(name, _version(name), one.versions)
        for name, bringer in _BROUGHT.items()
        for one in requirements(bringer)
        if (one.name, one.extra) == (name, "")
    ]
    core = [*_packages(needed, ""), *brought]
    environment = {
        name: value
        for name, value in sorted(os.environ.items())
        if name.startswith(("JAX_", "XLA_"))
    }
    extras = [_extra(needed, name) for name in EXTRAS]
    found = {
        "meshpar": meshpar.__version__,
        "python": platform.python_version(),
        "platform": sysconfig.get_platform(),
        "packages": [_as_json(package) for package in core],
        **_devices(),
        "targets": {
            name: {"can_compile": not missing, "missing": missing}
            for name, kind in PLATFORMS.items()
            for missing in [kind.missing_modules]
        },
        "extras": extras,
        "environment": environment,
    }
    return {**found, "problems": [*_problems(core, extras, found["error"])]}


def requirements(distribution: str) -> list[PackageRequirement]:
    """Return a distribution's requirements; none if it is not installed.

    Those of meshpar itself, in a checkout that is not installed, are read from its
    `pyproject.toml`.
    """
    try:
        lines = importlib.metadata.requires(distribution) or []
    except importlib.metadata.PackageNotFoundError:
        lines = _checkout_lines() if distribution == "meshpar" else []
    return [_parsed(line) for line in lines]


def _checkout_lines() -> list[str]:
    path = Path(meshpar.__file__).parents[1] / "pyproject.toml"
    if not path.is_file():
        return []
    project = tomllib.loads(path.read_text(encoding="utf-8"))["project"]
    extras = project["optional-dependencies"].items()
    lines = [f"{line}; extra == '{name}'" for name, some in extras for line in some]
    return [*project["dependencies"], *lines]


def _parsed(line: str) -> PackageRequirement:
    match = _REQUIREMENT.match(line)
    if match is None:
        return PackageRequirement(line, (), "", "")
    name, extras, versions, marker = match.groups(default="")
    extra = _EXTRA.search(marker)
    return PackageRequirement(
        name=name,
        extras=tuple(filter(None, re.split(r"[\s,]+", extras))),
        versions=versions.replace(" ", ""),
        extra=extra[1] if extra else "",
    )


def _packages(needed: list[PackageRequirement], extra: str) -> Iterator[Package]:
    """Yield the packages of an extra, with those of the extras that it names."""
    for one in needed:
        if one.extra == extra:
            if one.name != "meshpar":
                yield Package(one.name, _version(one.name), one.versions)
            inner = needed if one.name == "meshpar" else requirements(one.name)
            for name in one.extras:
                yield from _packages(inner, name)


def _version(distribution: str) -> str | None:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def satisfies(version: str, needs: str) -> bool:
    """Return True if a version is in a range; clauses of other kinds are not checked.

    Example:
        >>> satisfies("0.10.2", ">=0.10,<0.13"), satisfies("0.13.0.dev1", "<0.13")
        (True, False)
    """
    release = re.match(r"\d+(\.\d+)*", version)
    clauses = filter(None, map(_CLAUSE.fullmatch, needs.split(",")))
    return release is None or all(
        _COMPARED[clause[1]](_numbers(release[0]), _numbers(clause[2]))
        for clause in clauses
    )


def _numbers(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, without zeros at its end."""
    return tuple(map(int, re.sub(r"(\.0+)+$", "", version).split(".")))


def _as_json(package: Package) -> dict[str, Any]:
    return {**package._asdict(), "status": package.status}


def _devices() -> dict[str, Any]:
    """Return JAX's backend and devices, or the error that it raises."""
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        import jax

        backend = jax.default_backend()
        kinds = [device.device_kind for device in jax.local_devices()]
    except Exception as error:  # Of any package that JAX loads, too.
        line = f"{type(error).__name__}: {error}".splitlines()[0]
        return {"backend": None, "devices": [], "error": line}
    devices = [{"kind": kind, "number": len([*same])} for kind, same in groupby(kinds)]
    return {"backend": backend, "devices": devices, "error": ""}


def _extra(needed: list[PackageRequirement], name: str) -> dict[str, Any]:
    packages = list(_packages(needed, name))
    missing = [package.name for package in packages if package.version is None]
    return {
        "name": name,
        "gives": EXTRAS[name],
        "installed": bool(packages) and not missing,
        "packages": [_as_json(package) for package in packages],
        "missing": sorted({*missing}),
        "install": install_extra(name),
    }


def _problems(
    core: list[Package], extras: list[dict[str, Any]], jax_error: str
) -> Iterator[str]:
    """Yield what does not work, and what is installed in an unsupported version."""
    python = platform.python_version()
    try:
        needs = importlib.metadata.metadata("meshpar")["Requires-Python"] or ""
    except importlib.metadata.PackageNotFoundError:
        needs = ""
    if not satisfies(python, needs):
        yield f"Python {python} is running; {needs} is needed"
    yield from (
        f"{package.name} is missing: pip install '{package.name}{package.needs}'"
        for package in core
        if package.status == "missing"
    )
    known = [
        *map(_as_json, core),
        *(package for extra in extras for package in extra["packages"]),
    ]
    lines = (
        f"{package['name']} {package['version']} is installed; {package['needs']} is "
        "needed"
        for package in known
        if package["status"] == "unsupported"
    )
    yield from dict.fromkeys(lines)
    if jax_error:
        yield f"JAX finds no devices: {jax_error}"


def _lines(found: dict[str, Any]) -> Iterator[str]:
    yield f"meshpar {found['meshpar']}, Python {found['python']}, {found['platform']}"
    for package in found["packages"]:
        name, needs = package["name"], package["needs"]
        yield f"  {name:18}{package['version'] or 'missing':12}{needs}".rstrip()
    devices = [f"{each['number']} x {each['kind']}" for each in found["devices"]]
    yield f"devices: {', '.join(devices) or 'none'} (backend {found['backend']})"
    for name, value in found["environment"].items():
        yield f"  {name}={value}"
    yield "compiles for absent hardware:"
    for name, target in found["targets"].items():
        lacks = f"no: needs {', '.join(target['missing'])}; {install_extra('aot')}"
        yield f"  {name:14}{'yes' if target['can_compile'] else lacks}"
    yield "extras:"
    for extra in found["extras"]:
        state = "installed" if extra["installed"] else "missing"
        yield f"  {extra['name']:14}{state:12}{extra['gives']}"
        if not extra["installed"]:
            lacks = ", ".join(extra["missing"]) or "its packages are not known"
            yield f"  {'':26}{lacks}: {extra['install']}"
    if not found["problems"]:
        yield "problems: none"
    for problem in found["problems"]:
        yield f"problem: {problem}"
