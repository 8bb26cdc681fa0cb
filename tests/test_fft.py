"""A distributed FFT is `jnp.fft`, sends what it says and gathers nothing."""

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import InputError, Layout, RuleError, Rules, Scope, audit, fft, make_mesh
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
    wanted = both_ways(jnp.asarray(x), weights, *theirs(dims))
    assert [error(*pair) <= BOUND for pair in zip(found, wanted, strict=True)] == [
        True
    ] * 3


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", CASES)
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
        ("rows", False),
        ("rows_and_columns", True),
        ("volume", False),
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


# For each case the devices of each all-to-all of a transform, in order.
MOVES = {
    "rows": ([4, 4], [4]),
    "rows_and_columns": ([4, 4, 2, 2], [4, 4, 2]),
    "rows_over_two": ([8, 8], [8]),
    "volume": ([4, 2, 2, 4], [4, 2]),
    "whole": ([], []),
}


@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("case", MOVES)
def test_a_transform_sends_its_closed_form_and_gathers_nothing(case, transposed):
    axes, split, shape, _ = CASES[case]
    rules = rules_of(split)
    sharding = rules.sharding(mesh(), axes, shape)
    given = axes, over_of(axes), Scope(rules=rules)
    degrees = MOVES[case][transposed]
    with jax.set_mesh(mesh()):
        report = audit(
            lambda x: fft.fftn(x, *given, transposed=transposed),
            jax.ShapeDtypeStruct(shape, jnp.complex64, sharding=sharding),
        )
        listed = fft.moves_of(shape, *given, transposed=transposed)
    own_bytes = 8 * math.prod(sharding.shard_shape(shape))
    assert not report.surprises
    assert {row.reason for row in report.rows} <= {
        "asked by fft: a split dim made whole, or back"
    }
    assert [row.collective.kind for row in report.rows] == ["all-to-all"] * len(degrees)
    assert [row.collective.wire_bytes for row in report.rows] == [
        own_bytes * (n - 1) // n for n in degrees
    ]
    assert [math.prod(SIZES[axis] for axis in move.mesh_axes) for move in listed] == (
        degrees
    )


@pytest.mark.parametrize(
    "shape, split, changes, match",
    [
        ((1, 6, 8, 1), {"height": "tensor"}, {}, "'height' has size 6, which does not"),
        (
            (1, 8, 6, 3),
            {"height": "tensor"},
            {},
            "fft over 'height', split over tensor of size 4: no other dim divides by "
            r"it to be split meanwhile \('width' of 6, 'channels' of 3, 'batch' of 1\)",
        ),
        ((1, 4, 4, 1), {}, {"over": ("heigth",)}, "fft over 'heigth'.*did you mean"),
        ((1, 4, 4, 1), {}, {"over": ()}, "name one or more dims"),
        ((1, 4, 4, 1), {}, {"norm": "unit"}, "norm='unit': must be one of backward"),
    ],
)
def test_what_cannot_be_transformed_is_refused(shape, split, changes, match):
    given = {"over": ("height", "width"), "scope": Scope(rules=rules_of(split))}
    with (
        jax.set_mesh(mesh()),
        pytest.raises((InputError, RuleError), match=match),
    ):
        fft.fftn(jnp.ones(shape), IMAGE, **{**given, **changes})


@pytest.mark.parametrize(
    "modes, match",
    [
        (None, "'width' of size 8 has 5 frequencies.*tensor of size 4; give modes=4"),
        (6, "6 frequencies .modes. of 'width' of size 8: a real transform has 1 to 5"),
    ],
)
def test_frequencies_that_do_not_divide_are_refused(modes, match):
    scope = Scope(rules=rules_of({"width": "tensor"}))
    with jax.set_mesh(mesh()), pytest.raises(InputError, match=match):
        fft.rfftn(jnp.ones((1, 8, 8, 1)), IMAGE, ("width",), scope, modes=modes)
