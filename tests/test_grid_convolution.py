"""A convolution on a split periodic grid is that of one device, and sends its halo."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshpar import Layout, Rules, Scope, audit, make_mesh
from meshpar.parallel.grids.convolution import grid_convolution
from tests.marks import slow

AXES = ("batch", "height", "width", "embed")
SHAPE, CHANNELS = (2, 8, 16), 4
REASON = "asked by a convolution: halo of the grid"


def rules_of(split):
    return Rules({**dict.fromkeys(AXES), **split})


def plain(x, kernel):
    half = kernel.shape[0] // 2
    x = jnp.pad(x, ((0, 0), (half, half), (0, 0), (0, 0)))
    x = jnp.pad(x, ((0, 0), (0, 0), (half, half), (0, 0)), mode="wrap")
    return jax.lax.conv_general_dilated(
        x, kernel, (1, 1), "VALID", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )


def arrays(window):
    rng = np.random.default_rng(0)
    x = rng.normal(size=(*SHAPE, CHANNELS)).astype(np.float32)
    kernel = rng.normal(size=(window, window, CHANNELS, CHANNELS)).astype(np.float32)
    return x, kernel


def value_and_gradients(convolve):
    def total(x, kernel):
        return jnp.sum(jnp.tanh(convolve(x, kernel)) ** 2)

    return jax.value_and_grad(total, argnums=(0, 1))


# The first leaves a mesh axis idle, of which GSPMD's own kernel gradient is a multiple.
@pytest.mark.parametrize(
    "split, window",
    [
        ({"height": "tensor"}, 3),
        ({"height": "context", "width": "tensor"}, 5),
        slow({"width": "tensor"}, 3),
        slow({"width": ("context", "tensor")}, 3),
        slow({}, 3),
    ],
)
def test_a_periodic_convolution_and_its_gradients_are_those_of_one_device(
    split, window
):
    x, kernel = arrays(window)
    rules, mesh = rules_of(split), make_mesh(Layout(context=2, tensor=4))
    wanted = value_and_gradients(plain)(x, kernel)
    with jax.set_mesh(mesh):
        scope = Scope(rules=rules)
        run = value_and_gradients(
            lambda x, kernel: grid_convolution(x, kernel, AXES, ("width",), scope)
        )
        placed = jax.device_put(x, rules.sharding(mesh, AXES, x.shape))
        found = jax.jit(run)(placed, kernel)
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        error = np.linalg.norm(np.subtract(one, other)) / np.linalg.norm(other)
        assert error < 1e-6


def test_it_sends_two_halos_for_a_split_dim():
    split = {"height": "context", "width": "tensor"}
    x, kernel = arrays(3)
    rules, mesh = rules_of(split), make_mesh(Layout(context=2, tensor=4))
    with jax.set_mesh(mesh):
        report = audit(
            lambda x, kernel: grid_convolution(
                x, kernel, AXES, ("width",), Scope(rules=rules)
            ),
            jax.ShapeDtypeStruct(
                x.shape, x.dtype, sharding=rules.sharding(mesh, AXES, x.shape)
            ),
            kernel,
        )
    batch, rows, columns = SHAPE[0], SHAPE[1] // 2, SHAPE[2] // 4
    found = sorted(row.collective.payload_bytes for row in report.rows)
    assert {row.reason for row in report.rows} == {REASON}
    of_rows = 4 * batch * columns * CHANNELS
    of_columns = 4 * batch * (rows + 2) * CHANNELS
    assert found == sorted([of_rows, of_rows, of_columns, of_columns])


@pytest.mark.parametrize(
    "shape, split, periodic, refusal",
    [
        ((3, 4, 4), {}, ("width",), ("grid.wrong_kernel_dims", "(3, 4, 4)", 1, 3)),
        ((3, 3, 2, 4), {}, ("width",), ("grid.wrong_kernel_channels", 2, 4)),
        (
            (3, 3, 4, 4),
            {"embed": "tensor"},
            (),
            ("grid.split_channels", "'embed'", 4, "tensor"),
        ),
        (
            (3, 3, 4, 4),
            {},
            ("widht",),
            ("grid.unknown_periodic_dim", "'widht'", "'width'"),
        ),
        (
            (3, 3, 4, 4),
            {},
            "width",
            ("grid.periodic_not_a_tuple", "periodic='width'", "('width',)"),
        ),
    ],
)
def test_what_is_no_kernel_or_dim_of_the_grid_is_refused(
    refuses, shape, split, periodic, refusal
):
    scope, kernel = Scope(rules=rules_of(split)), np.ones(shape, np.float32)
    with jax.set_mesh(make_mesh(Layout(context=2, tensor=4))), refuses(*refusal):
        grid_convolution(arrays(3)[0], kernel, AXES, periodic, scope)


@pytest.mark.parametrize(
    "window, refusal",
    [
        (4, ("grid.even_window", 4, "'height'")),
        (7, ("grid.window_beyond_part", 7, "'height'", 3, 2)),
    ],
)
def test_a_window_that_does_not_fit_is_refused(refuses, window, refusal):
    x, kernel = arrays(window)
    scope = Scope(rules=rules_of({"height": "tensor"}))
    with jax.set_mesh(make_mesh(Layout(context=2, tensor=4))), refuses(*refusal):
        grid_convolution(x, kernel, AXES, ("width",), scope)
