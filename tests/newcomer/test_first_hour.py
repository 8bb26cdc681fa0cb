"""The first hour of a new user: the wheel, README, the tutorial, a run that goes on."""

import json
import re
import shlex
import signal
import subprocess
import time

import numpy as np
import pytest

from tests.newcomer.environment import ROOT, blocks
from tests.refusals import names

README, TUTORIAL = ROOT / "README.md", ROOT / "docs" / "tutorial.md"
TRAIN = (
    "meshpar train --text mine.txt --preset tiny --seed 3 --steps 400 "
    "--decay-steps 400 --global-batch 16 --seq 64 --bubble-rounds 0 --sample-tokens 0"
)


WHERE = """
import importlib.util, sys
import meshpar, meshpar.models.presets, meshpar.recipes.command
print(meshpar.__file__)
print(importlib.util.find_spec("models"), importlib.util.find_spec("recipes"))
print(*sys.path, sep="\\n")
"""


def check_first_steps(machine):
    """Imports, README's first program and the commands, from the wheel alone."""
    check_where_it_is(machine, machine.python(FIRST + WHERE))
    machine.shell("meshpar lint --preset tiny --layout fsdp=8")  # Status 0: none found.


FIRST = f"{blocks(README, 'python')[0]}print('last loss', metrics['loss'])\n"


def check_where_it_is(machine, printed):
    """Holds what a first program printed to a wheel outside of the checkout."""
    _, _, printed = printed.rpartition("last loss ")
    loss, origin, absent, *path = printed.splitlines()
    assert 0 < float(loss) < 20
    assert origin == str(machine.site_packages / "meshpar" / "__init__.py")
    assert absent == "None None"
    assert not [entry for entry in path if entry.startswith(str(ROOT / "meshpar"))]
    assert str(ROOT) not in path


LINT = """
import meshpar
models = [one for one in [*globals().values()] if isinstance(one, meshpar.Model)]
assert models
for layout in ("data=8", "fsdp=2,tensor=2", "data=2,stage=2,tensor=2"):
    found = [meshpar.lint(one, layout, seq=16).findings for one in models]
    assert not any(found), (layout, found)
"""
COMMAND = """
from meshpar.cli.main import main
import contextlib, io
with contextlib.redirect_stdout(io.StringIO()):
    assert main(["lint", "--preset", "tiny", "--layout", "fsdp=8"]) == 0
"""


@pytest.mark.slow
def test_the_wheel_runs_what_readme_shows_outside_of_the_checkout(quick):
    """In one process, which imports JAX once; README's own models have a clean lint."""
    programs = blocks(README, "python")
    for code in programs:
        name = re.match(r"# (\w+\.py)\n", code)
        if name:
            (quick.home / name[1]).write_text(code)
    own = [code for code in programs if "from_loss(" in code]
    assert own
    program = "".join([FIRST, COMMAND, *(code + LINT for code in own), WHERE])
    check_where_it_is(quick, quick.python(program))
    assert quick.shell("meshpar --version").startswith("meshpar ")


@pytest.mark.slow
def test_no_folder_of_the_wheel_is_called_models_or_recipes(quick):
    named = {path.name for path in quick.site_packages.iterdir()}
    assert {"models", "recipes", "tests"}.isdisjoint(named)
    packed = quick.site_packages / "meshpar"
    assert (packed / "models" / "presets.py").is_file()
    assert (packed / "recipes" / "data" / "shakespeare" / "hamlet.txt").is_file()


@pytest.mark.slow
def test_the_core_install_runs_readme_and_says_what_training_needs(core):
    check_first_steps(core)
    if (core.site_packages / "grain").exists():
        pytest.skip("grain comes with the core")
    words = ["meshpar", "train", "--steps", "1"]
    told = core.run(words, status=2).stderr
    assert told.count("\n") == 1
    assert names(told, "'meshpar[train]'")


@pytest.mark.slow
def test_the_commands_work_in_a_fresh_environment(core):
    core.shell("meshpar audit --preset tiny --layout data=2,fsdp=2,tensor=2")
    core.shell("meshpar fuzz --preset test --num 1")
    core.install(f"{core.wheel}[train]")
    if not TUTORIAL.exists():
        pytest.skip("there is no tutorial")
    for lines in blocks(TUTORIAL, "bash", slow=False):
        core.shell(lines)


def start(machine, line):
    return subprocess.Popen(
        shlex.split(line),
        cwd=machine.home,
        env=machine.variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder):
    """Step -> loss of a run."""
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    found = [json.loads(line) for line in lines]
    return {row["step"]: row["loss"] for row in found if "loss" in row}


def interrupted(machine, line, folder, num_steps):
    """What a run printed that was interrupted after so many steps."""
    child = start(machine, line)
    log, limit = folder / "metrics.jsonl", time.monotonic() + 600
    while not (log.exists() and len(losses(folder)) >= num_steps):
        assert child.poll() is None and time.monotonic() < limit, child.stdout.read()
        time.sleep(0.05)
    child.send_signal(signal.SIGINT)
    printed, _ = child.communicate(timeout=600)
    assert child.returncode == 130, printed
    return printed


@pytest.mark.slow
def test_an_interrupted_run_goes_on_by_its_hint_on_another_layout(quick):
    """Five steps and more of a text of one's own; then 400 in all, in equal losses."""
    text = (ROOT / "README.md").read_text() + (ROOT / "CONTRIBUTING.md").read_text()
    (quick.home / "mine.txt").write_text(text)
    whole, part = quick.home / "whole", quick.home / "part"
    line = f"{TRAIN} --layout data=4,tensor=2"
    printed = interrupted(quick, f"{line} --out part", part, 5)
    (hint,) = re.findall(r"^.*?(meshpar train .*--resume)$", _unwrapped(printed), re.M)
    before = losses(part)
    assert 5 <= len(before) < 395
    total = len(before) + 5
    more = f"{hint} --steps {total} --layout fsdp=4,stage=2,microbatches=2"
    quick.shell(more)
    quick.shell(f"{line} --steps {total} --out whole")
    found, wanted = losses(part), losses(whole)
    assert found.keys() == wanted.keys() == set(range(total))
    pairs = [(found[step], wanted[step]) for step in sorted(wanted)]
    np.testing.assert_allclose(*zip(*pairs, strict=True), rtol=1e-6)


def _unwrapped(printed):
    return printed.replace("\\\n", " ")
