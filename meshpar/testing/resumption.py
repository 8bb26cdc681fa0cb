"""A run that goes on under another layout, from a checkpoint."""

from __future__ import annotations

import tempfile
from pathlib import Path

from meshpar import TrainState, TrainStep


def resumed(step: TrainStep, later: TrainStep, state: TrainState) -> TrainState:
    """A state of one step's layout as another's reads it from a checkpoint."""
    # Orbax takes long to import, and most who compare layouts need none of it.
    from meshpar.train.checkpoint import Checkpoints

    with tempfile.TemporaryDirectory() as folder:
        with Checkpoints(Path(folder), layer_orders=step.layer_orders) as checkpoints:
            checkpoints.save(state, {})
        with Checkpoints(Path(folder), layer_orders=later.layer_orders) as checkpoints:
            return checkpoints.restore(later.state_shapes, later.shardings)
