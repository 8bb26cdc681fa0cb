"""Virtual devices: the number asked for, flags beside the user's, errors in time."""

import json
import os
import subprocess
import sys

import pytest

import meshpar
from meshpar.machine.emulate import AlreadyStartedError
from meshpar.models.presets import PRESETS
from tests import warm
from tests.marks import slow
from tests.refusals import check_words

BREADTH_FIRST = "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_CONCURRENCY_OPTIMIZED"
PATIENCE = "--xla_cpu_collective_call_terminate_timeout_seconds"


def run_child(code, python=(), **environment):
    """The JSON object that `code` prints, in a fork of a warm Python or another one."""
    ours = (
        "XLA_FLAGS",
        "PJRT_NPROC",
        "NPROC",
        "MESHPAR_EMULATE",
        "JAX_NUM_CPU_DEVICES",
        "JAX_PLATFORMS",
    )
    kept = {name: value for name, value in os.environ.items() if name not in ours}
    child = subprocess.run(
        [*(python or warm.words()), "-c", code],
        env={**kept, **environment},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert child.returncode == 0, child.stderr
    return json.loads(child.stdout.splitlines()[-1])


EMULATE_TWICE = """
import json, os
import meshpar
first = meshpar.emulate(8)
again = meshpar.emulate(8)
print(json.dumps({
    "flags": os.environ["XLA_FLAGS"].split(),
    "threads": os.environ["PJRT_NPROC"],
    "devices": [str(device.platform) for device in first],
    "same": first == again,
}))
"""


def test_eight_devices_appear_and_the_users_flags_are_kept_beside_ours():
    flags = "--xla_cpu_enable_fast_math=false"
    found = run_child(EMULATE_TWICE, [sys.executable], XLA_FLAGS=flags)
    assert found == {
        "flags": [
            "--xla_cpu_enable_fast_math=false",
            BREADTH_FIRST,
            f"{PATIENCE}=300",
        ],
        "threads": "64",
        "devices": ["cpu"] * 8,
        "same": True,
    }


BY_ENVIRONMENT = """
import json, os
import meshpar, jax
print(json.dumps([len(jax.devices()), os.environ["XLA_FLAGS"].split()]))
"""


@pytest.mark.parametrize(
    "mine",
    [
        "--xla_cpu_scheduler_type=CPU_SCHEDULER_TYPE_MEMORY_OPTIMIZED",
        slow("--xla_cpu_enable_concurrency_optimized_scheduler=false"),
    ],
)
def test_the_environment_variable_works_by_import_and_a_users_own_value_stays(mine):
    variables = {"MESHPAR_EMULATE": "4", "XLA_FLAGS": mine}
    found = run_child(BY_ENVIRONMENT, [sys.executable], **variables)
    assert found == [4, [mine, f"{PATIENCE}=300"]]


THREADS = """
import json, os
import meshpar, jax
meshpar.emulate(8)
jax.jit(lambda x: x + 1)(0.0).block_until_ready()
print(json.dumps([os.environ["PJRT_NPROC"], len(os.listdir("/proc/self/task"))]))
"""


@pytest.mark.parametrize(
    ("environment", "number"),
    [
        ({}, 64),
        ({"NPROC": "2"}, 64),
        ({"PJRT_NPROC": "many"}, 64),
        ({"NPROC": "96"}, 96),
        ({"PJRT_NPROC": "80", "NPROC": "96"}, 80),
    ],
)
def test_xla_has_eight_threads_for_each_device_or_as_many_as_the_user_says(
    environment, number
):
    if number == 64 and (os.cpu_count() or 1) > number:
        pytest.skip("more cores than that: XLA's own default is larger")
    variable, num_threads = run_child(THREADS, **environment)
    assert variable == str(number)
    assert num_threads > number


TOO_LATE = """
import json
import jax
jax.config.update("jax_platforms", "cpu")
jax.devices()
import meshpar
try:
    meshpar.emulate(8)
except RuntimeError as error:
    print(json.dumps([error.key, str(error)]))
"""


def test_emulating_after_jax_has_started_is_refused_with_both_ways_out(snapshot):
    key, message = run_child(TOO_LATE)
    assert key == "mesh.already_started"
    check_words(message, key, ["emulate(8)", 1, "MESHPAR_EMULATE=8"], snapshot)


@pytest.mark.parametrize("number", [0, -1, 2.0, "8"])
def test_a_number_that_is_none_is_refused(refuses, number):
    with refuses("mesh.device_count_below_one", f"emulate({number!r})", 1):
        meshpar.emulate(number)


@pytest.mark.parametrize("text", ["eight", "-1", "4.0"])
def test_a_bad_environment_variable_is_refused(refuses, text, monkeypatch):
    monkeypatch.setenv("MESHPAR_EMULATE", text)
    with refuses("mesh.device_count_not_number", f"MESHPAR_EMULATE='{text}'", 8):
        meshpar.emulate_from_environment()


def test_another_number_after_the_start_is_refused_here_too(refuses):
    with refuses("mesh.already_started", "emulate(4)", 8, kind=AlreadyStartedError):
        meshpar.emulate(4)


def test_the_same_number_again_is_fine():
    assert len(meshpar.emulate(8)) == 8


BUILD_FIRST = """
import json
import meshpar
from meshpar.models.presets import build
built = [build(name).num_parameters for name in {presets}]

import jax, jax.numpy as jnp
from flax import nnx

class Ends(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jax.random.normal(rngs.params(), (4, 4)))

    def embed(self, batch, scope):
        return batch["x"] @ self.w[...]

    def head(self, x, batch, scope):
        return jnp.sum(x**2), jnp.float32(len(x))

class Block(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)
        self.norm = nnx.BatchNorm(4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x, scope):
        return self.dropout(self.norm(self.linear(x)))

made = meshpar.from_nnx(ends=Ends, block=Block, num_layers=2)
built.append(made.num_parameters)
print(json.dumps([min(built) > 0, len(meshpar.emulate(4))]))
"""


ONE_OF_EACH_KIND = {type(config): name for name, config in PRESETS.items()}


@pytest.mark.parametrize(
    "presets",
    [[*ONE_OF_EACH_KIND.values()], slow([*PRESETS])],
    ids=["one of each kind", "all"],
)
def test_models_are_built_before_any_device_is_there(presets):
    assert run_child(BUILD_FIRST.format(presets=presets)) == [True, 4]
