"""What ends an interval of local steps, in words for who audits one of them."""

from __future__ import annotations

import math

import jax

from meshpar.layout import Layout
from meshpar.train.local_steps.functions import LocalStepFunctions
from meshpar.train.local_steps.state import outer_of


def sync_notes(functions: LocalStepFunctions, layout: Layout) -> tuple[str, ...]:
    """What a reader of a local step's audit should know of the average."""
    common = outer_of(functions.state_shapes).start, functions.replica.of_states
    parts = jax.tree.map(
        lambda shape, sharding: math.prod(sharding.shard_shape(shape.shape)), *common
    )
    num_bytes = 4 * sum(jax.tree.leaves(parts))
    return (
        f"sync_every={layout.sync_every}: nothing of this program crosses 'data'; "
        f"after every {layout.sync_every} steps another all-reduces {num_bytes:,} "
        "bytes of each device there (step.sync_program)",
    )
