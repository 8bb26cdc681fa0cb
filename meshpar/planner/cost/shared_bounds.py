"""What bounds of many layouts share, found once for all that have it in common."""

from __future__ import annotations

from collections.abc import Callable
from itertools import product

from meshpar.layout import Layout
from meshpar.planner.cost.run import Run
from meshpar.planner.cost.shared_costs import SharedCosts, shared_costs
from meshpar.planner.search.mesh_choices import MeshChoices
from meshpar.planner.search.space import Variant

_PLAIN = Layout()
_EVEN = (_PLAIN.schedule, 1, ())


class SharedBounds:
    """Shared costs of the layouts of one workload, cluster and batch, remembered.

    Args:
        run_of: A mesh shape and a variant as a run.
        kinds: Of each kind of block whether it has experts.
    """

    def __init__(
        self, run_of: Callable[[Layout, Variant], Run], kinds: tuple[bool, ...]
    ) -> None:
        self._run_of, self._kinds = run_of, kinds
        self._of_meshes: dict[tuple, SharedCosts] = {}
        self._least: dict[tuple, SharedCosts] = {}

    def least(self, mesh: Layout, like: Variant, choices: MeshChoices) -> SharedCosts:
        """The least of each, whichever of the choices it is of."""
        ways = choices.states, choices.schedules
        key = (_sizes(mesh), *_shared_by(mesh, like), *ways)
        if key not in self._least:
            self._least[key] = self._least_of_states(mesh, like, choices)
        return self._least[key]

    def _least_of_states(
        self, mesh: Layout, like: Variant, choices: MeshChoices
    ) -> SharedCosts:
        found = []
        one_of_each_split = {one[2]: one for one in choices.schedules}
        for state, scheduled in product(choices.states, one_of_each_split.values()):
            name, chunks, splits = scheduled if any(scheduled[2]) else _EVEN
            variant = like.with_state(state)
            variant = variant._replace(schedule=name, chunks=chunks, splits=splits)
            found.append(self.of(mesh, variant))
        if len(found) == 1:
            return found[0]
        state_bytes, once_s, gathers_s, bare_s = zip(*found, strict=True)
        least_s, least_bare_s = (
            tuple(tuple(map(min, *kind)) for kind in zip(*each, strict=True))
            for each in (gathers_s, bare_s)
        )
        return SharedCosts(min(state_bytes), min(once_s), least_s, least_bare_s)

    def of(self, mesh: Layout, variant: Variant) -> SharedCosts:
        """Those of one layout."""
        stored = (variant.param_dtype, variant.optimizer_memory, variant.splits)
        ways = variant.zero, variant.fsdp_gather, stored
        key = (_sizes(mesh), *_shared_by(mesh, variant), *ways)
        if key not in self._of_meshes:
            plain = variant
            if not any(variant.splits):
                plain = variant._replace(schedule=_PLAIN.schedule, chunks=1)
            run = self._run_of(mesh, plain)
            self._of_meshes[key] = shared_costs(run, self._kinds)
        return self._of_meshes[key]


def _shared_by(mesh: Layout, variant: Variant) -> tuple[bool, bool]:
    """Whether it runs in ticks; else whether parts may hide what moves weights."""
    in_ticks = mesh.stage > 1 or variant.microbatches > 1
    return in_ticks, not in_ticks and variant.sequence_parallel


def _sizes(mesh: Layout) -> tuple[int, ...]:
    batch = (mesh.data, mesh.fsdp, mesh.stage)
    return (*batch, mesh.context, mesh.expert, mesh.tensor)
