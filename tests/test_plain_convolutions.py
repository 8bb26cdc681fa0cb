"""A convolution of a model's own over split space: right, or refused by its line."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from meshpar import Blocks, Input, Layout, default_rules, from_nnx, make_train_step
from meshpar.models.layers.volume import VOLUME, Conv
from meshpar.parallel.grids.convolution import own_convolution
from tests.marks import slow

# Some layouts leave `tensor` without work, of which XLA's own gradient is a multiple.
pytestmark = [
    pytest.mark.filterwarnings("ignore::meshpar.IdleMeshAxisWarning"),
    pytest.mark.filterwarnings("ignore:the model of blocks .* cannot run in halves"),
]

SIDES = (8, 8, 4)
IDLE = {"depth": "context"}  # beside `tensor`
BEAMS = {"depth": "context", "height": "tensor"}


class Ends(nnx.Module):
    def __init__(self, rngs, make):
        self.conv = make(rngs)

    def embed(self, batch, scope):
        x = scope.constrain(batch["images"], VOLUME)
        own = isinstance(self.conv, Conv)
        return self.conv(x, scope) if own else self.conv(x)

    def head(self, x, batch, scope):
        return jnp.sum(jnp.tanh(x) ** 2), jnp.float32(x.size)


class Scaled(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(4))

    def __call__(self, x, scope):
        return scope.constrain(x * self.scale[...], VOLUME)


class Padded(nnx.Conv):
    """Pads by hand, as networks do whose padding is no zeros."""

    def __call__(self, x):
        return super().__call__(jnp.pad(x, [(0, 0), *[(1, 1)] * 3, (0, 0)]))


class Compiled(nnx.Conv):
    def __call__(self, x):
        return jax.jit(super().__call__)(x)


class Checkpointed(nnx.Conv):
    def __call__(self, x):
        return jax.checkpoint(super().__call__)(x)


class Whole(nnx.Conv):
    """Of a volume that each device has whole."""

    def __call__(self, x):
        whole = jax.sharding.PartitionSpec()
        return super().__call__(jax.lax.with_sharding_constraint(x, whole))


class Slices(nnx.Conv):
    """A two-dimensional convolution of each slice."""

    def __call__(self, x):
        made = super().__call__(x.reshape(-1, *x.shape[2:]))
        return made.reshape(*x.shape[:-1], made.shape[-1])


class BesideSeries(nnx.Module):
    """A one-dimensional convolution over another array, beside one of one place."""

    def __init__(self, rngs):
        self.series = nnx.Conv(2, 4, (3,), rngs=rngs)
        self.conv = nnx.Conv(2, 4, (1, 1, 1), rngs=rngs)

    def __call__(self, x):
        times = jnp.cos(jnp.arange(12.0).reshape(1, 6, 2))
        return self.conv(x) * jnp.mean(self.series(times))


class PaddedSides(nnx.Conv):
    def __call__(self, x):
        return super().__call__(jnp.pad(x, [(0, 0), (0, 0), (1, 1), (1, 1), (0, 0)]))


class Marked(nnx.Conv):
    """As one whose gradients its author takes care of."""

    def __call__(self, x):
        with own_convolution():
            return jax.jit(super().__call__)(x)


def plain(window=3, kind=nnx.Conv, **options):
    sides = window if isinstance(window, tuple) else (window,) * 3
    return lambda rngs: kind(2, 4, sides, rngs=rngs, **options)


def step_of(make, layout, rules, sides=SIDES):
    model = from_nnx(
        ends=lambda rngs: Ends(rngs, make),
        groups={"blocks": Blocks(block=Scaled, num_layers=1, stream=VOLUME)},
        inputs={"images": Input((*VOLUME[:-1], "channels"), shape=(None, *sides, 2))},
    )
    layout = Layout.parse(layout)
    return make_train_step(
        model,
        optax.sgd(0.1),
        layout,
        rules=default_rules(layout).with_rules(**rules),
        devices=jax.devices()[: layout.num_devices],
    )


def batch(sides=SIDES):
    values = np.random.default_rng(0).normal(size=(4, *sides, 2))
    return {"images": values.astype(np.float32)}


REFUSED = [
    (
        plain(),
        "context=2,tensor=2",
        IDLE,
        SIDES,
        ("grid.wrong_kernel_gradient", 2, "tensor=2"),
    ),
    (
        plain(),
        "data=2,context=2,tensor=2",
        IDLE,
        SIDES,
        ("grid.wrong_kernel_gradient", "'tensor'"),
    ),
    (
        plain(2, strides=2),
        "context=2,tensor=4",
        IDLE,
        SIDES,
        ("grid.wrong_kernel_gradient", "2 x 2 x 2", 4, "tensor=4"),
    ),
    (
        plain(kind=Padded, padding="VALID"),
        "context=2,tensor=2",
        IDLE,
        SIDES,
        ("grid.wrong_kernel_gradient", "tensor=2"),
    ),
    (
        plain(),
        "data=2,context=2,tensor=2",
        {"depth": "context", "width": "tensor"},
        (8, 8, 2),
        ("grid.wrong_input_gradient", 1, 2),
    ),
    (
        plain(kind=Padded, padding="VALID"),
        "data=2,context=2,tensor=2",
        {"depth": "context", "width": "tensor"},
        (8, 8, 2),
        ("grid.wrong_input_gradient", 1, 2),
    ),
    (
        plain(kernel_dilation=2),
        "data=2,context=2,tensor=2",
        {"depth": "context", "width": "tensor"},
        SIDES,
        ("grid.wrong_input_gradient", "5 x 5 x 5", 2, 4),
    ),
    (
        plain(padding="CIRCULAR"),
        "context=2,tensor=2",
        IDLE,
        SIDES,
        ("grid.wrong_kernel_gradient", 2, "tensor=2"),
    ),
    (
        plain(kind=Compiled),
        "context=2,tensor=2",
        IDLE,
        SIDES,
        ("grid.wrong_kernel_gradient", 2, "tensor=2"),
    ),
]


@pytest.mark.parametrize("make, layout, rules, sides, refusal", REFUSED)
def test_a_convolution_whose_gradient_xla_gets_wrong_is_refused_by_its_line(
    refuses, make, layout, rules, sides, refusal
):
    step, given = step_of(make, layout, rules, sides), batch(sides)

    def gradients(given):
        return step.audit_subject(given, gradients_only=True).flat()

    programs = [step.compile, gradients]
    if make is REFUSED[0][0]:  # on arrays too, which have to be made
        state = step.init(0)
        programs += [partial(step.loss_and_gradients, state), partial(step, state)]
    for at, program in enumerate(programs):
        with refuses(*refusal, words=at == 0) as refused:
            program(given)
        message = str(refused.value)
        assert f"{__file__}:" in message and "\n" not in message


RIGHT = {
    "no axis idle": (plain(), "data=2,context=2,tensor=2", BEAMS),
    "padded by hand": (
        plain(kind=Padded, padding="VALID"),
        "context=2,tensor=2",
        BEAMS,
    ),
    "of one place": (plain(1), "context=2,tensor=2", IDLE),
    "not along": (plain((1, 3, 3)), "context=2,tensor=2", IDLE),
    "by hand": (
        lambda rngs: Conv((2, 4), kernel=3, rngs=rngs),
        "data=2,context=2,tensor=2",
        IDLE,
    ),
    "compiled apart": (plain(1, kind=Compiled), "context=2,tensor=2", IDLE),
    "checkpointed": (
        plain((1, 3, 3), kind=Checkpointed),
        "data=2,context=2,tensor=2",
        IDLE,
    ),
    "of a whole volume": (plain(kind=Whole), "context=2,tensor=2", IDLE),
    "of a series": (BesideSeries, "context=2,tensor=2", IDLE),
    "of each slice": (plain((3, 3), kind=Slices), "context=2,tensor=2", IDLE),
    "padded along others": (
        plain((1, 3, 3), kind=PaddedSides, padding="VALID"),
        "context=2,tensor=2",
        IDLE,
    ),
}
COMPILED = ("no axis idle", "not along", "by hand")
"""What every run of the tests compiles; of all others it asks the check alone."""


@pytest.mark.parametrize("name", [name for name in RIGHT if name not in COMPILED])
def test_what_is_right_passes_the_check_before_a_program(name):
    step = step_of(*RIGHT[name])
    step.audit_subject(batch(), gradients_only=True).flat()


@pytest.mark.parametrize(
    "name", [name if name in COMPILED else slow(name) for name in RIGHT]
)
def test_what_is_not_refused_has_the_gradients_of_one_device(name):
    make, layout, rules = RIGHT[name]
    step, alone = step_of(make, layout, rules), step_of(make, "data=1", rules)
    state = step.init(0)
    loss, found = step.loss_and_gradients(state, batch())
    want_loss, want = alone.loss_and_gradients(alone.init(0), batch())
    np.testing.assert_allclose(loss, want_loss, rtol=1e-5)
    for one, other in zip(*map(jax.tree.leaves, (found, want)), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-7)


def test_a_convolution_that_its_author_takes_care_of_is_let_through():
    step = step_of(plain(kind=Marked), "context=2,tensor=2", IDLE)
    step.compile(batch())


def test_a_step_is_traced_once_for_its_check_and_its_program():
    calls = []

    class Counting(nnx.Conv):
        def __call__(self, x):
            calls.append(x.shape)
            return super().__call__(x)

    make = plain(kind=Counting)
    step = step_of(make, "context=2,tensor=2", BEAMS)
    state = step.init(0)
    del calls[:]
    state, _ = step(state, batch())
    once = len(calls)
    step(state, batch())
    assert len(calls) == once
    alone = step_of(make, "data=1", BEAMS)
    state = alone.init(0)
    del calls[:]
    alone(state, batch())
    assert len(calls) == once
