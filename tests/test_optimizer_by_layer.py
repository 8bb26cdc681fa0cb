"""What an optimizer does to stacked layers is what it does to layers by themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from meshpar import InputError, Layout, Model, Parameter
from meshpar.model.contract import is_parameter
from meshpar.testing.quick_compile import quick_compile_options
from meshpar.train.optimizer.by_layer import by_layer

QUICK = quick_compile_options("cpu")
BLOCKS = {"qkv": (16, 3, 4), "up": (16, 24), "square": (16, 16), "scale": (16,)}
ORDERS = {
    "first to last": None,
    "two chunks a rank": (0, 2, 1, 3),
    "an empty place": (0, 1, 2, -1),
}
ADAM = optax.adam(1e-2)


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def is_no_scale(tree):
    return jax.tree.map_with_path(lambda path, _: path[-1].key != "scale", tree)


def is_up(tree):
    name = "['blocks']['up']"
    return jax.tree.map_with_path(
        lambda path, _: jax.tree_util.keystr(path) == name, tree
    )


def kinds(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


EQUAL = {
    "adam": ADAM,
    "adamw with a mask by rank": optax.adamw(1e-2, weight_decay=0.5, mask=is_matrix),
    "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=16),
    "adan": optax.adan(1e-2),
    "lamb": optax.lamb(1e-2, weight_decay=0.1),
    "lars": optax.lars(1e-2),
    "lion": optax.lion(1e-2),
    "novograd": optax.novograd(1e-2),
    "rmsprop": optax.rmsprop(1e-2, centered=True, momentum=0.9),
    "sm3": optax.sm3(1e-2),
    "fromage": optax.fromage(1e-2),
    "polyak": optax.polyak_sgd(0.1),
    "muon": contrib.muon(1e-2),
    "galore": contrib.galore(1e-2, rank=4),
    "normalize": optax.chain(contrib.normalize(), optax.sgd(1e-2)),
    "prodigy": contrib.prodigy(1e-2),
    "dadapt": contrib.dadapt_adamw(1e-2),
    "dog": contrib.dog(1e-2),
    "dowg": contrib.dowg(1e-2),
    "cocob": contrib.cocob(),
    "adopt": contrib.adopt(1e-2),
    "ademamix": contrib.ademamix(1e-2),
    "madgrad": contrib.madgrad(1e-2),
    "momo": contrib.momo(1e-2),
    "momo adam": contrib.momo_adam(1e-2),
    "mechanize": contrib.mechanize(ADAM),
    "schedule-free adamw": contrib.schedule_free_adamw(1e-2),
    "clipped by global norm": optax.chain(optax.clip_by_global_norm(0.1), ADAM),
    "muon clipped by global norm": optax.chain(
        optax.clip_by_global_norm(0.1), contrib.muon(1e-2)
    ),
    "clipped by block rms": optax.chain(optax.clip_by_block_rms(1e-2), ADAM),
    "adaptive clip": optax.chain(optax.adaptive_grad_clip(0.01), ADAM),
    "centralized": optax.chain(optax.centralize(), ADAM),
    "hyperparameters": optax.inject_hyperparams(optax.adam)(learning_rate=1e-2),
    "every second step": optax.MultiSteps(
        optax.chain(optax.clip_by_global_norm(0.1), ADAM), 2
    ).gradient_transformation(),
    "every second update": optax.chain(ADAM, optax.apply_every(2)),
    "masked": optax.masked(ADAM, is_matrix),
    "masked by name": optax.chain(ADAM, optax.masked(optax.scale(0.1), is_no_scale)),
    "two optimizers": optax.multi_transform(
        {"matrix": contrib.muon(1e-2), "vector": optax.sgd(1e-2, momentum=0.9)}, kinds
    ),
    "where finite": optax.apply_if_finite(ADAM, 3),
    "plateau": optax.chain(
        ADAM, contrib.reduce_on_plateau(factor=0.5, patience=1, rtol=0.5)
    ),
    "warm-up": optax.adafactor(
        optax.linear_schedule(0.0, 1e-2, 2), min_dim_size_to_factor=16
    ),
}


def model_of(order):
    """Parameters of a model and nothing else: ends, and blocks in that order."""

    def parameter(shape, **layers):
        return Parameter(
            shape=shape,
            dtype=jnp.float32,
            logical_axes=(None,) * len(shape),
            initial=lambda key: jax.random.normal(key, shape),
            **layers,
        )

    num_layers = 4 if order is None else max(order) + 1
    layers = dict(num_layers=num_layers, layer_order=order)
    return Model(
        parameters={
            "table": parameter((32, 16)),
            "blocks": {name: parameter(dims, **layers) for name, dims in BLOCKS.items()},
            "more": {"up": parameter((16, 24), num_layers=2)},
            "norm": parameter((16,)),
        },
        embed=None,
        groups=(),
        head=None,
    )


def by_parameter(model, values_of, *trees):
    return jax.tree.map(values_of, model.parameters, *trees, is_leaf=is_parameter)


def unrolled(model, tree):
    """Every layer a parameter of its own."""

    def layers(parameter, stacked):
        if parameter.num_layers is None:
            return stacked
        order = parameter.layer_order or tuple(range(parameter.num_layers))
        return tuple(stacked[order.index(at)] for at in range(parameter.num_layers))

    return by_parameter(model, layers, tree)


def random_values(model, seed):
    """Zeros at places without a layer."""
    random = np.random.default_rng(seed)

    def value(parameter):
        found = random.standard_normal(parameter.stacked_shape, np.float32)
        if parameter.layer_order is not None:
            found[np.asarray(parameter.layer_order) < 0] = 0
        return found

    return by_parameter(model, value)


def trained(optimizer, values, gradients):
    """Parameters after some steps, each of another loss."""
    optimizer = optax.with_extra_args_support(optimizer)

    @jax.jit
    def steps(values):
        state = optimizer.init(values)
        for loss, gradient in zip((3.0, 2.0, 2.5), gradients, strict=True):
            updates, state = optimizer.update(gradient, state, values, value=loss)
            values = optax.apply_updates(values, updates)
        return values

    return jax.jit(steps, compiler_options=QUICK)(values)


def made(optimizer, model):
    return by_layer(optimizer, model, Layout())


@pytest.mark.parametrize("order", ORDERS)
@pytest.mark.parametrize("name", EQUAL)
def test_an_optimizer_treats_each_layer_as_a_parameter_of_its_own(name, order):
    optimizer, model = EQUAL[name], model_of(ORDERS[order])
    values, *gradients = (random_values(model, seed) for seed in range(4))
    found = trained(made(optimizer, model), values, gradients)
    wanted = trained(
        optimizer, unrolled(model, values), [unrolled(model, one) for one in gradients]
    )
    for one, other in zip(
        jax.tree.leaves(unrolled(model, found)), jax.tree.leaves(wanted), strict=True
    ):
        assert one.shape == other.shape
        assert np.linalg.norm(one - other) <= 1e-6 * np.linalg.norm(other)
    for path, parameter in model.flat_parameters().items():
        if parameter.layer_order is not None:
            empty = np.asarray(parameter.layer_order) < 0
            assert not found["blocks"][path.split(".")[1]][empty].any()
