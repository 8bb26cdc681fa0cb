"""A volume of 512 x 512 x 512 on eight devices that are not there, and on one."""

import functools

import optax
import pytest

from meshpar import absent_mesh, audit, make_train_step
from meshpar.model.inputs import input_shapes
from meshpar.models.presets import build
from meshpar.planner.volume_traces import traced_space
from meshpar.train.memory_report import estimated_bytes
from tests.test_audit_targets import needs_gpu_compiler

pytestmark = [needs_gpu_compiler, pytest.mark.slow]

SPLIT = "context=8,precision=bf16", "gpu:h100:1x8"
WHOLE = "precision=bf16", "gpu:h100:1x1"


def step_of(layout):
    model = build("unet3d-512")
    step = make_train_step(model, optax.adamw(1e-3), layout, mesh=absent_mesh(layout))
    return step, input_shapes(model.inputs, {"batch": 1})


@functools.cache
def compiled(layout, target):
    step, batch = step_of(layout)
    return audit(step, batch, target=target, timeout_s=1800)


def test_nothing_but_halos_kernels_and_norms_is_sent():
    """The largest halo is a plane of the finest level's two volumes together."""
    rows = compiled(*SPLIT).rows
    assert not [row for row in rows if row.surprise]
    kinds = {row.collective.kind for row in rows}
    assert kinds == {"collective-permute", "all-reduce"}
    permutes = [row for row in rows if row.collective.kind == "collective-permute"]
    assert all("halo of a convolution" in row.reason for row in permutes)
    plane = 512 * 512 * 16 * 2
    assert max(row.collective.payload_bytes for row in permutes) <= plane
    summed = [row.collective.payload_bytes for row in rows if row not in permutes]
    parameters = 4 * step_of(SPLIT[0])[0].model.num_parameters
    assert sum(summed) < parameters


def test_a_device_holds_an_eighth_of_what_one_holds_of_a_whole_volume():
    shared, alone = (
        compiled(*which).compiled_memory.temp_bytes for which in (SPLIT, WHOLE)
    )
    halos = traced_space(*step_of(SPLIT[0])).received_bytes
    assert shared <= 1.2 * (alone / 8 + halos)


@pytest.mark.parametrize("which", [SPLIT, WHOLE], ids=["split", "whole"])
def test_the_planner_knows_the_memory_of_a_volume_within_a_tenth(which):
    states, at_once = estimated_bytes(*step_of(which[0]))
    peak = compiled(*which).compiled_memory.peak_bytes
    assert states + at_once == pytest.approx(peak, rel=0.1)
