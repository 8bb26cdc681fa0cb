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


def test_results_made_last_do_not_count_but_their_operands_wait():
    def backward(weight, x, gradient):
        of_hidden = (x @ weight) * gradient
        of_input = of_hidden @ weight.T
        return x.T @ of_hidden, of_input @ of_input.T

    weight, x, gradient = jnp.zeros((200, 12)), jnp.zeros((64, 200)), jnp.zeros(12)
    program = jax.jit(backward).trace(weight, x, gradient).jaxpr
    in_order, last = (most_live(program, uncounted=1, last=at) for at in (False, True))
    # The last matmul reads `of_input` twice, as it is and transposed.
    assert in_order.total_bytes == 4 * (2 * 64 * 200 + 64 * 64)
    assert last.total_bytes == in_order.total_bytes + 4 * 64 * 12
    assert most_live(program).total_bytes == in_order.total_bytes + 4 * weight.size
    assert last.bytes_by_width == {
        200: 4 * 64 * 200,
        64: 4 * (64 * 200 + 64 * 64),
        12: 4 * 64 * 12,
    }


@pytest.mark.parametrize("width", [62, 64])
def test_scores_are_told_from_a_stream_as_wide_as_its_sequence(width):
    def attend(x):
        stream = jnp.tanh(x)
        heads = stream.reshape(1, 64, 2, width // 2)
        return stream, jnp.einsum("bthk,bshk->bhts", heads, heads)

    program = jax.jit(attend).trace(jnp.zeros((1, 64, width))).jaxpr
    every, others = (most_live(program, without=one) for one in (None, (64, 64)))
    assert every.total_bytes - others.total_bytes == 4 * 2 * 64 * 64
