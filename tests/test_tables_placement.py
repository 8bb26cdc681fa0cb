"""Tables, ids and placements refuse what makes no sense, and are even."""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import Input, Layout, embedding_tables, lint, make_mesh, make_train_step
from meshpar.models.presets import build
from meshpar.tables import SGD, LazyAdam, RowwiseAdagrad, Table, with_tables
from meshpar.tables.exchange import Exchange, hashed, positions, unique
from meshpar.tables.lookup import Shares
from meshpar.tables.optimizers import Slot
from meshpar.tables.placement import place_tables
from meshpar.tables.programs import TableFunctions
from meshpar.tables.table import COLUMN_WISE, KINDS, REPLICATED, ROW_WISE, TABLE_WISE
from meshpar.tables.tables import check_ids
from tests.marks import slow
from tests.states import normal_values


def table(**options):
    return Table(**{"name": "film", "rows": 100, "dim": 16, **options})


@pytest.mark.parametrize(
    "options, refusal",
    [
        ({"rows": 0}, ("value.not_whole_number", "film", "rows", 0, 1)),
        ({"rows": 2**31}, ("tables.too_many_rows", 2147483648, 2147483647)),
        ({"pooling": "max"}, ("tables.unknown_pooling", "max", "mean", "sum")),
        ({"dim": 2**16 + 1}, ("tables.too_many_columns", 65537, 65536)),
        ({"bucket": 100}, ("tables.bucket_outside_table", 100, 0, 99)),
        ({"bucket": 3, "hashed": True}, ("tables.bucket_of_hashed", 3, "hashed")),
        ({"bucket": 1.5}, ("value.not_whole_number", "bucket", 1.5, 0)),
        ({"bucket": True}, ("value.not_whole_number", "bucket", True)),
        ({"bucket": "x"}, ("value.not_whole_number", "bucket", "x")),
        ({"pooling": None}, ("tables.unknown_pooling", None, "mean", "sum")),
        ({"hashed": "no"}, ("tables.hashed_not_bool", "hashed", "no")),
        ({"scale": math.nan}, ("tables.scale_out_of_range", "scale", math.nan, 0)),
        ({"scale": -1.0}, ("tables.scale_out_of_range", "scale", -1.0)),
        ({"scale": "1"}, ("tables.scale_out_of_range", "scale", "'1'")),
        ({"features": "user"}, ("tables.features_not_tuple", "('user',)")),
        ({"features": None}, ("tables.features_not_texts", "features", None)),
        ({"features": (1, "b")}, ("tables.features_not_texts", "(1, 'b')")),
        ({"name": 3}, ("tables.name_not_text", "name", 3)),
        ({"into": None}, ("tables.name_not_text", "into", None)),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(options, refusal, refuses):
    with refuses(*refusal):
        table(**options)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(1e-3), optax.sgd(0.1), optax.contrib.muon(1e-3), None, "adam"],
)
def test_any_other_optimizer_is_refused(optimizer, refuses):
    with refuses("tables.unsupported_optimizer", "meshpar.tables.RowwiseAdagrad"):
        embedding_tables([table()], optimizer)


@pytest.mark.parametrize(
    "make, values",
    [
        (lambda: SGD(-0.1), ("rate", -0.1, 0)),
        (lambda: RowwiseAdagrad(0.1, epsilon=-1), ("epsilon", -1)),
        (lambda: LazyAdam(0.1, b2=1.0), ("b2", "1.0", 0, 1)),
    ],
)
def test_an_optimizer_that_makes_no_sense_is_refused(make, values, refuses):
    with refuses("optimizer.number_out_of_range", *values):
        make()


@pytest.mark.parametrize(
    "tables, refusal",
    [
        (
            [table(), table(name="film_weights")],
            ("tables.feature_named_as_weights", "'film_weights'", "'film'"),
        ),
        ([], ("tables.no_tables", 1)),
        (table(), ("tables.not_list", "Table;")),
        ({"film": table()}, ("tables.not_list", "dict", "Table")),
        (["film"], ("tables.not_table", "film", 0)),
        ([table(), table()], ("tables.duplicate_name", 2, "tables", "film")),
        (
            [table(), table(name="x", features=("film",))],
            ("tables.duplicate_name", 2, "features", "film"),
        ),
        ([table(), table(name="x", dim=8)], ("tables.differing_dims", 16, 8)),
    ],
)
def test_tables_that_do_not_go_together_are_refused(tables, refusal, refuses):
    with refuses(*refusal):
        embedding_tables(tables, SGD(0.1))


@pytest.mark.parametrize(
    "asked, refusal",
    [
        ({"flim": ROW_WISE}, ("tables.unknown_table", "flim", "film")),
        (None, ("tables.placement_wrong_type", None, "auto", "row_wise")),
        ({"film": None}, ("tables.unknown_placement", None, "column_wise")),
        ({"film": "rows"}, ("tables.unknown_placement", "rows", "'row_wise'")),
        ({"film": COLUMN_WISE}, ("tables.indivisible_columns", 16, 3)),
    ],
)
def test_a_placement_that_cannot_be_is_refused(asked, refusal, refuses):
    with refuses(*refusal):
        place_tables([table()], 3, {"film": 64}, asked)


def test_chosen_placements_are_even_in_bytes_and_lookups():
    """Sizes and bags of MLPerf's DLRM: five tables of 40 million rows, 21 others."""
    rows = [4 * 10**7, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 4 * 10**7]
    rows += [3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14, *[4 * 10**7] * 3]
    rows += [590152, 12973, 108, 36]
    bags = [3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27]
    bags += [10, 3, 1, 1]
    tables = [
        Table(name=f"id{at}", rows=many, dim=128, bag=bag)
        for at, (many, bag) in enumerate(zip(rows, bags, strict=True))
    ]
    row_bytes = {one.name: 516 for one in tables}
    found = place_tables(tables, 8, row_bytes)
    assert found.imbalance.table_bytes < 1.05
    assert found.imbalance.lookups < 1.2
    kinds = {one.table.rows: one.kind for one in found.placed}
    assert kinds[4 * 10**7] == ROW_WISE and kinds[3] == REPLICATED
    assert kinds[39060] == TABLE_WISE
    assert sum(load.lookups for load in found.loads) == pytest.approx(sum(bags))


@pytest.mark.parametrize("optimizer", [SGD(0.1), RowwiseAdagrad(0.1), LazyAdam(0.1)])
def test_a_load_is_what_a_device_holds(optimizer):
    """Of one kind alone, and of all together; tables of one device fill it on all."""
    tables = [table(name=f"t{at}", rows=rows) for at, rows in enumerate((130, 8, 99))]
    tables.append(table(name="t3", rows=50, dim=8, into="narrow"))
    mixed = {"t0": TABLE_WISE, "t1": COLUMN_WISE, "t2": REPLICATED, "t3": ROW_WISE}
    mesh = make_mesh(Layout(data=4), jax.devices()[:4])
    for placement in (*KINDS, mixed):
        made = embedding_tables(tables, optimizer, placement=placement)
        dense = SimpleNamespace(placement=SimpleNamespace(mesh=mesh))
        functions = TableFunctions(dense=dense, tables=made)
        held = 0
        for store in functions.stores:
            slots = {"rows": Slot(per_row=False), **optimizer.slots}
            for name, slot in slots.items():
                shape = store.shape[:1] if slot.per_row else store.shape
                spec = NamedSharding(mesh, functions.specs[store.name][name])
                held += 4 * math.prod(spec.shard_shape(shape))
        loads = made.placements(4).loads
        assert [load.table_bytes for load in loads] == [held] * 4


def test_a_table_on_one_device_shows_as_uneven():
    made = embedding_tables([table(rows=800)], SGD(0.1), placement=TABLE_WISE)
    assert made.placements(8).imbalance.table_bytes == 8
    assert "8.00 of the bytes that tables fill" in str(made.placements(8))


def test_tables_of_each_width_are_spread_by_themselves():
    """The fullest device of a width sets what all hold of it."""
    tables = [table(name=f"wide{at}", rows=1000, dim=64) for at in range(4)]
    tables += [table(name=f"thin{at}", rows=9000, into="thin") for at in range(4)]
    made = embedding_tables(tables, SGD(0.1), placement=TABLE_WISE)
    assert made.placements(4).imbalance.table_bytes == pytest.approx(1, rel=1e-3)
    # One large table fills a device in bytes, and another width's go there too.
    tables = [table(name="thin", rows=10**5, into="thin"), *tables[:4]]
    made = embedding_tables(tables, SGD(0.1), placement=TABLE_WISE)
    wide = [one.device for one in made.placements(4).placed if one.table.dim == 64]
    assert sorted(wide) == [0, 1, 2, 3]


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_a_place_of_its_own(kind):
    tables = [table(name=f"t{at}", rows=rows) for at, rows in enumerate((13, 8, 30))]
    placed = place_tables(tables, 4, {one.name: 64 for one in tables}, kind)
    (store,) = placed.stores
    codes = [store.codes(one, np.arange(one.table.rows)) for one in store.members]
    every = np.concatenate(codes)
    assert len(np.unique(every)) == 13 + 8 + 30
    assert every.min() >= 0 and every.max() < store.num_codes


def batch_of(ids):
    return {"film": np.asarray(ids, np.int32)}


def test_an_id_outside_of_its_table_is_an_error_on_the_host(refuses):
    for wrong in (100, -2):
        with refuses("batch.id_outside_table", "film", wrong, 100, 99):
            check_ids((table(),), batch_of([[5], [wrong]]))
    check_ids((table(),), batch_of([[99], [-1]]))
    check_ids((table(bucket=0),), batch_of([[100], [-2]]))
    check_ids((table(hashed=True),), batch_of([[2**31 - 1], [-2]]))


@pytest.mark.parametrize("more", [{"hashed": True}, {"bucket": 3}])
def test_ids_past_int32_are_refused_before_they_are_cut(more, refuses):
    batch = {"film": np.asarray([[2**32 + 5], [1]])}
    with refuses("batch.id_past_int32", "film", 4294967301, "int32"):
        check_ids((table(**more),), batch)
    with refuses("batch.ids_not_int32", "film", "uint32", "int32"):
        check_ids((table(**more),), {"film": jnp.zeros((2, 1), jnp.uint32)})


@pytest.mark.parametrize("dtype", [np.uint8, np.int8, np.int16])
def test_narrow_ids_name_the_rows_that_wide_ones_do(dtype):
    """On the last of 8 devices codes are past what the dtype counts to."""
    one = table(rows=8 * 2**13)
    (store,) = place_tables([one], 8, {"film": 64}, ROW_WISE).stores
    ids = np.asarray([[7], [127], [0]])
    looked_up = jax.jit(lambda batch: positions(store, batch))
    codes, _ = looked_up({"film": ids.astype(dtype)})
    np.testing.assert_array_equal(codes, store.codes(store.members[0], ids[:, 0]))
    shares = Shares(mesh_axes=(), replica_axes=(), sizes={})
    local = shares.local_batch({"film": jnp.asarray(ids, dtype)})
    assert local["film"].dtype == jnp.int32


def test_ids_of_another_shape_and_missing_ids_are_refused(refuses):
    with refuses("batch.wrong_shape", "film", (1, 1), 2):
        check_ids((table(bag=2),), batch_of([[1]]))
    with refuses("batch.missing_array", "film", "day"):
        check_ids((table(),), {"day": np.zeros((2, 1), np.int32)})


@pytest.mark.parametrize(
    "ids, refusal",
    [
        (np.zeros((2, 1)), ("batch.ids_not_integers", "film", "float64")),
        (np.full((2, 1), np.nan), ("batch.ids_not_integers", "float64")),
        (np.full((2, 1), np.inf), ("batch.ids_not_integers", "float64")),
        (jnp.zeros((2, 1)), ("batch.ids_not_integers", "float32")),
        (np.array([["a"], ["b"]]), ("batch.ids_not_integers", "<U1")),
        (np.array([[None], [1]]), ("batch.ids_not_integers", "object")),
        ([[0], [0, 1]], ("batch.not_an_array", "film", "list")),
    ],
)
def test_ids_that_are_no_whole_numbers_are_refused(ids, refusal, refuses):
    for more in ({}, {"hashed": True}):
        with refuses(*refusal):
            check_ids((table(**more),), {"film": ids})


@pytest.mark.parametrize("batch", [None, [1]])
def test_what_is_no_batch_is_refused(batch, refuses):
    with refuses("batch.not_a_dict", type(batch).__name__, "dict"):
        check_ids((table(),), batch)


def codes_of(one, ids):
    (store,) = place_tables([one], 2, {"film": 64}, REPLICATED).stores
    codes, weights = positions(store, batch_of(ids))
    return codes.tolist(), weights.tolist(), store


def test_a_bucket_takes_the_ids_outside_and_a_device_makes_others_nan():
    assert codes_of(table(bucket=7), [[3], [100], [-5]])[0] == [3, 7, 7]
    codes, weights, store = codes_of(table(), [[3], [100], [-1]])
    assert codes[0] == 3 and codes[2] == store.num_codes
    assert weights[0] == 1 and math.isnan(weights[1]) and weights[2] == 0


def test_hashed_ids_spread_evenly_over_all_rows():
    rows = np.asarray(hashed(jnp.arange(-50_000, 50_000), 100))
    counts = np.bincount(rows, minlength=100)
    assert rows.min() >= 0 and len(counts) == 100
    assert counts.min() > 800 and counts.max() < 1200  # of 1,000; sigma is 32


@functools.cache
def exchanged(kind, room):
    """Look up and update rows that one device holds, in as many rounds as it takes.

    Returns:
        Codes of the ids, (devices, ids); the store's rows; the rows that were looked
        up; how many devices updated each row, and in how many rounds.
    """
    mesh = make_mesh(Layout(data=4), jax.devices()[:4])
    (store,) = place_tables([table(dim=2)], 4, {"film": 8}, kind).stores
    (member,) = store.members
    rng = np.random.default_rng(0)
    ids = 4 * rng.integers(0, 25, (4, 40))  # row by row, device 0 holds all of them
    rows = rng.normal(size=(store.num_codes, 2)).astype(np.float32)

    def local(rows, ids):
        codes = store.codes(member, ids[0])
        found = unique(codes, jnp.ones(len(codes)), store.num_codes)
        exchange = Exchange(
            store=store, mesh_axes=("data",), num_codes=len(found.codes), room=room
        )
        looked_up = exchange.looked_up(rows, found.codes)
        ones = jnp.ones((len(found.codes), 1))

        def update(counts, local_rows, gradients):
            sums, rounds = counts
            more = gradients[:, 0]
            return (
                sums.at[local_rows].add(more, mode="drop"),
                rounds + jnp.zeros(store.rows).at[local_rows].max(more, mode="drop"),
            )

        counts = jnp.zeros(store.rows), jnp.zeros(store.rows)
        counts = exchange.gradients_sent(found.codes, ones, counts, update)
        return looked_up[found.slot][None], *counts

    spread = PartitionSpec("data")
    found, *counts = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(spread, spread),
            out_specs=spread,
            check_vma=False,
        )
    )(rows, ids)
    return np.asarray(store.codes(member, ids)), rows, found, *counts


@pytest.mark.parametrize(
    "room, kind",
    [
        (1, ROW_WISE),
        (3, TABLE_WISE),
        (64, ROW_WISE),
        *(slow(1, TABLE_WISE), slow(3, ROW_WISE), slow(64, TABLE_WISE)),
    ],
)
def test_nothing_is_dropped_where_a_device_wants_more_than_there_is_room(kind, room):
    codes, rows, found, counts, _ = exchanged(kind, room)
    np.testing.assert_array_equal(found, rows[codes])
    wanted = np.zeros(len(rows))
    for own in codes:  # each device sends each of its ids once
        wanted[np.unique(own)] += 1
    np.testing.assert_array_equal(counts, wanted)


@pytest.mark.parametrize("room, kind", [(1, ROW_WISE), (3, TABLE_WISE)])
def test_all_gradients_of_a_row_come_in_one_round(kind, room):
    """An optimizer's update of their sum is not that of one part after another."""
    *_, counts, rounds = exchanged(kind, room)
    assert counts.max() > 1
    np.testing.assert_array_equal(rounds, counts > 0)


@functools.cache
def dense_step(layout="data=8", **inputs):
    model = build("tiny-dlrm", features=1)
    if inputs:
        model = dataclasses.replace(model, inputs={**model.inputs, **inputs})
    return make_train_step(model, optax.sgd(0.1), layout)


@pytest.mark.parametrize(
    "inputs, declared",
    [
        ({"embedded": Input(("batch", None, None))}, "shape=None"),
        (
            {"embedded": Input(("batch", None, None), shape=(None, 1, 16))},
            "has_gradient=False",
        ),
    ],
)
def test_a_model_that_does_not_take_the_rows_is_refused(inputs, declared, refuses):
    with refuses("tables.input_mismatch", "embedded", declared):
        with_tables(dense_step(**inputs), embedding_tables([table()], SGD(0.1)))
    elsewhere = embedding_tables([table(into="rows")], SGD(0.1))
    with refuses("tables.undeclared_input", "rows", "embedded"):
        with_tables(dense_step(), elsewhere)


@pytest.mark.parametrize("layout", ["data=8,sync_every=2", "data=4,context=2"])
def test_an_input_with_a_gradient_is_refused_where_it_would_be_split(layout, refuses):
    key = "layout.unsupported_input_gradient"
    with refuses(key, "embedded", "sync_every", "context", 2):
        dense_step(layout)
    found = lint(build("tiny-dlrm", features=1), Layout.parse(layout)).findings
    assert key in [one.key for one in found]


def test_a_placement_that_cannot_be_is_refused_with_the_step(refuses):
    made = embedding_tables([table(dim=12)], SGD(0.1), placement=COLUMN_WISE)
    model = build("tiny-dlrm", features=1, dim=12, bottom=(12,))
    with refuses("tables.indivisible_columns", 12, 8):
        with_tables(make_train_step(model, optax.sgd(0.1), "data=8"), made)


def test_a_feature_named_as_an_input_of_the_model_is_refused(refuses):
    made = embedding_tables([table(features=("numbers",))], SGD(0.1))
    with refuses("tables.feature_is_input", "numbers"):
        with_tables(dense_step(), made)


def dense_batch(examples):
    return {
        "numbers": np.zeros((examples, 4), np.float32),
        "clicks": np.zeros(examples, np.float32),
    }


def test_a_batch_and_a_seed_are_checked_as_a_model_alone_checks_them(refuses):
    step = with_tables(
        dense_step("data=4,stage=2,microbatches=2"),
        embedding_tables([table()], SGD(0.1)),
    )
    batch = {**dense_batch(4), "film": np.zeros((4, 1), np.int32)}
    with refuses("batch.indivisible", 4, 2):
        step.evaluate(step.state_shapes, batch)
    with refuses("value.seed_out_of_range", "seed", -1, 0):
        step.init(-1)
    np.testing.assert_array_equal(step.rows_here(8), np.arange(8))


def test_rows_looked_up_are_counted_where_the_step_looks_them_up():
    """Three examples of each half of the batch, one a device, the fourth without."""
    made = embedding_tables([table()], SGD(0.1), placement=REPLICATED)
    step = with_tables(dense_step("data=2,tensor=4"), made)
    batch = {**dense_batch(6), "film": np.arange(6, dtype=np.int32)[:, None]}
    assert step.rows_looked_up(batch).tolist() == [1, 1, 1, 0, 1, 1, 1, 0]


def test_whole_numbers_have_no_gradient(refuses):
    batch = {**dense_batch(8), "embedded": np.zeros((8, 1, 16), np.int32)}
    with refuses("batch.dtype_without_gradient", "embedded", "int32"):
        dense_step().place(batch)


def test_a_gradient_of_an_input_that_is_not_finite_skips_the_step():
    """The loss and every parameter's gradient are finite: a root's is not at 0."""
    model = build("tiny-dlrm", features=1, bottom=(16,), top_width=8, top_layers=1)

    def embed(params, batch, scope):
        root = jnp.sqrt(batch["embedded"])
        return model.embed(params, {**batch, "embedded": root}, scope)

    step = make_train_step(
        dataclasses.replace(model, embed=embed),
        optax.sgd(0.1),
        "data=2",
        devices=jax.devices()[:2],
    )
    batch = {**dense_batch(4), "embedded": np.zeros((4, 1, 16), np.float32)}
    batch["numbers"] += 1
    state = normal_values(step.state_shapes)
    before = state.params
    state = jax.device_put(state, step.shardings)
    state, metrics = step(state, batch)
    assert np.isfinite(metrics["loss"]) and np.isfinite(metrics["grad_norm"])
    assert metrics["skipped"] == 1
    jax.tree.map(np.testing.assert_array_equal, before, jax.device_get(state.params))


def test_an_input_with_a_gradient_is_real(refuses):
    with refuses("batch.kind_without_gradient", "int", "float"):
        Input(("batch",), "int", has_gradient=True)


def test_optimizers_state_is_counted_in_a_tables_bytes():
    sizes = {SGD(0.1): 64, RowwiseAdagrad(0.1): 68, LazyAdam(0.1): 192}
    for optimizer, row_bytes in sizes.items():
        made = embedding_tables([table()], optimizer)
        assert made.row_bytes(made.tables[0]) == row_bytes
