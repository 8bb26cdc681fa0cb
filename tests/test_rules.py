"""Rules say where every dim lies; whatever they cannot lay out is an error in words."""

import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec as P

from meshpar import (
    BATCH_AXES,
    DATA_PARALLEL,
    FSDP,
    FSDP_TENSOR,
    FSDP_TENSOR_SEQUENCE,
    HSDP,
    TENSOR,
    TENSOR_SEQUENCE,
    Layout,
    RuleError,
    Rules,
    default_rules,
    make_mesh,
)
from meshpar.rules.presets import PRESETS

RULES = Rules(
    {"batch": ("data", "fsdp"), "embed": None, "heads": "tensor", "mlp": "tensor"}
)
SIZES = Layout(data=2, fsdp=2, tensor=4).mesh_shape


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(Layout(data=2, fsdp=2, tensor=2))


# The table of errors: each in full.

ERRORS = [
    (
        "indivisible",
        lambda: RULES.with_rules(layers=None).spec(
            ("layers", "embed", "mlp"),
            (24, 512, 6),
            mesh_shape=SIZES,
            path="blocks.mlp.up",
        ),
        "logical axis 'mlp' has size 6, which does not divide over mesh axis 'tensor' "
        "of size 4\n    blocks.mlp.up: shape (24, 512, 6) as ('layers', 'embed', "
        "'mlp'); pad it, map 'mlp' elsewhere, or replicate_if_indivisible",
    ),
    (
        "indivisible",
        lambda: RULES.spec(("batch", "embed"), (6, 4), mesh_shape=SIZES),
        "logical axis 'batch' has size 6, which does not divide over mesh axes 'data' "
        "x 'fsdp' of size 4\n    array: shape (6, 4) as ('batch', 'embed'); pad it, "
        "map 'batch' elsewhere, or replicate_if_indivisible",
    ),
    (
        "claimed_twice",
        lambda: RULES.spec(("mlp", "heads")),
        "mesh axis 'tensor' is claimed by both 'mlp' and 'heads' in ('mlp', 'heads'); "
        "an array can use each mesh axis once",
    ),
    (
        "unknown",
        lambda: RULES.spec(("batch", "hads")),
        "no rule for logical axis 'hads' of ('batch', 'hads'); did you mean 'heads'? "
        "known: batch, embed, heads, mlp",
    ),
    (
        "unknown",
        lambda: RULES.spec(("batch", "hads"), (8, 4), path="blocks.mlp.up"),
        "no rule for logical axis 'hads' of ('batch', 'hads'); did you mean 'heads'? "
        "known: batch, embed, heads, mlp\n"
        "    blocks.mlp.up: shape (8, 4) as ('batch', 'hads')",
    ),
    (
        "claimed_twice",
        lambda: RULES.spec(("mlp", "heads"), path="blocks.mlp.up"),
        "mesh axis 'tensor' is claimed by both 'mlp' and 'heads' in ('mlp', 'heads'); "
        "an array can use each mesh axis once\n    blocks.mlp.up: ('mlp', 'heads')",
    ),
    (
        "repeated",
        lambda: RULES.spec(("embed", "embed"), (4, 4), path="blocks.mlp.up"),
        "logical axis 'embed' names two dims of ('embed', 'embed'); give the dims "
        "different names\n    blocks.mlp.up: shape (4, 4) as ('embed', 'embed')",
    ),
    (
        "rank",
        lambda: RULES.spec(("embed",), (4, 4)),
        "array: shape (4, 4) has 2 dims, but ('embed',) names 1; name every dim, or "
        "write None",
    ),
    (
        "unknown",
        lambda: RULES.mesh_axes("zzz"),
        "no rule for logical axis 'zzz'; known: batch, embed, heads, mlp",
    ),
    (
        "repeated",
        lambda: RULES.spec(("embed", "embed")),
        "logical axis 'embed' names two dims of ('embed', 'embed'); give the dims "
        "different names",
    ),
    (
        "rank",
        lambda: RULES.spec(("batch", "embed"), (8, 4, 2), path="x"),
        "x: shape (8, 4, 2) has 3 dims, but ('batch', 'embed') names 2; name every "
        "dim, or write None",
    ),
    (
        "shadowed",
        lambda: Rules([("mlp", "tensor"), ("embed", None), ("mlp", None)]),
        "logical axis 'mlp' has two rules, ('tensor',) and None; only one can hold: "
        "remove the other",
    ),
    (
        "shadowed",
        lambda: Rules({"mlp": None}, parameters=[("mlp", "fsdp"), ("mlp", "data")]),
        "logical axis 'mlp' has two rules, ('fsdp',) and ('data',); only one can hold: "
        "remove the other",
    ),
    (
        "unknown",
        lambda: Rules({"mlp": "tensr"}),
        "rule 'mlp' names no mesh axis: 'tensr'; did you mean 'tensor'? known: "
        "context, data, expert, fsdp, stage, tensor",
    ),
    (
        "repeated",
        lambda: Rules({"batch": ("data", "fsdp", "data")}),
        "rule 'batch' names mesh axis 'data' twice in ('data', 'fsdp', 'data'); name "
        "it once",
    ),
    (
        "unknown",
        lambda: Rules({"mlp": "tensor"}, replicate_if_indivisible={"mpl"}),
        "no rule for logical axis 'mpl'; did you mean 'mlp'? known: mlp",
    ),
]


@pytest.mark.parametrize("kind, use, message", ERRORS)
def test_what_cannot_be_laid_out_is_an_error_in_full_words(kind, use, message):
    with pytest.raises(RuleError, match=f"^{re.escape(message)}$") as caught:
        use()
    assert caught.value.kind == kind


# The presets, as (activation, stored) specs of the same logical axes.

ACTIVATIONS = {
    ("batch", "seq", "embed"): [P(BATCH_AXES, None, None)] * 7,
    ("batch", "residual_seq", "embed"): [
        *[P(BATCH_AXES, None, None)] * 4,
        P(BATCH_AXES, "tensor", None),
        P(BATCH_AXES, None, None),
        P(BATCH_AXES, "tensor", None),
    ],
    ("batch", "seq", "heads", "head_dim"): [
        *[P(BATCH_AXES, None, None, None)] * 3,
        *[P(BATCH_AXES, None, "tensor", None)] * 4,
    ],
    ("batch", "seq", "kv_heads"): [
        *[P(BATCH_AXES, None, None)] * 3,
        *[P(BATCH_AXES, None, "tensor")] * 4,
    ],
    ("batch", "seq", "vocab"): [
        *[P(BATCH_AXES, None, None)] * 3,
        *[P(BATCH_AXES, None, "tensor")] * 4,
    ],
}
STORED = {
    ("layers", "embed", "mlp"): [
        P(None, None, None),
        P(None, "fsdp", None),
        P(None, "fsdp", None),
        P(None, None, "tensor"),
        P(None, None, "tensor"),
        P(None, "fsdp", "tensor"),
        P(None, "fsdp", "tensor"),
    ],
    ("vocab", "embed"): [
        P(None, None),
        P(None, "fsdp"),
        P(None, "fsdp"),
        P("tensor", None),
        P("tensor", None),
        P("tensor", "fsdp"),
        P("tensor", "fsdp"),
    ],
    ("embed",): [P(None), P("fsdp"), P("fsdp"), P(None), P(None), P("fsdp"), P("fsdp")],
}
IN_ORDER = (
    DATA_PARALLEL,
    FSDP,
    HSDP,
    TENSOR,
    TENSOR_SEQUENCE,
    FSDP_TENSOR,
    FSDP_TENSOR_SEQUENCE,
)


@pytest.mark.parametrize("logical_axes, specs", ACTIVATIONS.items(), ids=str)
def test_each_preset_lays_out_activations_as_the_table_says(logical_axes, specs):
    assert [rules.spec(logical_axes) for rules in IN_ORDER] == specs


@pytest.mark.parametrize("logical_axes, specs", STORED.items(), ids=str)
def test_each_preset_lays_out_stored_parameters_as_the_table_says(logical_axes, specs):
    assert [rules.stored.spec(logical_axes) for rules in IN_ORDER] == specs


def test_every_preset_is_in_the_tables():
    assert tuple(PRESETS.values()) == IN_ORDER


def test_parameters_have_their_own_rules_only_while_they_are_stored():
    assert FSDP.spec(("embed", "mlp")) == P(None, None)
    assert FSDP.stored.spec(("embed", "mlp")) == P("fsdp", None)
    assert FSDP.stored.stored == FSDP.stored


@pytest.mark.parametrize(
    "layout, residual",
    [
        (Layout(tensor=2), P(None, None, None)),
        (Layout(tensor=2, sequence_parallel=True), P(None, "tensor", None)),
        (Layout(data=2, sequence_parallel=True), P("data", None, None)),
    ],
)
def test_the_default_rules_do_what_the_layout_says(layout, residual):
    axes = ("batch", "residual_seq", "embed")
    assert default_rules(layout).spec(axes, mesh_shape=layout.mesh_shape) == residual


# Details of one spec.


@pytest.mark.parametrize(
    "layout, spec",
    [
        (Layout(), P(None, None)),
        (Layout(data=2), P("data", None)),
        (Layout(fsdp=2), P("fsdp", None)),
        (Layout(data=2, fsdp=4, tensor=2), P(("data", "fsdp"), "tensor")),
        (Layout(tensor=8), P(None, "tensor")),
    ],
)
def test_a_mesh_axis_of_size_1_is_in_no_spec(layout, spec):
    sizes = layout.mesh_shape
    assert RULES.spec(("batch", "mlp"), (16, 64), mesh_shape=sizes) == spec


@pytest.mark.parametrize("logical_axes", [("mlp", "heads"), ("batch", "mlp")])
def test_a_mesh_axis_of_size_1_is_in_no_error(logical_axes):
    sizes = Layout(fsdp=2).mesh_shape
    RULES.spec(logical_axes, (6, 7), mesh_shape=sizes)
    with pytest.raises(RuleError, match="over mesh axis 'fsdp' of size 2"):
        RULES.spec(("batch",), (7,), mesh_shape=sizes)


def test_a_dim_without_a_name_is_replicated():
    assert RULES.spec((None, "mlp", None)) == P(None, "tensor", None)


@pytest.mark.parametrize(
    "size, spec", [(6, P("data", None)), (8, P("data", "tensor")), (3, P("data", None))]
)
def test_a_waived_logical_axis_is_replicated_only_where_it_does_not_divide(size, spec):
    rules = Rules({"batch": "data", "mlp": "tensor"}, replicate_if_indivisible={"mlp"})
    assert rules.spec(("batch", "mlp"), (2, size), mesh_shape=SIZES) == spec
    with pytest.raises(RuleError, match="logical axis 'batch' has size 3"):
        rules.spec(("batch", "mlp"), (3, size), mesh_shape=SIZES)


def test_equal_rules_are_equal_and_hash_alike():
    pairs = Rules([("batch", ["data"]), ("mlp", "tensor")])
    mapping = Rules({"batch": "data", "mlp": ("tensor",)})
    assert pairs == mapping
    assert hash(pairs) == hash(mapping)


def test_changing_rules_leaves_the_old_ones_alone():
    changed = RULES.with_rules(mlp=None, experts="expert")
    assert changed.spec(("mlp", "experts")) == P(None, "expert")
    assert RULES.spec(("mlp",)) == P("tensor")


# On a mesh.


def test_a_sharding_splits_the_array_as_the_spec_says(mesh):
    sharding = FSDP_TENSOR.stored.sharding(mesh, ("embed", "mlp"), (8, 6))
    assert sharding.spec == P("fsdp", "tensor")
    assert sharding.shard_shape((8, 6)) == (4, 3)


def test_constraining_lays_the_array_out(mesh):
    with jax.set_mesh(mesh):
        constrain = jax.jit(lambda x: RULES.constrain(x, ("batch", "mlp")))
        laid_out = constrain(jnp.ones((8, 6)))
    assert laid_out.sharding.shard_shape(laid_out.shape) == (2, 3)


def test_constraining_without_a_mesh_is_an_error():
    match = re.escape(
        "constrain(('batch', 'mlp')): no mesh is set, so nothing would be laid out; "
        "run inside `with jax.set_mesh(mesh):`"
    )
    with pytest.raises(RuntimeError, match=match):
        RULES.constrain(jnp.ones((8, 6)), ("batch", "mlp"))


def test_constraining_an_array_that_does_not_divide_is_an_error(mesh):
    with (
        jax.set_mesh(mesh),
        pytest.raises(RuleError, match="'mlp' has size 7, which does not divide"),
    ):
        jax.eval_shape(lambda x: RULES.constrain(x, ("batch", "mlp")), jnp.ones((8, 7)))


def test_manual_mesh_axes_are_left_out_inside_a_shard_map(mesh):
    # The local batch of 1 would not divide over `data` and `fsdp` a second time.
    local = jax.shard_map(
        lambda x: RULES.constrain(2 * x, ("batch", "mlp")),
        mesh=mesh,
        in_specs=P(BATCH_AXES),
        out_specs=P(BATCH_AXES),
        axis_names=set(BATCH_AXES),
    )
    x = jnp.arange(24.0).reshape(4, 6)
    with jax.set_mesh(mesh):
        doubled = jax.jit(local)(x)
    assert (doubled == 2 * x).all()
    assert doubled.sharding.shard_shape(doubled.shape) == (1, 3)
