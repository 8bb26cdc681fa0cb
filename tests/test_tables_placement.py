"""Tables, ids and placements refuse what makes no sense, and are even."""

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

from meshpar import (
    Input,
    InputError,
    Layout,
    embedding_tables,
    make_mesh,
    make_train_step,
)
from meshpar.models.presets import build
from meshpar.tables import SGD, LazyAdam, RowwiseAdagrad, Table, with_tables
from meshpar.tables.exchange import Exchange
from meshpar.tables.ids import check_ids, hashed, positions, unique
from meshpar.tables.placement import placements_of
from meshpar.tables.stores import stores_of
from meshpar.tables.table import COLUMN_WISE, KINDS, REPLICATED, ROW_WISE, TABLE_WISE


def table(**options):
    return Table(**{"name": "film", "rows": 100, "dim": 16, **options})


@pytest.mark.parametrize(
    "options, match",
    [
        ({"rows": 0}, "table 'film' has rows=0"),
        ({"rows": 2**31}, "rows=2147483648, but int32 ids count to 2147483647; hash"),
        ({"pooling": "max"}, "no pooling 'max'; .*known: mean, sum"),
        ({"bucket": 100}, "bucket=100, which is no row of 0 to 99; name one"),
        ({"bucket": 3, "hashed": True}, "hashes its ids, so that none is outside"),
    ],
)
def test_a_table_that_makes_no_sense_is_refused(options, match):
    with pytest.raises(InputError, match=match):
        table(**options)


@pytest.mark.parametrize(
    "optimizer",
    [optax.adam(1e-3), optax.sgd(0.1), optax.contrib.muon(1e-3), None, "adam"],
)
def test_any_other_optimizer_is_refused(optimizer):
    with pytest.raises(InputError, match="only touched rows are, .*RowwiseAdagrad"):
        embedding_tables([table()], optimizer)


@pytest.mark.parametrize(
    "tables, match",
    [
        ([], "give at least 1 table"),
        ([table(), table()], "2 tables have the name 'film'; rename all but one"),
        ([table(), table(name="x", features=("film",))], "2 features have the name"),
        ([table(), table(name="x", dim=8)], "dim=16 and 8 are looked up into"),
    ],
)
def test_tables_that_do_not_go_together_are_refused(tables, match):
    with pytest.raises(InputError, match=match):
        embedding_tables(tables, SGD(0.1))


@pytest.mark.parametrize(
    "asked, match",
    [
        ({"flim": ROW_WISE}, "a placement is given for table 'flim', but there are"),
        ({"film": "rows"}, "no placement 'rows'; did you mean 'row_wise'"),
        ({"film": COLUMN_WISE}, "dim=16, which does not divide over 3 devices"),
    ],
)
def test_a_placement_that_cannot_be_is_refused(asked, match):
    with pytest.raises(InputError, match=match):
        placements_of([table()], 3, {"film": 64}, asked)


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
    found = placements_of(tables, 8, row_bytes)
    assert found.imbalance.table_bytes < 1.05
    assert found.imbalance.lookups < 1.2
    kinds = {one.table.rows: one.kind for one in found.placed}
    assert kinds[4 * 10**7] == ROW_WISE and kinds[3] == REPLICATED
    assert kinds[39060] == TABLE_WISE
    spread = sum(load.table_bytes for load in found.loads)
    twice = sum(
        7 * 516 * one.table.rows for one in found.placed if one.kind == REPLICATED
    )
    assert spread == pytest.approx(516 * sum(rows) + twice)
    assert sum(load.lookups for load in found.loads) == pytest.approx(sum(bags))


@pytest.mark.parametrize("kind", KINDS)
def test_every_row_has_a_place_of_its_own(kind):
    tables = [table(name=f"t{at}", rows=rows) for at, rows in enumerate((13, 8, 30))]
    placed = placements_of(tables, 4, {one.name: 64 for one in tables}, kind)
    (store,) = stores_of(placed)
    codes = [store.codes(one, np.arange(one.table.rows)) for one in store.members]
    every = np.concatenate(codes)
    assert len(np.unique(every)) == 13 + 8 + 30
    assert every.min() >= 0 and every.max() < store.num_codes


def batch_of(ids):
    return {"film": np.asarray(ids, np.int32)}


def test_an_id_outside_of_its_table_is_an_error_on_the_host():
    for wrong, match in ((100, "id 100, but table 'film' has 100 rows"), (-2, "id -2")):
        with pytest.raises(InputError, match=match):
            check_ids((table(),), batch_of([[5], [wrong]]))
    check_ids((table(),), batch_of([[99], [-1]]))
    check_ids((table(bucket=0),), batch_of([[100], [-2]]))
    check_ids((table(hashed=True),), batch_of([[2**31 - 1], [-2]]))


def test_ids_of_another_shape_and_missing_ids_are_refused():
    with pytest.raises(InputError, match="takes bags of 2: give it \\(examples, 2\\)"):
        check_ids((table(bag=2),), batch_of([[1]]))
    with pytest.raises(
        InputError, match="looks up batch\\['film'\\], but the batch has"
    ):
        check_ids((table(),), {"day": np.zeros((2, 1), np.int32)})


def codes_of(one, ids):
    (store,) = stores_of(placements_of([one], 2, {"film": 64}, REPLICATED))
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


@pytest.mark.parametrize("kind", [ROW_WISE, TABLE_WISE])
@pytest.mark.parametrize("room", [1, 3, 64])
def test_nothing_is_dropped_where_a_device_wants_more_than_there_is_room(kind, room):
    """All ids on one holder, in as many rounds as it takes; sums of all devices."""
    mesh = make_mesh(Layout(data=4), jax.devices()[:4])
    (store,) = stores_of(placements_of([table(dim=2)], 4, {"film": 8}, kind))
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
            return counts.at[local_rows].add(gradients[:, 0], mode="drop")

        counts = jnp.zeros(store.rows)
        sums = exchange.gradients_sent(found.codes, ones, counts, update)
        return looked_up[found.slot][None], sums

    spread = PartitionSpec("data")
    found, counts = jax.jit(
        jax.shard_map(
            local,
            mesh=mesh,
            in_specs=(spread, spread),
            out_specs=spread,
            check_vma=False,
        )
    )(rows, ids)
    np.testing.assert_array_equal(found, rows[store.codes(member, ids)])
    wanted = np.zeros(store.num_codes)
    for own in ids:  # each device sends each of its ids once
        wanted[store.codes(member, np.unique(own))] += 1
    np.testing.assert_array_equal(counts, wanted)


def dense_step(layout="data=8", **inputs):
    model = build("tiny-dlrm", features=1)
    if inputs:
        model = dataclasses.replace(model, inputs={**model.inputs, **inputs})
    return make_train_step(model, optax.sgd(0.1), layout)


@pytest.mark.parametrize(
    "inputs, match",
    [
        ({"embedded": Input(("batch", None, None))}, "declares shape=None, has_grad"),
        (
            {"embedded": Input(("batch", None, None), shape=(None, 1, 16))},
            "has_gradient=False; declare Input",
        ),
    ],
)
def test_a_model_that_does_not_take_the_rows_is_refused(inputs, match):
    with pytest.raises(InputError, match=match):
        with_tables(dense_step(**inputs), embedding_tables([table()], SGD(0.1)))
    elsewhere = embedding_tables([table(into="rows")], SGD(0.1))
    with pytest.raises(InputError, match="looked up into 'rows', but the model has"):
        with_tables(dense_step(), elsewhere)


def test_layouts_that_tables_cannot_train_under_are_refused():
    with pytest.raises(InputError, match="leave sync_every and context out"):
        step = dense_step("data=8,sync_every=2")
        with_tables(step, embedding_tables([table()], SGD(0.1)))


def test_an_input_with_a_gradient_is_real():
    with pytest.raises(InputError, match="kind 'int' has no gradient; make it 'float'"):
        Input(("batch",), "int", has_gradient=True)


def test_optimizers_state_is_counted_in_a_tables_bytes():
    sizes = {SGD(0.1): 64, RowwiseAdagrad(0.1): 68, LazyAdam(0.1): 192}
    for optimizer, row_bytes in sizes.items():
        made = embedding_tables([table()], optimizer)
        assert made.row_bytes(made.tables[0]) == row_bytes
