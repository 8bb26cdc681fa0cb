"""Rules say where every dim lies; whatever they cannot lay out is an error in words."""

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


# The table of errors.

KNOWN = "batch, embed, heads, mlp"
ERRORS = [
    (
        "indivisible",
        lambda: RULES.with_rules(layers=None).spec(
            ("layers", "embed", "mlp"),
            (24, 512, 6),
            mesh_shape=SIZES,
            path="blocks.mlp.up",
        ),
        (
            *("layout.indivisible", "'mlp'", 6, "'tensor'", 4, "blocks.mlp.up"),
            *((24, 512, 6), ("layers", "embed", "mlp"), "replicate_if_indivisible"),
        ),
    ),
    (
        "indivisible",
        lambda: RULES.spec(("batch", "embed"), (6, 4), mesh_shape=SIZES),
        (
            *("layout.indivisible", "'batch'", 6, "'data' x 'fsdp'", 4),
            *((6, 4), ("batch", "embed"), "replicate_if_indivisible"),
        ),
    ),
    (
        "claimed_twice",
        lambda: RULES.spec(("mlp", "heads")),
        ("rules.claimed_twice", "'tensor'", "'mlp' and 'heads'", ("mlp", "heads")),
    ),
    (
        "unknown",
        lambda: RULES.spec(("batch", "hads")),
        ("rules.missing_rule", "'hads'", ("batch", "hads"), "'heads'", KNOWN),
    ),
    (
        "unknown",
        lambda: RULES.spec(("batch", "hads"), (8, 4), path="blocks.mlp.up"),
        (
            *("rules.missing_rule", "'hads'", ("batch", "hads"), "'heads'", KNOWN),
            *("blocks.mlp.up", (8, 4)),
        ),
    ),
    (
        "claimed_twice",
        lambda: RULES.spec(("mlp", "heads"), path="blocks.mlp.up"),
        (
            *("rules.claimed_twice", "'tensor'", "'mlp' and 'heads'"),
            *("blocks.mlp.up", ("mlp", "heads")),
        ),
    ),
    (
        "repeated",
        lambda: RULES.spec(("embed", "embed"), (4, 4), path="blocks.mlp.up"),
        (
            *("rules.repeated_logical_axis", "'embed'", ("embed", "embed")),
            *("blocks.mlp.up", (4, 4)),
        ),
    ),
    (
        "rank",
        lambda: RULES.spec(("embed",), (4, 4)),
        ("rules.rank", "array", (4, 4), 2, ("embed",), 1),
    ),
    (
        "unknown",
        lambda: RULES.mesh_axes("zzz"),
        ("rules.missing_rule", "'zzz'", KNOWN),
    ),
    (
        "repeated",
        lambda: RULES.spec(("embed", "embed")),
        ("rules.repeated_logical_axis", "'embed'", ("embed", "embed")),
    ),
    (
        "rank",
        lambda: RULES.spec(("batch", "embed"), (8, 4, 2), path="x"),
        ("rules.rank", "x", (8, 4, 2), 3, ("batch", "embed"), 2),
    ),
    (
        "shadowed",
        lambda: Rules([("mlp", "tensor"), ("embed", None), ("mlp", None)]),
        ("rules.shadowed", "'mlp'", ("tensor",), None),
    ),
    (
        "shadowed",
        lambda: Rules({"mlp": None}, parameters=[("mlp", "fsdp"), ("mlp", "data")]),
        ("rules.shadowed", "'mlp'", ("fsdp",), ("data",)),
    ),
    (
        "unknown",
        lambda: Rules({"mlp": "tensr"}),
        (
            *("rules.unknown_mesh_axis", "'mlp'", "'tensr'", "'tensor'"),
            "context, data, expert, fsdp, stage, tensor",
        ),
    ),
    (
        "repeated",
        lambda: Rules({"batch": ("data", "fsdp", "data")}),
        ("rules.repeated_mesh_axis", "'batch'", "'data'", ("data", "fsdp", "data")),
    ),
    (
        "unknown",
        lambda: Rules({"mlp": "tensor"}, replicate_if_indivisible={"mpl"}),
        ("rules.missing_rule", "'mpl'", "'mlp'"),
    ),
    (
        "unknown",
        lambda: Rules({}, parameters={"mlp": "tensor"}).spec(("mlp",), path="up"),
        ("rules.parameters_only", "'mlp'", ("mlp",), "up"),
    ),
]


@pytest.mark.parametrize("kind, use, refusal", ERRORS)
def test_what_cannot_be_laid_out_is_an_error_in_full_words(kind, use, refusal, refuses):
    with refuses(*refusal, kind=RuleError) as caught:
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
def test_a_mesh_axis_of_size_1_is_in_no_error(logical_axes, refuses):
    sizes = Layout(fsdp=2).mesh_shape
    RULES.spec(logical_axes, (6, 7), mesh_shape=sizes)
    with refuses("layout.indivisible", "mesh axis 'fsdp'", 2, kind=RuleError):
        RULES.spec(("batch",), (7,), mesh_shape=sizes)


def test_a_dim_without_a_name_is_replicated():
    assert RULES.spec((None, "mlp", None)) == P(None, "tensor", None)


@pytest.mark.parametrize(
    "size, spec", [(6, P("data", None)), (8, P("data", "tensor")), (3, P("data", None))]
)
def test_a_waived_logical_axis_is_replicated_only_where_it_does_not_divide(
    size, spec, refuses
):
    rules = Rules({"batch": "data", "mlp": "tensor"}, replicate_if_indivisible={"mlp"})
    assert rules.spec(("batch", "mlp"), (2, size), mesh_shape=SIZES) == spec
    with refuses("layout.indivisible", "'batch'", 3, kind=RuleError):
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
    match = r"^constrain\(\('batch', 'mlp'\)\): .*`with jax.set_mesh\(mesh\):`$"
    with pytest.raises(RuntimeError, match=match):
        RULES.constrain(jnp.ones((8, 6)), ("batch", "mlp"))


def test_constraining_an_array_that_does_not_divide_is_an_error(mesh, refuses):
    refused = refuses("layout.indivisible", "'mlp'", 7, kind=RuleError)
    with jax.set_mesh(mesh), refused:
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
