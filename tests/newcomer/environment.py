"""A new user's machine: the wheel in a fresh environment, in a folder outside."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

_FENCED = re.compile(
    r"^(?:<!-- (?P<note>[^\n]*?) -->\n)?```(?P<language>\w+)[^\n]*\n(?P<code>.*?)^```",
    re.MULTILINE | re.DOTALL,
)


def blocks(page: Path, language: str, *, slow: bool = True) -> list[str]:
    """The code of a page in one language; not what it notes as not run, or as slow."""
    return [
        match["code"]
        for match in _FENCED.finditer(page.read_text())
        if match["language"] == language
        and not (match["note"] or "").startswith("not run")
        and (slow or not (match["note"] or "").startswith("slow"))
    ]


def built_wheel(folder: Path) -> Path:
    """The wheel of this checkout."""
    done = _pip(["wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)])
    if "No matching distribution" in done.stderr:
        pytest.skip("there is no package index to build the wheel with")
    assert done.returncode == 0, done.stderr
    (wheel,) = folder.glob("meshpar-*.whl")
    return wheel


class Machine:
    """A fresh environment, and a folder to work in.

    Args:
        folder: Where both are made.
        wheel: What is installed, without an extra.
        borrowed: Take what it needs from this process's environment instead of an
            index, and let XLA compile as quickly as it does for other tests: seconds
            instead of minutes.
    """

    def __init__(self, folder: Path, wheel: Path, *, borrowed: bool) -> None:
        self.borrowed = borrowed
        self.home = folder / "home"
        self.home.mkdir(parents=True)
        self.bin = folder / "venv" / "bin"
        self.wheel = wheel
        command = [sys.executable, "-m", "venv", "--without-pip", str(self.bin.parent)]
        subprocess.run(command, check=True)
        if borrowed:
            path = self.site_packages / "borrowed.pth"
            path.write_text(sysconfig.get_path("purelib") + "\n")
            # Python compiles what is imported, pip would compile all.
            self.install("--no-deps", "--no-compile", str(wheel))
        else:
            self.install(str(wheel))

    @property
    def site_packages(self) -> Path:
        """Where the wheel is."""
        (found,) = (self.bin.parent / "lib").glob("python3*/site-packages")
        return found

    def install(self, *what: str) -> None:
        """`pip install` into the environment."""
        done = _pip(["--python", str(self.bin / "python"), "install", *what])
        assert done.returncode == 0, done.stderr

    @property
    def variables(self) -> dict[str, str]:
        """A shell's, without any of this process's Python or meshpar."""
        ours = ("PYTHON", "MESHPAR", "VIRTUAL_ENV", "COVERAGE")
        ours = ours if self.borrowed else (*ours, "XLA_FLAGS", "JAX_")
        kept = {k: v for k, v in os.environ.items() if not k.startswith(ours)}
        path = os.pathsep.join([str(self.bin), os.environ["PATH"]])
        return {**kept, "PATH": path, "HOME": str(self.home)}

    def run(self, command: list[str], status: int = 0) -> subprocess.CompletedProcess:
        """Runs a command in the folder, and holds it to a status."""
        done = subprocess.run(
            command, cwd=self.home, env=self.variables, capture_output=True, text=True
        )
        assert done.returncode == status, f"{command}\n{done.stdout}\n{done.stderr}"
        return done

    def python(self, program: str) -> str:
        """What a program prints, that stands in a file of the folder."""
        (self.home / "program.py").write_text(program)
        return self.run(["python", "program.py"]).stdout

    def shell(self, lines: str) -> str:
        """What a page's lines print, verbatim."""
        return self.run(["bash", "-ec", lines]).stdout


def _pip(words: list[str]) -> subprocess.CompletedProcess:
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", *words]
    return subprocess.run(command, capture_output=True, text=True)
