"""The faults fit the library as it is, and a sample of them is found."""

import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.mutants.faults import MUTANTS
from tests.mutants.mutant import Mutant
from tests.mutants.running import (
    FOUND,
    INVALID,
    MISSED,
    TIMEOUT,
    absent_tests,
    copied,
    outcomes,
    run_unmutated,
)
from tests.mutants.table import table

ROOT = Path(__file__).parents[2]
COUNT = 91

needs_git = pytest.mark.skipif(
    shutil.which("git") is None or not (ROOT / ".git").exists(),
    reason="git says which files a copy has, and this is no checkout of it",
)


def rooms():
    """The folders of the library, and those of its larger rooms one level deeper."""
    packages = [
        *ROOT.glob("meshpar/*/__init__.py"),
        *ROOT.glob("meshpar/parallel/*/__init__.py"),
        *ROOT.glob("meshpar/train/*/__init__.py"),
        *ROOT.glob("models/*/__init__.py"),
    ]
    found = {str(path.parent.relative_to(ROOT)) for path in packages}
    return sorted(found - {"meshpar/models", "meshpar/recipes"} | {"models", "recipes"})


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_fault_is_one_line_that_its_file_has_once(mutant):
    text = (ROOT / mutant.file).read_text()
    lines, faulty = text.splitlines(), mutant.applied(text).splitlines()
    pairs = zip(lines, faulty, strict=True)
    assert sum(one != other for one, other in pairs) == 1


def test_there_are_enough_faults_each_with_a_name_of_its_own():
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS) == COUNT


def test_contributing_has_the_table_of_all_faults():
    """`python -m tests.mutants --table` prints it."""
    assert f"\n{table()}\n" in (ROOT / "CONTRIBUTING.md").read_text()


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_the_tests_that_claim_a_fault_are_there(mutant):
    assert mutant.tests and absent_tests(ROOT, mutant.tests) == []


@pytest.mark.parametrize("room", rooms())
def test_every_room_of_the_library_has_a_fault(room):
    assert any(mutant.file.startswith(f"{room}/") for mutant in MUTANTS)


LIBRARY = """\
import time

WAIT_S = 0

def double(number):
    time.sleep(WAIT_S)
    return 2 * number
"""
TESTS = """\
from library import double

def test_double():
    assert double(2) == 4
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """A library of one function with one test, as git sees it, that needs no plugin."""
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")
    root = tmp_path / "checkout"
    root.mkdir()
    subprocess.run(["git", "init", "--quiet", str(root)], check=True)
    (root / ".gitignore").write_text("ignored\n__pycache__/\n")
    for name, text in (
        ("library.py", LIBRARY),
        ("test_library.py", TESTS),
        ("test_again.py", TESTS),
        ("ignored", ""),
    ):
        (root / name).write_text(text)
    (root / "link.py").symlink_to("library.py")
    return root


def fault(name, old, new):
    tests = ("test_library.py::test_double", "test_again.py")
    return Mutant(
        name=name, effect="", file="library.py", old=old, new=new, tests=tests
    )


@needs_git
def test_a_copy_has_what_git_does_not_ignore_and_links_as_links(checkout, tmp_path):
    copy = copied(checkout, tmp_path / "copy")
    names = {path.name for path in copy.iterdir()}
    assert {"library.py", "test_library.py", "link.py"} < names
    assert "ignored" not in names and ".git" not in names
    assert (copy / "link.py").is_symlink()


@needs_git
def test_what_a_test_finds_is_told_from_what_only_breaks(checkout, tmp_path):
    copy = copied(checkout, tmp_path / "copy")
    mutants = [
        fault("sum", "2 * number", "3 * number"),
        fault("equal", "2 * number", "number * 2"),
        fault("import", "import time", "import tim"),
        fault("gone", "4 * number", "5 * number"),
    ]
    found = {one.mutant.name: one for one in outcomes([copy], mutants, limit_s=60)}
    assert {name: one.verdict for name, one in found.items()} == {
        "sum": FOUND,
        "equal": MISSED,
        "import": INVALID,
        "gone": INVALID,
    }
    assert found["sum"].detail == "test_library.py::test_double"
    assert found["import"].detail == "tests cannot be collected"
    assert "has its text 0 times" in found["gone"].detail
    assert (copy / "library.py").read_text() == LIBRARY


@pytest.mark.slow
@needs_git
def test_tests_that_do_not_end_find_nothing(checkout, tmp_path):
    copy = copied(checkout, tmp_path / "copy")
    slow = fault("slow", "WAIT_S = 0", "WAIT_S = 60")
    (found,) = outcomes([copy], [slow], limit_s=3)
    assert found.verdict == TIMEOUT


@pytest.mark.slow
@needs_git
def test_tests_that_fail_without_a_fault_are_named(checkout, tmp_path):
    (checkout / "test_library.py").write_text(TESTS.replace("== 4", "== 5"))
    copies = [copied(checkout, tmp_path / name) for name in ("one", "other")]
    ran = run_unmutated(copies, ["test_library.py"], limit_s=60)
    assert ran.status == 1 and ran.failed == ["test_library.py::test_double"]
    assert absent_tests(checkout, ["test_library.py::test_half", "test_other.py"]) == [
        "test_library.py::test_half",
        "test_other.py",
    ]


@needs_git
@pytest.mark.slow
def test_a_sample_of_the_faults_is_found():
    seed = str(random.randrange(1_000_000))
    command = [sys.executable, "-m", "tests.mutants", "--jobs", "1"]
    done = subprocess.run(
        [*command, "--sample", "6", "--seed", seed],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    print(done.stdout)  # The seed too.
    assert done.returncode == 0, done.stdout + done.stderr
