"""Ranks without a microbatch leave their layers out, unless a collective forbids it."""

import functools
import re
import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import PartitionSpec

from meshpar import audit, pipeline_value_and_grad
from tests.pipelined import assert_close
from tests.test_pipeline_value_and_grad import mesh_of

LAYERS, WIDTH = 6, 8


def block(weight, x):
    return x + jnp.tanh(x @ weight)


def block_with_permute(weight, x):
    """A neighbour's examples are added, which go around and are the same again."""
    around = lax.ppermute(weight, "data", [(0, 1), (1, 0)])
    return x + jnp.tanh(x @ ((weight + around) / 2))


def block_with_sum_over_ranks(weight, x):
    """Nothing of it is left, but every rank has to take part."""
    return x + jnp.tanh(x @ (weight + 0 * lax.psum(weight, "stage")))


def head(scale, x, targets):
    return jnp.mean((scale * x - targets) ** 2)


def value_and_grad_of(block):
    rng = np.random.default_rng(0)
    weights = rng.normal(size=(LAYERS, WIDTH, WIDTH)).astype(np.float32) / 4
    x, y = rng.normal(size=(2, 16, WIDTH)).astype(np.float32)
    value_and_grad = pipeline_value_and_grad(
        block, head, mesh=mesh_of(data=2, stage=2), num_microbatches=4
    )
    return functools.partial(value_and_grad, weights, np.float32(1.5), x, y)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("together", "hindrance"),
    [
        (block_with_permute, "ppermute over 'data'"),
        (block_with_sum_over_ranks, "psum over 'stage'"),
    ],
)
def test_a_block_that_needs_all_ranks_keeps_them_together_and_is_told(
    together, hindrance
):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        expected = value_and_grad_of(block)()
    with pytest.warns(UserWarning, match=hindrance):
        found = value_and_grad_of(together)()
    assert_close(found, expected)


def test_a_block_that_sums_over_the_ranks_is_told_when_it_is_traced():
    with pytest.warns(UserWarning, match="psum over 'stage'"):
        jax.eval_shape(value_and_grad_of(block_with_sum_over_ranks))


def test_the_audit_finds_a_permute_in_a_loop_that_ranks_leave():
    mesh = mesh_of(stage=2, data=2)

    def local(x):
        rounds = jnp.where(lax.axis_index("stage") == 0, 3, 0)

        def shift(carry):
            at, x = carry
            return at + 1, lax.ppermute(x, "data", [(0, 1), (1, 0)])

        def goes_on(carry):
            return (carry[0] < 3) & (carry[0] < rounds)

        return lax.while_loop(goes_on, shift, (0, x))[1]

    spec = PartitionSpec(("stage", "data"))
    mapped = jax.shard_map(
        local, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    report = audit(jax.jit(mapped), jax.ShapeDtypeStruct((8,), jnp.float32), mesh=mesh)
    [row] = [row.collective for row in report.rows]
    assert (row.executions, row.in_branch) == (3, True)
    [hazard] = report.hazards
    assert re.search("collective-permute over 'data'", hazard.message)
    assert hazard.kind == "divergent_permute"
