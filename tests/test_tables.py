"""Tables under any placement train as dense ones do on one device."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from meshpar import Layout, embedding_tables, make_train_step
from meshpar.models.presets import build
from meshpar.tables import SGD, LazyAdam, RowwiseAdagrad, Table, with_tables
from meshpar.tables.portable import BLOCK, PortableTables, padded_rows, stored_tables
from meshpar.tables.programs import with_arrays
from meshpar.tables.table import KINDS
from meshpar.train.checkpoint import Checkpoints
from tests import dlrm_reference
from tests.marks import slow
from tests.states import zeros, zeros_of

STEPS, EXAMPLES = 20, 16
OPTIMIZERS = {
    "SGD": SGD(dlrm_reference.RATE),
    "RowwiseAdagrad": RowwiseAdagrad(dlrm_reference.RATE),
    "LazyAdam": LazyAdam(dlrm_reference.RATE),
}
# Rows that do not divide over 8 devices, a table of two features, bags of one and more.
TABLES = (
    Table(name="film", rows=101, dim=16, features=("seen", "liked"), bag=3),
    Table(name="user", rows=57, dim=16),
    Table(name="place", rows=33, dim=16, bag=4, pooling="mean"),
    Table(name="day", rows=7, dim=16, bag=2),
)
FEATURES = {
    feature: (table.name, table.pooling)
    for table in TABLES
    for feature in table.features
}
MIXED = dict(zip([table.name for table in TABLES], KINDS, strict=True))
STAGES = "data=2,stage=2,tensor=2,microbatches=4,schedule=1f1b"
"""The layout under which `make test` trains tables of every placement."""

SIZES = dict(features=5, bottom=(8, 16), top_width=16)


@functools.cache
def batches():
    """Ids that repeat within an example, a batch and over batches; empty bags too."""
    rng = np.random.default_rng(0)
    found = []
    for _ in range(STEPS):
        batch = {
            "numbers": rng.normal(size=(EXAMPLES, 4)).astype(np.float32),
            "clicks": rng.integers(0, 2, EXAMPLES).astype(np.float32),
            "weights": rng.uniform(0.5, 2, EXAMPLES).astype(np.float32),
        }
        for table in TABLES:
            for feature in table.features:
                shape = EXAMPLES, table.bag
                ids = np.minimum(rng.zipf(1.3, shape) - 1, table.rows - 1)
                ids = np.where(rng.random(shape) < 0.2, -1, ids)
                batch[feature] = ids.astype(np.int32)
        batch["place"][0] = -1
        batch["seen_weights"] = rng.uniform(0, 2, (EXAMPLES, 3)).astype(np.float32)
        batch["place_weights"] = rng.uniform(0.1, 2, (EXAMPLES, 4)).astype(np.float32)
        found.append(batch)
    return found


def model_optimizer():
    return optax.adamw(3e-3, eps=1e-3)


@functools.cache
def made(layout, optimizer, layers):
    """A step of mixed placements, compiled once."""
    return step_of(layout, optimizer, MIXED, top_layers=layers)


def step_of(layout, optimizer, placement, preset="tiny-dlrm", **sizes):
    layout = Layout.parse(layout)
    dense = make_train_step(
        build(preset, **SIZES, **sizes),
        model_optimizer(),
        layout,
        devices=jax.devices()[: layout.num_devices],
        check=False,  # Other tests of tables ask whether examples are apart.
    )
    tables = embedding_tables(TABLES, OPTIMIZERS[optimizer], placement=placement)
    return with_tables(dense, tables)


@functools.cache
def first_values(optimizer, layers):
    """Parameters and tables that every layout and placement starts from."""
    step = step_of("data=1", optimizer, "row_wise", top_layers=layers)
    state = step.init(3)
    params = jax.tree.map(np.asarray, step.dense.in_layer_order(state.params))
    return params, step.host_tables(state)


@functools.cache
def dense_run(optimizer, layers):
    params, tables = first_values(optimizer, layers)
    return dlrm_reference.train(
        params, tables, optimizer, FEATURES, batches(), model_optimizer()
    )


def check_equal(step, optimizer, layers):
    """20 steps give what the dense program gives: losses, parameters, every row."""
    state = step.init(3)
    for name, table in first_values(optimizer, layers)[1].items():
        for kind, values in table.items():
            np.testing.assert_array_equal(step.host_tables(state)[name][kind], values)
    losses = []
    for batch in batches():
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    wanted, params, tables = dense_run(optimizer, layers)
    np.testing.assert_allclose(losses, wanted, rtol=1e-5)
    found = step.host_tables(state)
    for name, table in tables.items():
        assert found[name].keys() == table.keys()
        for kind, values in table.items():
            error = np.linalg.norm(found[name][kind] - values)
            assert error <= 1e-5 * np.linalg.norm(values), (name, kind)
    own = jax.tree.leaves(step.dense.in_layer_order(state.params))
    for one, values in zip(own, jax.tree.leaves(params), strict=True):
        assert np.linalg.norm(one - values) <= 2e-5 * np.linalg.norm(values)


@pytest.mark.parametrize(
    "optimizer, layout",
    [
        ("RowwiseAdagrad", "data=2,fsdp=2,tensor=2"),
        slow("RowwiseAdagrad", STAGES),
        slow("LazyAdam", "fsdp=4,tensor=2"),
        slow("SGD", "data=8"),
        slow("RowwiseAdagrad", "data=1"),
    ],
)
def test_tables_of_every_placement_train_as_dense_ones(optimizer, layout):
    check_equal(made(layout, optimizer, 2), optimizer, 2)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_placement_trains_as_dense_tables(kind, optimizer):
    step = step_of("data=2,fsdp=4", optimizer, kind, top_layers=2)
    check_equal(step, optimizer, 2)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layout, layers",
    [
        ("fsdp=2,stage=4,microbatches=2,schedule=gpipe", 5),
        ("stage=2,tensor=2,microbatches=2,schedule=interleaved_1f1b,chunks=2", 4),
    ],
)
def test_tables_train_beside_the_stages_of_a_pipeline(layout, layers):
    optimizer = "RowwiseAdagrad"
    check_equal(made(layout, optimizer, layers), optimizer, layers)


# Blocks of so many rows stand for many devices: of 24, as of 4,096, number squared is
# no divisor, and 8 devices have blocks of fewer rows, and of more, than devices.
@pytest.mark.parametrize(
    "layout, placement, block",
    [
        (STAGES, MIXED, BLOCK),
        (STAGES, MIXED, 24),
        slow("data=1", "table_wise", BLOCK),
        slow("data=3", {**MIXED, "user": "row_wise"}, BLOCK),  # by way of the host
        *(slow("fsdp=8", kind, BLOCK) for kind in KINDS),
        slow("fsdp=8", "row_wise", 8),
    ],
)
def test_tables_are_taken_out_of_a_placement_row_by_row_and_put_back(
    layout, placement, block, monkeypatch
):
    monkeypatch.setattr("meshpar.tables.portable.BLOCK", block)
    optimizer = "RowwiseAdagrad" if placement is MIXED else "LazyAdam"
    step = made(layout, optimizer, 2) if placement is MIXED else None
    step = step or step_of(layout, optimizer, placement, top_layers=2)
    rng = np.random.default_rng(0)
    slots = OPTIMIZERS[optimizer].slots
    wanted = {
        table.name: {
            name: rng.normal(size=shape).astype(np.float32)
            for name, shape in (
                ("rows", (table.rows, table.dim)),
                *((name, slot_shape(table, slot)) for name, slot in slots.items()),
            )
        }
        for table in TABLES
    }
    shardings = step.shardings.model_state["embedding_tables"]
    given = stored_tables(step.functions.stores, wanted, shardings)
    portable = PortableTables(functions=step.functions)
    state = portable.taken_out(with_arrays(step.init(3), given))
    for table in TABLES:
        found = jax.device_get(state.model_state["embedding_tables"][table.name])
        assert found.pop("num_rows") == table.rows
        for kind, values in found.items():
            rows, rest = np.split(values, [table.rows])
            np.testing.assert_array_equal(rows, wanted[table.name][kind])
            assert len(values) == padded_rows(table.rows) and not rest.any()
    back = step.host_tables(portable.put_in(state))
    jax.tree.map(np.testing.assert_array_equal, back, wanted)


def test_what_a_table_has_no_row_for_is_no_part_of_its_checkpoint():
    """Devices have places of such rows too: 101 rows over 8 have 104."""
    step = made(STAGES, "RowwiseAdagrad", 2)
    state = step.init(3)
    ones = jax.tree.map(jnp.ones_like, state.model_state["embedding_tables"])
    tables = step.portable(with_arrays(state, ones)).model_state["embedding_tables"]
    for table in TABLES:
        of_rows = np.arange(BLOCK) < table.rows
        for name in ones["spread_16"]:
            values = np.asarray(tables[table.name][name])
            np.testing.assert_array_equal(values.reshape(BLOCK, -1)[:, 0], of_rows)


def test_devices_of_processes_that_cannot_share_blocks_are_refused_at_once(
    tmp_path, monkeypatch, refuses
):
    step = step_of("data=6", "SGD", "row_wise", top_layers=2)
    several = property(lambda mesh: True)
    monkeypatch.setattr(jax.sharding.Mesh, "is_multi_process", several)
    with refuses("checkpoint.indivisible_tables", 6, 4096, 4):
        step.checkpoints(tmp_path)


def slot_shape(table, slot):
    return (table.rows,) if slot.per_row else (table.rows, table.dim)


@pytest.mark.parametrize("rows", [102, 5000])
def test_a_checkpoint_of_other_rows_is_refused(rows, tmp_path, refuses):
    """Also of so many that they are filled up to another number."""
    step = made("data=2,fsdp=2,tensor=2", "RowwiseAdagrad", 2)
    tables = (dataclasses.replace(TABLES[0], rows=rows), *TABLES[1:])
    optimizer = OPTIMIZERS["RowwiseAdagrad"]
    other = with_tables(step.dense, embedding_tables(tables, optimizer))
    portable = PortableTables(functions=step.functions)
    state = zeros(portable.shapes, portable.shardings)
    for table in TABLES:
        state.model_state["embedding_tables"][table.name]["num_rows"] += table.rows
    with step.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(state, {})
    with (
        other.checkpoints(tmp_path) as checkpoints,
        refuses("checkpoint.table_rows_mismatch", "film", 101, rows),
    ):
        other.restored(checkpoints)


def test_a_checkpoint_of_an_earlier_version_is_refused_as_such(tmp_path, refuses):
    """There tables lay as they were placed."""
    step = made("data=2,fsdp=2,tensor=2", "RowwiseAdagrad", 2)
    with Checkpoints(tmp_path, layer_orders=None) as checkpoints:
        checkpoints.save(zeros_of(step), {})
    with (
        step.checkpoints(tmp_path) as checkpoints,
        refuses("checkpoint.no_tables"),
    ):
        step.restored(checkpoints)


@pytest.mark.slow
def test_devices_that_do_not_divide_save_and_restore_parts_of_tables(tmp_path):
    step = step_of("data=3", "LazyAdam", "row_wise", top_layers=2)
    state = step.init(3)
    portable = step.portable(state)
    for one in portable.model_state["embedding_tables"].values():
        assert one["rows"].addressable_shards[0].data.shape == (BLOCK // 2, 16)
    with step.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(portable, {})
        found = step.restored(checkpoints)
    assert found.model_state["embedding_tables"].keys() == (
        state.model_state["embedding_tables"].keys()
    )
    tables = step.host_tables(state), step.host_tables(found)
    jax.tree.map(np.testing.assert_array_equal, *tables)


@pytest.mark.slow
def test_a_checkpoint_goes_on_under_another_placement_and_layout(tmp_path):
    """As if it had never stopped, on as many devices and on fewer."""
    first = made("data=2,fsdp=2,tensor=2", "LazyAdam", 2)
    state = first.init(3)
    for batch in batches()[:2]:
        state, _ = first(state, batch)
    with first.checkpoints(tmp_path) as checkpoints:
        checkpoints.save(first.portable(state), {})
    state, metrics = first(state, batches()[2])
    for layout, placement in (("fsdp=8", "row_wise"), ("data=1", "replicated")):
        then = step_of(layout, "LazyAdam", placement, top_layers=2)
        with then.checkpoints(tmp_path) as checkpoints:
            found, again = then(then.restored(checkpoints), batches()[2])
        np.testing.assert_allclose(again["loss"], metrics["loss"], rtol=1e-6)
        tables = then.host_tables(found)
        for name, table in first.host_tables(state).items():
            for kind, values in table.items():
                np.testing.assert_allclose(tables[name][kind], values, atol=1e-6)


def test_a_step_that_is_not_finite_leaves_the_tables_as_they_are():
    step = made(STAGES, "RowwiseAdagrad", 2)
    state = step.init(3)
    before = step.host_tables(state)
    outside = step.place(batches()[0])
    # An id outside of its table, on a device, where nobody has looked at it.
    outside["user"] = outside["user"].at[0].set(57)
    state, metrics = step(state, outside)
    assert np.isnan(metrics["loss"]) and metrics["skipped"] == 1
    for name, table in step.host_tables(state).items():
        for kind, values in table.items():
            np.testing.assert_array_equal(values, before[name][kind])
