"""Collective matmul: the matmuls of sequence parallelism in chunks of tokens.

A gather before a matmul and a scatter after one leave the device idle. Here every
device sends its tokens to each other device, and multiplies those that have arrived
while others travel; a row-parallel matmul sends the partial sums of other devices'
tokens, and multiplies its own last. The same bytes are sent, without a ring: a switch
joins the devices, so that any pair is as near as any other, and partial sums are
rounded once and added up in fp32.
Reference: Wang et al. 2023, "Overlap communication with dependent computation via
decomposition"; Korthikanti et al. 2022, section 4.2.2.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

from meshpar.collectives import asked, on_parts, own_lane
from meshpar.hardware.platforms import platform_named
from meshpar.model.scope import Scope
from meshpar.rules.rules import LogicalAxes, array_split, auto_mesh_shape, spec_axes

LEAST_TOKENS = 256
"""Fewest tokens of a chunk. With half as many, the latency of a send to another H100
(3.4 us) is longer than its bytes take (256 x 4096 in bf16: 5.4 us), and reading the
weight takes longer than the arithmetic of its matmul."""


@dataclass(frozen=True, kw_only=True)
class TokenMatmul:
    """A matmul of (batch, tokens, ...) and a weight, in chunks of tokens.

    Args:
        dims: Subscripts of the einsum: the tokens, the weight, the result.
        mesh_axis: Mesh axis of GSPMD that splits the tokens.
        weight: How it splits the weight.
        whole: How it splits the array that has the tokens of all devices: the result of
            a column-parallel matmul, the input of a row-parallel one.
        keeps: True to keep the gathered tokens for the backward, which otherwise sends
            them again.
    """

    dims: str
    mesh_axis: str
    weight: PartitionSpec
    whole: PartitionSpec
    keeps: bool

    @property
    def split(self) -> PartitionSpec:
        """How the mesh axis splits the array whose tokens are this device's."""
        return PartitionSpec(None, self.mesh_axis)

    def gradient_dims(self) -> tuple[str, str]:
        """Return the subscripts of the gradients of the tokens and of the weight."""
        x, weight, y = _terms(self.dims)
        return f"{y},{weight}->{x}", f"{x},{y}->{weight}"


def token_matmul(
    dims: str,
    shapes: Sequence[tuple[int, ...]],
    whole_axes: LogicalAxes,
    scope: Scope,
    *,
    column: bool,
) -> TokenMatmul | None:
    """Return a matmul in chunks of tokens; None if it runs at once.

    It runs in chunks if one mesh axis splits the residual stream's sequence and the
    weight, if the platform overlaps them, if the chunks are large enough, and if
    pipeline ranks run in lock step: permutes carry the chunks.

    Args:
        dims: Subscripts of the einsum.
        shapes: Shapes of its two operands; the first is (batch, tokens, ...).
        whole_axes: Logical axes of the array that has the tokens of all devices.
        scope: Where the function runs.
        column: True if that array is the result, False if it is the first operand.
    """
    rules, axes = scope.rules, scope.sequence_axes
    if rules is None or len(axes) != 1 or scope.ranks_diverge:
        return None
    x, weight, y = _terms(dims)
    length = dict(zip(x + weight, (*shapes[0], *shapes[1]), strict=True))
    num_devices = auto_mesh_shape()[axes[0]]
    tokens, odd = divmod(length[x[1]], num_devices)
    if odd or length[x[0]] * tokens < LEAST_TOKENS:
        return None
    if not platform_named(scope.platform).chunks_matmuls:
        return None
    letters = y if column else x
    split = array_split(rules, whole_axes, [length[letter] for letter in letters])
    of_letter = dict(zip(letters, split, strict=True))
    whole = PartitionSpec(*split)
    of_weight = PartitionSpec(*(of_letter.get(letter, ()) for letter in weight))
    if not spec_axes(whole) == spec_axes(of_weight) == axes:
        return None
    return TokenMatmul(
        dims=dims,
        mesh_axis=axes[0],
        weight=of_weight,
        whole=whole,
        keeps=scope.recomputed,
    )


def _terms(dims: str) -> tuple[str, str, str]:
    operands, result = dims.split("->")
    one, other = operands.split(",")
    return one, other, result


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gathered_matmul(how: TokenMatmul, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return a column-parallel matmul of tokens that are split over devices.

    Each device sends its batch x tokens x embed values to the n-1 others. The backward
    sends as many partial sums of the gradient of `x`, and the tokens once more unless
    they are kept.
    """
    return _gathered_forward(how, x, weight)[0]


def _gathered_forward(
    how: TokenMatmul, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    def local(x: jax.Array, weight: jax.Array) -> tuple[jax.Array, ...]:
        chunks = _sent_to_all(x, how.mesh_axis)
        products = [jnp.einsum(how.dims, chunk, weight) for chunk in chunks]
        y = _in_order(products, how.mesh_axis)
        return (y, _in_order(chunks, how.mesh_axis)) if how.keeps else (y,)

    y, *kept = on_parts(
        local,
        x,
        weight,
        specs=(how.split, how.weight),
        out_specs=(how.whole, PartitionSpec())[: 1 + how.keeps],
        mesh_axes={how.mesh_axis},
    )
    return y, (kept[0] if how.keeps else x, weight)


def _gathered_backward(
    how: TokenMatmul, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def local(dy: jax.Array, weight: jax.Array, *x: jax.Array) -> tuple[jax.Array, ...]:
        whole = [
            _in_order(_sent_to_all(one, how.mesh_axis), how.mesh_axis) for one in x
        ]
        dims, _ = how.gradient_dims()
        return _summed_products(dims, dy, weight, how.mesh_axis), *whole

    x, weight = kept
    sent = () if how.keeps else (x,)
    dx, *whole = on_parts(
        local,
        dy,
        weight,
        *sent,
        specs=(how.whole, how.weight, how.split)[: 2 + len(sent)],
        out_specs=(how.split, PartitionSpec())[: 1 + len(sent)],
        mesh_axes={how.mesh_axis},
    )
    (x,) = whole or (x,)
    return _with_weight_gradient(how, dx, (x, PartitionSpec()), (dy, how.whole))


gathered_matmul.defvjp(_gathered_forward, _gathered_backward)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def scattered_matmul(how: TokenMatmul, x: jax.Array, weight: jax.Array) -> jax.Array:
    """Return this device's tokens of a row-parallel matmul, summed over devices.

    Each device sends batch x tokens x embed partial sums to each of the n-1 others. The
    backward sends as many values of the gradient, once for both of its matmuls.
    """
    return _scattered_forward(how, x, weight)[0]


def _scattered_forward(
    how: TokenMatmul, x: jax.Array, weight: jax.Array
) -> tuple[jax.Array, tuple[jax.Array, jax.Array]]:
    y = on_parts(
        lambda x, weight: _summed_products(how.dims, x, weight, how.mesh_axis),
        x,
        weight,
        specs=(how.whole, how.weight),
        out_specs=how.split,
        mesh_axes={how.mesh_axis},
    )
    return y, (x, weight)


def _scattered_backward(
    how: TokenMatmul, kept: tuple[jax.Array, jax.Array], dy: jax.Array
) -> tuple[jax.Array, jax.Array]:
    def local(dy: jax.Array, weight: jax.Array) -> tuple[jax.Array, jax.Array]:
        dims, _ = how.gradient_dims()
        chunks = _sent_to_all(dy, how.mesh_axis)
        products = [jnp.einsum(dims, chunk, weight) for chunk in chunks]
        return _in_order(products, how.mesh_axis), _in_order(chunks, how.mesh_axis)

    x, weight = kept
    dx, dy = on_parts(
        local,
        dy,
        weight,
        specs=(how.split, how.weight),
        out_specs=(how.whole, PartitionSpec()),
        mesh_axes={how.mesh_axis},
    )
    return _with_weight_gradient(how, dx, (x, how.whole), (dy, PartitionSpec()))


scattered_matmul.defvjp(_scattered_forward, _scattered_backward)


def _with_weight_gradient(
    how: TokenMatmul,
    dx: jax.Array,
    x: tuple[jax.Array, PartitionSpec],
    dy: tuple[jax.Array, PartitionSpec],
) -> tuple[jax.Array, jax.Array]:
    """Return the gradients of the tokens and of the weight behind a barrier.

    The matmul of the weight's gradient then runs beside the sends of its block. XLA:GPU
    puts it off to the end of the backward otherwise, where nothing is left to hide. It
    is a region of its own, which a split backward can do later (`split_backward`).

    Args:
        how: The matmul.
        dx: Gradient of its tokens.
        x: All tokens, and how the mesh axis splits them.
        dy: The gradient of all tokens of its result, and how the mesh axis splits it.
    """
    _, dims = how.gradient_dims()
    dweight = on_parts(
        functools.partial(jnp.einsum, dims),
        x[0],
        dy[0],
        specs=(x[1], dy[1]),
        out_specs=how.weight,
        mesh_axes={how.mesh_axis},
    )
    return lax.optimization_barrier((dx, dweight))


def _sent_to_all(x: jax.Array, mesh_axis: str) -> list[jax.Array]:
    """Return this device's array, and those of the devices 1, 2, ... before it."""
    chunks = [x]
    with asked("token_gather"):
        for distance in range(1, lax.axis_size(mesh_axis)):
            chunks.append(_sent(x, mesh_axis, distance))
    return chunks


def _summed_products(
    dims: str, x: jax.Array, weight: jax.Array, mesh_axis: str
) -> jax.Array:
    """Return this device's tokens of the products of all devices, added up in fp32."""
    num_devices, rank = lax.axis_size(mesh_axis), lax.axis_index(mesh_axis)
    tokens = x.shape[1] // num_devices

    def product(distance: int) -> jax.Array:
        start = (rank + distance) % num_devices * tokens
        chunk = lax.dynamic_slice_in_dim(x, start, tokens, axis=1)
        return jnp.einsum(dims, chunk, weight)

    with asked("token_scatter"):
        arrived = [
            _sent(product(distance), mesh_axis, distance)
            for distance in range(1, num_devices)
        ]
    own = product(0)
    total = sum((each.astype(jnp.float32) for each in arrived), own.astype(jnp.float32))
    return total.astype(own.dtype)


def _sent(x: jax.Array, mesh_axis: str, distance: int) -> jax.Array:
    """Send an array `distance` devices on; return the one that arrives."""
    num_devices = lax.axis_size(mesh_axis)
    pairs = [(one, (one + distance) % num_devices) for one in range(num_devices)]
    with own_lane():
        return lax.ppermute(x, mesh_axis, pairs)


def _in_order(chunks: Sequence[jax.Array], mesh_axis: str) -> jax.Array:
    """Join chunks of this device and of those before it, in the sequence's order."""
    num_devices, rank = lax.axis_size(mesh_axis), lax.axis_index(mesh_axis)
    batch, tokens, *others = chunks[0].shape
    whole = jnp.zeros((batch, num_devices * tokens, *others), chunks[0].dtype)
    for distance, chunk in enumerate(chunks):
        start = (rank - distance) % num_devices * tokens
        whole = lax.dynamic_update_slice_in_dim(whole, chunk, start, axis=1)
    return whole
