"""What of a layout and its rules generation knows."""

from __future__ import annotations

import math

from meshpar.layout import MESH_AXES, Layout
from meshpar.model.contract import Model
from meshpar.rules.rules import Rules

_WHOLE = {
    "heads": "heads do not divide over {}: attention is whole on each device",
    "kv_heads": "key/value heads do not divide over {}: their weights are whole on "
    "each device, which keeps copies of the heads of its own queries",
}

PLAIN = Layout()
"""One device."""

_KEPT = (*MESH_AXES, "splits", "zero", "zero_axes", "precision", "param_dtype")


def generation_layout(layout: Layout | str) -> Layout:
    """The part of a layout that generation knows; what is for training alone is left.

    Sizes of mesh axes, uneven stages, microbatches of stages, what `fsdp` stores split
    and dtypes stay.

    Example:
        >>> str(generation_layout("data=2,tensor=2,sequence_parallel=true,remat=full"))
        'data=2,tensor=2'
    """
    layout = Layout.of(layout)
    kept = {name: getattr(layout, name) for name in _KEPT}
    if layout.stage > 1:
        # Layer by layer: a rank would hold all of its layers whole.
        kept |= {"microbatches": layout.microbatches, "fsdp_gather": "microbatch"}
    if layout.param_dtype != "fp32":
        kept["param_dtype"] = "bf16"
    if layout.chunks > 1:
        kept["splits"] = ()
    return Layout(**kept)


def with_whole_heads(
    model: Model, layout: Layout, rules: Rules
) -> tuple[Rules, tuple[str, ...]]:
    """Rules under which heads that do not divide are whole on each device; and notes.

    A training step refuses them; whoever generates has the model that there is.
    """
    notes = []
    for name, words in _WHOLE.items():
        mesh_axes = rules.table.get(name, ())
        shards = math.prod(layout.mesh_shape[axis] for axis in mesh_axes)
        uneven = {
            size
            for one in model.flat_parameters().values()
            for axis, size in zip(one.logical_axes, one.shape, strict=True)
            if axis == name and size % shards
        }
        if uneven:
            rules = rules.with_rules(**{name: None})
            axes = " x ".join(mesh_axes)
            notes.append(f"{min(uneven)} {words.format(f'{axes}={shards}')}")
    return rules, tuple(notes)
