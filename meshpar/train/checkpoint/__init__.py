"""Checkpoints: written while a run goes on, read under any layout, checked for damage.

`Checkpoints` saves and restores; `contents.read_contents` and `contents.read_arrays`
read a checkpoint without a model. Nothing here knows recipes or their options.
"""

from meshpar.train.checkpoint.checkpoints import Checkpoints
from meshpar.train.checkpoint.choice import (
    CheckpointError,
    DamagedCheckpointWarning,
    UncheckedCheckpointWarning,
)

__all__ = [
    "CheckpointError",
    "Checkpoints",
    "DamagedCheckpointWarning",
    "UncheckedCheckpointWarning",
]
