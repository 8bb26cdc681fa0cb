"""A reader of one training step opens few files: those whose functions it executes."""

import subprocess
import sys
from pathlib import Path

import pytest

from tests.marks import slow

ROOT = Path(__file__).parents[1]
COUNT = """
import inspect, sys
import jax, numpy as np, optax
import meshpar
from meshpar import make_train_step
from meshpar.models.presets import build

meshpar.emulate(8)
layout = meshpar.Layout.parse(sys.argv[1])
model, files = build("tiny"), set()

def note(frame, event, argument):
    code = frame.f_code
    is_function = code.co_flags & inspect.CO_OPTIMIZED  # No class body.
    # Python asks `find_spec` for each module that JAX tries to import in vain.
    if event == "call" and is_function and code.co_name != "find_spec":
        files.add(code.co_filename)

batch = {name: np.zeros((8, 16), np.int32) for name in ("tokens", "targets")}
batch["weights"] = np.ones((8, 16), np.float32)
devices = jax.devices()[: layout.num_devices]
sys.setprofile(note)
step = make_train_step(model, optax.adamw(1e-3), layout, devices=devices)
step(step.init(0), batch)
sys.setprofile(None)
print(*files, sep="\\n")
"""


@pytest.mark.parametrize(
    ("line", "most"),
    [("data=1", 47), slow("data=2,stage=2,tensor=2,microbatches=4", 75)],
)
def test_one_step_executes_functions_of_few_files(line, most):
    command = [sys.executable, "-c", COUNT, line]
    found = subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout
    files = [
        path
        for path in found.splitlines()
        if path.startswith(f"{ROOT}/meshpar/")
        and not path.startswith((f"{ROOT}/meshpar/models", f"{ROOT}/meshpar/recipes"))
    ]
    assert 30 < len(files) <= most, "\n".join(sorted(files))
