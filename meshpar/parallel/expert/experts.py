"""Dropless routed experts that are split over mesh axes.

The first round has room for a quarter more rows than each device gets on average. Rows
that do not fit go in further rounds, of a quarter of that room each, as many as the
fullest device needs; all devices that share the experts run equally many. Residuals are
kept for the first round only; further rounds, which few steps need, are recomputed in
the backward. The first round goes in parts, each sent beside the matmuls of another.

Gated MLPs may be split along `mlp` too: each device multiplies its part of the hidden
values, and one all-reduce of tokens * embed values sums the results, another one the
gradients of the tokens. GSPMD splits the arrays of an `ExpertFunction`, inside the loop
over tiles.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float, Int

from meshpar.collectives import asked, on_parts, running_times, sum_dtype
from meshpar.errors import InputError
from meshpar.hardware.platforms import platform_named
from meshpar.model.scope import Scope
from meshpar.parallel.expert.functions import Arrays, ExpertFunction, Function, GatedMLP
from meshpar.parallel.expert.host_exchange import Hosts
from meshpar.parallel.expert.rounds import (
    RECEIVED,
    Kept,
    Round,
    run,
    run_backward,
)
from meshpar.parallel.expert.routes import Routes, make_routes
from meshpar.parallel.sizes import (
    first_parts,
    first_room,
    further_room,
    host_room,
    most_room,
)
from meshpar.parallel.tensor import refuse_split_embed
from meshpar.rules.rules import array_split, spec_axes


@dataclass(frozen=True, kw_only=True)
class _Static:
    """Static arguments of a call.

    Args:
        first: Sizes of the first round.
        more: Sizes of each further round; None if none is ever needed.
        split: Specs of the experts' arrays over automatic mesh axes that are made
            manual.
        wide: Dtype of sums over these mesh axes.
    """

    first: Round
    more: Round | None
    split: tuple[PartitionSpec, ...]
    wide: Any

    @property
    def mesh_axes(self) -> tuple[str, ...]:
        """Return the automatic mesh axes that split the experts' hidden values."""
        axes = (axis for spec in self.split for axis in spec_axes(spec))
        return tuple(dict.fromkeys(axes))

    def routes(self, experts: jax.Array) -> Routes:
        """Return the routes of a device's tokens, (tokens, choices)."""
        first = self.first
        return make_routes(
            experts,
            first.num_experts * first.num_devices,
            first.num_devices,
            by_token=first.hosts is not None,
        )


class Further(NamedTuple):
    """Rounds and rows after the first round of a call's forward, fp32 scalars.

    Args:
        rounds: Rounds after the first one, the same on all devices that share experts.
        rows: Rows of this device's tokens in these rounds.
    """

    rounds: jax.Array
    rows: jax.Array


def routed_mlp(
    x: Float[Array, "*tokens embed"],
    experts: Int[Array, "*tokens choices"],
    weights: Float[Array, "*tokens choices"],
    gate_up: Float[Array, "experts embed 2 mlp"],
    down: Float[Array, "experts mlp embed"],
    scope: Scope,
    *,
    num_experts: int,
    most_rows: int | None = None,
    distinct: bool = True,
) -> Float[Array, "*tokens embed"]:
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
        distinct: Whether the choices of a token are different experts.

    Raises:
        InputError: The experts are not split as the rules say, or the rules split
            `embed` over a mesh axis of GSPMD.
    """
    y, *_ = counted_mlp(
        (x, experts, weights),
        (gate_up, down),
        scope,
        num_experts=num_experts,
        most_rows=most_rows,
        distinct=distinct,
    )
    return y


def counted_mlp(
    tokens: tuple[jax.Array, jax.Array, jax.Array],
    kernels: tuple[jax.Array, jax.Array],
    scope: Scope,
    *,
    num_experts: int,
    most_rows: int | None = None,
    distinct: bool = True,
    beside: Arrays = (),
) -> tuple[jax.Array, Further, Arrays]:
    """Return what `routed_mlp` does, how much went in further rounds, and `beside`.

    Args:
        tokens: `x`, `experts` and `weights`.
        kernels: `gate_up` and `down`.
        scope: As for `routed_mlp`.
        num_experts: As for `routed_mlp`.
        most_rows: As for `routed_mlp`.
        distinct: As for `routed_mlp`.
        beside: Arrays to compute while the forward's first rows are sent, if they are
            sent between hosts.
    """
    gate_up, down = kernels
    gate_up_spec = array_split(scope.rules, (None, "embed", None, "mlp"), gate_up.shape)
    down_spec = array_split(scope.rules, (None, "mlp", "embed"), down.shape)
    refuse_split_embed(gate_up_spec[1], "experts multiply tokens")
    call = _ExpertSpec(
        function=GatedMLP(platform=scope.platform),
        split=(PartitionSpec(*gate_up_spec), PartitionSpec(*down_spec)),
        num_experts=num_experts,
        distinct=distinct,
        most_rows=most_rows,
    )
    return _route(call, scope, *tokens, kernels, beside)


def routed_function(
    x: Float[Array, "*tokens embed"],
    experts: Int[Array, "*tokens choices"],
    weights: Float[Array, "*tokens choices"],
    parameters: Any,
    scope: Scope,
    *,
    function: Callable[[Any, jax.Array], jax.Array],
    num_experts: int,
    distinct: bool = True,
) -> Float[Array, "*tokens embed"]:
    """Return `sum_k weights_k * function(parameters of expert_k, x)`.

    Args:
        x: As for `routed_mlp`.
        experts: As for `routed_mlp`.
        weights: As for `routed_mlp`.
        parameters: Tree of arrays, of this device's experts along their first dim.
        scope: Where the function runs.
        function: (tree of one expert, (rows, embed)) -> (rows, embed), each row by
            itself.
        num_experts: As for `routed_mlp`.
        distinct: As for `routed_mlp`.

    Raises:
        InputError: The experts are not split as the rules say, or the function returns
            another shape or reads other arrays.
    """
    arrays, structure = jax.tree.flatten(parameters)
    expert = ExpertFunction(function=function, structure=structure)
    expert.check(tuple(arrays), x.reshape(-1, x.shape[-1]))
    call = _ExpertSpec(
        function=expert,
        split=(PartitionSpec(),) * len(arrays),
        num_experts=num_experts,
        distinct=distinct,
    )
    return _route(call, scope, x, experts, weights, tuple(arrays))[0]


@dataclass(frozen=True, kw_only=True)
class _ExpertSpec:
    """Function and sizes of the experts of one call, as in `routed_mlp`.

    Args:
        function: Function of one expert.
        split: As in `_Static`.
        num_experts: Experts of all devices together.
        distinct: Whether the choices of a token are different experts.
        most_rows: Most rows that one expert can get from this device.
    """

    function: Function
    split: tuple[PartitionSpec, ...]
    num_experts: int
    distinct: bool
    most_rows: int | None = None

    def static(self, scope: Scope, tokens: int, choices: int) -> _Static:
        """Return the static arguments for a device's tokens."""
        axes = scope.expert_axes
        num_devices = math.prod(lax.axis_size(axis) for axis in axes)
        own = self.num_experts // num_devices
        most = tokens, choices, own if self.distinct else max(own, choices)
        room = first_room(*most, num_devices, self.most_rows)
        fits = room >= most_room(*most, self.most_rows)
        num_hosts = scope.expert_hosts
        tokens_to_host = host_room(
            tokens, choices, num_hosts, num_devices // num_hosts * room, is_most=fits
        )
        hosts = Hosts(number=num_hosts, room=tokens_to_host) if tokens_to_host else None
        parts, backward_parts = 1, 1
        overlaps = platform_named(scope.platform).overlaps_all_to_alls
        if num_devices > 1 and overlaps and scope.experts_in_parts:
            rows = num_devices * room // own
            by_host = num_hosts if hosts else 0
            parts, backward_parts = first_parts(rows, room, num_hosts=by_host)
        first = Round(
            mesh_axes=axes,
            num_devices=num_devices,
            num_experts=own,
            room=room,
            function=self.function,
            hosts=hosts,
            parts=parts,
            backward_parts=backward_parts,
        )
        more = replace(
            first, room=further_room(room), hosts=None, parts=1, backward_parts=1
        )
        return _Static(
            first=first,
            more=None if fits else more,
            split=self.split,
            wide=sum_dtype(jnp.float32, scope.platform),
        )


def _route(
    call: _ExpertSpec,
    scope: Scope,
    x: jax.Array,
    experts: jax.Array,
    weights: jax.Array,
    arrays: Arrays,
    beside: Arrays = (),
) -> tuple[jax.Array, Further, Arrays]:
    if scope.order is not None and scope.order.probing:
        y = x * jnp.sum(weights, axis=-1, keepdims=True).astype(x.dtype)
        return y, Further(jnp.float32(0), jnp.float32(0)), beside
    rows = [array.reshape(-1, array.shape[-1]) for array in (x, experts, weights)]
    static = call.static(scope, *rows[1].shape)
    num_devices = static.first.num_devices
    if num_devices > 1:
        # The backward sends gradients before what leads to the choice is recomputed.
        rows[1] = checkpoint_name(rows[1], RECEIVED)
    for own in (array.shape[0] for array in arrays):
        if own * num_devices != call.num_experts:
            raise InputError(
                f"experts: {own} on each of {num_devices} devices, but the router has "
                f"{call.num_experts}; give the experts' arrays the logical axis "
                "'experts' first, and map it to 'expert'",
                key="model.wrong_number_of_experts",
            )
    # Inside a host rows take less than a gather of parameters, which XLA leaves for
    # the end of a block. Under `mesh_axes` GSPMD has yet to add up `beside`.
    is_ordered = static.first.hosts is not None and not static.mesh_axes
    y, further, ordered = _routed(static, *rows, arrays, beside if is_ordered else ())
    return y.reshape(x.shape), further, ordered if is_ordered else beside


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _routed(static: _Static, *arrays: Any) -> tuple[jax.Array, Further, Arrays]:
    """Return y_ND for x_ND, expert_NK, weight_NK, and a tuple of experts' arrays.

    The last argument is `beside`, which comes back.
    """
    return _routed_forward(static, *arrays)[0]


def _routed_forward(
    static: _Static, *arrays: Any
) -> tuple[tuple[jax.Array, Further, Arrays], tuple]:
    *others, beside = arrays
    whole = PartitionSpec()
    y, further, beside, kept, left = _on_parts(
        static,
        functools.partial(_forward_on_part, static, beside=beside),
        tuple(others),
        (whole, whole, whole, _kept_specs(static), whole),
    )
    return (y, further, beside), (tuple(others), kept, left)


def _routed_backward(static: _Static, residuals: tuple, gradients: tuple) -> tuple:
    arrays, kept, left = residuals
    dy, _, dbeside = gradients
    whole = PartitionSpec()
    dx, dweight, dexperts = _on_parts(
        static,
        functools.partial(_backward_on_part, static),
        (*arrays, kept, dy, left),
        (whole, whole, static.split),
    )
    return dx, None, dweight, dexperts, dbeside


_routed.defvjp(_routed_forward, _routed_backward)


def _forward_on_part(
    static: _Static,
    x: jax.Array,
    expert: jax.Array,
    weight: jax.Array,
    experts: Arrays,
    *,
    beside: Arrays,
) -> tuple[jax.Array, Further, Arrays, Kept, jax.Array]:
    """Return results, further rounds and residuals of this part of the experts."""
    routes, choices = static.routes(expert), expert.shape[1]
    left, further = _left(static, routes, choices)
    y, kept, beside = run(static.first, x, weight, experts, routes, expert, 0, beside)

    def more(sizes: Round, first: jax.Array, y: jax.Array) -> jax.Array:
        return y + run(sizes, x, weight, experts, routes, expert, first)[0]

    y = _run_further(static, routes, choices, left, more, y)
    return _sum_out(static, y).astype(x.dtype), further, beside, kept, left


def _backward_on_part(
    static: _Static,
    x: jax.Array,
    expert: jax.Array,
    weight: jax.Array,
    experts: Arrays,
    kept: Kept,
    dy: jax.Array,
    left: jax.Array,
) -> tuple[jax.Array, jax.Array, Arrays]:
    """Return gradients of the tokens, their weights, and this part of the experts."""
    routes = static.routes(expert)
    choices = expert.shape[1]
    gradients = run_backward(static.first, kept, dy, experts, routes, 0, choices)

    def more(sizes: Round, first: jax.Array, gradients: tuple) -> tuple:
        _, again, _ = run(sizes, x, weight, experts, routes, expert, first)
        added = run_backward(sizes, again, dy, experts, routes, first, choices)
        return jax.tree.map(jnp.add, gradients, added)

    dx, dweight, dexperts = _run_further(static, routes, choices, left, more, gradients)
    summed = _sum_out(static, dx), _sum_out(static, dweight), dexperts
    return jax.tree.map(
        lambda gradient, array: gradient.astype(array.dtype),
        summed,
        (x, weight, experts),
    )


def _left(static: _Static, routes: Routes, choices: int) -> tuple[jax.Array, Further]:
    """Return the most rows that a first round leaves for one device, and the further.

    One all-reduce of a number over the devices that share the experts.
    """
    if static.more is None:
        return jnp.int32(0), Further(jnp.float32(0), jnp.float32(0))
    rows = routes.counts - static.first.exchange(routes, 0, choices).num_sent
    with asked("expert_rounds"):
        left = lax.pmax(jnp.max(rows), static.more.mesh_axes)
    # The backward runs as many rounds.
    left = checkpoint_name(left, RECEIVED)
    rounds = -(-left // static.more.room)
    return left, Further(rounds.astype(jnp.float32), jnp.sum(rows, dtype=jnp.float32))


def _run_further(
    static: _Static,
    routes: Routes,
    choices: int,
    left: jax.Array,
    more: Callable[..., Any],
    carry: Any,
) -> Any:
    """Update `carry` in as many further rounds as the fullest device needs."""
    sizes = static.more
    if sizes is None:
        return carry
    done = static.first.exchange(routes, 0, choices).num_sent

    def one(state: tuple) -> tuple:
        first, carry = state
        return first + sizes.room, more(sizes, done + first, carry)

    with running_times(0):
        state = jnp.int32(0), carry
        return lax.while_loop(lambda state: state[0] < left, one, state)[1]


def _sum_out(static: _Static, values: jax.Array) -> jax.Array:
    if not static.mesh_axes:
        return values
    with asked("expert_sum"):
        return lax.psum(values.astype(static.wide), static.mesh_axes)


def _kept_specs(static: _Static) -> Any:
    whole, gate_up = PartitionSpec(), static.split[0]
    products = (PartitionSpec(None, *gate_up[2:]),)
    order = whole if static.first.num_devices > 1 else None
    make: Callable[..., Any] = Kept  # with specs in place of arrays
    picks = None if static.first.hosts is None else whole
    return make(
        x=whole,
        products=products,
        weight=whole,
        order=order,
        counts=whole,
        picks=picks,
    )


def _on_parts(
    static: _Static, local: Callable[..., Any], arrays: tuple, out_specs: Any
) -> Any:
    """Map a function over parts, along the mesh axes of `static.split`, if any."""
    whole = PartitionSpec()
    specs = (whole, whole, whole, static.split, _kept_specs(static), whole, whole)
    return on_parts(
        local,
        *arrays,
        specs=specs[: len(arrays)],
        out_specs=out_specs,
        mesh_axes=set(static.mesh_axes),
    )
