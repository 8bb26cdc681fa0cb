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
from meshpar.tables import LazyAdam, Table, with_tables
from meshpar.tables.table import COLUMN_WISE, KINDS, REPLICATED, ROW_WISE
from tests.marks import slow

EXAMPLES, ROWS, TIMES = 128, 1024, 100


@functools.cache
def audited(layout, placement, rows):
    """A step of six tables, two of one kind where kinds are mixed, and its report."""
    tables = [Table(name=f"id{at}", rows=rows, dim=16, bag=2) for at in range(6)]
    if placement == "mixed":
        placement = {f"id{at}": KINDS[at % len(KINDS)] for at in range(6)}
    made = embedding_tables(tables, LazyAdam(0.01), placement=placement)
    step = with_tables(
        make_train_step(build("tiny-dlrm"), optax.sgd(0.1), layout), made
    )
    batch = {f"id{at}": np.zeros((EXAMPLES, 2), np.int32) for at in range(6)}
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
    slow("data=2,fsdp=4", ROW_WISE),
    slow("data=2,fsdp=2,tensor=2", COLUMN_WISE),
    slow("data=8", REPLICATED),
    slow("data=2,stage=2,tensor=2,microbatches=2", "mixed"),
]


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
