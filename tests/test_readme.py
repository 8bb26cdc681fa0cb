"""The programs in README run as they stand there."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
BLOCKS = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def block(first_line):
    """The one block of Python that begins with that line."""
    (found,) = (text for text in BLOCKS if text.startswith(f"{first_line}\n"))
    return found


@pytest.fixture(autouse=True)
def checkout(monkeypatch):
    """Processes that a test starts import this checkout."""
    monkeypatch.setenv("PYTHONPATH", str(ROOT))


def output_of(program, folder):
    path = folder / "program.py"
    path.write_text(program)
    command = [sys.executable, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_the_first_program_trains_a_language_model(tmp_path):
    program = block("import numpy") + "print(metrics['loss'], metrics['skipped'])\n"
    loss, skipped = map(float, output_of(program, tmp_path).split())
    assert 0 < loss < 20
    assert skipped == 0


def test_a_model_of_images_in_two_groups_learns_in_a_pipeline(tmp_path):
    losses = [*map(float, output_of(block("# my_images.py"), tmp_path).split())]
    assert len(losses) == 10
    assert losses[-1] < losses[0] / 2


def test_the_test_file_of_a_model_passes(pytester):
    tests = block("# test_my_model.py")
    assert len([line for line in tests.splitlines() if line]) <= 20
    pytester.makeini("[pytest]\nmeshpar_emulate = 8\npythonpath = .\n")
    pytester.makepyfile(my_model=block("# my_model.py"), test_my_model=tests)
    pytester.runpytest_subprocess("-q").assert_outcomes(passed=2)
