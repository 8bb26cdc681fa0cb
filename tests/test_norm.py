"""The global norm counts every value once, however many devices hold it."""

import jax
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import Layout, make_mesh
from meshpar.parallel.reduction import global_norm

TREES = {
    "replicated": {"a": P(), "b": {"c": P(None, None)}},
    "partly split": {"a": P("fsdp"), "b": {"c": P(None, "tensor")}},
    "split in one array, whole in another": {"a": P(), "b": {"c": P("fsdp", "tensor")}},
    "wholly split": {
        "a": P(("data", "fsdp", "tensor")),
        "b": {"c": P("data", "tensor")},
    },
    "over axes of size 1": {"a": P("stage"), "b": {"c": P(("fsdp", "expert"), None)}},
}


@pytest.fixture(scope="module")
def mesh():
    return make_mesh(Layout(data=2, fsdp=2, tensor=2))


def tree_of(dtype):
    rng = np.random.default_rng(0)
    return {
        "a": rng.normal(size=(16,)).astype(dtype),
        "b": {"c": rng.normal(size=(4, 6)).astype(dtype)},
    }


def laid_out(mesh, specs, dtype="float32"):
    shardings = jax.tree.map(
        lambda spec: NamedSharding(mesh, spec),
        specs,
        is_leaf=lambda node: isinstance(node, P),
    )
    return jax.device_put(tree_of(dtype), shardings), shardings


@pytest.mark.parametrize("specs", TREES.values(), ids=TREES)
def test_the_norm_is_that_of_the_whole_arrays(mesh, specs):
    tree, shardings = laid_out(mesh, specs)
    norm = jax.jit(lambda tree: global_norm(tree, shardings, mesh))(tree)
    np.testing.assert_allclose(norm, optax.tree.norm(tree_of("float32")), rtol=1e-6)


def test_half_precision_is_summed_in_fp32(mesh):
    tree, shardings = laid_out(mesh, TREES["partly split"], jax.numpy.bfloat16)
    norm = jax.jit(lambda tree: global_norm(tree, shardings, mesh))(tree)
    whole = jax.tree.map(lambda x: x.astype(np.float32), tree_of(jax.numpy.bfloat16))
    assert norm.dtype == np.float32
    np.testing.assert_allclose(norm, optax.tree.norm(whole), rtol=1e-6)
