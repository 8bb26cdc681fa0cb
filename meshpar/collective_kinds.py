"""The kinds of collectives: what XLA calls each, what writes it, and what it sends.

One table: `meshpar.audit` finds and counts by it, the planner's bytes and times follow
from it. A new kind is a row here, and a formula in `planner.machine.collective_cost`
where it takes another time than the kinds that are there.

Reference for bytes on the wire: ring algorithms (Chan et al. 2007, "Collective
communication: theory, practice, and experience").
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class CollectiveKind:
    """One kind of collective.

    Args:
        name: XLA's.
        primitives: JAX's names of what becomes one.
        times: How often what a device sends goes over the wire.
        keeps_own: True if a device keeps its own n-th of the array, and sends the rest.
        takes_as: The kind whose time it takes; empty for a time of its own, or a send's
            where the planner has none.
    """

    name: str
    primitives: tuple[str, ...]
    times: int = 1
    keeps_own: bool = True
    takes_as: str = ""

    def sent(self, num_devices: int) -> tuple[int, int]:
        """Return the share of the whole array that each device sends, as a fraction.

        The whole array: gathered, or before it is scattered; of a ragged all-to-all,
        whose sizes are data, the smaller of those that send and receive, which is the
        most where nothing is sent twice.

        Example:
            >>> KINDS["all-reduce"].sent(4)
            (6, 4)
            >>> KINDS["collective-permute"].sent(4)
            (4, 4)
        """
        return self.times * (num_devices - self.keeps_own), num_devices


KINDS: dict[str, CollectiveKind] = {
    kind.name: kind
    for kind in (
        CollectiveKind(
            name="all-reduce",
            primitives=("psum", "psum2", "psum_invariant", "pmean", "pmax", "pmin"),
            times=2,
        ),
        CollectiveKind(
            name="all-gather", primitives=("all_gather", "all_gather_invariant")
        ),
        CollectiveKind(
            name="reduce-scatter", primitives=("reduce_scatter", "psum_scatter")
        ),
        CollectiveKind(name="all-to-all", primitives=("all_to_all",)),
        CollectiveKind(
            name="ragged-all-to-all",
            primitives=("ragged_all_to_all",),
            takes_as="all-to-all",
        ),
        CollectiveKind(
            name="collective-permute",
            primitives=("ppermute", "pshuffle"),
            keeps_own=False,
        ),
        CollectiveKind(
            name="collective-broadcast", primitives=("pbroadcast",), keeps_own=False
        ),
    )
}
"""Name -> kind."""

WRITTEN_AS: dict[str, str] = {
    primitive: kind.name for kind in KINDS.values() for primitive in kind.primitives
}
"""JAX's name of a primitive -> the kind that it becomes."""
