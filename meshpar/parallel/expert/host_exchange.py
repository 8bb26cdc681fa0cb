"""The exchange of rows in which each token goes once to each host that has its experts.

Of `h` hosts with `m` devices each, device `i` of a host sends a token to device `i` of
each other host that has some of its experts. That device repeats the row for the
experts' devices of its own host. On the way back it adds up the token's results in fp32
and sends one row. So the network carries a row per token and host, not per choice.

Hosts are numbered by distance: a device sends to the host `distance` after its own and
receives from the one `distance` before it. A part of the exchange is some distances,
beginning with the own host, which the network does not wait for.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.collectives import asked
from meshpar.parallel.expert.exchange import Hops, all_to_all, at_index
from meshpar.parallel.expert.routes import Routes, sent


@dataclass(frozen=True, kw_only=True)
class Hosts:
    """Hosts of the devices that share experts; each has the same number of them.

    Args:
        number: Number of hosts, whose devices follow one another.
        room: Tokens that a device sends to each host.
    """

    number: int
    room: int


@dataclass(frozen=True, kw_only=True)
class HostExchange:
    """The first round's rows of a device, once to each host of their experts and back.

    It has the methods of `exchange.Exchange`. Routes are in the order of the tokens.

    Args:
        mesh_axes: As for `Exchange`.
        room: As for `Exchange`: rows to a device from each token's device.
        routes: As for `Exchange`.
        choices: As for `Exchange`.
        hosts: The hosts.
        given_picks: What `picks` returned; None to exchange it.
    """

    mesh_axes: tuple[str, ...]
    room: int
    routes: Routes
    choices: int
    hosts: Hosts
    given_picks: jax.Array | None = None

    # h hosts, m devices of one, N tokens, K choices, R tokens to a host, D embed.

    @property
    def per_host(self) -> int:
        """Return the number of devices of a host."""
        return self.routes.num_devices // self.hosts.number

    @cached_property
    def row_Nh(self) -> jax.Array:
        """Return the row of each token among those to each host; R if it has none."""
        host_NK = (self.routes.device // self.per_host).reshape(-1, self.choices)
        fits_NK = self._fits.reshape(-1, self.choices)
        every = jnp.arange(self.hosts.number, dtype=jnp.int32)
        wanted = jnp.any(fits_NK[..., None] & (host_NK[..., None] == every), axis=1)
        count = jnp.cumsum(wanted, axis=0, dtype=jnp.int32)
        here = wanted & (count <= self.hosts.room)
        return jnp.where(here, count - 1, self.hosts.room)

    @cached_property
    def token_hR(self) -> jax.Array:
        """Return the token of each row to each host; N if there is none."""
        tokens, number = self.row_Nh.shape
        empty = jnp.full((number, self.hosts.room), tokens, jnp.int32)
        host = jnp.arange(number, dtype=jnp.int32)
        token = jnp.arange(tokens, dtype=jnp.int32)[:, None]
        return empty.at[host, self.row_Nh].set(token, mode="drop")

    @cached_property
    def picks(self) -> jax.Array:
        """Return where this device sends the rows it has received, (h, R, K).

        An index of (m, room) for each choice of each token from each host, by
        distance; `m * room` if the expert is on another host. One all-to-all between
        the hosts, of h * R * K int32 numbers.
        """
        if self.given_picks is not None:
            return self.given_picks
        absent = self.per_host * self.room
        device = self.routes.device
        own = device % self.per_host * self.room + self.routes.ranks()
        own_NK = jnp.where(self._fits, own, absent).reshape(-1, self.choices)
        host_NK = (device // self.per_host).reshape(-1, self.choices)
        slot, host = (
            each.at[self.token_hR].get(mode="fill", fill_value=absent)
            for each in (own_NK, host_NK)
        )
        every = jnp.arange(self.hosts.number, dtype=jnp.int32)[:, None, None]
        slot = jnp.where(host == every, slot, absent)
        received = all_to_all(slot, self.mesh_axes, "expert_dispatch", self._across)
        return received[self._before]

    @cached_property
    def sent(self) -> tuple[jax.Array, jax.Array]:
        """Return what `Exchange.sent` does."""
        assignment, valid = sent(self.routes, 0, self.room)
        return assignment, valid & self._arrives[assignment]

    @property
    def num_sent(self) -> jax.Array:
        """Return what `Exchange.num_sent` does.

        Rows and tokens are in the same order, so those that fit are the first ones.
        """
        every = jnp.arange(self.routes.num_devices, dtype=jnp.int32)
        to = self._arrives[:, None] & (self.routes.device[:, None] == every)
        return jnp.sum(to, axis=0, dtype=jnp.int32)

    def rows(self, x_ND: jax.Array, part: int, parts: int) -> jax.Array:
        """Return the tokens to the hosts of a part, (distances, R, D)."""
        to = self._after[self._distances(part, parts)]
        return at_index(x_ND, self.token_hR[to])

    def dispatch(self, part: int, parts: int, name: str) -> Hops:
        """Return what sends the rows of a part; (rows, embed) arrive.

        A collective-permute of R * D values for each other host of the part, then an
        all-to-all inside the hosts of distances * m * room * D values.
        """
        here = self._distances(part, parts)

        def between(rows: jax.Array) -> jax.Array:
            return self._permuted(rows, here, name, back=False)

        def inside(tokens: jax.Array) -> jax.Array:
            repeated = at_index(lax.collapse(tokens, 0, 2), self._sources(here))
            arrived = all_to_all(repeated, self.mesh_axes, name, self._inside)
            return lax.collapse(arrived, 0, 3)

        return between, inside

    def combine(self, part: int, parts: int, name: str) -> Hops:
        """Return what sends the results of a part back, (distances, R, D).

        The collectives of `dispatch` in the other order.
        """
        here = self._distances(part, parts)

        def inside(results: jax.Array) -> jax.Array:
            shape = self.per_host, -1, self.room, results.shape[-1]
            rows = results.reshape(shape)
            back = all_to_all(rows, self.mesh_axes, name, self._inside)
            rows = at_index(lax.collapse(back, 0, 3), self._slots(here))
            return rows.astype(jnp.float32).sum(axis=2).astype(results.dtype)

        def between(sums: jax.Array) -> jax.Array:
            return self._permuted(sums, here, name, back=True)

        return inside, between

    def sums(self, returned: Sequence[jax.Array]) -> jax.Array:
        """Return fp32 sums of each token's results, of all parts that came back."""
        room, number = self.hosts.room, self.hosts.number
        row = self.row_Nh[:, self._after]
        at = row + room * jnp.arange(number, dtype=jnp.int32)
        at = jnp.where(row < room, at, number * room)
        rows = lax.collapse(jnp.concatenate(returned), 0, 2)
        return at_index(rows, at).astype(jnp.float32).sum(axis=1)

    def send_numbers(self, numbers: jax.Array, name: str) -> jax.Array:
        """Return numbers of the rows, (devices, room, ...), as receivers have them."""
        return self._by_distance(all_to_all(numbers, self.mesh_axes, name))

    def return_numbers(self, numbers: jax.Array, name: str) -> jax.Array:
        """Return numbers of received rows, (devices, room), by token and choice."""
        # Twice the order by distance is the order of the hosts.
        numbers = self._by_distance(numbers)
        returned = all_to_all(numbers, self.mesh_axes, name).reshape(-1)
        at = self.routes.device * self.room + self.routes.ranks()
        at = jnp.where(self._arrives, at, len(returned))
        return at_index(returned, at).reshape(-1, self.choices)

    def row_parts(self, parts: int) -> jax.Array:
        """Return the part of each received row, broadcast against (devices, room)."""
        size = self.routes.num_devices // parts
        device = jnp.arange(self.routes.num_devices, dtype=jnp.int32)
        return (device // size)[:, None]

    def in_part(self, index: jax.Array, part: int, parts: int) -> jax.Array:
        """Return what `Exchange.in_part` does; a part is (m, distances, room)."""
        distances = self.hosts.number // parts
        device, rank = index // self.room, index % self.room
        distance, device = device // self.per_host, device % self.per_host
        distance = distance - part * distances
        return (device * distances + distance) * self.room + rank

    def in_parts(self, index: jax.Array, parts: int) -> jax.Array:
        """Return what `Exchange.in_parts` does."""
        size = self.routes.num_devices * self.room // parts
        part = index // size
        moved = part * size + self.in_part(index % size, 0, parts)
        return jnp.where(part < parts, moved, index)

    def part_values(self, by_row: jax.Array, part: int, parts: int) -> jax.Array:
        """Return values of received rows, (rows,), as a part of the rows has them."""
        by_row = by_row.reshape(parts, -1, self.per_host, self.room)
        return by_row[part].swapaxes(0, 1).reshape(-1)

    @property
    def _fits(self) -> jax.Array:
        """Return True for each assignment that its expert's device has room for."""
        is_one = self.routes.device < self.routes.num_devices
        return is_one & (self.routes.ranks() < self.room)

    @cached_property
    def _arrives(self) -> jax.Array:
        """Return True for each assignment that is sent."""
        host = self.routes.device // self.per_host
        host = jnp.minimum(host, self.hosts.number - 1)
        token = jnp.arange(len(host), dtype=jnp.int32) // self.choices
        return self._fits & (self.row_Nh[token, host] < self.hosts.room)

    @property
    def _inside(self) -> list[list[int]]:
        devices = range(self.routes.num_devices)
        return [
            list(devices[first : first + self.per_host])
            for first in devices[:: self.per_host]
        ]

    @property
    def _across(self) -> list[list[int]]:
        return [list(group) for group in zip(*self._inside, strict=True)]

    @property
    def _after(self) -> jax.Array:
        """Return the host at each distance after this one."""
        return (self._host + jnp.arange(self.hosts.number)) % self.hosts.number

    @property
    def _before(self) -> jax.Array:
        """Return the host at each distance before this one."""
        return (self._host - jnp.arange(self.hosts.number)) % self.hosts.number

    @property
    def _host(self) -> jax.Array:
        return lax.axis_index(self.mesh_axes) // self.per_host

    def _distances(self, part: int, parts: int) -> slice:
        size = self.hosts.number // parts
        return slice(part * size, (part + 1) * size)

    def _slots(self, distances: slice) -> jax.Array:
        """Return the index in (m, distances, room) of each choice of a received row.

        Past the end if the choice is on another host.
        """
        picks = self.picks[distances]
        number, size = len(picks), self.per_host * self.room
        each = jnp.arange(number, dtype=jnp.int32)[:, None, None]
        device, rank = picks // self.room, picks % self.room
        slot = (device * number + each) * self.room + rank
        return jnp.where(picks < size, slot, number * size)

    def _sources(self, distances: slice) -> jax.Array:
        """Return the received row, of (distances, R), at each (m, distances, room)."""
        slots = self._slots(distances)
        number, absent = len(slots), len(slots) * self.hosts.room
        shape = self.per_host, number, self.room
        rows = jnp.arange(absent, dtype=jnp.int32).reshape(number, -1, 1)
        empty = jnp.full((math.prod(shape),), absent, jnp.int32)
        return empty.at[slots].set(rows, mode="drop").reshape(shape)

    def _by_distance(self, numbers: jax.Array) -> jax.Array:
        by_host = numbers.reshape(self.hosts.number, self.per_host, *numbers.shape[1:])
        return by_host[self._before].reshape(numbers.shape)

    def _permuted(
        self, rows: jax.Array, distances: slice, name: str, *, back: bool
    ) -> jax.Array:
        """Move (distances, R, D) to the hosts so far after this one, or before it."""
        num_devices = self.routes.num_devices
        moved = []
        for each, distance in enumerate(range(distances.start, distances.stop)):
            far = distance * self.per_host * (-1 if back else 1)
            pairs = [(at, (at + far) % num_devices) for at in range(num_devices)]
            row = rows[each]
            if distance:
                with asked(f"{name}_host"):
                    row = lax.ppermute(row, self.mesh_axes, pairs)
            moved.append(row)
        return jnp.stack(moved)
