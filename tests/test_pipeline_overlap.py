"""Matmuls lie beside a pipeline's hops, in programs for accelerators not here."""

import optax
import pytest

from meshpar import Layout, audit, batch_shapes, make_train_step
from meshpar.machine.mesh import absent_mesh
from meshpar.models.presets import build
from tests.test_audit_targets import needs_gpu_compiler

SEQ = 4096
FOUR_IN_FLIGHT = {"xla_gpu_experimental_parallel_collective_overlap_limit": 4}


@pytest.mark.slow
@needs_gpu_compiler
@pytest.mark.parametrize(
    ("line", "compiler_options"),
    [
        ("data=16,stage=4", {}),
        # Stages that send themselves: a hop cannot travel beside them while only one
        # collective is in flight at a time. With two, one of the two hops does.
        ("data=2,stage=4,tensor=8,sequence_parallel=true", FOUR_IN_FLIGHT),
    ],
)
def test_nine_in_ten_hops_are_hidden_on_absent_gpus(line, compiler_options):
    # Of 32 microbatches, for hops while the pipeline fills and drains have no matmul.
    layout = Layout.parse(f"{line},microbatches=32,remat=full,precision=bf16")
    step = make_train_step(
        build("llama3-8b", layers=8),
        optax.sgd(1.0),
        layout,
        mesh=absent_mesh(layout),
    )
    report = audit(
        step.gradient_program,
        batch_shapes(layout.data * layout.microbatches, SEQ),
        target="gpu:h100:8x8",
        compiler_options=compiler_options,
    )
    [hops] = [
        total
        for total in report.overlap()
        if (total.mesh_axes, total.kind) == (("stage",), "collective-permute")
    ]
    assert hops.wire_bytes and hops.hidden_share >= 0.9
