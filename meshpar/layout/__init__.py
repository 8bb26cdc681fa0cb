"""A layout: how a step lies on its devices, as plain data and one line of text.

`layout.Layout` has the size of each mesh axis and the options of a step,
`context_method` the values of its option for attention, and `requirements` each rule
that lint, step, planner, fuzzer and command line hold a layout to, one row each.
Nothing here imports JAX or reads a model: callers give the sizes.
"""

from __future__ import annotations

from meshpar.layout.layout import (
    BATCH_AXES,
    BY_COST,
    EXECUTIONS,
    FIXED_EXECUTIONS,
    MANUAL_AXES,
    MESH_AXES,
    REMATS,
    STAGE_REMATS,
    TOKEN_AXES,
    ZERO_AXES,
    Layout,
)

__all__ = [
    "BATCH_AXES",
    "BY_COST",
    "MANUAL_AXES",
    "MESH_AXES",
    "EXECUTIONS",
    "FIXED_EXECUTIONS",
    "REMATS",
    "STAGE_REMATS",
    "TOKEN_AXES",
    "ZERO_AXES",
    "Layout",
]
