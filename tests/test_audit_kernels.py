"""Calls of kernels: what they compute, what they move, and what is said of the rest."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

from meshpar.audit import targets
from meshpar.audit.flops import UncountedCall, program_flops
from meshpar.audit.hlo import parse_program
from meshpar.audit.report import AuditReport, audit
from meshpar.hardware.splash_kernels import splash_flops, splash_scope
from tests.test_audit_counts import array
from tests.test_audit_surprises import line_with
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler

NUM_DEVICES, SIZE = 4, 512

# Kernels as XLA:TPU prints them, a loop around one of them.

TPU = """\
HloModule jit_program

FileNames
1 "/home/user/train.py"

FileLocations
1 {file_name_id=1 function_name_id=1 line=12 end_line=12 column=1 end_column=2}

StackFrames
1 {file_location_id=1 parent_frame_id=1}

%body (state: (s32[], f32[64,64])) -> (s32[], f32[64,64]) {
  %state = (s32[], f32[64,64]{1,0}) parameter(0)
  %i = s32[] get-tuple-element(%state), index=0
  %x = f32[64,64]{1,0} get-tuple-element(%state), index=1
  %attend.1 = f32[64,64]{1,0} custom-call(%x), custom_call_target="tpu_custom_call", \
frontend_attributes={kernel_metadata={
"xprof_metadata":"{\\"block_q\\": 128}"
}}, metadata={op_name="jit(f)/while/body/attend/pallas_call" stack_frame_id=1}
  ROOT %new = (s32[], f32[64,64]{1,0}) tuple(%i, %attend.1)
}

%condition (state.1: (s32[], f32[64,64])) -> pred[] {
  ROOT %state.1 = (s32[], f32[64,64]{1,0}) parameter(0)
}

ENTRY %main (x.2: f32[64,64]) -> f32[64,64] {
  %x.2 = f32[64,64]{1,0} parameter(0)
  %start = s32[] constant(0)
  %first = (s32[], f32[64,64]{1,0}) tuple(%start, %x.2)
  %loop = (s32[], f32[64,64]{1,0}) while(%first), condition=%condition, body=%body, \
backend_config={"known_trip_count":{"n":"5"}}
  %y = f32[64,64]{1,0} get-tuple-element(%loop), index=1
  %matmul.1 = f32[64,64]{1,0} custom-call(%y, %y), \
custom_call_target="tpu_custom_call", backend_config={"custom_call_config":\
{"body":"","cost_estimate":{"transcendentals":"0","flops":"524288"}}}
  ROOT %both = f32[64,64]{1,0} custom-call(%matmul.1), custom_call_target="Solve"
}
"""


def test_a_kernel_counts_as_it_estimates_itself_or_is_named_with_line_and_times():
    flops = program_flops(parse_program(TPU))
    assert flops.total == 524_288
    found = {call.name: call for call in flops.uncounted}
    attend = UncountedCall(name="attend", source="/home/user/train.py:12", executions=5)
    assert found["attend"] == attend
    assert set(found) == {"attend", "Solve"}


def test_an_instruction_that_breaks_inside_of_an_attribute_is_read_whole():
    body = parse_program(TPU).computations["body"]
    assert body.by_name["attend.1"].op_path.endswith("attend/pallas_call")
    assert body.root.name == "new"


def test_splash_kernels_make_two_three_and_four_matmuls_of_the_pairs():
    pairs, size = 66 * 128**2, 64
    matmuls = {"fwd": 2, "dq": 3, "dkv": 4}
    for kernel, count in matmuls.items():
        scope = splash_scope(pairs, size, size)
        path = f"jit(f)/{scope}/splash_mha_{kernel}_x/pallas_call"
        assert splash_flops(path) == count * 2 * pairs * size


# The real compilers.


def on_shards(local, *arrays, target: str) -> AuditReport:
    """The audit of a function of each device's rows."""
    mesh = AbstractMesh((NUM_DEVICES,), ("expert",), axis_types=(AxisType.Auto,))
    split = P("expert")
    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(split,) * len(arrays),
        out_specs=split,
        check_vma=False,
    )
    return audit(mapped, *arrays, mesh=mesh, target=target)


def multiply(estimate: pallas.CostEstimate | None):
    def kernel(x, y, result):
        result[...] = jnp.dot(x[...], y[...], preferred_element_type=jnp.float32)

    def local(x, y):
        shape = jax.ShapeDtypeStruct((SIZE, SIZE), jnp.float32)
        options = {"cost_estimate": estimate, "name": "tiles"}
        return pallas.pallas_call(kernel, out_shape=shape, **options)(x, y)

    return local


@needs_tpu_compiler
@pytest.mark.slow
@pytest.mark.parametrize("is_estimated", [True, False])
def test_a_matmul_by_a_kernel_is_counted_or_said_not_to_be(is_estimated):
    operations = 2 * SIZE**3
    estimate = pallas.CostEstimate(
        flops=operations, bytes_accessed=3 * SIZE**2 * 4, transcendentals=0
    )
    x = array(NUM_DEVICES * SIZE, SIZE)
    local = multiply(estimate if is_estimated else None)
    report = on_shards(local, x, x, target="tpu:v5e:2x2")
    assert report.flops == (operations if is_estimated else 0)
    source = line_with(multiply, "pallas_call(")
    row = {"name": "tiles", "source": source, "executions": 1}
    rows = json.loads(json.dumps(report.to_json()))["uncounted"]
    assert rows == ([] if is_estimated else [row])


@needs_tpu_compiler
@pytest.mark.slow
def test_the_flops_of_a_ragged_dot_on_a_tpu_are_those_of_its_rows():
    experts = 8
    report = on_shards(
        lax.ragged_dot,
        array(NUM_DEVICES * SIZE, SIZE, dtype=jnp.bfloat16),
        array(NUM_DEVICES * experts, SIZE, 2 * SIZE, dtype=jnp.bfloat16),
        array(NUM_DEVICES * experts, dtype=jnp.int32),
        target="tpu:v5e:2x2",
    )
    assert report.flops == 2 * SIZE * SIZE * 2 * SIZE
    assert not report.uncounted


def exchange(x, result, *offsets_and_sizes):
    return lax.ragged_all_to_all(x, result, *offsets_and_sizes, axis_name="expert")


def exchanged(target: str) -> AuditReport:
    rows, count = array(NUM_DEVICES * 64, 128), array(NUM_DEVICES**2, dtype=jnp.int32)
    return on_shards(exchange, rows, rows, *4 * (count,), target=target)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target",
    [
        pytest.param("tpu:v5e:2x2", marks=needs_tpu_compiler),
        pytest.param("gpu:h100:1x4", marks=needs_gpu_compiler),
    ],
)
def test_a_ragged_exchange_is_counted_over_its_mesh_axis(target):
    report = exchanged(target)
    [row] = report.rows
    found = row.collective
    assert (found.kind, found.mesh_axes) == ("ragged-all-to-all", ("expert",))
    assert (found.payload_bytes, found.wire_bytes) == (64 * 128 * 4, 64 * 128 * 3)
    assert row.reason == "written in the program as ragged_all_to_all"
    assert not report.surprises
    total = report.totals()["expert", "ragged-all-to-all"]
    assert total["wire_bytes"] == 64 * 128 * 3


def test_a_ragged_exchange_on_cpus_is_a_hazard_with_a_way_out():
    report = exchanged("cpu:virtual:4")
    [hazard] = report.hazards
    assert (hazard.kind, hazard.source) == (
        "ragged_all_to_all",
        line_with(exchange, "lax.ragged_all_to_all"),
    )
    assert "audit it with a target such as 'tpu:" in hazard.message
    assert "ragged-all-to-all" in report.problem


@needs_gpu_compiler
def test_a_call_that_cannot_be_exported_is_one_line_that_names_it(refuses, monkeypatch):
    monkeypatch.setattr(targets, "_CUSTOM_CALLS", ())
    values = ("gpu:h100:1x4", "jax.export", "'ragged_all_to_all'")
    with refuses("audit.refused_custom_call", *values) as error:
        exchanged("gpu:h100:1x4")
    assert "\n" not in str(error.value)
