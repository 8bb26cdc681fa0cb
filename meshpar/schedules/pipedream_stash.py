"""PipeDream with weight stashing: 1F1B in which each backward is followed by an update.

Each stage updates its weights after the backward of every microbatch. A backward uses
the weights that its forward used, so a stage keeps a version for every microbatch in
flight. Stage s of S computes the gradient of a microbatch with weights that lack the
last S-1-s updates:

    w[t+1] = w[t] - update(gradient of microbatch t at w_s[t - (S-1-s)], s = 0 .. S-1)

where versions before the first are the first. The order of the actions is that of 1F1B.
The losses are those of another method than synchronous training.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

from meshpar.schedules.base import Op, Schedule
from meshpar.schedules.interleaved_1f1b import ONE_FOR_ONE, one_for_one_orders
from meshpar.schedules.method import ScheduleMethod
from meshpar.schedules.tick_table import TickTable

if TYPE_CHECKING:
    import numpy as np

pipedream_stash = ScheduleMethod(
    name="pipedream_stash",
    orders=one_for_one_orders,
    updates_each_microbatch=True,
    closed_forms=ONE_FOR_ONE,
    reference="Narayanan et al., 'PipeDream: Generalized Pipeline Parallelism for DNN "
    "Training', SOSP 2019, sections 3.2 and 3.3 (weight stashing, without vertical "
    "sync)",
)


@dataclass(frozen=True)
class WeightVersions:
    """The versions of its weights that each rank keeps, and the slots they lie in.

    Version v is that after v updates; it lies in slot v modulo the number of slots,
    which is the same on all ranks.

    Args:
        schedule: A schedule of one stage a rank, each backward followed by an update.
        table: Its ticks, one action of a rank in each.

    Example:
        >>> from meshpar.schedules.tick_table import tick_table
        >>> schedule = pipedream_stash(num_ranks=3, num_microbatches=6)
        >>> versions = WeightVersions(schedule, tick_table(schedule, divergent=True))
        >>> versions.kept
        (3, 2, 1)
        >>> versions.used[0]
        (0, 0, 0, 1, 2, 3)
    """

    schedule: Schedule
    table: TickTable

    @cached_property
    def used(self) -> tuple[tuple[int, ...], ...]:
        """The version that each rank uses for each microbatch, forward and backward."""
        return tuple(
            tuple(
                sum(other.op is Op.B for other in order[:at])
                for at, action in enumerate(order)
                if action.op is Op.F
            )
            for order in self.schedule.orders
        )

    @cached_property
    def kept(self) -> tuple[int, ...]:
        """The most versions that each rank keeps at once, the newest included."""
        return tuple(
            max(1 + done - version for done, version in enumerate(used))
            for used in self.used
        )

    @property
    def num_slots(self) -> int:
        """Slots that every rank has."""
        return max(self.kept)

    @cached_property
    def newest(self) -> np.ndarray:
        """Slot of each rank's newest version before a tick's update, (ticks, ranks)."""
        import numpy as np

        updates = (self.table.backward_microbatch >= 0).astype(np.int32)
        done = np.asarray(np.cumsum(updates, axis=0, dtype=np.int32) - updates)
        return done % self.num_slots

    @cached_property
    def read(self) -> np.ndarray:
        """Slot of the version that each rank's action uses, (ticks, ranks)."""
        import numpy as np

        forward, backward = (
            self.table.forward_microbatch,
            self.table.backward_microbatch,
        )
        microbatch = np.maximum(np.maximum(forward, backward), 0)
        ranks = np.arange(self.schedule.num_ranks)
        used = np.array(self.used, np.int32)[ranks, microbatch]
        return np.asarray(used % self.num_slots)

    @cached_property
    def written(self) -> np.ndarray:
        """Slot that each rank's update fills, -1 without one, (ticks, ranks)."""
        import numpy as np

        updates = self.table.backward_microbatch >= 0
        slot = (self.newest + 1) % self.num_slots
        return np.where(updates, slot, -1).astype(np.int32)

    @property
    def last(self) -> int:
        """Slot of the version after all updates."""
        return self.schedule.num_microbatches % self.num_slots
