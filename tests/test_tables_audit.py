"""What a step with tables sends and allocates does not depend on their sizes."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Layout, audit, embedding_tables, make_mesh, make_train_step
from meshpar.models.presets import build
from meshpar.tables import LazyAdam, RowwiseAdagrad, Table, with_tables
from meshpar.tables.table import COLUMN_WISE, KINDS, REPLICATED, ROW_WISE
from tests.marks import slow
from tests.test_audit_targets import needs_gpu_compiler, needs_tpu_compiler

EXAMPLES, ROWS, TIMES = 128, 1024, 100


@functools.cache
def audited(layout, placement, rows):
    """A step of five tables, two of one kind where kinds are mixed, and its report."""
    num = 5
    tables = [Table(name=f"id{at}", rows=rows, dim=16, bag=2) for at in range(num)]
    if placement == "mixed":
        placement = {f"id{at}": KINDS[at % len(KINDS)] for at in range(num)}
    made = embedding_tables(tables, LazyAdam(0.01), placement=placement)
    step = with_tables(
        make_train_step(build("tiny-dlrm", features=num), optax.sgd(0.1), layout), made
    )
    batch = {f"id{at}": np.zeros((EXAMPLES, 2), np.int32) for at in range(num)}
    batch["numbers"] = np.zeros((EXAMPLES, 4), np.float32)
    batch["clicks"] = np.zeros(EXAMPLES, np.float32)
    return step, audit(step, batch)


def sent(report):
    """What crosses between devices: (kind, mesh axes, bytes, executions), sorted."""
    return sorted(
        (one.kind, one.mesh_axes, one.wire_bytes, one.executions)
        for one in (row.collective for row in report.rows)
    )


CASES = [
    ("data=2,fsdp=2,tensor=2", "mixed"),
    ("data=2,fsdp=4", ROW_WISE),
    ("data=2,fsdp=2,tensor=2", COLUMN_WISE),
    ("data=8", REPLICATED),
    slow("data=2,stage=2,tensor=2,microbatches=2", "mixed"),
]


@pytest.mark.slow
@pytest.mark.parametrize("layout, placement", CASES)
def test_a_table_a_hundred_times_as_long_sends_and_allocates_no_more(layout, placement):
    _, small = audited(layout, placement, ROWS)
    step, large = audited(layout, placement, TIMES * ROWS)
    assert sent(large) == sent(small)
    assert large.compiled_memory.temp_bytes == small.compiled_memory.temp_bytes
    grown = TIMES * ROWS * 16 * 3 * 4 / 8  # of one spread table, Adam's moments too
    assert large.compiled_memory.argument_bytes > grown
    # The state is updated in its own memory: all of it is returned where it came in.
    state = sum(
        np.prod(sharding.shard_shape(leaf.shape)) * leaf.dtype.itemsize
        for leaf, sharding in zip(
            jax.tree.leaves(step.state_shapes),
            jax.tree.leaves(step.shardings),
            strict=True,
        )
    )
    assert large.compiled_memory.alias_bytes == state


def compiled_for(target, dim, kinds, rows):
    """A step of a table of each kind over eight absent devices."""
    tables = [
        Table(name=f"id{at}", rows=rows, dim=dim, bag=2) for at in range(len(kinds))
    ]
    placement = {table.name: kind for table, kind in zip(tables, kinds, strict=True)}
    made = embedding_tables(tables, RowwiseAdagrad(0.1), placement=placement)
    sizes = dict(features=len(kinds), dim=dim, bottom=(dim,), top_width=8, top_layers=1)
    model = build("tiny-dlrm", **sizes)
    step = with_tables(make_train_step(model, optax.sgd(0.1), "data=8"), made)
    batch = {table.name: np.zeros((64, 2), np.int32) for table in tables}
    batch["numbers"] = np.zeros((64, 4), np.float32)
    batch["clicks"] = np.zeros(64, np.float32)
    return audit(step, batch, target=target, timeout_s=1800)


@pytest.mark.slow
@pytest.mark.parametrize(
    "target, dim, kinds",
    [
        pytest.param(
            *("gpu:h100:1x8", 16, (ROW_WISE, COLUMN_WISE)), marks=needs_gpu_compiler
        ),
        # Of rows that are no multiple of 128 values XLA:TPU makes a copy of the table.
        pytest.param("tpu:v5p:2x2x2", 128, (ROW_WISE,), marks=needs_tpu_compiler),
    ],
)
def test_absent_devices_send_and_allocate_no_more_for_a_longer_table(
    target, dim, kinds
):
    small, large = (
        compiled_for(target, dim, kinds, rows) for rows in (ROWS, TIMES * ROWS)
    )
    assert small.complaints() == large.complaints() == []
    assert sent(large) == sent(small)
    # A short table fits into a TPU's VMEM, where more is kept at once.
    assert large.compiled_memory.temp_bytes <= small.compiled_memory.temp_bytes


def test_an_audit_for_tpus_names_the_tables_that_are_copied_there():
    made = embedding_tables(
        [
            Table(name="wide", rows=64, dim=128),
            Table(name="other", rows=64, dim=128),
        ],
        RowwiseAdagrad(0.1),
        placement={"wide": ROW_WISE, "other": COLUMN_WISE},
    )
    model = build("tiny-dlrm", features=2, dim=128, bottom=(128,))
    step = with_tables(make_train_step(model, optax.sgd(0.1), "data=8"), made)
    batch = {name: np.zeros((8, 1), np.int32) for name in ("wide", "other")}
    batch |= {"numbers": np.zeros((8, 4)), "clicks": np.zeros(8)}
    (note,) = step.audit_subject(batch, platform="tpu").notes
    assert "tables other: a device has 16 values of a row, no multiple of 128" in note
    assert step.audit_subject(batch, platform="gpu").notes == ()


@pytest.mark.parametrize("layout, placement", CASES)
def test_nobody_is_surprised_by_what_tables_send(layout, placement):
    _, report = audited(layout, placement, ROWS)
    assert report.complaints() == []


def test_a_dense_gradient_of_a_table_would_be_sent_whole():
    """The audit sees it: so the test above can fail."""
    mesh = make_mesh(Layout(data=8))
    rows = NamedSharding(mesh, PartitionSpec("data"))
    table = jax.ShapeDtypeStruct((ROWS, 16), jnp.float32, sharding=rows)
    ids = jax.ShapeDtypeStruct((EXAMPLES,), jnp.int32, sharding=rows)
    report = audit(jax.grad(lambda table, ids: jnp.sum(table[ids] ** 2)), table, ids)
    assert sum(wire for *_, wire, _ in sent(report)) >= ROWS * 16 * 4 / 2
