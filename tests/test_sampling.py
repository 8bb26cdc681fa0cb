"""A Diffusion Transformer's samples: accurate, and the same under every layout."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Layout, absent_mesh, make_train_step
from meshpar.models.dit_sampling import METHODS, integrate, sample
from tests.marks import slow
from tests.zoo.diffusion import (
    CHANNELS,
    CLASSES,
    COLUMNS,
    DIT,
    IMAGE,
    PATCH,
    TOKENS,
    VALUES,
    config,
    velocity,
)
from tests.zoo.plain import SEED, Whole

LABELS = np.arange(8) % (CLASSES + 1)
NUM_STEPS, NOISE_SEED, LAYERS = 3, 5, 4
BOUND = 1e-4


@pytest.mark.parametrize("method, order", [("euler", 1), ("heun", 2)])
def test_the_error_falls_with_the_order_of_the_method(method, order):
    """dx/dt = x goes from 1 back to 1/e."""

    def error(num_steps):
        found = integrate(lambda x, _: x, jnp.float32(1), num_steps, METHODS[method])
        return abs(float(found) - math.exp(-1))

    assert error(8) / error(16) == pytest.approx(2**order, rel=0.2)


def test_a_path_is_followed_from_noise_to_what_it_began_from():
    """Where the velocity is the target itself, samples are the clean values."""
    clean, noise = jax.random.normal(jax.random.key(0), (2, 3, 4))
    for prediction in ("flow", "v"):
        path = config(LAYERS, prediction).path

        def speed(_, time, path=path):
            return path.rate * path.target(clean, noise, jnp.float32(time))

        found = integrate(speed, noise, 64, METHODS["heun"])
        np.testing.assert_allclose(found, clean, atol=2e-4)


@functools.cache
def plain():
    """Jitted (patches, time, labels) -> velocity of the plain model."""

    def built():
        return Whole(DIT.ends, DIT.groups(LAYERS))

    graph = nnx.graphdef(nnx.eval_shape(built))
    state = jax.jit(lambda: nnx.split(built())[1])()

    @jax.jit
    def found(patches, time, labels):
        times = jnp.full(len(patches), time)
        return velocity(nnx.merge(graph, state), patches, times, labels)

    return found


@functools.cache
def plain_samples(method, guidance, prediction):
    """Patches put together by hand, from steps written out."""
    rate = {"flow": 1.0, "v": math.pi / 2}[prediction]
    none = np.full_like(LABELS, CLASSES)

    def speed(x, time):
        found = plain()(x, time, LABELS)
        if guidance != 1:
            without = plain()(x, time, none)
            found = without + guidance * (found - without)
        return rate * found

    keys = [jax.random.fold_in(jax.random.key(NOISE_SEED), at) for at in range(8)]
    x = jnp.stack([jax.random.normal(key, (TOKENS, VALUES)) for key in keys])
    for at in range(NUM_STEPS):
        time, to = 1 - at / NUM_STEPS, 1 - (at + 1) / NUM_STEPS
        slope = speed(x, time)
        if method == "heun":
            slope = (slope + speed(x - slope / NUM_STEPS, to)) / 2
        x = x - slope / NUM_STEPS
    images = np.zeros((8, IMAGE, IMAGE, CHANNELS), np.float32)
    for token, patch in enumerate(np.moveaxis(np.asarray(x), 1, 0)):
        row, column = (PATCH * place for place in divmod(token, COLUMNS))
        place = images[:, row : row + PATCH, column : column + PATCH]
        place[:] = patch.reshape(8, PATCH, PATCH, CHANNELS)
    return images


@functools.cache
def laid_out(layout, prediction="flow"):
    layout = Layout.parse(layout)
    step = make_train_step(
        DIT.model(LAYERS, prediction=prediction),
        optax.sgd(0.1),
        layout,
        devices=jax.devices()[: layout.num_devices],
    )
    return step, step.init(SEED)


def check(layout, method, guidance, prediction):
    step, state = laid_out(layout, prediction)
    found = sample(
        config(LAYERS, prediction),
        step,
        state,
        LABELS,
        num_steps=NUM_STEPS,
        method=method,
        guidance=guidance,
        seed=NOISE_SEED,
    )
    wanted = plain_samples(method, guidance, prediction)
    np.testing.assert_allclose(found, wanted, atol=BOUND * np.abs(wanted).max())


FEW = "fsdp=2,tensor=2"
ALL = [
    "fsdp=2,tensor=2,stage=2,microbatches=2",
    "data=8",
    "fsdp=8",
    "tensor=8",
    "data=2,fsdp=2,tensor=2,sequence_parallel=true",
    "context=4,attention=ring",
    "data=2,context=4,attention=ulysses",
    "context=2,attention=allgather",
    "stage=4,microbatches=4",
    "data=2,stage=2,microbatches=4,schedule=interleaved_1f1b,chunks=2",
    "stage=2,context=2,microbatches=2",
]


@pytest.mark.parametrize(
    "layout", [FEW, *map(slow, ["context=2,attention=ring", *ALL])]
)
def test_samples_are_those_of_one_device(layout):
    check(layout, "euler", 3.0, "flow")


@pytest.mark.parametrize(
    "method, guidance, prediction", [slow("heun", 1.0, "flow"), slow("euler", 3.0, "v")]
)
def test_every_method_and_path_samples_so(method, guidance, prediction):
    check("data=1", method, guidance, prediction)


@pytest.mark.parametrize(
    "changes, refusal",
    [
        ({"method": "hoin"}, ("generation.unknown_method", "'hoin'", "'heun'")),
        ({"num_steps": 0}, ("value.not_whole_number", "num_steps=0", 1)),
        (
            {"labels": [0, 6]},
            ("generation.labels_out_of_range", 0, 6, "classes=5"),
        ),
        ({"labels": 3}, ("generation.labels_wrong_shape", ())),
        (
            {"labels": [0.9, 1.7]},
            ("generation.labels_not_whole", "float64", 0, 5),
        ),
        ({"labels": [np.nan]}, ("generation.labels_not_whole", "float64")),
        (
            {"labels": np.array([2**32 + 1])},
            ("generation.labels_out_of_range", 2**32 + 1),
        ),
        ({"labels": [2**32]}, ("generation.labels_out_of_range", 2**32)),
        ({"labels": ["cat"]}, ("generation.labels_not_whole", "<U3")),
        ({"labels": [[1], [1, 2]]}, ("generation.ragged_labels",)),
    ],
)
def test_what_makes_no_sense_is_refused(changes, refusal, refuses):
    given = {"labels": LABELS, **changes}
    words = refusal[0] != "generation.ragged_labels"  # NumPy's.
    with refuses(*refusal, words=words):
        sample(config(1), step_of("data=1"), None, **given)


def step_of(layout):
    mesh = absent_mesh(Layout.parse(layout))
    return make_train_step(DIT.model(1), optax.sgd(0.1), layout, mesh=mesh)


def test_examples_that_do_not_divide_are_refused(refuses):
    with refuses("batch.indivisible", "labels", 3, 2):
        sample(config(1), step_of("data=2"), None, labels=[0, 1, 2])
