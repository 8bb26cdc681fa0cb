"""meshpar: lay a JAX model out over named meshes, in one line, with nothing silent."""

from meshpar.emulate import emulate, emulate_from_environment
from meshpar.errors import InputError
from meshpar.layout import BATCH_AXES, MESH_AXES, Layout
from meshpar.topology import Topology, TopologyWarning

emulate_from_environment()  # before anything below can start JAX

# ruff: noqa: E402
from meshpar.audit.report import AuditReport, audit
from meshpar.lint.lint import Finding, LintReport, lint
from meshpar.mesh import absent_mesh, make_mesh
from meshpar.model.contract import BlockGroup, Model
from meshpar.model.inputs import Input
from meshpar.model.nnx import Blocks, from_nnx
from meshpar.model.parameter import Parameter
from meshpar.model.scope import Scope
from meshpar.model.tracing import batch_shapes
from meshpar.model.values import initial_key
from meshpar.parallel.pipeline.value_and_grad import pipeline_value_and_grad
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
from meshpar.rules.table import RuleError
from meshpar.train.make_step import make_train_step
from meshpar.train.memory_report import MemoryReport, memory_report
from meshpar.train.state import TrainState
from meshpar.train.step import TrainStep

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
    "Input",
    "InputError",
    "Layout",
    "LintReport",
    "MESH_AXES",
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
    "absent_mesh",
    "audit",
    "MemoryReport",
    "memory_report",
    "batch_shapes",
    "born_sharded",
    "default_rules",
    "emulate",
    "from_nnx",
    "initial_key",
    "lint",
    "make_mesh",
    "make_train_step",
    "nnx_shardings",
    "pipeline_value_and_grad",
    "tree_shardings",
]
