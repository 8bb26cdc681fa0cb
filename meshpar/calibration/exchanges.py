"""Trials of collectives by kind, size and members of a group."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.calibration.trial import Trial, mesh_of, trial
from meshpar.planner.machine.collective_cost import all_gather_s, all_reduce_s, send_s
from meshpar.planner.machine.link import Link

_KIB = 2**10
CPU_BYTES = (16 * _KIB, 256 * _KIB, 2048 * _KIB)
ACCELERATOR_BYTES = (1024 * _KIB, 16_384 * _KIB, 262_144 * _KIB)
_REPEATS = 8


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One collective.

    Args:
        kind: `all-reduce`; `there and back`, a reduce-scatter and an all-gather; or
            `collective-permute` around the group.
        members: Devices of a group.
        payload_bytes: Of the whole array.
    """

    kind: str
    members: int
    payload_bytes: int

    @property
    def name(self) -> str:
        """What reports call it."""
        kib = self.payload_bytes / _KIB
        return f"{self.kind} of {kib:g} KiB over {self.members} devices"

    def expected_s(self, link: Link) -> float:
        """What the planner's formulas say it takes."""
        if self.kind == "all-reduce":
            return all_reduce_s(self.payload_bytes, self.members, link)
        if self.kind == "collective-permute":
            return send_s(self.payload_bytes, link)
        return 2 * all_gather_s(self.payload_bytes, self.members, link)


def exchanges(num_devices: int, sizes: Sequence[int]) -> list[Exchange]:
    """Every kind and size over every group size that is a power of two, or all."""
    members = [n for n in (2, 4, 8) if n <= num_devices and num_devices % n == 0]
    if num_devices > 1 and num_devices not in members:
        members.append(num_devices)
    return [
        Exchange(kind=kind, members=count, payload_bytes=size)
        for kind in _BODIES
        for count in members
        for size in sizes
    ]


def exchange_trial(devices: Sequence[jax.Device], exchange: Exchange) -> Trial:
    """The trial of one collective, in all groups at once."""
    members = exchange.members
    values = exchange.payload_bytes // 4 // members * members
    return trial(
        exchange.name,
        mesh_of(devices, members),
        _BODIES[exchange.kind],
        [jnp.ones(values, jnp.float32)],
        repeats=_REPEATS,
    )


def _all_reduce(x: jax.Array) -> jax.Array:
    return lax.pcast(lax.psum(x, "member") * 0.5, "member", to="varying")


def _there_and_back(x: jax.Array) -> jax.Array:
    own = lax.psum_scatter(x, "member", tiled=True) * 0.5
    return lax.all_gather(own, "member", tiled=True)


def _around(x: jax.Array) -> jax.Array:
    members = lax.axis_size("member")
    to_next = [(i, (i + 1) % members) for i in range(members)]
    return lax.ppermute(x, "member", to_next)


_BODIES = {
    "all-reduce": _all_reduce,
    "there and back": _there_and_back,
    "collective-permute": _around,
}
