"""Sums over devices of numbers, and functions of whole sequences of arrays alone."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import Mesh, PartitionSpec

from meshpar.model.scope import Scope
from meshpar.model.token_order import TokenOrder


def on_two_devices(function):
    """What `function` gives on each of two devices that share `context`."""
    mesh, spec = Mesh(jax.devices()[:2], ("context",)), PartitionSpec("context")
    mapped = jax.shard_map(
        function, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    return jax.jit(mapped)(jnp.ones(8)).tolist()


@pytest.mark.parametrize("name", ["batch_sum", "sequence_sum"])
def test_numbers_are_added_up_as_arrays_are(name):
    if name == "batch_sum":
        scope = Scope(batch_axes=("context",))
    else:
        scope = Scope(order=TokenOrder(mesh_axis="context", num_ranks=2))

    def counted(x):
        return x * getattr(scope, name)(x.shape[0])

    assert on_two_devices(counted) == [8.0] * 8


@pytest.mark.parametrize(
    ("x", "given"),
    [(jnp.ones(3), "(3,)"), ({"a": jnp.ones((2, 3))}, "dict")],
)
def test_functions_of_whole_sequences_take_one_array_of_tokens(refuses, x, given):
    with refuses("model.over_sequence_not_tokens", "scope.over_sequence", given):
        Scope().over_sequence(lambda v: v, x)
