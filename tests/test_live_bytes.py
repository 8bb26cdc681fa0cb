"""The most bytes that a traced program holds at once, counted on programs by hand."""

import jax
import jax.numpy as jnp
import pytest

from meshpar.trace.costs import most_live


def two_matmuls(x, weight):
    hidden = jnp.tanh(x @ weight)
    return hidden @ weight.T


@pytest.mark.parametrize(
    ("lanes", "hidden_columns", "columns"), [(1, 12, 200), (128, 128, 256)]
)
def test_a_last_dim_takes_whole_lanes(lanes, hidden_columns, columns):
    """Of 12 and 200 columns; the second matmul reads what the first and tanh made."""
    x, weight = jnp.zeros((64, 200)), jnp.zeros((200, 12))
    live = most_live(jax.jit(two_matmuls).trace(x, weight).jaxpr, lanes)
    turned = 12 * columns  # the weight, transposed
    kept = 64 * hidden_columns + turned
    assert live.operation == "dot_general"
    assert live.total_bytes == 4 * (kept + 64 * columns)


def test_results_made_later_wait_with_their_operands_until_the_others_are_there():
    def backward(weight, x, gradient):
        of_hidden = jnp.tanh(x @ weight) * gradient
        return x.T @ of_hidden, of_hidden @ weight.T

    weight, x, gradient = jnp.zeros((200, 12)), jnp.zeros((64, 200)), jnp.zeros(12)
    program = jax.jit(backward).trace(weight, x, gradient).jaxpr
    of_hidden, turned, result = 64 * 12, 12 * 200, 64 * 200
    last, all_of_it = most_live(program, later=1), most_live(program)
    assert last.total_bytes == 4 * (of_hidden + turned + result)
    assert all_of_it.total_bytes == last.total_bytes + 4 * weight.size
