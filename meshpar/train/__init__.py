"""Training: how a step is built and what it needs around it.

`step.make_train_step` makes a `TrainStep`; `step_functions` has what its programs
compute. State, optimizer, batches, checkpoints and faults of a run stand beside them.
What a model computes, and how it is split, is `meshpar.model`'s and
`meshpar.parallel`'s.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.machinery
import sys
import warnings
from collections.abc import Sequence
from types import ModuleType

_MOVED = {
    "meshpar.train.interrupt": "meshpar.train.faults",
    "meshpar.train.replay": "meshpar.train.same_step",
    "meshpar.train.watchdog": "meshpar.train.faults",
}
"""Documented modules of the last release -> where their names are now."""


class _MovedModules(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Import a moved module by its former name, with a DeprecationWarning."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        return importlib.machinery.ModuleSpec(name, self) if name in _MOVED else None

    def exec_module(self, module: ModuleType) -> None:
        home = importlib.import_module(_MOVED[module.__name__])
        warnings.warn(
            f"{module.__name__} has moved to {home.__name__}; its former name goes "
            "with the next release",
            DeprecationWarning,
            stacklevel=2,
        )
        vars(module).update(
            {name: it for name, it in vars(home).items() if name[0] != "_"}
        )


sys.meta_path.append(_MovedModules())
