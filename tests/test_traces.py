"""Traced programs are walked in one place; what its domains make of loops and calls."""

from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from meshpar.errors import InputError
from meshpar.trace.costs import Operand, matmul_flops
from meshpar.trace.dependence import has_gradient, is_read
from meshpar.trace.walk import Loop, steps

ROOT = Path(__file__).parents[1]
X = jax.ShapeDtypeStruct((4, 8), jnp.float32)
W = jax.ShapeDtypeStruct((8, 8), jnp.float32)


def test_one_file_knows_the_equations_of_a_program():
    paths = (ROOT / "meshpar").rglob("*.py")
    assert [
        str(path.relative_to(ROOT)) for path in paths if ".eqns" in path.read_text()
    ] == ["meshpar/trace/walk.py"]


def scanned(x, w):
    return lax.scan(lambda x, _: (x @ w, None), x, None, length=3)[0]


def repeated(x, w):
    return lax.while_loop(lambda x: x.sum() < 9, lambda x: x @ w, x)


def test_a_loop_tells_constants_from_what_it_carries():
    for function, length in ((scanned, 3), (repeated, None)):
        [equation] = [
            one
            for one in steps(jax.make_jaxpr(function)(X, W))
            if Loop.parse(one) is not None
        ]
        loop = Loop.parse(equation)
        consts, carried, slices = loop.split(equation.invars)
        assert [var.aval.shape for var in (*consts, *carried)] == [(8, 8), (4, 8)]
        assert (slices, loop.length) == ([], length)


def test_matmuls_count_as_often_as_their_loop_runs():
    flops = matmul_flops(
        jax.make_jaxpr(scanned)(X, W), [Operand(), Operand(None, True)]
    )
    assert (flops.with_weights, flops.between_activations) == (3 * 2 * 4 * 8 * 8, 0)


def test_matmuls_in_a_loop_of_unknown_length_are_refused_or_assumed():
    program = jax.make_jaxpr(repeated)(X, W)
    with pytest.raises(InputError, match="number of iterations"):
        matmul_flops(program, [Operand()] * 2)
    flops = matmul_flops(program, [Operand()] * 2, while_length=2)
    assert flops.total == 2 * 2 * 4 * 8 * 8


@pytest.mark.parametrize("index, cost", [(None, 2), (0, 2), (1, 1), (2, 0)])
def test_of_branches_the_known_one_counts_or_the_most_expensive(index, cost):
    def chosen(index, x, w):
        branches = [lambda x: x @ w @ w, lambda x: x @ w, lambda x: x]
        return lax.switch(index, branches, x)

    program = jax.make_jaxpr(chosen)(jnp.int32(0), X, W)
    known = Operand(None if index is None else jnp.int32(index))
    assert (
        matmul_flops(program, [known, Operand(), Operand()]).total
        == cost * 2 * 4 * 8 * 8
    )


def test_what_a_loop_carries_on_depends_on_what_ends_it():
    def counted(x):
        return lax.while_loop(
            lambda c: c[0] < x, lambda c: (c[0] + 1, c[1]), (0.0, 1.0)
        )

    assert is_read(lambda x: counted(x)[0], 3.0)
    assert not has_gradient(lambda x: counted(x)[0], 3.0)


def test_a_gradient_reaches_what_later_iterations_carry():
    def shifted(x):
        a, b, c = lax.scan(lambda abc, _: ((x, *abc[:2]), None), (0.0,) * 3, None, 3)[0]
        return c

    assert has_gradient(shifted, 1.0)
    assert not has_gradient(lambda x: shifted(lax.stop_gradient(x)), 1.0)
