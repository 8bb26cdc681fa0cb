"""Muon by owners is optax's Muon, with each matrix whole on one device alone."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec
from optax import contrib
from optax.contrib import MuonDimensionNumbers

from meshpar import (
    Layout,
    absent_mesh,
    audit,
    batch_shapes,
    default_rules,
    make_mesh,
    make_train_step,
)
from meshpar.collectives import ASKED
from meshpar.models.presets import build
from meshpar.optimizers import muon
from meshpar.optimizers.muon import NewtonSchulz
from meshpar.parallel.by_owners import Exchange, Owners
from meshpar.parallel.matrices import OnMatrices
from meshpar.parallel.owners import Operand, assign_owners
from meshpar.parallel.parameter_specs import parameter_specs
from meshpar.parallel.pipeline.stages import arranged_for
from meshpar.recipes.optimizers import muon_dims
from meshpar.rules.sharding import path_name
from meshpar.testing.batches import random_batch
from meshpar.train.checkpoint import Checkpoints
from tests.marks import slow
from tests.pipelined import batch_of, mlp_of, step_of
from tests.test_audit_targets import needs_gpu_compiler

P = PartitionSpec
NEWTON_SCHULZ = NewtonSchulz(steps=5, preconditioning="frobenius")

DIMS = {
    "heads": MuonDimensionNumbers((0,), (1, 2)),
    "experts": MuonDimensionNumbers(-2, -1),
    "up": MuonDimensionNumbers(),
    "scale": None,
}
SHAPES = {"heads": (8, 2, 8), "experts": (3, 12, 8), "up": (8, 20), "scale": (8,)}


@pytest.mark.parametrize(
    "options",
    [
        dict(muon_weight_dimension_numbers=DIMS, weight_decay=0.1, beta=0.9),
        dict(muon_weight_dimension_numbers=lambda params: DIMS, consistent_rms=0.2),
        dict(ns_coeffs="dion", nesterov=False, adam_learning_rate=1e-3),
        dict(preconditioning="schatten", ns_steps=4, adaptive=True, mu_dtype="float32"),
    ],
    ids=["dims", "rms", "dion", "schatten"],
)
def test_updates_and_state_are_those_of_optax(options):
    keys = jax.random.split(jax.random.key(0), len(SHAPES))
    pairs = zip(SHAPES.items(), keys, strict=True)
    params = {name: jax.random.normal(key, shape) for (name, shape), key in pairs}
    params["experts"] = params["experts"].astype(jnp.bfloat16)

    def two_updates(optimizer):
        gradients = jax.tree.map(lambda x: jnp.sin(3 * x), params)
        others = jax.tree.map(jnp.cos, params)
        first, state = optimizer.update(gradients, optimizer.init(params), params)
        second, state = optimizer.update(others, state, params)
        return first, second, state

    found, wanted = (
        jax.jit(lambda make=make: two_updates(make(1e-2, **options)))()
        for make in (muon, contrib.muon)
    )
    assert jax.tree.structure(found) == jax.tree.structure(wanted)
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-7)


def owners_by_layout(model, layout):
    """Who owns which matrix of a model, and the arrays of all matrices."""
    model, rules = arranged_for(model, layout), default_rules(layout)
    parameters = {path: model.flat_parameters()[path] for path in muon_dims(model)}
    owners = Owners(
        mesh=absent_mesh(layout),
        specs={
            path: parameter_specs(path, one, layout, rules)["spec"]
            for path, one in parameters.items()
        },
        filled={
            path: tuple(at >= 0 for at in one.places)
            for path, one in parameters.items()
        },
        has_ragged=True,
    )
    operations = [
        NEWTON_SCHULZ.on_array(parameters[path].shape, dims)
        for path, dims in muon_dims(model).items()
    ]
    shapes = [one.stacked_shape for one in parameters.values()]
    return owners.assignment(list(parameters), operations, shapes), shapes


LARGE = [
    ("llama3-8b", "fsdp=64", 2.0),
    ("llama3-8b", "fsdp=8,tensor=8", 2.0),
    ("llama3-8b", "stage=4,fsdp=16,microbatches=8", 2.0),
    ("mixtral-8x7b", "expert=8", 2.0),
    ("mixtral-8x7b", "expert=8,tensor=4", 2.0),
    ("llama3-8b", "data=16,zero=1", 2.0),
    ("llama3-8b", "data=8,fsdp=8", 2.0 + 7),  # Each result to 7 more copies.
]


@pytest.mark.parametrize(("preset", "line", "bound"), LARGE)
def test_devices_have_equal_flops_and_each_matrix_goes_there_and_back(
    preset, line, bound
):
    found, shapes = owners_by_layout(build(preset), Layout.parse(line))
    assert found.flops.max() <= 1.05 * found.ideal_flops
    sent = 0
    for group in found.groups:
        packing = Exchange(found, group, has_ragged=True).packing
        assert packing.counts.sum() == group.filled.sum(), "each has one owner"
        shard = math.prod(group.sharding.shard)
        sent += 2 * packing.counts.sum() * shard * (packing.num_owners - 1)
        if (copies := packing.num_copies) > 1:
            num_devices = found.flops.size
            sent += num_devices * packing.size * shard * (copies - 1)
    assert sent <= bound * sum(map(math.prod, shapes))


def test_work_is_even_over_shapes_where_no_shape_divides():
    matrices = {"heads": (12, 16, 32), "mlp": (9, 16, 64)}
    operands = [
        Operand(OnMatrices(name, (), flops), shape, P(None, "fsdp"), (True,) * shape[0])
        for flops, (name, shape) in zip((30, 50), matrices.items(), strict=True)
    ]
    assigned_flops = assign_owners(operands, {"fsdp": 8}).flops
    assert assigned_flops.sum() == 12 * 30 + 9 * 50
    assert assigned_flops.max() == 110, "the shapes by themselves: 2 x 30 + 2 x 50"


def mixed(matrix, scale):
    """Depends on every value of the matrix, and on where each lies."""
    weights = jnp.arange(matrix.size, dtype=matrix.dtype).reshape(matrix.shape)
    return scale * jnp.cumsum(matrix, 0) + jnp.sum(weights * matrix) - matrix**2


def ragged(rows, out, at, sizes, out_at, out_sizes, *, axis_name):
    """`lax.ragged_all_to_all`, which XLA:CPU has not, by its documentation."""
    rows, at, sizes, out_at = (
        lax.all_gather(one, axis_name) for one in (rows, at, sizes, out_at)
    )
    own = lax.axis_index(axis_name)
    for device, array in enumerate(rows):
        place = jnp.arange(len(array)) - at[device, own]
        valid = (place >= 0) & (place < sizes[device, own])
        target = jnp.where(valid, place + out_at[device, own], len(out))
        out = out.at[target].set(array, mode="drop")
    return jnp.where((sizes[:, own] == out_sizes).all(), out, jnp.nan)


LAYERS = (True, True, False, True, True, False)

LIES = [
    ("fsdp=8", {"up": P(None, "fsdp")}),
    ("fsdp=2,tensor=4", {"up": P(None, "tensor", "fsdp")}),
    ("fsdp=2,tensor=2,data=2", {"up": P(None, None, ("tensor", "fsdp"))}),
    ("stage=2,fsdp=4,microbatches=2", {"up": P("stage", "fsdp")}),
    ("data=8", {"up": P()}),
    ("expert=2,fsdp=2,data=2", {"experts": P(None, "expert", None, "fsdp")}),
    (
        "stage=2,expert=2,tensor=2,microbatches=2",
        {
            "experts": P("stage", "expert"),
            "up": P("stage", None, "tensor"),
            "whole": P("fsdp"),
        },
    ),
]


@pytest.mark.parametrize("has_ragged", [False, True], ids=["padded", "ragged"])
@pytest.mark.parametrize(("line", "specs"), LIES)
def test_owners_compute_what_one_device_does(line, specs, has_ragged, monkeypatch):
    monkeypatch.setattr(lax, "ragged_all_to_all", ragged)
    shapes = {"up": (6, 16, 8), "experts": (6, 4, 8, 16), "whole": (8, 16)}
    operations = {
        "up": OnMatrices(mixed, (), flops=3),
        "experts": OnMatrices(mixed, (0,), flops=5),
        "whole": OnMatrices(mixed, (), flops=3),
    }
    mesh = make_mesh(Layout.parse(line))
    owners = Owners(
        mesh=mesh,
        specs=specs,
        filled={path: LAYERS for path in ("up", "experts")},
        has_ragged=has_ragged,
    )
    keys = jax.random.split(jax.random.key(1), len(specs))
    arrays = [
        jax.device_put(jax.random.normal(key, shapes[path]), NamedSharding(mesh, spec))
        for key, (path, spec) in zip(keys, specs.items(), strict=True)
    ]
    paths = list(specs)
    chosen = [operations[path] for path in paths]
    scale = jnp.float32(0.5)
    run = jax.jit(lambda arrays: owners.run(paths, chosen, arrays, [scale]))
    for path, array, found in zip(paths, arrays, run(arrays), strict=True):
        assert found.sharding.is_equivalent_to(array.sharding, array.ndim)
        whole = np.asarray(array)
        if path == "whole":
            wanted = operations[path](whole, scale)
        else:
            wanted = jax.vmap(operations[path], (0, None))(whole, scale)
            wanted = np.where(
                np.reshape(LAYERS, (-1, *(1,) * (whole.ndim - 1))), wanted, 0
            )
        np.testing.assert_allclose(found, wanted, rtol=1e-5, atol=1e-4)


def test_the_audit_names_the_collectives_and_counts_the_busiest_devices_work():
    shapes = {"heads": (12, 16, 32), "mlp": (9, 16, 64)}
    line = "fsdp=4,data=2"
    mesh = make_mesh(Layout.parse(line))
    owners = Owners(
        mesh=mesh,
        specs=dict.fromkeys(shapes, P(None, "fsdp")),
        filled={path: (True,) * shape[0] for path, shape in shapes.items()},
        has_ragged=False,
    )
    operations = [
        NEWTON_SCHULZ.on_array(shape[1:], MuonDimensionNumbers())
        for shape in shapes.values()
    ]
    shared = jnp.float32((3.4, -4.8, 2.0)), jnp.float32(1e-8)
    sharding = NamedSharding(mesh, P(None, "fsdp"))
    arrays = [
        jax.ShapeDtypeStruct(shape, jnp.float32, sharding=sharding)
        for shape in shapes.values()
    ]

    @jax.jit
    def orthogonalized(arrays):
        return owners.run(list(shapes), operations, arrays, shared)

    report = audit(orthogonalized, arrays, mesh=mesh)
    assert report.surprises == ()
    names = ("owner_dispatch", "owner_return", "owner_gather")
    assert {row.reason for row in report.rows} == {ASKED[name][1] for name in names}
    found = owners.assignment(list(shapes), operations, shapes.values())
    assert report.flops == found.flops.max()


@pytest.mark.slow
@needs_gpu_compiler
def test_on_gpus_shards_are_sent_without_padding():
    layout, model = Layout.parse("fsdp=8"), build("tiny", layers=3)
    reports = {
        optimizer: audit(
            make_train_step(model, optimizer, layout, mesh=absent_mesh(layout)),
            batch_shapes(model, 8, seq=16),
            target="gpu:h100:1x8",
        )
        for optimizer in (muon_for(model), optax.adamw(1e-3))
    }
    with_muon, with_adamw = reports.values()
    assert with_muon.surprises == ()
    words = [ASKED[name][1] for name in ("owner_dispatch", "owner_return")]
    rows = [row.collective for row in with_muon.rows if row.reason in words]
    matrices = [model.flat_parameters()[path] for path in muon_dims(model)]
    num_bytes = sum(4 * math.prod(one.stacked_shape) for one in matrices)
    assert {row.kind for row in rows} == {"ragged-all-to-all"}
    assert 8 * sum(row.wire_bytes for row in rows) == num_bytes * 2 * 7 // 8
    assigned_flops = owners_by_layout(model, layout)[0].flops
    assert with_muon.flops - with_adamw.flops == assigned_flops.max()


def muon_for(model, make=muon):
    """Muon of the matrices of a model's blocks."""
    dims = muon_dims(model)

    def chosen(params):
        return jax.tree.map_with_path(lambda path, _: dims.get(path_name(path)), params)

    return make(1e-2, muon_weight_dimension_numbers=chosen, consistent_rms=0.2)


@functools.cache
def trained(name, line, make=muon):
    """Losses of three steps and the parameters after them, layers first to last."""
    model = mlp_of(3) if name == "mlp" else build(name)
    step = step_of(model, line, muon_for(model, make), max_grad_norm=1.0)
    batch = batch_of() if name == "mlp" else random_batch(model, 8, 16, seed=0)
    state, losses = step.init(0), []
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, step.in_layer_order(state.params))


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("mlp", "fsdp=2,stage=2,microbatches=2"),  # 3 layers as 2 and 1
        slow("mlp", "fsdp=8"),
        slow("mlp", "fsdp=2,tensor=2"),
        slow("mlp", "data=4,tensor=2"),
        slow("mlp", "data=2,fsdp=2,zero=2,tensor=2"),
        slow("mlp", "data=4,zero=1"),
        slow("mlp", "fsdp=2,optimizer_memory=host"),
        slow("mlp", "stage=3,tensor=2,microbatches=2"),
        slow("tiny-moe", "expert=4,data=2"),
        slow("tiny-moe", "fsdp=2,expert=2,tensor=2"),
    ],
)
def test_three_steps_are_those_of_optax_on_one_device(name, line):
    losses, found = trained(name, line)
    wanted_losses, wanted = trained(name, "data=1", contrib.muon)
    np.testing.assert_allclose(losses, wanted_losses, rtol=1e-5)
    assert wanted_losses[2] < wanted_losses[0]
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(one - other).mean() <= 1e-5 * np.abs(other).mean()


@pytest.mark.parametrize(
    ("make", "first", "second"),
    [
        slow(muon, "fsdp=2,tensor=2", "stage=2,microbatches=2"),
        slow(muon, "stage=2,microbatches=2", "data=4,zero=1"),
        slow(contrib.muon, "data=1", "fsdp=2,tensor=2"),  # Of a run with optax's.
    ],
)
def test_a_checkpoint_goes_on_under_another_layout(make, first, second, tmp_path):
    model, batch = mlp_of(3), batch_of()
    before, after = (
        step_of(model, line, muon_for(model, one), max_grad_norm=1.0)
        for line, one in ((first, make), (second, muon))
    )
    state = before.init(0)
    for _ in range(2):
        state, _ = before(state, batch)
    with Checkpoints(tmp_path, layer_orders=before.layer_orders) as checkpoints:
        checkpoints.save(state, {"layout": first})
    with Checkpoints(tmp_path, layer_orders=after.layer_orders) as checkpoints:
        state = checkpoints.restore(after.state_shapes, after.shardings)
    state, metrics = after(state, batch)
    losses, wanted = trained("mlp", "data=1", contrib.muon)
    assert float(metrics["loss"]) == pytest.approx(losses[2], rel=1e-5)
    found = jax.tree.map(np.asarray, after.in_layer_order(state.params))
    for one, other in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert np.abs(one - other).mean() <= 1e-5 * np.abs(other).mean()


@pytest.mark.slow
def test_replicas_and_their_outer_optimizer_have_owners_of_their_own():
    model, line = mlp_of(3), "data=2,fsdp=2,sync_every=2"
    states = {}
    for make in (muon, contrib.muon):
        inner, outer = muon_for(model, make), muon_for(model, make)
        step = step_of(model, line, inner, outer_optimizer=outer)
        state = step.init(0)
        for _ in range(4):
            state, _ = step(state, batch_of())
        states[make] = jax.tree.leaves(jax.device_get(state.params))
        if make is muon:
            assert audit(step, batch_of()).surprises == ()
            assert audit(step.sync_program, batch_of()).surprises == ()
    for one, other in zip(*states.values(), strict=True):
        assert np.abs(one - other).mean() <= 1e-5 * np.abs(other).mean()
