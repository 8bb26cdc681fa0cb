"""Training: how a step is built and what it needs around it.

`step.make_train_step` makes a `TrainStep`; `step_functions` has what its programs
compute. State, optimizer, batches, checkpoints and faults of a run stand beside them.
What a model computes, and how it is split, is `meshpar.model`'s and
`meshpar.parallel`'s.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

_MOVED = {
    "meshpar.train.interrupt": "meshpar.train.faults",
    "meshpar.train.replay": "meshpar.train.same_step",
    "meshpar.train.watchdog": "meshpar.train.faults",
}
"""Documented modules of the last release -> where their names are now."""


class _MovedModule(ModuleType):
    """A module by its former name, which warns that it has moved."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        home = _MOVED[self.__name__]
        warnings.warn(
            f"{self.__name__} has moved to {home}; its former name goes with the next "
            "release",
            DeprecationWarning,
            stacklevel=2,
        )
        return getattr(importlib.import_module(home), name)


sys.modules.update({name: _MovedModule(name) for name in _MOVED})
