"""Lookup and loss over a split vocabulary equal their plain forms, gradients too."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from meshpar import DATA_PARALLEL, TENSOR, Layout, Scope, make_mesh
from meshpar.parallel.tensor import cross_entropy, vocab_lookup

BATCH, SEQ, VOCAB, EMBED = 2, 5, 16, 3
TENSOR_SIZES = (1, 2, 4, 8)


@functools.cache
def mesh_of(tensor):
    return make_mesh(Layout(tensor=tensor), jax.devices()[:tensor])


def put(mesh, x, *spec):
    return jax.device_put(x, NamedSharding(mesh, P(*spec)))


def normal(seed, *shape):
    return np.random.default_rng(seed).normal(size=shape).astype(np.float32)


def tokens_of(seed=0):
    """Tokens with the first and last row, and one row twice."""
    tokens = np.random.default_rng(seed).integers(0, VOCAB, (BATCH, SEQ), np.int32)
    tokens[0, :4] = 0, VOCAB - 1, 7, 7
    return tokens


@functools.cache
def lookup_value_and_gradient(rules):
    """(table, tokens, cotangent) -> the rows, and the gradient of the table."""
    scope = Scope(rules=rules)

    def run(table, tokens, cotangent):
        value, vjp = jax.vjp(lambda table: vocab_lookup(table, tokens, scope), table)
        return value, vjp(cotangent)[0]

    return jax.jit(run)


def looked_up(table, tokens, cotangent, tensor, rules=TENSOR):
    """The rows and the table's gradient on that many devices."""
    mesh = mesh_of(tensor)
    spec = rules.spec(("vocab", "embed"), mesh_shape=dict(mesh.shape))
    with jax.set_mesh(mesh):
        return lookup_value_and_gradient(rules)(
            put(mesh, table, *spec), put(mesh, tokens), put(mesh, cotangent)
        )


@pytest.mark.parametrize("rules", [TENSOR, DATA_PARALLEL], ids=["split", "whole"])
@pytest.mark.parametrize("tensor", TENSOR_SIZES)
def test_the_lookup_equals_indexing_in_values_and_gradients(tensor, rules):
    table, tokens, cotangent = (
        normal(0, VOCAB, EMBED),
        tokens_of(),
        normal(1, BATCH, SEQ, EMBED),
    )
    expected_gradient = np.zeros_like(table)
    np.add.at(expected_gradient, tokens, cotangent)
    value, gradient = looked_up(table, tokens, cotangent, tensor, rules)
    np.testing.assert_array_equal(value, table[tokens])
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("tensor", [2, 8])
def test_the_lookup_leaves_the_gradient_in_the_tables_shards(tensor):
    given = normal(0, VOCAB, EMBED), tokens_of(), normal(1, BATCH, SEQ, EMBED)
    _, gradient = looked_up(*given, tensor)
    assert gradient.sharding.shard_shape(gradient.shape) == (VOCAB // tensor, EMBED)


@pytest.mark.parametrize("axes", [("context", "tensor"), ("tensor", "context")])
def test_a_vocabulary_over_two_mesh_axes_is_looked_up(axes):
    mesh = make_mesh(Layout(context=2, tensor=4))
    rules = TENSOR.with_rules(vocab=axes)
    table, cotangent = normal(0, VOCAB, EMBED), normal(1, BATCH, SEQ, EMBED)
    expected_gradient = np.zeros_like(table)
    np.add.at(expected_gradient, tokens_of(), cotangent)
    with jax.set_mesh(mesh):
        value, gradient = lookup_value_and_gradient(rules)(
            put(mesh, table, axes), put(mesh, tokens_of()), put(mesh, cotangent)
        )
    np.testing.assert_array_equal(value, table[tokens_of()])
    np.testing.assert_allclose(gradient, expected_gradient, rtol=1e-6, atol=1e-6)


def test_the_lookup_works_without_any_mesh():
    table, tokens = normal(0, VOCAB, EMBED), tokens_of()
    found = vocab_lookup(jnp.asarray(table), jnp.asarray(tokens), Scope())
    np.testing.assert_array_equal(found, table[tokens])


@pytest.mark.parametrize("tensor", TENSOR_SIZES)
@pytest.mark.parametrize("token", [-1, VOCAB])
def test_a_token_outside_the_vocabulary_is_nan_on_every_layout(tensor, token):
    tokens = tokens_of()
    tokens[0, 1] = token
    given = normal(0, VOCAB, EMBED), tokens, normal(1, BATCH, SEQ, EMBED)
    found, _ = looked_up(*given, tensor)
    unknown = np.zeros(tokens.shape, bool)
    unknown[0, 1] = True
    np.testing.assert_array_equal(np.isnan(found).all(axis=-1), unknown)


@pytest.mark.parametrize("tensor", TENSOR_SIZES)
@pytest.mark.parametrize("target", [-100, VOCAB])
@pytest.mark.parametrize("weight", [0.0, 1.0])
def test_a_target_outside_the_vocabulary_counts_as_nan_or_not_at_all(
    tensor, target, weight
):
    mesh, targets = mesh_of(tensor), tokens_of(3)
    targets[0, 1] = target
    weights = np.ones((BATCH, SEQ), np.float32)
    weights[0, 1] = weight
    with jax.set_mesh(mesh):
        (loss, _), _ = value_and_gradient_on("cpu")(
            put(mesh, normal(2, BATCH, SEQ, VOCAB), None, None, "tensor"),
            put(mesh, targets),
            put(mesh, weights),
        )
    assert np.isnan(loss) == (weight > 0)


def reference_loss(logits, targets, weights):
    log_probabilities = jax.nn.log_softmax(logits)
    one_hot = jax.nn.one_hot(targets, logits.shape[-1])
    return -jnp.sum(log_probabilities * one_hot * weights[..., None]), jnp.sum(weights)


reference = jax.jit(jax.value_and_grad(reference_loss, has_aux=True))


@functools.cache
def value_and_gradient_on(platform):
    """The loss as it runs on a platform: on the CPU, collectives follow one another."""
    scope = Scope(rules=TENSOR, platform=platform)
    function = functools.partial(cross_entropy, scope=scope)
    return jax.jit(jax.value_and_grad(function, has_aux=True))


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("scale", [1.0, 200.0], ids=["usual", "large"])
@pytest.mark.parametrize("tensor", TENSOR_SIZES)
def test_the_loss_equals_log_softmax_in_values_and_gradients(tensor, scale, platform):
    logits, targets = scale * normal(2, BATCH, SEQ, VOCAB), tokens_of(3)
    weights = np.ones((BATCH, SEQ), np.float32)
    weights[0, 1] = 0.0
    (loss, weight_sum), gradient = reference(logits, targets, weights)
    mesh = mesh_of(tensor)
    with jax.set_mesh(mesh):
        (found, found_weights), found_gradient = value_and_gradient_on(platform)(
            put(mesh, logits, None, None, "tensor"),
            put(mesh, targets),
            put(mesh, weights),
        )
    np.testing.assert_allclose(found, loss, rtol=1e-6)
    assert found_weights == weight_sum == weights.sum()
    np.testing.assert_allclose(found_gradient, gradient, rtol=1e-5, atol=1e-6)
    assert not found_gradient[0, 1].any()


@pytest.mark.parametrize("platform", ["cpu", "gpu"])
@pytest.mark.parametrize("tensor", [2, 4])
def test_the_loss_gathers_no_logits(tensor, platform):
    mesh = mesh_of(tensor)
    shapes = (
        jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))
        for shape, dtype, spec in [
            ((BATCH, SEQ, VOCAB), jnp.float32, (None, None, "tensor")),
            ((BATCH, SEQ), jnp.int32, ()),
            ((BATCH, SEQ), jnp.float32, ()),
        ]
    )
    with jax.set_mesh(mesh):
        text = value_and_gradient_on(platform).lower(*shapes).compile().as_text()
    assert "all-gather(" not in text
    assert "all-reduce(" in text
