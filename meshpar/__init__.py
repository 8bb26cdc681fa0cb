"""meshpar: train one JAX model under any parallelism by changing one string.

Each public name is imported when it is first asked for, so that what needs no JAX, as
the planner, starts without it.
"""

from __future__ import annotations

import importlib
import importlib.util
import sys
import warnings
from typing import TYPE_CHECKING, Any

from meshpar.errors import InputError, nearest
from meshpar.machine.emulate import emulate, emulate_from_environment

emulate_from_environment()  # before anything else can start JAX

# Importing a part of a package binds the package's name here, over a function of that
# name. Loaded now, and unbound, they are the functions to whoever asks.
for _package in ("audit", "lint"):
    importlib.import_module(f"meshpar.{_package}")
    del globals()[_package]

# Modules of the last release -> where their names are now; both work for one release.
_FORMER_MODULES = {
    "meshpar.audit.block_trace": "meshpar.planner.from_model",
    "meshpar.data.device_batches": "meshpar.data.batches",
    "meshpar.data.errors": "meshpar.errors",
    "meshpar.data.mixture": "meshpar.data.batches",
    "meshpar.data.nanogpt": "meshpar.data.token_files",
    "meshpar.data.packing": "meshpar.data.batches",
    "meshpar.data.row_sources": "meshpar.data.batches",
    "meshpar.data.rows": "meshpar.data.batches",
    "meshpar.data.token_cache": "meshpar.data.tokenizer",
    "meshpar.data.token_file": "meshpar.data.token_files",
    "meshpar.data.token_stream": "meshpar.data.token_files",
    "meshpar.lint.rows": "meshpar.lint.findings",
    "meshpar.machine.mesh_order": "meshpar.machine.mesh",
    "meshpar.mesh": "meshpar.machine.mesh",
    "meshpar.mesh_order": "meshpar.machine.mesh",
    "meshpar.model.single": "meshpar.model.tracing",
    "meshpar.parallel.convolution_gradients": "meshpar.parallel.grids.convolution",
    "meshpar.parallel.grid_convolution": "meshpar.parallel.grids.convolution",
    "meshpar.parallel.grids.convolution_gradients": (
        "meshpar.parallel.grids.convolution"
    ),
    "meshpar.parallel.token_chunks": "meshpar.parallel.remat",
    "meshpar.planner.cost.in_words": "meshpar.planner.cost.estimate",
    "meshpar.planner.machine.execution_fields": "meshpar.planner.machine.program",
    "meshpar.planner.machine.overlap": "meshpar.planner.machine.collective_cost",
    "meshpar.planner.published.measured": "meshpar.planner.published.megatron",
    "meshpar.planner.search.assumptions": "meshpar.planner.search.result",
    "meshpar.planner.search.constraints": "meshpar.planner.search.space",
    "meshpar.planner.search.nearest_fit": "meshpar.planner.search.remedies",
    "meshpar.planner.search.sensitivity": "meshpar.planner.search.remedies",
    "meshpar.testing.bounds": "meshpar.testing.comparison",
    "meshpar.testing.report": "meshpar.testing.comparison",
    "meshpar.topology": "meshpar.machine.topology",
    "meshpar.train.interrupt": "meshpar.train.faults",
    "meshpar.train.replay": "meshpar.train.same_step",
    "meshpar.train.replica_metrics": "meshpar.train.metrics",
    "meshpar.train.sample": "meshpar.generation.sampling",
    "meshpar.train.watchdog": "meshpar.train.faults",
}
# `emulate` is a function here, so its module must not be bound to that name again.
sys.modules["meshpar.emulate"] = sys.modules["meshpar.machine.emulate"]


class _FormerModules:
    """Finds a module that moved by its former name, with a `DeprecationWarning`."""

    @staticmethod
    def find_spec(name: str, *_: Any) -> Any:
        if name not in _FORMER_MODULES:
            return None
        new = _FORMER_MODULES[name]
        warnings.warn(
            f"{name} is now {new}; import it by that name",
            DeprecationWarning,
            stacklevel=2,
        )
        return importlib.util.spec_from_loader(name, _FormerModules)  # type: ignore

    @staticmethod
    def create_module(_: Any) -> None:
        return None

    @staticmethod
    def exec_module(module: Any) -> None:
        new = importlib.import_module(_FORMER_MODULES[module.__name__])
        sys.modules[module.__name__] = new


sys.meta_path.append(_FormerModules)

_HOMES = {
    "AuditReport": "meshpar.audit.report",
    "BATCH_AXES": "meshpar.layout",
    "BlockGroup": "meshpar.model.contract",
    "Blocks": "meshpar.model.nnx",
    "DATA_PARALLEL": "meshpar.rules.presets",
    "FSDP": "meshpar.rules.presets",
    "FSDP_TENSOR": "meshpar.rules.presets",
    "FSDP_TENSOR_SEQUENCE": "meshpar.rules.presets",
    "Finding": "meshpar.lint.lint",
    "HSDP": "meshpar.rules.presets",
    "IdleMeshAxisWarning": "meshpar.train.refusals",
    "Input": "meshpar.model.inputs",
    "Layout": "meshpar.layout",
    "LintReport": "meshpar.lint.lint",
    "MESH_AXES": "meshpar.layout",
    "MemoryReport": "meshpar.train.memory_report",
    "Model": "meshpar.model.contract",
    "Parameter": "meshpar.model.parameter",
    "RuleError": "meshpar.errors",
    "Rules": "meshpar.rules.rules",
    "Scope": "meshpar.model.scope",
    "TENSOR": "meshpar.rules.presets",
    "TENSOR_SEQUENCE": "meshpar.rules.presets",
    "Topology": "meshpar.machine.topology",
    "TopologyWarning": "meshpar.machine.topology",
    "TrainState": "meshpar.train.state",
    "TrainStep": "meshpar.train.step",
    "UnusedDevicesWarning": "meshpar.machine.mesh",
    "absent_mesh": "meshpar.machine.mesh",
    "attend": "meshpar.model.loss.drop_ins",
    "audit": "meshpar.audit.report",
    "batch_shapes": "meshpar.model.tracing",
    "born_sharded": "meshpar.rules.sharding",
    "default_rules": "meshpar.rules.presets",
    "embedding_tables": "meshpar.tables.tables",
    "experts": "meshpar.model.loss.drop_ins",
    "from_loss": "meshpar.model.loss.from_loss",
    "from_nnx": "meshpar.model.nnx",
    "generate": "meshpar.generation.generate",
    "initial_key": "meshpar.model.parameter",
    "lint": "meshpar.lint.lint",
    "make_mesh": "meshpar.machine.mesh",
    "make_train_step": "meshpar.train.make_step",
    "memory_report": "meshpar.train.memory_report",
    "nnx_shardings": "meshpar.rules.sharding",
    "pipeline_value_and_grad": "meshpar.parallel.pipeline.value_and_grad",
    "positions": "meshpar.model.loss.drop_ins",
    "reshard": "meshpar.parallel.resharding",
    "suggest_names": "meshpar.model.loss.suggest_names",
    "tree_shardings": "meshpar.rules.sharding",
}
"""Public name -> the module that has it; `InputError` and `emulate` are here."""

if TYPE_CHECKING:
    from meshpar.audit.report import AuditReport, audit
    from meshpar.errors import RuleError
    from meshpar.generation.generate import generate
    from meshpar.layout import BATCH_AXES, MESH_AXES, Layout
    from meshpar.lint.lint import Finding, LintReport, lint
    from meshpar.machine.mesh import UnusedDevicesWarning, absent_mesh, make_mesh
    from meshpar.machine.topology import Topology, TopologyWarning
    from meshpar.model.contract import BlockGroup, Model
    from meshpar.model.inputs import Input
    from meshpar.model.loss.drop_ins import attend, experts, positions
    from meshpar.model.loss.from_loss import from_loss
    from meshpar.model.loss.suggest_names import suggest_names
    from meshpar.model.nnx import Blocks, from_nnx
    from meshpar.model.parameter import Parameter, initial_key
    from meshpar.model.scope import Scope
    from meshpar.model.tracing import batch_shapes
    from meshpar.parallel.pipeline.value_and_grad import pipeline_value_and_grad
    from meshpar.parallel.resharding import reshard
    from meshpar.rules.presets import (
        DATA_PARALLEL,
        FSDP,
        FSDP_TENSOR,
        FSDP_TENSOR_SEQUENCE,
        HSDP,
        TENSOR,
        TENSOR_SEQUENCE,
        default_rules,
    )
    from meshpar.rules.rules import Rules
    from meshpar.rules.sharding import born_sharded, nnx_shardings, tree_shardings
    from meshpar.tables.tables import embedding_tables
    from meshpar.train.make_step import make_train_step
    from meshpar.train.memory_report import MemoryReport, memory_report
    from meshpar.train.refusals import IdleMeshAxisWarning
    from meshpar.train.state import TrainState
    from meshpar.train.step import TrainStep

    __version__: str
else:

    def __getattr__(name: str) -> Any:
        # Type checkers take a module that they see this in to have every name.
        if name in _HOMES:
            value = getattr(importlib.import_module(_HOMES[name]), name)
        elif name == "__version__":
            value = _version()
        elif not name.startswith("_") and importlib.util.find_spec(f"meshpar.{name}"):
            return importlib.import_module(f"meshpar.{name}")
        else:
            raise AttributeError(
                f"module 'meshpar' has no attribute {name!r}; {nearest(name, __all__)}"
            )
        globals()[name] = value
        return value


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("meshpar")
    except PackageNotFoundError:
        return "of a checkout that is not installed"


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


__all__ = [
    "AuditReport",
    "BATCH_AXES",
    "BlockGroup",
    "Blocks",
    "DATA_PARALLEL",
    "FSDP",
    "FSDP_TENSOR",
    "FSDP_TENSOR_SEQUENCE",
    "Finding",
    "HSDP",
    "IdleMeshAxisWarning",
    "Input",
    "InputError",
    "Layout",
    "LintReport",
    "MESH_AXES",
    "MemoryReport",
    "Model",
    "Parameter",
    "RuleError",
    "Rules",
    "Scope",
    "TENSOR",
    "TENSOR_SEQUENCE",
    "Topology",
    "TopologyWarning",
    "TrainState",
    "TrainStep",
    "UnusedDevicesWarning",
    "absent_mesh",
    "attend",
    "audit",
    "batch_shapes",
    "born_sharded",
    "default_rules",
    "embedding_tables",
    "emulate",
    "experts",
    "from_loss",
    "from_nnx",
    "generate",
    "initial_key",
    "lint",
    "make_mesh",
    "make_train_step",
    "memory_report",
    "nnx_shardings",
    "pipeline_value_and_grad",
    "positions",
    "reshard",
    "suggest_names",
    "tree_shardings",
]
