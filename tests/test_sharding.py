"""Rules apply to whole trees, and arrays are born in the shards that they ask for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from jax.sharding import PartitionSpec as P

from meshpar import (
    FSDP_TENSOR,
    Layout,
    RuleError,
    born_sharded,
    make_mesh,
    nnx_shardings,
    tree_shardings,
)

SHAPES = {"mlp": {"up": (8, 12), "down": (12, 8)}, "norm": (8,)}
AXES = {"mlp": {"up": ("embed", "mlp"), "down": ("mlp", "embed")}, "norm": ("embed",)}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(Layout(data=2, fsdp=2, tensor=2))


def structs(shapes):
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, jnp.float32),
        shapes,
        is_leaf=lambda node: isinstance(node, tuple),
    )


def specs(shardings):
    return jax.tree.map(lambda sharding: sharding.spec, shardings)


def test_every_array_of_a_tree_gets_the_sharding_of_its_stored_form(mesh):
    shardings = tree_shardings(structs(SHAPES), AXES, mesh, FSDP_TENSOR)
    assert specs(shardings) == {
        "mlp": {"up": P("fsdp", "tensor"), "down": P("tensor", "fsdp")},
        "norm": P("fsdp"),
    }


@pytest.mark.parametrize(
    "shape, axes, refusal",
    [
        ((8, 7), ("embed", "mlp"), ("layout.indivisible", "mlp.up", (8, 7), 2)),
        ((8,), ("embed", "mlp"), ("rules.rank", "mlp.up", (8,), 1)),
        ((8, 8), ("embed", "mpl"), ("rules.missing_rule", "mlp.up", (8, 8), "'mpl'")),
    ],
)
def test_an_array_that_cannot_be_laid_out_is_named_by_its_path(
    mesh, shape, axes, refusal, refuses
):
    with refuses(*refusal, axes, kind=RuleError):
        tree_shardings(
            structs({"mlp": {"up": shape}}), {"mlp": {"up": axes}}, mesh, FSDP_TENSOR
        )


def linear():
    kernel = nnx.with_partitioning(nnx.initializers.lecun_normal(), ("embed", "mlp"))
    with nnx.use_eager_sharding(False):
        return nnx.Linear(8, 12, kernel_init=kernel, rngs=nnx.Rngs(0))


@pytest.mark.parametrize("build", [linear, lambda: nnx.eval_shape(linear)])
def test_a_flax_module_is_laid_out_by_its_own_metadata(mesh, build):
    shardings = nnx_shardings(build(), mesh, FSDP_TENSOR)
    assert specs(shardings) == {"kernel": P("fsdp", "tensor"), "bias": P(None)}


def test_a_misspelt_name_in_a_flax_module_is_an_error(mesh, refuses):
    rules = FSDP_TENSOR
    kernel = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mpl"))
    with nnx.use_eager_sharding(False):
        module = nnx.Linear(8, 12, kernel_init=kernel, rngs=nnx.Rngs(0))
    with refuses("rules.missing_rule", "'mpl'", "'mlp'", kind=RuleError):
        nnx_shardings(module, mesh, rules)


def test_arrays_are_born_in_their_shards_with_the_values_of_one_device(mesh):
    def create(key):
        return jax.tree.map(
            lambda struct: jax.random.normal(key, struct.shape), structs(SHAPES)
        )

    shardings = tree_shardings(structs(SHAPES), AXES, mesh, FSDP_TENSOR)
    arrays = born_sharded(create, shardings)(jax.random.key(0))
    local_shapes = jax.tree.map(lambda x: x.addressable_shards[0].data.shape, arrays)
    assert local_shapes == {"mlp": {"up": (4, 6), "down": (6, 4)}, "norm": (4,)}
    jax.tree.map(np.testing.assert_array_equal, arrays, create(jax.random.key(0)))
