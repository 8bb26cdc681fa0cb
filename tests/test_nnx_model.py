"""A Flax NNX module becomes a model whose initial values depend on their path only."""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import from_nnx, make_train_step

EMBED, VOCAB = 4, 8


def draw(rngs, *shape):
    return nnx.Param(nnx.initializers.normal(1.0)(rngs.params(), shape, jnp.float32))


class Ends(nnx.Module):
    def __init__(self, rngs):
        self.table = draw(rngs, VOCAB, EMBED)

    def embed(self, batch, scope):
        return self.table[...][batch["tokens"]]

    def head(self, x, batch, scope):
        logits = x @ self.table[...].T
        losses = optax.softmax_cross_entropy_with_integer_labels(
            logits, batch["targets"]
        )
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])


class Block(nnx.Module):
    """A block with the parameters `names`, made in that order."""

    def __init__(self, rngs, names=("first", "second")):
        for name in names:
            setattr(self, name, draw(rngs, EMBED, EMBED))

    def __call__(self, x, scope):
        return x + x @ self.first[...] @ self.second[...]


class Widening(Block):
    def __call__(self, x, scope):
        return jnp.concatenate([x, x], axis=-1)


class Narrowing(Block):
    def __call__(self, x, scope):
        return x.astype(jnp.bfloat16)


class Counting(Block):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.calls = nnx.BatchStat(jnp.zeros(()))


def model(block=Block, *, num_layers=2, ends=Ends, **options):
    return from_nnx(ends=ends, block=block, num_layers=num_layers, **options)


@functools.cache
def initial(*names, num_layers=2, seed=0):
    """Initial values of a model whose blocks make the parameters `names` in order."""
    named = model(lambda rngs: Block(rngs, names), num_layers=num_layers)
    return jax.jit(named.init)(seed)


def without(params, name):
    return {
        **params,
        "blocks": {k: v for k, v in params["blocks"].items() if k != name},
    }


def test_the_order_in_which_a_module_makes_its_parameters_changes_no_value():
    one, other = initial("first", "second"), initial("second", "first")
    jax.tree.map(np.testing.assert_array_equal, one, other)


def test_another_parameter_changes_no_other_value():
    few, many = initial("first", "second"), initial("extra", "first", "second")
    assert "extra" in many["blocks"]
    jax.tree.map(np.testing.assert_array_equal, few, without(many, "extra"))


def test_another_layer_changes_no_earlier_layer():
    short, deep = initial("first", "second"), initial("first", "second", num_layers=3)
    first_two = jax.tree.map(lambda value: value[:2], deep["blocks"])
    jax.tree.map(np.testing.assert_array_equal, short, {**deep, "blocks": first_two})


def test_values_differ_between_seeds_paths_and_layers():
    params, reseeded = initial("first", "second"), initial("first", "second", seed=1)
    first, second = params["blocks"]["first"], params["blocks"]["second"]
    values = [*first, *second, *reseeded["blocks"]["first"]]
    distinct = {np.asarray(value).tobytes() for value in values}
    assert len(distinct) == len(values)


def test_initial_values_are_the_same_compiled_and_not():
    eager, compiled = model().init(0), initial("first", "second")
    jax.tree.map(np.testing.assert_array_equal, eager, compiled)


def test_parameters_carry_their_shape_and_layers():
    flat = model().flat_parameters()
    assert {path: leaf.stacked_shape for path, leaf in flat.items()} == {
        "blocks.first": (2, EMBED, EMBED),
        "blocks.second": (2, EMBED, EMBED),
        "table": (VOCAB, EMBED),
    }


@pytest.mark.parametrize("part", ["block", "ends"])
def test_state_that_is_no_parameter_is_refused(part):
    class CountingEnds(Ends):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.calls = nnx.BatchStat(jnp.zeros(()))

    modules = {"block": {"block": Counting}, "ends": {"ends": CountingEnds}}
    match = "module state 'calls' is no nnx.Param; keep running statistics and random"
    with pytest.raises(ValueError, match=match):
        model(**modules[part])


def test_a_random_stream_in_a_module_is_refused():
    class Dropping(Block):
        def __init__(self, rngs):
            super().__init__(rngs)
            self.dropout = nnx.Dropout(0.1, rngs=rngs)

    with pytest.raises(ValueError, match=r"module state 'dropout\..* is no nnx.Param"):
        model(Dropping)


@pytest.mark.parametrize(
    "options, match",
    [
        ({"num_layers": 0}, "num_layers=0: a model has at least 1 block"),
        (
            {"group": "table"},
            "the ends have parameters called 'table', the blocks' own name; rename "
            "them or pass another group=",
        ),
    ],
)
def test_a_model_that_makes_no_sense_is_refused(options, match):
    with pytest.raises(ValueError, match=match):
        model(**options)


@pytest.mark.parametrize(
    "block, change",
    [
        (Widening, "float32(2, 4, 4) to float32(2, 4, 8)"),
        (Narrowing, "float32(2, 4, 4) to bfloat16(2, 4, 4)"),
    ],
)
def test_a_block_that_changes_shape_or_dtype_is_refused(block, change):
    step = make_train_step(
        model(block), optax.sgd(0.1), "data=1", devices=jax.devices()[:1]
    )
    tokens = np.zeros((2, 4), np.int32)
    batch = {
        "tokens": tokens,
        "targets": tokens,
        "weights": np.ones((2, 4), np.float32),
    }
    match = re.escape(f"a block maps {change}; blocks must keep shape and dtype")
    with pytest.raises(ValueError, match=match):
        step.compile(batch)


def test_a_model_without_logits_says_so():
    assert model().logits is None
