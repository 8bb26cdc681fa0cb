"""Virtual devices do not deadlock, and give the same numbers every time."""

import functools
import os
import subprocess

import pytest

from tests import warm
from tests.marks import slow

_RUN = """
import meshpar
devices = meshpar.emulate(8)
import numpy as np, optax
from meshpar.testing.equivalence import quick_compile_options
from meshpar.models.presets import build
step = meshpar.make_train_step(
    build("{preset}"), optax.adamw(1e-3), "{layout}", max_grad_norm=1.0,
    compiler_options=quick_compile_options("cpu") if "{preset}" == "test" else None,
    check=False)
state = step.init(0)
tokens = np.random.default_rng(0).integers(0, 64, (32, {seq} + 1), np.int32)
batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:],
             weights=np.ones((32, {seq}), np.float32))
for _ in range({steps}):
    state, metrics = step(state, batch)
    print(float(metrics["loss"]).hex(), float(metrics["grad_norm"]).hex())
"""


_SHARDED = "data=2,fsdp=2,tensor=2"
_PIPELINED = "data=2,stage=2,tensor=2,microbatches=4"


def _losses(layout: str, steps: int, preset: str = "tiny") -> str:
    # The first execution in a fresh process is where XLA:CPU pairs collectives wrongly.
    sizes = {"preset": preset, "seq": 16 if preset == "test" else 128}
    return _run_alone(_RUN.format(layout=layout, steps=steps, **sizes), timeout_s=600)


def _run_alone(program: str, *, timeout_s: int) -> str:
    """What a program prints, with the settings of `emulate` alone."""
    ours = ("XLA_FLAGS", "PJRT_NPROC", "NPROC")
    usual = {name: value for name, value in os.environ.items() if name not in ours}
    done = subprocess.run(
        [*warm.words(), "-c", program],
        capture_output=True,
        text=True,
        timeout=timeout_s,
        env=usual,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert "may be stuck" not in done.stderr
    return done.stdout


@pytest.mark.slow
@pytest.mark.parametrize(
    ("layout", "preset"),
    [(_PIPELINED, "test"), slow(_PIPELINED, "tiny"), slow(_SHARDED, "tiny")],
)
def test_first_steps_are_the_same_in_every_process(layout, preset):
    assert len({_losses(layout, 2, preset) for _ in range(2)}) == 1


@functools.cache
def _first_losses(layout, steps):
    return _losses(layout, steps)


@pytest.mark.slow
@pytest.mark.parametrize("part", range(5))  # `make test-all` has twenty starts
def test_fifty_steps_of_four_starts_never_hang_and_never_differ(part):
    losses = {_losses(_SHARDED, 50) for _ in range(4)}
    assert losses == {_first_losses(_SHARDED, 50)}


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout",
    [
        _PIPELINED,
        "fsdp=2,stage=2,tensor=2,microbatches=2,sequence_parallel=true",
        "data=2,stage=4,microbatches=4",
    ],
)
@pytest.mark.parametrize("part", range(5))
def test_three_pipelined_steps_of_four_starts_never_hang_and_never_differ(layout, part):
    losses = {_losses(layout, 3) for _ in range(4)}
    assert losses == {_first_losses(layout, 3)}


# As a plain training loop does: nothing waits for a step before the next one is asked.
_UNREAD = """
import os
import meshpar
meshpar.emulate(8)
import numpy as np, optax
from meshpar.testing.equivalence import quick_compile_options
from meshpar.models.presets import build
step = meshpar.make_train_step(
    build("test", layers={layers}), optax.adamw(1e-3), "{layout}", max_grad_norm=1.0,
    compiler_options=quick_compile_options("cpu"), check=False)
state = step.init(0)
tokens = np.random.default_rng(0).integers(0, 64, (16, 17), np.int32)
batch = dict(tokens=tokens[:, :-1], targets=tokens[:, 1:],
             weights=np.ones((16, 16), np.float32))
for done in range(1, {steps} + 1):
    state, metrics = step(state, batch)
    if done % ({steps} // 4) == 0:
        resident = int(open("/proc/self/statm").read().split()[1])
        print(resident * os.sysconf("SC_PAGE_SIZE") / 2**20)
assert np.isfinite(float(metrics["loss"]))
"""


def test_a_loop_that_reads_no_metric_ends():
    program = _UNREAD.format(layout="data=8", steps=100, layers=1)
    _run_alone(program, timeout_s=120)


@pytest.mark.slow
@pytest.mark.parametrize("layout", ["data=8", "fsdp=8"])
def test_ten_thousand_unread_steps_end_and_hold_no_more_memory(layout):
    program = _UNREAD.format(layout=layout, steps=10_000, layers=2)
    printed = _run_alone(program, timeout_s=3600)
    resident_mib = [float(line) for line in printed.split()]
    assert resident_mib[-1] < 1.1 * resident_mib[0]
