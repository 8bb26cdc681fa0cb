"""What tests of the pipeline share: small models, one batch, the plain program."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax

from meshpar import Layout, Model, Parameter, TrainState, make_train_step
from meshpar.model.contract import BlockGroup
from meshpar.model.inputs import default_inputs
from meshpar.model.scope import Scope
from meshpar.model.tracing import forward, loss
from meshpar.models.presets import build
from meshpar.parallel.reduction import random_key
from meshpar.testing.batches import random_batch, step_batches
from meshpar.testing.equivalence import quick_compile_options

BATCH, SEQ, SEED = 24, 16, 3
QUICK = quick_compile_options("cpu")
SGD = optax.sgd(1.0)


def parameter(shape, axes, num_layers=None):
    """A parameter of normal values."""
    return Parameter(
        shape=shape,
        dtype=jnp.float32,
        logical_axes=axes,
        initial=lambda key: 0.3 * jax.random.normal(key, shape),
        num_layers=num_layers,
    )


@functools.cache
def model_of(layers, dropout=0.0):
    """A small Llama, or a small GPT-2 with dropout in embedding and blocks."""
    if dropout:
        sizes = dict(hidden=32, heads=4, vocab=64, max_seq=SEQ)
        return build(layers=layers, dropout=dropout, **sizes)
    return build("test", layers=layers)


@functools.cache
def mlp_of(layers, dropout=0.0):
    """A model of few operations: a third of a Llama's time to trace and compile.

    A block sums each token's predecessors, and its MLP is split over `tensor`; the ends
    are one table. Dropout is in embedding and blocks.
    """
    embed, hidden, vocab = 16, 32, 64

    def embedded(params, batch, scope):
        return scope.dropout(params["table"][batch["tokens"]], dropout, "embed")

    def block(params, x, scope):
        before = jnp.cumsum(x, 1) / SEQ
        inside = scope.save(jnp.tanh(before @ params["up"]), "hidden")
        inside = scope.dropout(inside, dropout, "hidden")
        residual = ("batch", "residual_seq", "embed")
        return x + scope.constrain(inside @ params["down"], residual)

    def logits(params, x, scope):
        return x @ params["table"].T

    def head(params, x, batch, scope):
        targets = jax.nn.one_hot(batch["targets"], vocab)
        losses = -jnp.sum(targets * jax.nn.log_softmax(logits(params, x, scope)), -1)
        return jnp.sum(losses * batch["weights"]), jnp.sum(batch["weights"])

    return Model(
        parameters={
            "table": parameter((vocab, embed), ("vocab", "embed")),
            "blocks": {
                "up": parameter((embed, hidden), ("embed", "mlp"), layers),
                "down": parameter((hidden, embed), ("mlp", "embed"), layers),
            },
        },
        embed=embedded,
        groups=(BlockGroup(name="blocks", num_layers=layers, block=block),),
        head=head,
        logits=logits,
        inputs=default_inputs(),
        per_token=True,
    )


@functools.cache
def batch_of():
    """Random tokens, of which about half count."""
    model = build("test")
    batch = random_batch(model, BATCH, SEQ, seed=0)
    return step_batches(model, batch, "holes", seed=1, num_steps=1)[0]


@functools.cache
def params_of(model):
    """Initial values in the model's own order of layers."""
    return jax.device_get(jax.jit(model.init, compiler_options=QUICK)(SEED))


@functools.cache
def plain(model):
    """Loss and gradients of the model alone, on one device."""
    batch = batch_of()
    scope = Scope(
        examples=jnp.arange(BATCH, dtype=jnp.uint32),
        random=random_key(jnp.uint32(SEED), jnp.int32(0)),
        training=True,
    )
    value_and_grad = jax.jit(
        jax.value_and_grad(lambda params: loss(model, params, batch, scope)),
        compiler_options=QUICK,
    )
    return jax.device_get(value_and_grad(params_of(model)))


@functools.cache
def plain_logits(model):
    """Logits of the model alone, on one device."""

    def logits(params, tokens):
        x = forward(model, params, {"tokens": tokens}, Scope())
        return model.logits(model.split(params)[0], x, Scope())

    program = jax.jit(logits, compiler_options=QUICK)
    return jax.device_get(program(params_of(model), batch_of()["tokens"]))


def step_of(model, line, optimizer=SGD, **options):
    """A training step on the first devices."""
    layout = Layout.parse(line)
    devices = jax.devices()[: layout.num_devices]
    options = {"compiler_options": QUICK, **options}
    return make_train_step(model, optimizer, layout, devices=devices, **options)


def state_of(step, model):
    """The first state of a step: the shared initial values, and zeros."""
    params = jax.tree.map(_arranged, step.model.parameters, params_of(model))
    state = TrainState(
        step=jnp.int32(0),
        seed=jnp.uint32(SEED),
        skipped=jnp.int32(0),
        params=params,
        opt_state=jax.tree.map(
            lambda one: np.zeros(one.shape, one.dtype), step.state_shapes.opt_state
        ),
    )
    return jax.device_put(state, step.shardings)


def pipelined(model, line):
    """Loss and gradients under a layout, as the devices hold them, and the step."""
    step = step_of(model, line)
    value, gradients = step.loss_and_gradients(state_of(step, model), batch_of())
    return step, float(value), gradients


def assert_equal_to_plain(model, line, bound=1e-5):
    """Holds loss and every gradient to those of the model alone."""
    step, value, gradients = pipelined(model, line)
    wanted_value, wanted = plain(model)
    assert abs(value - wanted_value) <= bound * abs(wanted_value)
    assert_close(step.in_layer_order(gradients), wanted, bound)
    jax.tree.map(_assert_empty_places, step.model.parameters, jax.device_get(gradients))


def assert_close(found, wanted, bound=1e-5):
    """Holds every array to a relative Frobenius error."""
    for (path, value), other in zip(
        jax.tree.leaves_with_path(wanted), jax.tree.leaves(found), strict=True
    ):
        where = jax.tree_util.keystr(path)
        assert other.shape == value.shape, where
        error = np.linalg.norm(other - value) / max(np.linalg.norm(value), 1e-8)
        assert error <= bound, (where, error)


def _arranged(parameter, value):
    if parameter.layer_order is None:
        return value
    places = [value[at] if at >= 0 else 0 * value[0] for at in parameter.layer_order]
    return np.stack(places)


def _assert_empty_places(parameter, gradient):
    if parameter.layer_order is not None:
        assert not gradient[np.asarray(parameter.layer_order) < 0].any()
