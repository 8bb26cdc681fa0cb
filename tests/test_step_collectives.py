"""Collectives of the compiled step: those that the layout asks for, and no others."""

import functools
from collections import Counter

import jax
import jax.numpy as jnp
import optax
import pytest

from meshpar import Layout, make_train_step
from meshpar.audit.collectives import Collective
from meshpar.audit.report import AuditReport, audit
from meshpar.models.presets import build
from tests.marks import slow

LAYERS, BATCH, SEQ = 3, 16, 16
MODEL = build("test", layers=LAYERS)
# A weight here has at least 1,024 values, an activation 2,048, and a
# norm's scale 32.
SMALL_BYTES = 1024


@functools.cache
def audited(line: str) -> AuditReport:
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    step = make_train_step(MODEL, optax.adam(1e-3), layout, devices=devices)
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.int32)
    weights = jax.ShapeDtypeStruct((BATCH, SEQ), jnp.float32)
    return audit(step, dict(tokens=tokens, targets=tokens, weights=weights))


def collectives(line: str) -> list[Collective]:
    return [row.collective for row in audited(line).rows]


def place(row: Collective) -> str:
    """`forward` or `backward` loop over the layers, or `outside` of them."""
    if not row.in_loop:
        return "outside"
    return "backward" if "transpose(jvp" in row.op_path else "forward"


def counts(
    rows: list[Collective], where: str, mesh_axis: str, min_bytes: int
) -> dict[str, int]:
    """Kind -> number of collectives over one mesh axis, small ones left out."""
    return dict(
        Counter(
            row.kind
            for row in rows
            if place(row) == where
            and row.mesh_axes == (mesh_axis,)
            and row.payload_bytes >= min_bytes
        )
    )


ALL_AXES = "data=2,fsdp=2,tensor=2"
"""What every run of the tests counts in one program."""

LINES = [
    slow("tensor=2"),
    slow("data=8"),
    slow("fsdp=8"),
    ALL_AXES,
    slow(f"{ALL_AXES},sequence_parallel=true"),
]


@pytest.mark.parametrize("line", LINES)
def test_a_step_has_no_surprise_and_a_reason_for_every_row(line):
    report = audited(line)
    assert report.rows
    assert not report.surprises
    assert all(row.reason for row in report.rows)
    assert all(row.collective.mesh_axes for row in report.rows)
    assert all(row.collective.counted for row in report.rows)
    assert not report.hazards
    assert not report.uncounted


@pytest.mark.parametrize("line", [slow("tensor=2"), ALL_AXES])
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_block_all_reduces_twice_over_tensor_in_each_pass(line, where):
    rows = collectives(line)
    assert counts(rows, where, "tensor", SMALL_BYTES) == {"all-reduce": 2}
    activation = BATCH // Layout.parse(line).batch_shards * SEQ * 32 * 4
    over_tensor = [
        row for row in rows if place(row) == where and row.mesh_axes == ("tensor",)
    ]
    assert [row.payload_bytes for row in over_tensor] == [activation, activation]
    assert [row.executions for row in over_tensor] == [LAYERS, LAYERS]


@pytest.mark.parametrize("line", [slow("fsdp=8"), ALL_AXES])
def test_each_weight_is_gathered_once_per_pass_and_its_gradient_scattered_once(line):
    rows = collectives(line)
    weights_of_a_block = 6
    gathers = {"all-gather": weights_of_a_block}
    scatters = {"reduce-scatter": weights_of_a_block}
    assert counts(rows, "forward", "fsdp", 0) == gathers
    assert counts(rows, "backward", "fsdp", 0) == gathers | scatters
    weights_outside = 2
    a_norm_scale = 32 * 4
    assert counts(rows, "outside", "fsdp", a_norm_scale) == {
        "all-gather": weights_outside,
        "reduce-scatter": weights_outside,
    }


@pytest.mark.parametrize("line", [slow("fsdp=8"), ALL_AXES])
def test_gathered_bytes_are_those_of_the_weights_and_nothing_larger_moves(line):
    rows, layout = collectives(line), Layout.parse(line)
    block_bytes = sum(
        parameter.struct.size // LAYERS * 4 // (layout.tensor if len(shape) > 1 else 1)
        for path, parameter in MODEL.flat_parameters().items()
        if path.startswith("blocks.")
        for shape in [parameter.shape]
    )
    for kind, where in (
        ("all-gather", "forward"),
        ("all-gather", "backward"),
        ("reduce-scatter", "backward"),
    ):
        chosen = [row for row in rows if row.kind == kind and place(row) == where]
        sent = block_bytes * (layout.fsdp - 1) // layout.fsdp
        assert sum(row.payload_bytes for row in chosen) == block_bytes
        assert sum(row.wire_bytes for row in chosen) == sent


@pytest.mark.slow
def test_pure_data_parallel_reduces_gradients_once_and_nothing_else():
    rows = collectives("data=8")
    assert all(place(row) == "outside" and row.kind == "all-reduce" for row in rows)
    large = [row for row in rows if row.payload_bytes > SMALL_BYTES]
    assert [row.payload_bytes for row in large] == [4 * MODEL.num_parameters]


@pytest.mark.parametrize("line", [slow("data=8"), slow("fsdp=8"), ALL_AXES])
def test_nothing_else_of_the_size_of_an_activation_or_a_weight_moves(line):
    asked_for = {
        ("forward", "all-reduce", ("tensor",)): 2,
        ("backward", "all-reduce", ("tensor",)): 2,
        ("outside", "all-reduce", ("tensor",)): 2 + 3,  # ends, and loss of each token
        ("outside", "all-reduce", ("data",)): 1,
        ("forward", "all-gather", ("fsdp",)): 4,  # a block's matrices
        ("backward", "all-gather", ("fsdp",)): 4,
        ("backward", "reduce-scatter", ("fsdp",)): 4,
        ("outside", "all-gather", ("fsdp",)): 1,  # the embedding table
        ("outside", "reduce-scatter", ("fsdp",)): 1,
    }
    for row in collectives(line):
        if row.payload_bytes < SMALL_BYTES:
            continue
        key = (place(row), row.kind, row.mesh_axes)
        assert asked_for.get(key, 0) > 0, row
        asked_for[key] -= 1


@pytest.mark.parametrize(("line", "parts"), [slow("fsdp=8", 8), (ALL_AXES, 4)])
def test_a_device_holds_its_part_of_the_state_alone(line, parts):
    whole = 3 * 4 * MODEL.num_parameters
    per_device = audited(line).memory.argument_bytes
    batch_bytes = (BATCH * SEQ * 3 + BATCH) * 4 // Layout.parse(line).batch_shards
    assert per_device - batch_bytes == pytest.approx(whole / parts, rel=0.01)


@pytest.mark.parametrize(("line", "parts"), [slow("fsdp=8", 8), (ALL_AXES, 4)])
def test_a_train_state_is_updated_in_place(line, parts):
    memory = audited(line).memory
    assert memory.alias_bytes >= 3 * 4 * MODEL.num_parameters / parts


@pytest.mark.parametrize("line", [slow("data=8"), ALL_AXES])
def test_flops_are_those_of_the_matmuls_forward_and_backward(line):
    # 2 products for each weight and token, 3 times; and of attention's scores and mix.
    embed, tokens = 32, BATCH * SEQ
    matrices = sum(
        parameter.struct.size
        for path, parameter in MODEL.flat_parameters().items()
        if len(parameter.shape) > 1
    )
    products = matrices * tokens + LAYERS * 2 * tokens * SEQ * embed
    assert audited(line).flops == pytest.approx(2 * 3 * products / 8, rel=0.01)
