"""Orders of the mesh axes: the time of a step in each, and what lies on slower links.

Devices are numbered along the mesh, the last axis innermost, so that the order decides
which axes lie inside a chip, a host or a rack, and which have a ring of a torus.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from meshpar.planner.cost.run import Run
from meshpar.planner.cost.step_time import step_time
from meshpar.planner.cost.step_traffic import sent_in_a_step
from meshpar.planner.machine.cluster import Link
from meshpar.planner.plan import milliseconds

LEAST_GAIN = 0.01
"""Part of a step that a faster order saves at least."""


class OrderTime(NamedTuple):
    """Step time in one order of the mesh axes of several devices, outermost first."""

    order: tuple[str, ...]
    step_s: float

    @property
    def text(self) -> str:
        """Value for `--mesh-order`."""
        return ",".join(self.order)


@dataclass(frozen=True, kw_only=True)
class MeshOrders:
    """The orders of a run's mesh axes that differ in a link.

    Args:
        times: The time of each, fastest first.
        present: The run's own.
        slow: Groups of mesh axes on a slower link than in the fastest order, and both
            links in words.
    """

    times: tuple[OrderTime, ...]
    present: OrderTime
    slow: tuple[str, ...]

    @property
    def fastest(self) -> OrderTime:
        """The run's own order, unless another saves `LEAST_GAIN` of the step."""
        first = self.times[0]
        saves = first.step_s < (1 - LEAST_GAIN) * self.present.step_s
        return first if saves else self.present

    @property
    def lines(self) -> list[str]:
        """Line of text that names slow axes and both times; none if the order is best.

        Not where it saves less than `LEAST_GAIN`.
        """
        fastest = self.fastest
        if fastest is self.present:
            return []
        times = (
            f"a step takes {milliseconds(self.present.step_s)}, in the order "
            f"{fastest.text} {milliseconds(fastest.step_s)} (--mesh-order)"
        )
        return [f"mesh order {self.present.text}: {'; '.join([*self.slow, times])}"]

    def as_json(self) -> dict[str, Any]:
        """Return the orders as plain data."""
        return {
            "present": list(self.present.order),
            "fastest": list(self.fastest.order),
            "slow": list(self.slow) if self.lines else [],
            "orders": [
                {"order": list(one.order), "step_s": one.step_s} for one in self.times
            ],
        }


def mesh_orders(run: Run) -> MeshOrders | None:
    """Return the time of a run in each order; None where all are alike.

    So they are where one axis has all devices, and on several kinds of devices, which
    one axis has to cross (`meshpar.planner.machine.mixed`).
    """
    if run.cluster.parts or run.whole is not None or len(_large(run)) < 2:
        return None
    groups = tuple(dict.fromkeys(one.mesh_axes for one in sent_in_a_step(run)))
    seen: dict[tuple[Link, ...], Run] = {}
    for ordered in (run, *_ordered(run)):
        seen.setdefault(tuple(ordered.link(*group) for group in groups), ordered)
    if len(seen) == 1:
        return None
    timed = [
        (OrderTime(_large(one), step_time(one).step_s), one) for one in seen.values()
    ]
    present = timed[0][0]
    best, its_run = min(timed, key=lambda one: one[0].step_s)
    return MeshOrders(
        times=tuple(sorted((time for time, _ in timed), key=lambda one: one.step_s)),
        present=present,
        slow=tuple(_slower(run, its_run, groups)) if best is not present else (),
    )


def _large(run: Run) -> tuple[str, ...]:
    """Return the mesh axes of several devices, outermost first."""
    return tuple(axis for axis, size in run.mesh_shape.items() if size > 1)


def _ordered(run: Run) -> Iterator[Run]:
    """Yield the run in every order of its mesh axes of several devices."""
    large = _large(run)
    small = tuple(axis for axis in run.order if axis not in large)
    for order in itertools.permutations(large):
        yield replace(run, order=(*small, *order))


def _slower(run: Run, best: Run, groups: tuple[tuple[str, ...], ...]) -> Iterator[str]:
    """Yield groups whose link is slower than in another order, in words."""
    for group in groups:
        now, then = run.link(*group), best.link(*group)
        if now.bytes_per_s < then.bytes_per_s:
            here, there = _place(run, now), _place(best, then)
            axes, faster = "+".join(group), f"{then.bytes_per_s / 1e9:.4g} GB/s"
            there = "at" if here == there else f"{there} at"
            yield (
                f"'{axes}' lies {here} at {now.bytes_per_s / 1e9:.4g} GB/s, not "
                f"{there} {faster}"
            )


def _place(run: Run, link: Link) -> str:
    """Return where a link leads, in words."""
    if link.rack is not None:
        return "between racks"
    if link.name == "network" and run.cluster.torus:
        return "between slices"
    if not link.spans:
        return _PLACES[link.name]
    links = [span.links for span in link.spans]
    parts = [
        f"{'a' if count == 1 else count} {name}{'s' if count > 1 else ''}"
        for name, count in (("ring", links.count(2)), ("line", links.count(1)))
        if count
    ]
    return f"on {' and '.join(parts)} of the torus"


_PLACES = {
    "none": "on one device",
    "chip": "inside a chip",
    "host": "inside a host",
    "network": "between hosts",
}
