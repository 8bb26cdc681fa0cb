"""One round of rows to their experts and back, forward and backward written out.

`Routes` say which row goes to which device. Of `n` devices that share the experts each
sends `room` rows to every other. A round of the forward is two all-to-alls of n * room
* embed values (rows there, results back) and one of two fp32 numbers a row; one of the
backward is two of n * room * embed values and one of a number a row. A single device
sends nothing. `host_exchange` sends fewer rows between hosts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

from meshpar.model.scope import SAVED_PREFIX
from meshpar.parallel.expert import tiles as tiles_of_rows
from meshpar.parallel.expert.exchange import Exchange
from meshpar.parallel.expert.functions import Arrays, Function
from meshpar.parallel.expert.host_exchange import HostExchange, Hosts
from meshpar.parallel.expert.routes import Routes, inverse
from meshpar.parallel.expert.tiles import (
    LEAST_TILES_BY_HOST,
    Tiles,
    reader,
    rows_of,
    tile_size,
)

SENT_ROWS = SAVED_PREFIX + "experts_in"
"""Name in a trace of the rows that experts multiply."""

RECEIVED = "received"
"""Name of rows from other devices and of what tells their order.

`remat=full` and `dots` keep them too: what was sent is not sent again."""

_PRODUCTS = SAVED_PREFIX + "experts_gate_up"


@dataclass(frozen=True, kw_only=True)
class Round:
    """Static sizes of a round.

    Args:
        mesh_axes: Mesh axes that split the experts; none if nothing is sent.
        num_devices: Devices along these axes.
        num_experts: Experts of one device.
        room: Rows to each device.
        function: Function of one expert.
        hosts: Hosts that each token is sent to once; None if each row goes by itself.
        parts: Parts of the rows that the forward sends one after another.
        backward_parts: The same of the backward, a divisor of `parts`.
    """

    mesh_axes: tuple[str, ...]
    num_devices: int
    num_experts: int
    room: int
    function: Function
    hosts: Hosts | None = None
    parts: int = 1
    backward_parts: int = 1

    @property
    def num_rows(self) -> int:
        """Return the rows that one device receives."""
        return self.num_devices * self.room

    def tile(self, parts: int) -> int:
        """Return the rows of a tile if the round is taken in so many parts."""
        rows = self.num_rows // parts
        if self.hosts is None or parts == 1:
            return tile_size(rows, self.num_experts)
        return tile_size(rows, self.num_experts, LEAST_TILES_BY_HOST)

    def exchange(
        self,
        routes: Routes,
        first: jax.Array | int,
        choices: int,
        picks: jax.Array | None = None,
    ) -> Exchange | HostExchange:
        """Return the exchange of the rows.

        Args:
            routes: Routes of the tokens.
            first: Rows that went to each device in the rounds before.
            choices: Experts of a token.
            picks: `Kept.picks`; None to exchange them.
        """
        if self.hosts is None:
            return Exchange(
                mesh_axes=self.mesh_axes,
                room=self.room,
                routes=routes,
                first=first,
                choices=choices,
            )
        return HostExchange(
            mesh_axes=self.mesh_axes,
            room=self.room,
            routes=routes,
            choices=choices,
            hosts=self.hosts,
            given_picks=picks,
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Kept:
    """Residuals of a round.

    Places are those in the order of the experts, and of parts within an expert.

    Args:
        x: Received rows of each part.
        products: What the experts' function keeps of the row at each place, padded.
        weight: fp32 weight of each received row, (devices * room,).
        order: Index in (devices, room) of the row at each place; None if rows came in
            their places.
        counts: (parts, experts) int32, rows of each expert in each part.
        picks: `HostExchange.picks`, if there are hosts.
    """

    x: tuple[jax.Array, ...]
    products: Arrays
    weight: jax.Array
    order: jax.Array | None
    counts: jax.Array
    picks: jax.Array | None = None


def run(
    static: Round,
    x_ND: jax.Array,
    weight_NK: jax.Array,
    experts: Arrays,
    routes: Routes,
    expert_NK: jax.Array,
    first: jax.Array | int,
    beside: Arrays = (),
) -> tuple[jax.Array, Kept, Arrays]:
    """Return fp32 sums of `weight * expert(x)` over the round's choices, and residuals.

    And `beside`.

    Args:
        static: Sizes.
        x_ND: This device's tokens.
        weight_NK: fp32 weight of each choice.
        experts: Arrays of this device's experts.
        routes: Routes of the tokens.
        expert_NK: The expert of each choice.
        first: Rows that went to each device in the rounds before.
        beside: Arrays that are computed while the first rows are sent.
    """
    exchange = static.exchange(routes, first, expert_NK.shape[1])
    if isinstance(exchange, HostExchange):
        exchange = replace(exchange, given_picks=_received(static, exchange.picks))
    weight, order, counts = _received(
        static, _places(static, exchange, weight_NK, expert_NK)
    )
    read_weight = reader(weight, order, static.tile(static.parts))
    xs: list[jax.Array] = []

    def multiply(part: int, rows: jax.Array, _: Arrays, results: tuple) -> tuple:
        # Named before it is used: a policy that keeps it sends nothing again.
        x = _received(static, rows)
        xs.append(x)
        tiles = _tiles(static, counts, part, static.parts)
        at = None if order is None else exchange.in_part(order, part, static.parts)
        read_x = reader(x, at, tiles.tile)
        results = tiles_of_rows.forward(
            lambda first: (read_x(first), read_weight(first)),
            experts,
            tiles,
            static.function,
            results,
        )
        return results, results[0]

    empty = tiles_of_rows.empty_results(
        x_ND, experts, static.num_rows, static.tile(1), static.function
    )
    names = "expert_dispatch", "expert_combine"
    (_, products), summed, beside = _by_parts(
        exchange, x_ND, order, static.parts, names, multiply, beside, empty
    )
    products = tuple(checkpoint_name(array, _PRODUCTS) for array in products)
    kept = Kept(
        x=tuple(xs),
        products=products,
        weight=weight,
        order=order,
        counts=counts,
        picks=exchange.picks if isinstance(exchange, HostExchange) else None,
    )
    return summed, kept, beside


def run_backward(
    static: Round,
    kept: Kept,
    dy_ND: jax.Array,
    experts: Arrays,
    routes: Routes,
    first: jax.Array | int,
    choices: int,
) -> tuple[jax.Array, jax.Array, Arrays]:
    """Return fp32 gradients of `x`, `weight` and the experts' arrays of `run`."""
    exchange = static.exchange(routes, first, choices, kept.picks)
    order, parts = kept.order, static.backward_parts
    tile = static.tile(parts)
    x = jnp.concatenate(kept.x)
    x_at = None if order is None else exchange.in_parts(order, static.parts)
    read_x, read_weight = reader(x, x_at, tile), reader(kept.weight, order, tile)

    def multiply(
        part: int, rows: jax.Array, products: Arrays, gradients: tuple
    ) -> tuple:
        tiles = _tiles(static, kept.counts, part, parts)
        at = None if order is None else exchange.in_part(order, part, parts)
        read_dy = reader(rows, at, tile)

        def read(first: jax.Array) -> tuple:
            of_tile = tuple(rows_of(array, first, tile) for array in products)
            return read_x(first), read_weight(first), of_tile, read_dy(first)

        gradients = tiles_of_rows.backward(
            read, experts, tiles, static.function, gradients
        )
        return gradients, gradients[0]

    empty = tiles_of_rows.empty_gradients(x, experts, static.num_rows, static.tile(1))
    names = "expert_combine_gradient", "expert_dispatch_gradient"
    (_, dweight, dexperts), dx, _ = _by_parts(
        exchange, dy_ND, order, parts, names, multiply, kept.products, empty
    )
    at = slice(static.num_rows) if order is None else inverse(order)
    dweight = dweight[at].reshape(static.num_devices, static.room)
    return dx, exchange.return_numbers(dweight, names[1]), dexperts


def _by_parts(
    exchange: Exchange | HostExchange,
    x_ND: jax.Array,
    order: jax.Array | None,
    num_parts: int,
    names: tuple[str, str],
    multiply: Callable[[int, jax.Array, Arrays, tuple], tuple],
    needed: Arrays,
    carry: tuple,
) -> tuple[tuple, jax.Array, Arrays]:
    """Send rows, multiply them and send the results back, part by part.

    While a part is multiplied, the next ones are sent and the results of those before
    go back: XLA does no such thing by itself, so barriers fix the order.

    Args:
        exchange: How rows are sent.
        x_ND: Values of this device's tokens.
        order: As in `Kept`.
        num_parts: Number of parts.
        names: Names in `ASKED` of both ways.
        multiply: (part, its received rows, needed, carry) -> (carry, array of results
            by place).
        needed: Arrays that are computed while the first part is sent.
        carry: What the first part is given.

    Returns:
        The carry after the last part, fp32 sums of the results of each token, and
        `needed`.
    """
    if order is None:
        rows = lax.collapse(exchange.rows(x_ND, 0, 1), 0, 2)
        carry, by_place = multiply(0, rows, needed, carry)
        return carry, exchange.sums([by_place[: len(rows)]]), needed
    places = inverse(order)
    there, back = (
        [send(part, num_parts, name) for part in range(num_parts)]
        for send, name in zip((exchange.dispatch, exchange.combine), names, strict=True)
    )
    num_hops = len(there[0])
    held = [exchange.rows(x_ND, part, num_parts) for part in range(num_parts)]
    # Step `s` multiplies part `s`, and is one hop of each part near it. What the step
    # before did ends here, also of a part that is back. The last hops may go beside
    # what follows.
    for step in range(-num_hops, num_parts + num_hops):
        near = range(max(0, step - num_hops), min(num_parts, step + num_hops + 1))
        at = slice(max(0, near.start - 1), near.stop)
        if step == 0:
            held[at], needed = lax.optimization_barrier((held[at], needed))
        elif step <= num_parts:
            held[at] = lax.optimization_barrier(held[at])
        for part in near:
            if part > step:
                held[part] = there[part][step - part](held[part])
            elif part < step:
                held[part] = back[part][step - part - 1](held[part])
        if step in near:
            carry, by_place = multiply(step, held[step], needed, carry)
            held[step] = by_place[exchange.part_values(places, step, num_parts)]
    return carry, exchange.sums(held), needed


def _places(
    static: Round,
    exchange: Exchange | HostExchange,
    weight_NK: jax.Array,
    expert_NK: jax.Array,
) -> tuple[jax.Array, jax.Array | None, jax.Array]:
    """Return `weight`, `order` and `counts` of `Kept`."""
    assignment, valid = exchange.sent
    weight = jnp.where(valid, weight_NK.reshape(-1)[assignment], 0.0)
    own = expert_NK.reshape(-1)[assignment] % static.num_experts
    own = jnp.where(valid, own, static.num_experts)
    if static.num_devices > 1:
        beside = jnp.stack([own.astype(jnp.float32), weight], axis=-1)
        beside = exchange.send_numbers(beside, "expert_dispatch")
        own, weight = beside[..., 0].astype(jnp.int32), beside[..., 1]
    part = exchange.row_parts(static.parts)
    place = own * static.parts + part
    every = jnp.arange(static.num_experts * static.parts, dtype=jnp.int32)
    counts = jnp.sum(place.reshape(-1, 1) == every, axis=0, dtype=jnp.int32)
    counts = counts.reshape(static.num_experts, static.parts).T
    order = None
    if static.num_devices > 1:
        order = jnp.argsort(place.reshape(-1), stable=True)
    return weight.reshape(-1), order, counts


def _tiles(static: Round, counts: jax.Array, part: int, num_parts: int) -> Tiles:
    """Return the tiles of one part, if the round is taken in so many."""
    counts = counts.reshape(num_parts, -1, static.num_experts).sum(axis=1)
    by_place = counts.T.reshape(-1)
    starts = (jnp.cumsum(by_place) - by_place).reshape(static.num_experts, num_parts)
    rows = static.num_rows // num_parts
    tile = static.tile(num_parts)
    return tiles_of_rows.cut(counts[part], starts[:, part], rows, tile)


def _received(static: Round, arrays: Any) -> Any:
    """Name what came from other devices, for policies of recomputation."""
    arrays = checkpoint_name(arrays, SENT_ROWS)
    return checkpoint_name(arrays, RECEIVED) if static.num_devices > 1 else arrays
