"""README's programs have no type errors, as scripts of who installed the wheel."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.newcomer.environment import ROOT, blocks


@pytest.fixture(scope="module")
def scripts(tmp_path_factory):
    """A folder with README's programs; one that imports nothing continues another."""
    folder = tmp_path_factory.mktemp("scripts")
    programs: list[str] = []
    for code in blocks(ROOT / "README.md", "python"):
        if "import " in code or not programs:
            programs.append(code)
        else:
            programs[-1] += code
    for number, code in enumerate(programs):
        (folder / f"program_{number}.py").write_text(code)
    return folder


def checked(folder: Path, *command: str) -> None:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
def test_mypy_finds_no_error(scripts, quick):
    """optax has neither annotations that mypy reads nor stubs."""
    (scripts / "mypy.ini").write_text(
        "[mypy]\n[mypy-optax.*]\nignore_missing_imports = true\n"
    )
    python = str(quick.bin / "python")
    command = [sys.executable, "-m", "mypy", "--config-file", "mypy.ini"]
    files = sorted(path.name for path in scripts.glob("*.py"))
    checked(scripts, *command, "--python-executable", python, *files)


@pytest.mark.slow
def test_pyright_finds_no_error(scripts, quick):
    version = [sys.executable, "-m", "pyright", "--version"]
    if subprocess.run(version, capture_output=True).returncode:
        pytest.skip("pyright is not installed, or gets no Node to run on")
    python = str(quick.bin / "python")
    checked(scripts, sys.executable, "-m", "pyright", "--pythonpath", python)
