"""Dropless routed MLPs whose experts are split over mesh axes.

The first round has room for a quarter more rows than each device gets on average. Rows
that do not fit go in further rounds, of a quarter of that room each, as many as the
fullest device needs; all devices that share the experts run equally many. Residuals are
kept for the first round only; further rounds, which few steps need, are recomputed in
the backward.

Experts may be split along `mlp` too: each device multiplies its part of the hidden
values, and one all-reduce of tokens * embed values sums the results, another one the
gradients of the tokens.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshpar.collectives import asked, on_parts, sum_dtype
from meshpar.errors import InputError
from meshpar.model.scope import Scope
from meshpar.parallel.expert.rounds import (
    Kept,
    Round,
    Routes,
    make_routes,
    most_for_one,
    run,
    run_backward,
)
from meshpar.parallel.sizes import first_room, further_room, most_room
from meshpar.parallel.tensor import refuse_split_embed
from meshpar.rules.rules import array_split, spec_axes


@dataclass(frozen=True, kw_only=True)
class _Static:
    """Static arguments of a call.

    Args:
        first: Sizes of the first round.
        more: Sizes of each further round; None if none is ever needed.
        split: Specs of `gate_up` and `down` over automatic mesh axes.
        wide: Dtype of sums over these mesh axes.
    """

    first: Round
    more: Round | None
    split: tuple[PartitionSpec, PartitionSpec]
    wide: Any

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Return the automatic mesh axes that split the experts' hidden values."""
        axes = (axis for spec in self.split for axis in spec_axes(spec))
        return tuple(dict.fromkeys(axes))

    def routes(self, experts: jax.Array) -> Routes:
        """Return the routes of a device's tokens, (tokens, choices)."""
        num_devices = self.first.num_devices
        return make_routes(experts, self.first.num_experts * num_devices, num_devices)


def routed_mlp(
    x: Float[Array, "batch seq embed"],
    experts: Int[Array, "batch seq choices"],
    weights: Float[Array, "batch seq choices"],
    gate_up: Float[Array, "experts embed 2 mlp"],
    down: Float[Array, "experts mlp embed"],
    scope: Scope,
    *,
    num_experts: int,
    most_rows: int | None = None,
) -> Float[Array, "batch seq embed"]:
    """Return `sum_k weights_k * expert_k(x)`, expert(x) = down(silu(gate(x)) * up(x)).

    Args:
        x: This device's tokens, whole over `tensor`.
        experts: int32 expert of each choice; `num_experts` for a dropped choice.
        weights: fp32 weight of each choice.
        gate_up: This device's experts, as the block gets them.
        down: As `gate_up`.
        scope: Where the function runs.
        num_experts: Experts of all devices together.
        most_rows: Most rows that one expert can get from this device, if the router
            bounds them; no further round is needed then.

    Raises:
        InputError: The experts are not split as the rules say, or the rules split
            `embed` over a mesh axis of GSPMD.
    """
    if scope.exchanges is not None:
        scope.exchanges.append("routed_mlp")
    if scope.order is not None and scope.order.probing:
        return x * jnp.sum(weights, axis=-1, keepdims=True).astype(x.dtype)
    batch, seq, choices = experts.shape
    shapes = (gate_up.shape, down.shape)
    static = _static(shapes, scope, num_experts, batch * seq, choices, most_rows)
    y = _routed(
        static,
        x.reshape(batch * seq, -1),
        experts.reshape(batch * seq, choices),
        weights.reshape(batch * seq, choices),
        gate_up,
        down,
    )
    return y.reshape(x.shape)


def expert_axes(scope: Scope) -> tuple[str, ...]:
    """Return the mesh axes of size above 1 that split the experts of a scope."""
    if scope.rules is None:
        return ()
    mapped = scope.rules.table.get("experts") or ()
    return tuple(axis for axis in mapped if axis in scope.batch_axes)


def _static(
    shapes: tuple,
    scope: Scope,
    num_experts: int,
    tokens: int,
    choices: int,
    most_rows: int | None,
) -> _Static:
    axes = expert_axes(scope)
    num_devices = math.prod(lax.axis_size(axis) for axis in axes)
    own = shapes[0][0]
    if own * num_devices != num_experts:
        raise InputError(
            f"experts: {own} on each of {num_devices} devices, but the router has "
            f"{num_experts}; give gate_up and down the logical axis 'experts', and map "
            "it to 'expert'",
            key="model.wrong_number_of_experts",
        )
    most = most_room(tokens, choices, own, most_rows)
    room = first_room(tokens, choices, own, num_devices, most_rows)
    first = Round(
        mesh_axes=axes,
        num_devices=num_devices,
        num_experts=own,
        room=room,
        platform=scope.platform,
    )
    gate_up = array_split(scope.rules, (None, "embed", None, "mlp"), shapes[0])
    down = array_split(scope.rules, (None, "mlp", "embed"), shapes[1])
    refuse_split_embed(gate_up[1], "experts multiply tokens")
    return _Static(
        first=first,
        more=replace(first, room=further_room(room)) if room < most else None,
        split=(PartitionSpec(*gate_up), PartitionSpec(*down)),
        wide=sum_dtype(jnp.float32, scope.platform),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(static: _Static, *arrays: jax.Array) -> jax.Array:
    """Return y_ND for x_ND, expert_NK, weight_NK, gate_up_EDPF and down_EFD."""
    return _routed_forward(static, *arrays)[0]


def _routed_forward(static: _Static, *arrays: jax.Array) -> tuple[jax.Array, tuple]:
    local = functools.partial(_forward_on_part, static)
    y, kept = _on_parts(static, local, arrays, (PartitionSpec(), _kept_specs(static)))
    return y, (arrays, kept)


def _routed_backward(static: _Static, residuals: tuple, dy: jax.Array) -> tuple:
    arrays, kept = residuals
    whole = PartitionSpec()
    dx, dweight, dgate_up, ddown = _on_parts(
        static,
        functools.partial(_backward_on_part, static),
        (*arrays, kept, dy),
        (whole, whole, *static.split),
    )
    return dx, None, dweight, dgate_up, ddown


_routed.defvjp(_routed_forward, _routed_backward)


def _forward_on_part(
    static: _Static,
    x: jax.Array,
    expert: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
) -> tuple[jax.Array, Kept]:
    """Return results and residuals of this part of the experts."""
    routes, experts = static.routes(expert), (gate_up, down)
    y, kept = run(static.first, x, weight, experts, routes, expert, 0)

    def more(sizes: Round, first: jax.Array, y: jax.Array) -> jax.Array:
        return y + run(sizes, x, weight, experts, routes, expert, first)[0]

    y = _further(static, routes, more, y)
    return _sum_out(static, y).astype(x.dtype), kept


def _backward_on_part(
    static: _Static,
    x: jax.Array,
    expert: jax.Array,
    weight: jax.Array,
    gate_up: jax.Array,
    down: jax.Array,
    kept: Kept,
    dy: jax.Array,
) -> tuple[jax.Array, ...]:
    """Return gradients of the tokens, their weights, and this part of the experts."""
    routes, experts = static.routes(expert), (gate_up, down)
    choices = expert.shape[1]
    gradients = run_backward(static.first, kept, dy, experts, routes, 0, choices)

    def more(sizes: Round, first: jax.Array, gradients: tuple) -> tuple:
        _, again = run(sizes, x, weight, experts, routes, expert, first)
        added = run_backward(sizes, again, dy, experts, routes, first, choices)
        return jax.tree.map(jnp.add, gradients, added)

    dx, dweight, *dexperts = _further(static, routes, more, gradients)
    summed = _sum_out(static, dx), _sum_out(static, dweight), *dexperts
    like = x, weight, gate_up, down
    return tuple(
        gradient.astype(array.dtype)
        for gradient, array in zip(summed, like, strict=True)
    )


def _further(
    static: _Static, routes: Routes, more: Callable[..., Any], carry: Any
) -> Any:
    """Update `carry` in as many further rounds as the fullest device needs.

    One all-reduce of a number over the devices that share the experts.
    """
    sizes = static.more
    if sizes is None:
        return carry
    left = most_for_one(routes) - static.first.room
    with asked("expert_rounds"):
        left = lax.pmax(left, sizes.mesh_axes)

    def one(state: tuple) -> tuple:
        first, carry = state
        return first + sizes.room, more(sizes, static.first.room + first, carry)

    return lax.while_loop(lambda state: state[0] < left, one, (jnp.int32(0), carry))[1]


def _sum_out(static: _Static, values: jax.Array) -> jax.Array:
    if not static.mesh_axes:
        return values
    with asked("expert_sum"):
        return lax.psum(values.astype(static.wide), static.mesh_axes)


def _kept_specs(static: _Static) -> Any:
    whole, gate_up = PartitionSpec(), static.split[0]
    both = PartitionSpec(None, *gate_up[2:])
    order = whole if static.first.num_devices > 1 else None
    make: Callable[..., Any] = Kept  # with specs in place of arrays
    return make(x=whole, both=both, weight=whole, order=order, tiles=whole)


def _on_parts(
    static: _Static, local: Callable[..., Any], arrays: tuple, out_specs: Any
) -> Any:
    """Map a function over parts, along the automatic mesh axes of the experts."""
    whole = PartitionSpec()
    specs = (whole, whole, whole, *static.split, _kept_specs(static), whole)
    return on_parts(
        local,
        *arrays,
        specs=specs[: len(arrays)],
        out_specs=out_specs,
        mesh_axes=set(static.mesh_axes),
    )
