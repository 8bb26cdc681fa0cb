"""Whether a rank without a microbatch may leave its layers out.

Then ranks part: one is in its layers while another is past them. A collective-permute
there is a trap: XLA:CPU waits in it for all devices, not for the pair, and computes
wrong numbers or hangs. GSPMD puts some in by itself. So a rank skips only where no mesh
axis at work is left to GSPMD, and where the layers, forward and backward, are traced to
have none of their own, and no collective over `stage`. Otherwise it computes on zeros.
`meshpar.audit` finds what stands in such a loop of a compiled program nevertheless
(hazard `divergent_permute`).

Only on CPUs, where virtual devices share the cores: an accelerator has nothing else to
do, and a GPU copies the loop's condition to its host in every iteration.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

import jax

from meshpar.hardware.platforms import platform_named
from meshpar.layout import MANUAL_AXES
from meshpar.parallel.blocks import Known, Stack
from meshpar.parallel.pipeline.ends import STAGE
from meshpar.trace.walk import collective_axes, equations

_PERMUTES = ("ppermute", "pgather")


def mesh_hindrance(mesh_shape: Mapping[str, int], platform: str) -> str | None:
    """Why idle ranks of a mesh compute on zeros; None where their layers may say.

    Args:
        mesh_shape: Size of each mesh axis.
        platform: Kind of device.

    Example:
        >>> mesh_hindrance({"data": 2, "stage": 4, "tensor": 1}, "cpu")
        >>> mesh_hindrance({"stage": 4, "tensor": 2}, "cpu")
        "GSPMD partitions over 'tensor', and may permute there"
    """
    if not platform_named(platform).is_host:
        return f"a {platform} has nothing else to do, and would wait for its host"
    automatic = [
        axis
        for axis, size in mesh_shape.items()
        if size > 1 and axis not in MANUAL_AXES
    ]
    if automatic:
        axes = " and ".join(map(repr, automatic))
        return f"GSPMD partitions over {axes}, and may permute there"
    return None


def layers_hindrance(stack: Stack, x: Any, known: Known) -> str | None:
    """Why idle ranks cannot leave these layers out: a collective of theirs, or None.

    Args:
        stack: The layers.
        x: Shapes of the stream that they take.
        known: What scopes are made of.
    """

    def one_layer(x: Any, dx: Any) -> Any:
        shard, state, layer = jax.tree.map(lambda value: value[0], stack.xs)
        known_here = {**known, "state": state}
        block, weights = stack.block, stack.block.gather(shard)
        forward, residuals = block.forward_keeping(weights, x, layer, known_here)
        gradients, dx = block.backward(weights, residuals, dx, 1.0, layer, known_here)
        return forward, block.scatter(gradients), dx

    for equation in equations(jax.make_jaxpr(one_layer)(x, x).jaxpr):
        name, axes = equation.primitive.name, collective_axes(equation)
        if name in _PERMUTES or STAGE in axes:
            return f"{name} over {' and '.join(map(repr, axes))}"
    return None


def tell(group: str, hindrance: str) -> None:
    """Warns that idle ranks compute on zeros because of what stands in the layers."""
    warnings.warn(
        f"the pipeline's group {group!r} has a {hindrance}, which must not run on some "
        "ranks alone, so idle ranks compute on zeros for (stages - 1) ticks of each "
        "pass; move it to embed or head to save them",
        stacklevel=2,
    )
