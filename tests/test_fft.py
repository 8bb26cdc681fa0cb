"""A distributed FFT is `jnp.fft`, and refuses what it cannot split."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import Layout, Rules, Scope, fft, make_mesh
from tests.marks import slow

BOUND = 1e-6
SIZES = {"context": 2, "tensor": 4}
IMAGE = ("batch", "height", "width", "channels")
VOLUME = ("batch", "depth", "height", "width")
LINE = ("width", "channels")

# Logical axes, how the rules split them, shape, frequencies kept of a real transform.
CASES = {
    "rows": (IMAGE, {"height": "tensor"}, (2, 8, 12, 3), 4),
    "rows_and_columns": (
        IMAGE,
        {"height": "context", "width": "tensor"},
        (2, 8, 8, 3),
        4,
    ),
    "columns": (IMAGE, {"width": "tensor"}, (1, 4, 8, 3), 4),
    "rows_over_two": (IMAGE, {"height": ("context", "tensor")}, (1, 8, 16, 8), None),
    "volume": (VOLUME, {"depth": "context", "height": "tensor"}, (1, 4, 8, 8), 4),
    "slabs": (VOLUME, {"depth": "tensor"}, (1, 8, 4, 6), 2),
    "line": (LINE, {"width": "tensor"}, (12, 8), 4),
    "channels_too": (
        IMAGE,
        {"height": "tensor", "channels": "context"},
        (1, 8, 4, 4),
        3,
    ),
    "whole": (IMAGE, {}, (1, 4, 6, 2), 4),
}


def rules_of(split):
    every = dict.fromkeys((*IMAGE, *VOLUME))
    return Rules({**every, **split})


def over_of(logical_axes):
    return tuple(axis for axis in logical_axes if axis in ("depth", "height", "width"))


def mesh():
    return make_mesh(Layout(**SIZES))


def values(shape, seed=0, *, real=False):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=shape).astype(np.float32)
    return x if real else (x + 1j * rng.normal(size=shape)).astype(np.complex64)


def error(found, wanted):
    found, wanted = np.asarray(found), np.asarray(wanted)
    return np.linalg.norm(found - wanted) / np.linalg.norm(wanted)


def laid_out(function, x, axes, split):
    """A function's results of an array that lies as the rules say."""
    rules = rules_of(split)
    with jax.set_mesh(mesh()) as _:
        x = jax.device_put(x, rules.sharding(mesh(), axes, x.shape))
        return jax.jit(lambda x: function(x, Scope(rules=rules)))(x)


def both_ways(x, weights, transform, back):
    """The transform, what it goes back to, and the gradient of a weighted sum."""

    def total(x):
        return jnp.sum(jnp.abs(transform(x) * weights) ** 2)

    return transform(x), back(transform(x)), jax.grad(total)(x)


def compare(case, norm, ours, theirs, *, real):
    axes, split, shape, modes = CASES[case]
    dims = tuple(axes.index(name) for name in over_of(axes))
    out = list(shape)
    if real:
        out[dims[-1]] = modes or shape[dims[-1]] // 2 + 1
    x, weights = values(shape, real=real), values(out, 1)
    found = laid_out(
        lambda x, scope: both_ways(x, weights, *ours(scope)), x, axes, split
    )
    # What jnp makes of what was kept: frequencies left out count as 0.
    wanted = jax.jit(lambda x: both_ways(x, weights, *theirs(dims)))(x)
    assert [error(*pair) <= BOUND for pair in zip(found, wanted, strict=True)] == [
        True
    ] * 3


def test_outside_of_jit_it_has_a_gradient_and_a_batch_too():
    axes, split, shape, _ = CASES["rows"]
    rules, x = rules_of(split), values(shape, real=True)
    weights = values(shape, 1)

    def total(transform):
        return lambda x: jnp.sum(jnp.abs(transform(x) * weights))

    wanted = jax.jit(jax.grad(total(lambda x: jnp.fft.fftn(x, axes=(1, 2)))))(x)
    with jax.set_mesh(mesh()):
        given = over_of(axes), Scope(rules=rules)
        placed = jax.device_put(x, rules.sharding(mesh(), axes, shape))
        found = jax.grad(total(lambda x: fft.fftn(x, axes, *given)))(placed)
        mapped = jax.vmap(lambda x: fft.fftn(x, axes[1:], *given))(placed)
    assert error(found, wanted) <= BOUND
    assert error(mapped, np.fft.fftn(x, axes=(1, 2))) <= BOUND


QUICK = {
    *(("rows_and_columns", False), ("rows_over_two", False), ("volume", False)),
    *(("line", False), ("channels_too", False)),
    *(("rows_and_columns", True), ("volume", True)),
}
"""One dim over two mesh axes, two and three over one each, with and without moves back;
other cases have a part of these."""


@pytest.mark.parametrize(
    "case, transposed",
    [
        case if case in QUICK else slow(*case)
        for case in itertools.product(CASES, (False, True))
    ],
)
def test_a_split_transform_its_inverse_and_gradient_are_those_of_jnp(case, transposed):
    axes = CASES[case][0]
    options = {"transposed": transposed, "norm": "ortho"}

    def ours(scope):
        given = axes, over_of(axes), scope
        return (
            lambda x: fft.fftn(x, *given, **options),
            lambda y: fft.ifftn(y, *given, **options),
        )

    def theirs(dims):
        return (
            lambda x: jnp.fft.fftn(x, axes=dims, norm="ortho"),
            lambda y: jnp.fft.ifftn(y, axes=dims, norm="ortho"),
        )

    compare(case, "ortho", ours, theirs, real=False)


@pytest.mark.parametrize(
    "case, transposed",
    [
        ("rows_and_columns", True),
        ("volume", False),
        slow("rows", False),
        *(slow(case, True) for case in ("rows", "columns", "slabs", "whole", "line")),
    ],
)
def test_a_real_transform_keeps_the_lowest_frequencies(case, transposed):
    axes, _, shape, modes = CASES[case]
    size = shape[axes.index("width")]

    def ours(scope):
        given = axes, over_of(axes), scope
        return (
            lambda x: fft.rfftn(x, *given, modes=modes, transposed=transposed),
            lambda y: fft.irfftn(y, *given, size=size, transposed=transposed),
        )

    def theirs(dims):
        def back(y):
            widths = [(0, 0)] * y.ndim
            widths[dims[-1]] = (0, size // 2 + 1 - y.shape[dims[-1]])
            sizes = [shape[dim] for dim in dims]
            return jnp.fft.irfftn(jnp.pad(y, widths), s=sizes, axes=dims)

        def transform(x):
            y = jnp.fft.rfftn(x, axes=dims)
            return jax.lax.slice_in_dim(y, 0, modes, axis=dims[-1])

        return transform, back

    compare(case, "backward", ours, theirs, real=True)


@pytest.mark.parametrize(
    "shape, split, changes, refusal",
    [
        (
            (1, 6, 8, 1),
            {"height": "tensor"},
            {},
            ("layout.indivisible", "'height'", 6, "'tensor'", 4),
        ),
        (
            (1, 8, 6, 3),
            {"height": "tensor"},
            {},
            ("grid.indivisible_fft", "'height'", "'width'", "'channels'", 6, 3, 1, 4),
        ),
        (
            (1, 8, 12, 2),
            {"height": "tensor", "width": "context"},
            {"over": ("height",)},
            ("grid.indivisible_fft", "'channels'", "'batch'", "'width'", 2, 4, 12, 8),
        ),
        (
            (1, 4, 4, 1),
            {},
            {"over": ("heigth",)},
            ("grid.unknown_fft_dim", "'heigth'", "'height'"),
        ),
        (
            (1, 4, 4, 1),
            {},
            {"over": "height"},
            ("grid.fft_dims_not_a_tuple", "('height',)"),
        ),
        (
            (1, 4, 4, 1),
            {},
            {"over": ()},
            ("grid.fft_dims_not_once", "'batch'", "'height'"),
        ),
        (
            (1, 4, 4, 1),
            {},
            {"norm": "unit"},
            ("grid.unknown_fft_norm", "norm='unit'", "backward"),
        ),
        ((4, 4), {}, {}, ("grid.wrong_number_of_axes", 2, "(4, 4)", 4, "'batch'")),
    ],
)
def test_what_cannot_be_transformed_is_refused(refuses, shape, split, changes, refusal):
    given = {"over": ("height", "width"), "scope": Scope(rules=rules_of(split))}
    with jax.set_mesh(mesh()), refuses(*refusal):
        fft.fftn(jnp.ones(shape), IMAGE, **{**given, **changes})


@pytest.mark.parametrize(
    "modes, refusal",
    [
        (None, ("grid.indivisible_modes", "'width'", 8, 5, "tensor", 4, "modes=4")),
        (6, ("grid.too_many_modes", 8, "modes=6", 5, "modes=1")),
        (2.5, ("value.not_whole_number", "modes=2.5", 1)),
    ],
)
def test_frequencies_that_do_not_divide_are_refused(refuses, modes, refusal):
    scope = Scope(rules=rules_of({"width": "tensor"}))
    with jax.set_mesh(mesh()), refuses(*refusal):
        fft.rfftn(jnp.ones((1, 8, 8, 1)), IMAGE, ("width",), scope, modes=modes)


def test_what_a_real_transform_cannot_take_is_refused(refuses):
    given = (IMAGE, ("width",), Scope())
    frequencies = jnp.ones((1, 8, 6, 1), jnp.complex64)
    with refuses("grid.ambiguous_fft_dim", "'width'", 2):
        fft.fftn(frequencies, ("batch", "width", "width", None), ("width",), Scope())
    with refuses("grid.complex_values", "rfftn", "complex64", "fftn"):
        fft.rfftn(frequencies, *given)
    with refuses("grid.too_many_frequencies", "size=8", "'width'", 6, 5, "size=10"):
        fft.irfftn(frequencies, *given, size=8)
    scope, given_of = Scope(rules=rules_of({"width": "tensor"})), (IMAGE, ("width",))
    with (
        jax.set_mesh(mesh()),
        refuses("grid.indivisible_modes", "irfftn", "'width'", 8, 5),
    ):
        fft.irfftn(frequencies[:, :, :5], *given_of, scope, size=8)
    with refuses("grid.too_many_modes", "filtered", "'width'", "modes=6", 5):
        fft.filtered(jnp.ones((1, 8, 8, 1)), max, (), *given, modes=6)
    with refuses("grid.filter_changed_shape", "(1, 8, 5, 2)", "(1, 8, 5, 1)"):
        fft.filtered(
            jnp.ones((1, 8, 8, 1)), lambda w, y: jnp.concatenate([y, y], 3), (), *given
        )
