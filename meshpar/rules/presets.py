"""The usual rules by name: data parallel, FSDP, tensor and sequence parallel.

`residual_seq` is the sequence dim of the residual stream between the attention and MLP,
`seq` the one inside them. Volumes are split along `depth`, over all devices that share
an example; `with_rules(depth="context", height="tensor")` cuts them along two dims.
"""

from __future__ import annotations

from dataclasses import replace

from meshpar.layout import BATCH_AXES, Layout
from meshpar.rules.rules import Rules

_BATCH = Rules(
    {
        "batch": BATCH_AXES,
        "seq": None,
        "residual_seq": None,
        "embed": None,
        "heads": None,
        "kv_heads": None,
        "head_dim": None,
        "mlp": None,
        "vocab": None,
        "layers": None,
        "experts": "expert",
        "depth": ("context", "tensor"),
        "height": None,
        "width": None,
        "pair_rows": "context",
        "pair_columns": "tensor",
    }
)

DATA_PARALLEL = replace(_BATCH, of_preset=frozenset(_BATCH.table))
"""The batch is split, parameters are replicated."""

FSDP = replace(DATA_PARALLEL, parameters={"embed": ("fsdp",)})
"""Stored parameters are split over `fsdp` too; with `data` > 1 this is HSDP."""

HSDP = FSDP
"""FSDP inside `fsdp`, replicas across `data` (hybrid sharding)."""

_SPLIT = dict.fromkeys(("heads", "kv_heads", "mlp", "vocab"), ("tensor",))
TENSOR = replace(DATA_PARALLEL, table={**DATA_PARALLEL.table, **_SPLIT})
"""Megatron tensor parallel: heads, MLP and vocabulary (Shoeybi et al. 2019)."""

TENSOR_SEQUENCE = replace(TENSOR, table={**TENSOR.table, "residual_seq": ("tensor",)})
"""And the residual stream's sequence (Korthikanti et al. 2022)."""

FSDP_TENSOR = replace(TENSOR, parameters=FSDP.parameters)
"""Both: one weight dim over `fsdp`, another over `tensor`."""

FSDP_TENSOR_SEQUENCE = replace(TENSOR_SEQUENCE, parameters=FSDP.parameters)
"""All of them."""

PRESETS = {
    "data_parallel": DATA_PARALLEL,
    "fsdp": FSDP,
    "hsdp": HSDP,
    "tensor": TENSOR,
    "tensor_sequence": TENSOR_SEQUENCE,
    "fsdp_tensor": FSDP_TENSOR,
    "fsdp_tensor_sequence": FSDP_TENSOR_SEQUENCE,
}


def default_rules(layout: Layout | str) -> Rules:
    """Return the preset that a layout asks for; a mesh axis of size 1 has no effect.

    Args:
        layout: It or its text; its `sequence_parallel`, `zero` and `zero_axes` choose.

    Example:
        >>> default_rules(Layout(fsdp=8)).stored.mesh_axes("embed")
        ('fsdp',)
    """
    layout = Layout.of(layout)
    preset = FSDP_TENSOR_SEQUENCE if layout.sequence_parallel else FSDP_TENSOR
    split = {"embed": layout.split_axes} if layout.zero == 3 else {}
    return replace(preset, parameters={**split, "layers": ("stage",)})
