"""Routed gated MLPs over a batch, experts split over mesh axes, no token lost.

The first round has room for a quarter more rows than each device gets on average; what
does not fit goes in further rounds, of a quarter of the room each, as many as the
fullest device of all needs. All devices that share the experts run as many: the number
is a maximum over them. Residuals are kept of the first round; the others, which few
steps need, run again in the backward.

Experts may be split along `mlp` too: each device multiplies its part of the hidden
values, and one all-reduce of tokens * embed values adds up the results, one more the
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
    most_for_one,
    routes_of,
    run,
    run_backward,
)
from meshpar.parallel.moves import split_of
from meshpar.parallel.sizes import first_room, further_room, most_room
from meshpar.parallel.tensor import refuse_split_embed
from meshpar.rules.rules import spec_axes


@dataclass(frozen=True, kw_only=True)
class _Static:
    """What is known of a call before it runs.

    Args:
        first: Sizes of the first round.
        more: Sizes of each further one; None where none is ever needed.
        split: How `gate_up` and `down` lie over automatic mesh axes.
        wide: Dtype of sums over them.
    """

    first: Round
    more: Round | None
    split: tuple[PartitionSpec, PartitionSpec]
    wide: Any

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Automatic mesh axes that split the experts' hidden values."""
        return tuple(dict.fromkeys(a for spec in self.split for a in spec_axes(spec)))

    def routes_of(self, experts: jax.Array) -> Routes:
        """The routes of a device's tokens, (tokens, choices)."""
        num_devices = self.first.num_devices
        return routes_of(experts, self.first.num_experts * num_devices, num_devices)


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
    """`sum_k weights_k * expert_k(x)`, `expert(x) = down(silu(gate(x)) * up(x))`.

    Args:
        x: This device's tokens, whole over `tensor`.
        experts: int32, of each choice; `num_experts` for one that was dropped.
        weights: fp32, of each choice.
        gate_up: This device's experts, as the block is given them.
        down: As `gate_up`.
        scope: Where the function runs.
        num_experts: Of all devices together.
        most_rows: The most rows that one expert can get from this device, where the
            router bounds them; no further round is needed then.

    Raises:
        InputError: The experts do not lie as the rules say, or those split `embed`
            over a mesh axis of GSPMD.
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
    """The mesh axes at work that split the experts of a scope."""
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
    return _Static(
        first=first,
        more=replace(first, room=further_room(room)) if room < most else None,
        split=_split(scope, shapes),
        wide=sum_dtype(jnp.float32, scope.platform),
    )


def _split(scope: Scope, shapes: tuple) -> tuple[PartitionSpec, PartitionSpec]:
    of_gate_up, of_down = shapes
    gate_up = split_of(scope, (None, "embed", None, "mlp"), of_gate_up)
    down = split_of(scope, (None, "mlp", "embed"), of_down)
    refuse_split_embed(gate_up[1], "experts multiply tokens")
    return PartitionSpec(*gate_up), PartitionSpec(*down)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(static: _Static, *arrays: jax.Array) -> jax.Array:
    """y_ND of x_ND, expert_NK, weight_NK, gate_up_EDPF and down_EFD."""
    return _routed_forward(static, *arrays)[0]


def _routed_forward(static: _Static, *arrays: jax.Array) -> tuple[jax.Array, tuple]:
    local = functools.partial(_forward_on_part, static)
    y, kept = _on_parts(static, local, arrays, (PartitionSpec(), _kept_specs(static)))
    return y, (arrays, kept)


def _routed_backward(static: _Static, found: tuple, dy: jax.Array) -> tuple:
    arrays, kept = found
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
    """The results, and what the first round keeps, of this part of the experts."""
    routes, experts = static.routes_of(expert), (gate_up, down)
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
    """Gradients of the tokens, their weights, and this part of the experts."""
    routes, experts, choices = (
        static.routes_of(expert),
        (gate_up, down),
        expert.shape[1],
    )
    gradients = run_backward(static.first, kept, dy, experts, routes, 0, choices)

    def more(sizes: Round, first: jax.Array, gradients: tuple) -> tuple:
        _, again = run(sizes, x, weight, experts, routes, expert, first)
        found = run_backward(sizes, again, dy, experts, routes, first, choices)
        return jax.tree.map(jnp.add, gradients, found)

    dx, dweight, *of_experts = _further(static, routes, more, gradients)
    found = _sum_out(static, dx), _sum_out(static, dweight), *of_experts
    like = x, weight, gate_up, down
    return tuple(
        gradient.astype(array.dtype)
        for gradient, array in zip(found, like, strict=True)
    )


def _further(
    static: _Static, routes: Routes, more: Callable[..., Any], carry: Any
) -> Any:
    """`carry` after as many further rounds as the fullest device needs.

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
    make: Callable[..., Any] = Kept  # of specs in place of arrays
    return make(x=whole, both=both, weight=whole, order=order, tiles=whole)


def _on_parts(
    static: _Static, local: Callable[..., Any], arrays: tuple, out_specs: Any
) -> Any:
    """`local` of this device's parts over the automatic mesh axes of the experts."""
    whole = PartitionSpec()
    specs = (whole, whole, whole, *static.split, _kept_specs(static), whole)
    return on_parts(
        local,
        *arrays,
        specs=specs[: len(arrays)],
        out_specs=out_specs,
        mesh_axes=set(static.mesh_axes),
    )
