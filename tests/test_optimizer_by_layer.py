"""What an optimizer does to stacked layers is what it does to layers by themselves."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

from meshpar import Layout, Model, Parameter
from meshpar.model.parameter import is_parameter
from meshpar.testing.equivalence import quick_compile_options
from meshpar.train.optimizer.by_layer import by_layer
from tests.marks import slow

QUICK = quick_compile_options("cpu")
BLOCKS = {"qkv": (16, 2, 4), "up": (16, 24), "scale": (16,)}
IN_ORDER, ARRANGED = None, (2, 0, -1, 1)
"""As one device holds layers, and as ranks might: chunks and an empty place."""

ADAM = optax.adam(1e-2)


def is_matrix(tree):
    return jax.tree.map(lambda x: x.ndim > 1, tree)


def is_no_scale(tree):
    """By the key above where layers are parameters of their own, in a tuple."""

    def keep(path, _):
        keys = [one.key for one in path if isinstance(one, jax.tree_util.DictKey)]
        return keys[-1] != "scale"

    return jax.tree.map_with_path(keep, tree)


def kinds(tree):
    return jax.tree.map(lambda x: "matrix" if x.ndim > 1 else "vector", tree)


def by_largest(updates, state, params=None):
    """The gradients over the largest norm of one, of all parameters'."""
    norms = [jnp.sqrt(jnp.sum(leaf**2)) for leaf in jax.tree.leaves(updates)]
    largest = jnp.max(jnp.stack(norms))
    total = jnp.sum(jnp.asarray([1.0 + norm for norm in norms]))
    return jax.tree.map(lambda leaf: leaf / largest / total, updates), state


def transformation(update, init=optax.init_empty_state):
    return optax.GradientTransformation(init, update)


EQUAL = {
    "over the largest norm": transformation(by_largest),
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

QUICKLY = (
    *("adafactor", "sm3", "every second step", "adamw with a mask by rank"),
    *("muon clipped by global norm", "over the largest norm"),
)
"""Those of `EQUAL` that are not left to `make test-full`."""


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

    num_layers = 3 if order is None else max(order) + 1
    layers = dict(num_layers=num_layers, layer_order=order)
    return Model(
        parameters={
            "table": parameter((32, 16)),
            "blocks": {
                name: parameter(dims, **layers) for name, dims in BLOCKS.items()
            },
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

    def step(values, state, gradient, loss):
        updates, state = optimizer.update(gradient, state, values, value=loss)
        return optax.apply_updates(values, updates), state

    step = jax.jit(step, compiler_options=QUICK)
    state = jax.jit(optimizer.init, compiler_options=QUICK)(values)
    for loss, gradient in zip((3.0, 2.0, 2.5), gradients, strict=True):
        values, state = step(values, state, gradient, loss)
    return values


def made(optimizer, model):
    return by_layer(optimizer, model, Layout())


@pytest.mark.parametrize(
    ("name", "order"),
    [
        *(
            (name, ARRANGED) if name in QUICKLY else slow(name, ARRANGED)
            for name in EQUAL
        ),
        *(slow(name, IN_ORDER) for name in EQUAL),
    ],
)
def test_an_optimizer_treats_each_layer_as_a_parameter_of_its_own(name, order):
    optimizer, model = EQUAL[name], model_of(order)
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


def test_places_without_a_layer_stay_empty_whatever_is_added_to_layers():
    def add(updates, state, params=None):
        return jax.tree.map(lambda leaf: jnp.full_like(leaf, 0.5), updates), state

    model = model_of(ARRANGED)
    values, *gradients = (random_values(model, seed) for seed in range(4))
    found = trained(made(transformation(add), model), values, gradients)["blocks"]
    empty = np.asarray(ARRANGED) < 0
    for name, array in found.items():
        assert not array[empty].any()
        wanted = values["blocks"][name][~empty] + 3 * 0.5
        np.testing.assert_allclose(array[~empty], wanted, rtol=1e-6)


def pruned(mask):
    """Adam of the weights that a mask of all layers keeps."""
    update = lambda updates, state, params=None: (  # noqa: E731
        {**updates, "blocks": jax.tree.map(jnp.multiply, updates["blocks"], mask)},
        state,
    )
    mask_updates = optax.GradientTransformation(optax.init_empty_state, update)
    return optax.chain(ADAM, mask_updates)


def mask_of(model, seed=7):
    blocks = random_values(model, seed)["blocks"]
    return jax.tree.map(lambda x: np.float32(x > 0), blocks)


def test_masks_in_the_order_of_layers_keep_their_weights():
    model = model_of(IN_ORDER)
    mask = mask_of(model)
    values, *gradients = (random_values(model, seed) for seed in range(4))
    found = trained(made(pruned(mask), model), values, gradients)["blocks"]
    wanted = trained(ADAM, values, gradients)["blocks"]
    for name, kept in mask.items():
        np.testing.assert_allclose(
            found[name], np.where(kept, wanted[name], values["blocks"][name]), rtol=1e-6
        )


def test_masks_in_the_order_of_layers_are_refused_where_layers_lie_otherwise(refuses):
    mask = mask_of(model_of(IN_ORDER))
    shapes = ("blocks.qkv", (16, 2, 4), (3, 16, 2, 4), "'data=1'")
    with refuses("optimizer.stacked_out_of_order", *shapes, "3 layers in 4 places", 1):
        made(pruned(mask), model_of(ARRANGED))
    with refuses("optimizer.stacked_out_of_order", *shapes, "3 layers"):
        made(pruned(mask), model_of((0, 2, 1)))


def with_mask(optimizer):
    return optax.chain(optimizer, pruned(mask_of(model_of(IN_ORDER))))


def scaled_by_other_layers(name):
    """An optimizer that reads one parameter to update another."""

    def update(updates, state, params=None):
        blocks = {**updates["blocks"]}
        blocks["scale"] = blocks["scale"] * params[name[0]][name[1]].mean()
        return {**updates, "blocks": blocks}, state

    return optax.GradientTransformation(optax.init_empty_state, update)


def mean_of_all(updates, state, params=None):
    leaves = jax.tree.leaves(updates)
    mean = sum(jnp.sum(leaf) for leaf in leaves) / sum(leaf.size for leaf in leaves)
    return jax.tree.map(lambda leaf: leaf - mean, updates), state


def in_one_array(updates, state, params=None):
    return updates, jnp.stack([jnp.sum(leaf) for leaf in jax.tree.leaves(updates)])


BLOCKS_UP_ALONE = {
    "table": False,
    "blocks": {"qkv": False, "up": True, "scale": False},
    "more": {"up": False},
    "norm": False,
}
BY_LAYER, RAISES = "optimizer.not_by_layer", "optimizer.raises"
OUT_OF_ORDER = "optimizer.stacked_out_of_order"
JOINS = "optimizer.joins_stacked_layers"
CHANGES = "optimizer.update_changes_tree"
REFUSED = {
    "flatten": (optax.flatten(ADAM), (BY_LAYER, "blocks.qkv", "blocks.scale")),
    "noise": (optax.noisy_sgd(1e-2, 0.1, 0.5, 0), (BY_LAYER, "blocks.qkv")),
    "a global norm of one parameter alone": (
        optax.chain(
            optax.masked(optax.clip_by_global_norm(1.0), BLOCKS_UP_ALONE), ADAM
        ),
        (BY_LAYER, "blocks.up"),
    ),
    "lbfgs": (optax.scale_by_lbfgs(), (BY_LAYER, "blocks.qkv", "blocks.scale", "scan")),
    "lbfgs with a line search": (optax.lbfgs(), (RAISES, "TypeError", 2)),
    "sophia": (contrib.sophia(1e-3), (RAISES, "ValueError", "obj_fn")),
    "lookahead": (
        optax.lookahead(ADAM, 3, 0.5),
        (RAISES, "AttributeError", "'fast'"),
    ),
    "skipping by norm": (
        optax.MultiSteps(
            ADAM,
            2,
            should_skip_update_fn=lambda *of: optax.skip_large_updates(
                *of, max_squared_norm=10.0
            ),
        ).gradient_transformation(),
        (BY_LAYER, "skip_state.norm_squared"),
    ),
    "one parameter by another": (
        scaled_by_other_layers(("blocks", "up")),
        (BY_LAYER, "blocks.scale", "blocks.up", "mul"),
    ),
    "a mean over all": (transformation(mean_of_all), (BY_LAYER, "blocks.qkv")),
    "a sum of each in one array": (
        transformation(in_one_array, lambda _: jnp.zeros(6)),
        (BY_LAYER, "blocks.qkv", "blocks.scale"),
    ),
    "another tree of state": (
        transformation(lambda updates, state, params=None: (updates, params)),
        (CHANGES, "InputError"),
    ),
    "adafactor and a mask": (
        with_mask(optax.adafactor(1e-2)),
        (JOINS, "InputError", "blocks.qkv", (16, 2, 4), (3, 16, 2, 4)),
    ),
    "muon and a mask": (
        with_mask(contrib.muon(1e-2)),
        (JOINS, "InputError", "blocks.scale"),
    ),
}

QUOTING = (
    *("flatten", "lbfgs", "lbfgs with a line search", "sophia", "lookahead"),
    *("a sum of each in one array", "muon and a mask"),
)
"""Of `REFUSED`, those that name an operation or an error of Optax's or JAX's version.
"""


@pytest.mark.parametrize("order", [IN_ORDER, ARRANGED])
@pytest.mark.parametrize("name", [name for name in REFUSED if "mask" not in name])
def test_an_optimizer_that_has_no_meaning_for_each_layer_is_refused(
    name, order, refuses
):
    optimizer, (key, *values) = REFUSED[name]
    if order is ARRANGED and key in (RAISES, CHANGES):
        key, values = OUT_OF_ORDER, [*values, "'data=1'", "3 layers in 4 places"]
    with refuses(key, *values, words=name not in QUOTING):
        made(optimizer, model_of(order))


@pytest.mark.parametrize("name", [name for name in REFUSED if "mask" in name])
def test_a_mask_beside_what_looks_at_whole_arrays_is_refused(name, refuses):
    optimizer, (key, *values) = REFUSED[name]
    with refuses(key, *values, words=name not in QUOTING):
        made(optimizer, model_of(IN_ORDER))


@pytest.mark.parametrize(
    "mask",
    [
        lambda tree: jax.tree.map_with_path(
            lambda path, _: jax.tree_util.keystr(path) == "['blocks']['up']", tree
        ),
        lambda tree: jax.tree.map_with_path(lambda path, _: path[-1].key == "up", tree),
        {
            "table": True,
            "blocks": {"qkv": True, "up": True, "scale": False},
            "more": {"up": True},
            "norm": False,
        },
    ],
)
def test_masks_by_path_and_masks_made_beforehand_are_taken(mask):
    made(optax.adamw(1e-2, mask=mask), model_of(ARRANGED))


def test_an_optimizer_of_a_model_without_layers_is_as_given():
    model = model_of(IN_ORDER)
    ends = {name: model.parameters[name] for name in ("table", "norm")}
    model = dataclasses.replace(model, parameters=ends)
    made(optax.flatten(ADAM), model)


def test_nothing_of_a_parameters_size_is_computed():
    model = model_of(ARRANGED)
    huge = Parameter(
        shape=(2**20, 2**20),
        dtype=jnp.float32,
        logical_axes=(None, None),
        initial=None,
        num_layers=3,
        layer_order=ARRANGED,
    )
    model = dataclasses.replace(
        model, parameters={**model.parameters, "huge": {"up": huge}}
    )
    made(optax.chain(optax.clip_by_global_norm(1.0), contrib.muon(1e-3)), model)
