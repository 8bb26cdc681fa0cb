"""Places without a layer in stages of uneven size, whatever a block does with 0."""

import functools

import jax
import jax.numpy as jnp
import pytest

from meshpar import Model, Parameter
from meshpar.model.contract import BlockGroup
from tests.marks import slow
from tests.pipelined import assert_equal_to_plain

EMBED, VOCAB = 16, 64


def weight_norm(params, x, scope):
    """A block whose value and gradient are undefined where all weights are 0."""
    weight = params["w"]
    return x + x @ (weight / jnp.sqrt(jnp.sum(weight**2, 0, keepdims=True)))


def with_sums(params, x, scope):
    size = jnp.sqrt(jnp.sum(params["w"] ** 2))
    return weight_norm(params, x, scope), {"size": size * jnp.sum(x**2)}


def root(params, x, scope):
    """A block whose value is defined there, but not its gradient."""
    return x + jnp.sqrt(jnp.sum(params["w"] ** 2)) * x


@functools.cache
def model_of(block, size_coefficient=None):
    auxiliary = {} if size_coefficient is None else {"size": size_coefficient}

    def parameter(shape, axes, num_layers=None):
        return Parameter(
            shape=shape,
            dtype=jnp.float32,
            logical_axes=axes,
            initial=lambda key: 0.1 * jax.random.normal(key, shape),
            num_layers=num_layers,
        )

    def head(params, x, batch, scope):
        logits = jax.nn.log_softmax(x @ params["table"].T)
        picked = jnp.sum(jax.nn.one_hot(batch["targets"], VOCAB) * logits, -1)
        return -jnp.sum(picked * batch["weights"]), jnp.sum(batch["weights"])

    group = BlockGroup(name="blocks", num_layers=3, block=block, auxiliary=auxiliary)
    return Model(
        parameters={
            "table": parameter((VOCAB, EMBED), ("vocab", "embed")),
            "blocks": {"w": parameter((EMBED, EMBED), ("embed", None), 3)},
        },
        embed=lambda params, batch, scope: params["table"][batch["tokens"]],
        groups=(group,),
        head=head,
        per_token=True,
    )


@pytest.mark.parametrize(
    ("block", "remat"),
    [
        (root, "stage"),
        slow(weight_norm, "none"),
        slow(weight_norm, "full"),
        slow(weight_norm, "stage"),
        slow(root, "none"),
        slow(root, "full"),
    ],
)
def test_a_block_undefined_at_zeros_trains_as_on_one_device(block, remat):
    assert_equal_to_plain(model_of(block), f"stage=2,microbatches=2,remat={remat}")


@pytest.mark.parametrize("gather", [slow("microbatch"), slow("step")])
def test_auxiliary_losses_and_split_parameters_too(gather):
    line = f"fsdp=2,stage=2,microbatches=2,fsdp_gather={gather}"
    assert_equal_to_plain(model_of(with_sums, 0.1), line)
