"""Space split over mesh axes: where volumes lie, what is refused, what is sent."""

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding, PartitionSpec

from meshpar import (
    Layout,
    RuleError,
    Rules,
    Scope,
    audit,
    default_rules,
    lint,
    make_mesh,
    make_train_step,
)
from meshpar.audit.collectives import Collective
from meshpar.audit.evidence import Evidence
from meshpar.audit.needs import halo_reason
from meshpar.models.layers.volume import VOLUME, Conv
from meshpar.models.presets import build
from meshpar.models.unet3d import UNet3DConfig
from meshpar.parallel.grids.space import space_errors
from meshpar.trace.operations import operations
from tests.refusals import names

BEAMS = {"depth": "context", "height": "tensor"}
RULES = default_rules(Layout.parse("stage=2,tensor=2,microbatches=2"))
NAMED = ((0, "images"), (1, "labels"))
SMALL = {"depth": 8, "height": 8, "width": 4, "base": 4, "groups": 2}


def step_of(layout, rules=None, **sizes):
    layout = Layout.parse(layout)
    return make_train_step(
        build("tiny-unet3d", **{**SMALL, **sizes}),
        optax.sgd(0.1),
        layout,
        rules=default_rules(layout).with_rules(**(rules or {})),
        devices=jax.devices()[: layout.num_devices],
    )


def test_a_volume_lies_in_parts_on_its_devices():
    step = step_of("data=2,context=2,tensor=2", BEAMS)
    batch = {
        "images": np.zeros((2, 8, 8, 4, 1), np.float32),
        "labels": np.zeros((2, 8, 8, 4), np.int32),
    }
    placed = step.place(batch)
    assert placed["images"].sharding.shard_shape((2, 8, 8, 4, 1)) == (1, 4, 4, 4, 1)
    assert placed["labels"].sharding.shard_shape((2, 8, 8, 4)) == (1, 4, 4, 4)
    assert step.place(placed)["images"] is placed["images"]


def test_without_a_rule_of_its_own_the_depth_is_shared_by_all():
    step = step_of("context=2,tensor=2")
    placed = step.place({"images": np.zeros((1, 8, 8, 4, 1), np.float32)} | labels())
    assert placed["images"].sharding.shard_shape((1, 8, 8, 4, 1)) == (1, 2, 8, 4, 1)


def labels():
    return {"labels": np.zeros((1, 8, 8, 4), np.int32)}


@pytest.mark.parametrize(
    "layout, refusal",
    [
        (
            "stage=2,tensor=2,microbatches=2",
            ("layout.stages_of_split_space", "tensor=2", "stage=2"),
        ),
        (
            "data=2,tensor=2,sync_every=2",
            ("layout.replicas_of_split_space", "sync_every=2"),
        ),
        (
            "fsdp=2,context=2,zero_axes=context",
            ("layout.states_split_with_space", "'context'", "zero_axes"),
        ),
        (
            "context=2,attention=allgather",
            ("layout.attention_beside_space", "attention=allgather"),
        ),
    ],
)
def test_what_cannot_stand_beside_split_space_is_refused_by_name(
    refuses, layout, refusal
):
    with refuses(*refusal) as error:
        step_of(layout)
    found = lint(build("tiny-unet3d", **SMALL), layout, global_batch=4).findings
    [told] = [one for one in found if one.path == "space"]
    assert (told.key, told.message) == (refusal[0], str(error.value))


def test_space_that_only_streams_have_is_refused_beside_stages_too():
    """Of a model that reads rows of values and folds them into volumes."""
    model = build("tiny-unet3d", **SMALL)
    flat = {
        name: replace(one, logical_axes=("batch", *(None,) * (len(one.shape) - 1)))
        for name, one in model.inputs.items()
    }
    layout = Layout.parse("stage=2,tensor=2,microbatches=2")
    (found,) = space_errors(replace(model, inputs=flat), layout, RULES)
    assert found.key == "layout.stages_of_split_space"
    assert names(str(found), "tensor=2") and names(str(found), "stage=2")
    alone = Layout.parse("stage=2,data=2,microbatches=2")
    assert not list(space_errors(replace(model, inputs=flat), alone, RULES))


def test_a_dim_of_space_that_does_not_divide_is_refused_with_both_numbers(refuses):
    batch = {"images": np.zeros((1, 6, 8, 4, 1), np.float32)}
    batch["labels"] = np.zeros((1, 6, 8, 4), np.int32)
    step = step_of("tensor=4", depth=6)
    with refuses("layout.indivisible", "'depth'", 6, 4, kind=RuleError):
        step.place(batch)
    findings = lint(build("tiny-unet3d", **SMALL), "tensor=8").findings
    told = [one.message for one in findings if one.key == "layout.indivisible"]
    assert any("size 4" in message for message in told)  # of the coarser level


def test_levels_that_do_not_halve_a_volume_are_refused_with_a_way_out(refuses):
    with refuses("model.volume_indivisible", "depth=197", 4, 200):
        UNet3DConfig(depth=197, height=200, width=200, classes=2, levels=3)
    with refuses("model.volume_indivisible", 8, "levels=3", "patch=2"):
        UNet3DConfig(depth=196, height=200, width=200, classes=2, levels=3, patch=2)


@pytest.mark.parametrize("layout", ["context=4", "fsdp=2,context=2,tensor=2"])
def test_lint_has_nothing_to_say_of_split_volumes(layout):
    assert lint(build("tiny-unet3d", **SMALL), layout).findings == ()


@pytest.fixture(scope="module")
def mesh():
    return make_mesh("context=2,tensor=2", jax.devices()[:4])


@pytest.mark.parametrize(
    "rules, kernel, stride, sides",
    [
        ({"depth": "context"}, 3, 1, (4, 4, 2)),  # `tensor` is idle
        ({"depth": "context"}, 2, 2, (4, 4, 2)),
        ({"depth": "context"}, 3, 3, (12, 3, 3)),
        # One place of width each.
        ({"depth": "tensor", "width": "context"}, 3, 1, (4, 4, 2)),
        (BEAMS, 2, 2, (6, 4, 2)),  # whose result is not split along the depth
        (BEAMS, 3, 3, (3, 12, 3)),  # no more than its input
    ],
)
def test_gradients_of_a_convolution_are_those_of_one_device(
    mesh, rules, kernel, stride, sides
):
    scope = Scope(rules=waived(rules))
    layer = conv((4, 4), kernel=kernel, stride=stride)
    graph, weights = nnx.split(layer)
    x = np.random.default_rng(0).normal(size=(2, *sides, 4)).astype(np.float32)

    def total(weights, x, scope=scope):
        y = nnx.merge(graph, weights)(scope.constrain(x, VOLUME), scope)
        return jnp.sum(jnp.tanh(y) ** 2)

    def plainly(weights, x):
        """Padded by hand, and no rule of `Conv`'s for its gradient."""
        before = (kernel - stride) // 2
        y = jax.lax.conv_general_dilated(
            x,
            weights["kernel"][...],
            (stride,) * 3,
            [(before, kernel - stride - before)] * 3,
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )
        return jnp.sum(jnp.tanh(y + weights["bias"][...]) ** 2)

    want, of_plain = jax.jit(jax.value_and_grad(plainly, (0, 1)))(weights, x)
    with jax.set_mesh(mesh):
        split = jax.device_put(x, scope.rules.sharding(mesh, VOLUME, x.shape))
        found, of_split = jax.jit(jax.value_and_grad(total, (0, 1)))(weights, split)
    np.testing.assert_allclose(found, want, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (of_split, of_plain)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)


def waived(rules):
    """Volumes split so, and whole where their sides do not divide."""
    table = dict.fromkeys(VOLUME[:-1]) | rules
    return Rules(table, replicate_if_indivisible=set(VOLUME[1:-1]))


def conv(channels, **options):
    with nnx.use_eager_sharding(False):
        return Conv(channels, **options, rngs=nnx.Rngs(0))


@pytest.mark.parametrize(
    "rules, sides, options, refusal",
    [
        (
            {"depth": "context"},
            (2, 4, 4),
            {"kernel": 5},
            ("grid.window_beyond_part", 5, "'depth'", 2, 1),
        ),
        (
            {"depth": "context"},
            (4, 2, 2),
            {"stride": 3},
            ("grid.indivisible_by_stride", "'depth'", 4, 3, 2, 6),
        ),
        (
            {"depth": "context"},
            (6, 2, 2),
            {"kernel": 2, "stride": 2},
            ("grid.indivisible_by_stride", "'depth'", 2, 3, 8),
        ),
        (
            {"depth": "context"},
            (7, 2, 2),
            {"stride": 2},
            ("grid.strided_result_split_alone", "'depth'", 7, 4, "tensor", 8),
        ),
        (
            BEAMS,
            (3, 7, 2),
            {"stride": 2},
            ("grid.strided_result_split_alone", "'depth'", 3, 2, 1, 4),
        ),
    ],
)
def test_a_convolution_of_wrong_gradients_is_refused_with_a_way_out(
    refuses, mesh, rules, sides, options, refusal
):
    layer, scope = conv((1, 1), **options), Scope(rules=waived(rules))
    with jax.set_mesh(mesh), refuses(*refusal):
        layer(jnp.ones((1, *sides, 1)), scope)


@pytest.mark.parametrize("order", [("tensor", "context"), ("context", "tensor")])
def test_one_place_of_a_coarser_level_beside_split_examples_is_refused(refuses, order):
    """XLA halves what goes back through its norms there (jax 0.10.2)."""
    rules = dict(zip(("depth", "width"), order, strict=True))
    step = step_of("data=2,context=2,tensor=2", rules)
    batch = {name: jnp.zeros((2, 8, 8, 4, 1)[: 5 - at]) for at, name in NAMED}
    batch["labels"] = batch["labels"].astype(int)
    with refuses("grid.short_part_beside_examples", "'width'", 2, 1, "'depth'"):
        step.compile(batch)


def convolved(stride=1, dilation=1, kernel=3):
    def total(x, weight):
        y = jax.lax.conv_general_dilated(
            x,
            weight,
            (stride,) * 3,
            "SAME",
            rhs_dilation=(dilation,) * 3,
            dimension_numbers=("NDHWC", "DHWIO", "NDHWC"),
        )
        return jnp.sum(jnp.tanh(y))

    return jax.value_and_grad(total, (0, 1)), (kernel,) * 3 + (4, 5)


@pytest.mark.parametrize(
    "options, widest",
    [({}, 1), ({"dilation": 2}, 2), ({"stride": 2, "kernel": 2}, 0)],
    ids=["plain", "dilated", "strided"],
)
def test_a_convolution_sends_halos_of_its_width_and_sums_its_kernel(
    mesh, options, widest
):
    """Of parts of 8 x 4: no permute has more places along a split dim."""
    function, kernel = convolved(**options)
    split = NamedSharding(mesh, PartitionSpec(None, "context", "tensor"))
    whole = NamedSharding(mesh, PartitionSpec())
    given = (
        jax.ShapeDtypeStruct((1, 16, 8, 6, 4), jnp.float32, sharding=split),
        jax.ShapeDtypeStruct(kernel, jnp.float32, sharding=whole),
    )
    report = audit(jax.jit(function, out_shardings=(whole, (split, whole))), *given)
    assert not [row for row in report.rows if row.surprise]
    permutes = [one for one in report.rows if "halo" in one.reason]
    assert bool(permutes) == bool(widest)
    for one in permutes:
        [dims] = one.collective.dims
        assert one.collective.kind == "collective-permute"
        along = 1 if one.collective.mesh_axes == ("context",) else 2
        assert dims[along] <= widest
        assert one.collective.payload_bytes == 4 * np.prod(dims)
    kinds = {row.collective.kind for row in report.rows}
    assert kinds <= {"collective-permute", "all-reduce"}


def test_what_is_wider_than_a_window_reaches_is_no_halo(mesh):
    function, kernel = convolved()
    split = NamedSharding(mesh, PartitionSpec(None, "context", "tensor"))
    given = (
        jax.ShapeDtypeStruct((1, 16, 8, 6, 4), jnp.float32),
        jax.ShapeDtypeStruct(kernel, jnp.float32),
    )
    traced = operations(jax.jit(function).trace(*given).jaxpr, (split, None))
    evidence = Evidence.from_trace(traced, dict(mesh.shape))
    [forward, *_] = evidence.named("conv_general_dilated", "")
    row = Collective(
        kind="collective-permute",
        mesh_axes=("context",),
        group_size=2,
        dtype="f32",
        dims=((1, 1, 4, 6, 4),),
        payload_bytes=384,
        wire_bytes=384,
        executions=1,
        counted=True,
        is_async=False,
        in_branch=False,
        in_loop=False,
        op_path="jit(f)/conv_general_dilated",
        source=forward.source,
        uses=(),
        line=1,
    )
    assert halo_reason(row, evidence) is not None
    for dims in ((1, 8, 4, 6, 4), (1, 3, 4, 6, 4), (1, 1, 4, 6, 3), (1, 1, 12, 6, 4)):
        assert halo_reason(replace(row, dims=(dims,)), evidence) is None, dims
    for other in ("all-gather", "all-to-all"):
        assert halo_reason(replace(row, kind=other), evidence) is None
