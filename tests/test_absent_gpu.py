"""Collectives of the step compiled for eight H100s that are not there.

XLA:CPU has no reduce-scatter for a split residual stream; XLA:GPU has, and its compiler
needs no GPU.
"""

import importlib.util
import subprocess
import sys
from pathlib import Path

import pytest

from meshpar import Layout
from tests.hlo import collectives, counts

TARGET = Path(__file__).parent / "data" / "gpu_target_h100.txt"
BATCH, SEQ, EMBED = 16, 32, 64
SMALL_BYTES = 2048
_RUN = f"""
import sys
import jax
jax.config.update("jax_platforms", "cpu")
import jax.numpy as jnp, optax
from jax.experimental import topologies
from meshpar import Layout, make_train_step
from models.presets import build
layout = Layout.parse(sys.argv[1])
target = open({str(TARGET)!r}).read()
devices = topologies.get_topology_desc(
    platform="cuda", target_config=target, topology="1x1x8").devices
model = build("test", layers=4, hidden={EMBED}, ffn=192)
step = make_train_step(
    model, optax.adam(1e-3), layout, devices=devices[:layout.num_devices])
tokens = jax.ShapeDtypeStruct(({BATCH}, {SEQ}), jnp.int32)
weights = jax.ShapeDtypeStruct(({BATCH}, {SEQ}), jnp.float32)
print(step.compile(dict(tokens=tokens, targets=tokens, weights=weights)).as_text())
"""

needs_plugin = pytest.mark.skipif(
    importlib.util.find_spec("jax_plugins.xla_cuda13") is None
    if importlib.util.find_spec("jax_plugins")
    else True,
    reason="the extra 'aot' is not installed",
)


def _rows(line: str) -> list:
    program = [sys.executable, "-c", _RUN, line]
    done = subprocess.run(program, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-2000:]
    return collectives(done.stdout, Layout.parse(line).mesh_shape)


@needs_plugin
def test_sequence_parallel_gathers_twice_and_scatters_twice_in_each_pass():
    rows = _rows("fsdp=2,tensor=2,sequence_parallel=true")
    asked_for = {"all-gather": 2, "reduce-scatter": 2}
    for place in ("forward", "backward"):
        assert counts(rows, place, "tensor", SMALL_BYTES) == asked_for
    # XLA:GPU gathers a whole block's weights at once.
    assert counts(rows, "forward", "fsdp", 0) == {"all-gather": 1}
    assert counts(rows, "backward", "fsdp", 0) == {"all-gather": 1, "reduce-scatter": 1}
