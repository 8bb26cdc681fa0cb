"""Bytes, executions, FLOPs and memory of functions written here, counted by hand."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar.audit.report import AuditReport, audit

MESHES = [
    {"data": 2, "tensor": 4},
    {"data": 4, "tensor": 2},
    {"data": 1, "tensor": 8},
    {"data": 8, "tensor": 1},
    {"data": 2, "stage": 1, "tensor": 2},
]
ROWS, COLUMNS, ITEM = 64, 128, 4


def mesh_of(**sizes: int) -> Mesh:
    return jax.make_mesh(
        tuple(sizes.values()),
        tuple(sizes),
        axis_types=(AxisType.Auto,) * len(sizes),
        devices=jax.devices()[: math.prod(sizes.values())],
    )


def array(*shape: int, dtype=jnp.float32, sharding=None) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)


def moved(report: AuditReport) -> list[tuple]:
    """(kind, mesh axes, payload, wire, executions) of what crosses between devices."""
    return [
        (c.kind, c.mesh_axes, c.payload_bytes, c.wire_bytes, c.executions)
        for c in (row.collective for row in report.rows)
        if c.mesh_axes != ()
    ]


# Collectives written in a shard_map: the local array is ROWS x COLUMNS.

LOCAL = ROWS * COLUMNS * ITEM
WRITTEN = {
    "psum": (
        lambda x, axis, n: lax.psum(x, axis),
        lambda n: ("all-reduce", LOCAL, 2 * LOCAL * (n - 1) // n),
    ),
    "pmax": (
        lambda x, axis, n: lax.pmax(x, axis),
        lambda n: ("all-reduce", LOCAL, 2 * LOCAL * (n - 1) // n),
    ),
    "all_gather": (
        lambda x, axis, n: lax.all_gather(x, axis, tiled=True),
        lambda n: ("all-gather", n * LOCAL, LOCAL * (n - 1)),
    ),
    "psum_scatter": (
        lambda x, axis, n: lax.psum_scatter(x, axis, tiled=True),
        lambda n: ("reduce-scatter", LOCAL, LOCAL * (n - 1) // n),
    ),
    "all_to_all": (
        lambda x, axis, n: lax.all_to_all(x, axis, 0, 1, tiled=True),
        lambda n: ("all-to-all", LOCAL, LOCAL * (n - 1) // n),
    ),
    "ppermute": (
        lambda x, axis, n: lax.ppermute(x, axis, [(i, (i + 1) % n) for i in range(n)]),
        lambda n: ("collective-permute", LOCAL, LOCAL),
    ),
}


@pytest.mark.parametrize("sizes", MESHES, ids=str)
@pytest.mark.parametrize("name", WRITTEN)
def test_written_collectives_move_the_bytes_of_the_formulas(name, sizes):
    write, expect = WRITTEN[name]
    mesh, size = mesh_of(**sizes), sizes["tensor"]

    def local(x):
        return write(x * 2, "tensor", size) * 3

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P(), out_specs=P("tensor"), check_vma=False
    )
    report = audit(mapped, array(ROWS, COLUMNS), mesh=mesh)
    kind, payload, wire = expect(size)
    expected = [(kind, ("tensor",), payload, wire, 1)]
    assert moved(report) == (expected if size > 1 else [])
    assert not report.surprises
    if size > 1:
        assert report.rows[0].reason == (
            f"written in the program as {name.replace('psum_s', 'reduce_s')}"
        )


def test_a_sum_over_two_mesh_axes_is_one_collective_over_both():
    mesh = mesh_of(data=2, stage=2, tensor=2)
    mapped = jax.shard_map(
        lambda x: lax.psum(x * 2, ("data", "tensor")),
        mesh=mesh,
        in_specs=P(),
        out_specs=P(),
        check_vma=False,
    )
    report = audit(mapped, array(ROWS, COLUMNS), mesh=mesh)
    wire = 2 * LOCAL * 3 // 4
    assert moved(report) == [("all-reduce", ("data", "tensor"), LOCAL, wire, 1)]


# Matmuls that GSPMD partitions.


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_row_parallel_matmul_sums_its_output_once(sizes):
    mesh, (data, tensor) = mesh_of(**sizes), (sizes["data"], sizes["tensor"])
    split = NamedSharding(mesh, P("data", "tensor"))
    matmul = jax.jit(jnp.matmul, out_shardings=NamedSharding(mesh, P("data")))
    weight = array(256, 64, sharding=NamedSharding(mesh, P("tensor")))
    report = audit(matmul, array(128, 256, sharding=split), weight)
    size = 128 // data * 64 * 4
    wire = 2 * size * (tensor - 1) // tensor
    expected = [("all-reduce", ("tensor",), size, wire, 1)]
    assert moved(report) == (expected if tensor > 1 else [])
    assert all(
        row.reason == "row-parallel output of a split matmul" for row in report.rows
    )
    assert report.flops == 2 * (128 // data) * 64 * (256 // tensor)
    # Each device holds its part of x, w and the result.
    assert report.memory.argument_bytes == 4 * (
        128 // data * 256 // tensor + 256 // tensor * 64
    )
    assert report.memory.output_bytes == size


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_a_constraint_gathers_what_it_asks_for_and_says_so(sizes):
    mesh, (data, tensor) = mesh_of(**sizes), (sizes["data"], sizes["tensor"])

    def column_then_whole(x, w):
        y = lax.with_sharding_constraint(
            x @ w, NamedSharding(mesh, P("data", "tensor"))
        )
        return lax.with_sharding_constraint(jnp.sin(y), NamedSharding(mesh, P("data")))

    report = audit(
        column_then_whole,
        array(128, 64, sharding=NamedSharding(mesh, P("data"))),
        array(64, 256, sharding=NamedSharding(mesh, P(None, "tensor"))),
    )
    size = 128 // data * 256 * 4
    wire = size * (tensor - 1) // tensor
    expected = [("all-gather", ("tensor",), size, wire, 1)]
    assert moved(report) == (expected if tensor > 1 else [])
    assert [row.reason for row in report.rows] == (
        ["another layout, asked for by a sharding constraint"] if tensor > 1 else []
    )
    assert report.flops == 2 * (128 // data) * 64 * (256 // tensor)


# Loops and branches.

MESH = {"data": 2, "tensor": 4}


def looped(lengths: tuple[int, ...], mesh: Mesh):
    """Sums over tensor, of a matmul, in as many nested scans as there are lengths."""

    def step(x, w, lengths):
        if not lengths:
            return lax.psum(x @ w, "tensor") * 0.1

        def body(x, _):
            return step(x, w, lengths[1:]), None

        return lax.scan(body, x, length=lengths[0])[0]

    return jax.shard_map(
        lambda x, w: step(x, w, lengths),
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )


@pytest.mark.parametrize("lengths", [(), (5,), (5, 3), (2, 3, 4)])
def test_trips_multiply_executions_and_flops(lengths):
    mesh, trips = mesh_of(**MESH), math.prod(lengths)
    report = audit(looped(lengths, mesh), array(32, 48), array(48, 48), mesh=mesh)
    size = 16 * 48 * 4
    assert moved(report) == [
        ("all-reduce", ("tensor",), size, 2 * size * 3 // 4, trips)
    ]
    assert report.flops == 2 * 16 * 48 * 48 * trips
    assert report.totals()["tensor", "all-reduce"] == {
        "executions": trips,
        "payload_bytes": trips * size,
        "wire_bytes": trips * 2 * size * 3 // 4,
    }


def test_a_loop_that_may_end_early_is_not_counted():
    mesh = mesh_of(**MESH)

    def local(x):
        def more(state):
            step, x = state
            return (step < 5) & (x[0, 0] < 100.0)

        def body(state):
            step, x = state
            return step + 1, lax.psum(x, "tensor")

        return lax.while_loop(more, body, (0, x))[1]

    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=P("data"), out_specs=P("data"), check_vma=False
    )
    [row] = audit(mapped, array(32, 48), mesh=mesh).rows
    assert (row.collective.executions, row.collective.counted) == (1, False)


def test_a_sum_in_a_branch_is_marked_and_no_hazard():
    mesh = mesh_of(**MESH)

    def local(x, chosen):
        return lax.cond(
            chosen[0] > 0, lambda x: lax.psum(x, "tensor"), lambda x: x * 4, x
        )

    mapped = jax.shard_map(
        local,
        mesh=mesh,
        in_specs=(P("data"), P()),
        out_specs=P("data"),
        check_vma=False,
    )
    report = audit(mapped, array(32, 48), array(1, dtype=jnp.int32), mesh=mesh)
    [row] = report.rows
    assert row.collective.kind == "all-reduce"
    assert row.collective.in_branch
    assert not report.hazards


@pytest.mark.parametrize(
    "subscripts, left, right, flops",
    [
        ("mk,kn->mn", (24, 40), (40, 56), 2 * 24 * 40 * 56),
        ("bmk,bkn->bmn", (6, 24, 40), (6, 40, 56), 2 * 6 * 24 * 40 * 56),
        ("bqhd,bkhd->bhqk", (2, 16, 4, 8), (2, 32, 4, 8), 2 * 2 * 4 * 16 * 32 * 8),
        ("mk,k->m", (24, 40), (40,), 2 * 24 * 40),
        ("bqd,dhk->bqhk", (2, 16, 24), (24, 4, 8), 2 * 2 * 16 * 24 * 4 * 8),
    ],
)
def test_flops_of_a_matmul_are_two_for_each_product(subscripts, left, right, flops):
    report = audit(
        lambda x, y: jnp.einsum(subscripts, x, y),
        array(*left),
        array(*right),
        mesh=mesh_of(data=1),
    )
    assert report.flops == flops
    assert not report.rows


def test_flops_of_a_gradient_are_three_times_those_of_the_loss():
    def loss(w, x):
        return jnp.sum(jnp.sin(x @ w) ** 2)

    report = audit(
        lambda w, x: jax.value_and_grad(loss, argnums=(0, 1))(w, x),
        array(48, 56),
        array(24, 48),
        mesh=mesh_of(data=1),
    )
    assert report.flops == 3 * 2 * 24 * 48 * 56


def test_flops_of_a_convolution_leave_the_padding_out():
    report = audit(
        lambda x, w: lax.conv_general_dilated(x, w, (1,), [(1, 1)]),
        array(2, 3, 10),
        array(5, 3, 3),
        mesh=mesh_of(data=1),
    )
    positions = 3 * 10 - 2  # Window 3, but each end lacks one.
    assert report.flops == 2 * 2 * 3 * 5 * positions


# Memory.


def test_memory_of_arguments_and_results_is_that_of_one_device():
    mesh = mesh_of(**MESH)
    split = NamedSharding(mesh, P("data", "tensor"))
    x = array(64, 128, sharding=split)
    step = jax.jit(lambda x, y: (x + y, x.astype(jnp.bfloat16)), out_shardings=split)
    memory = audit(step, x, x).memory
    part = 64 * 128 // 8
    assert memory.argument_bytes == 2 * part * 4
    # The results and the table of their two addresses.
    assert memory.output_bytes - part * (4 + 2) in (0, 2 * 8)
    assert memory.alias_bytes == 0


def test_a_donated_argument_is_counted_once_in_the_peak():
    mesh = mesh_of(**MESH)
    x = array(64, 128, sharding=NamedSharding(mesh, P("data", "tensor")))
    memory = audit(jax.jit(lambda x: x + 1, donate_argnums=0), x).memory
    part = 64 * 128 // 8 * 4
    assert (memory.argument_bytes, memory.alias_bytes) == (part, part)
    assert memory.peak_bytes < 2 * part


def test_the_largest_array_is_named_with_the_line_that_writes_it():
    def outer(x):
        y = jnp.outer(x, x)  # The largest.
        return jnp.sort(y, axis=0)[0]

    report = audit(outer, array(512), mesh=mesh_of(data=1))
    largest = report.buffers[0]
    assert (largest.bytes, largest.dims) == (512 * 512 * 4, (512, 512))
    first = outer.__code__.co_firstlineno
    assert largest.source.endswith(
        (f"test_audit_counts.py:{first + 1}", f"test_audit_counts.py:{first + 2}")
    )


def test_without_a_mesh_the_error_says_how_to_give_one(refuses):
    with refuses("audit.no_mesh", "mesh=", "jax.set_mesh(mesh)"):
        audit(lambda x: x, array(4))
