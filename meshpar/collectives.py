"""Collectives that follow one another, where the backend needs to be told.

XLA:CPU runs whatever is ready, and pairs the collectives of different devices by kind,
group and channel. `jax.shard_map` gives all its collectives one channel, so two of them
that are ready together may be paired crosswise: silently wrong numbers, an abort or a
deadlock, most often in the first execution of a program (measured with jax 0.10.2 on 2
cores: 1 in 3 first steps of a model on data=2,fsdp=2,tensor=2). `follow` makes one wait
for the other through data, the only order that XLA:CPU's executor keeps (an
`optimization_barrier` is removed before it). Accelerators run in program order: there
`follow` must not be used, for it would forbid overlap.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import PartitionSpec

ASKED = {
    "parameter_gather": ("all-gather", "FSDP gather of parameters before their use"),
    "gradient_scatter": ("reduce-scatter", "FSDP reduce-scatter of gradients"),
    "gradient_reduction": ("all-reduce", "gradient reduction over the batch axes"),
    "optimizer": ("any", "an optimizer that needs more than its own shard"),
    "loss_sum": ("all-reduce", "loss and weights summed over the global batch"),
    "gradient_norm": ("all-reduce", "global norm of the gradients"),
    "stage_forward": ("collective-permute", "activations to the next stage"),
    "stage_backward": ("collective-permute", "gradients to the stage before"),
    "embed_gather": ("all-gather", "embedding shared by the ranks, to the first stage"),
    "embed_scatter": ("reduce-scatter", "embedding's gradient, shared by the ranks"),
    "head_scatter": ("reduce-scatter", "last stage's output, shared by the ranks"),
    "head_gather": ("all-gather", "loss's gradient, back to the last stage"),
    "vocab_lookup": ("all-reduce", "embedding rows from a split vocabulary"),
    "vocab_loss": ("all-reduce", "cross-entropy over a split vocabulary"),
    "head_input_gather": ("all-gather", "sequence gathered before the head's matmul"),
    "head_input_gradient": ("all-reduce", "gradient from a head split by vocabulary"),
    "head_input_gradient_scatter": (
        "reduce-scatter",
        "gradient from a head split by vocabulary, scattered along the sequence",
    ),
    "token_sum": ("all-reduce", "loss and table's gradient over a split sequence"),
}
"""What the library's own collectives are for: their kind, and words for the reason."""

ASKED_PREFIX = "asked-"

Zero = jax.Array
"""A number that is always 0, and known only once an earlier array is."""


def asked(name: str) -> AbstractContextManager:
    """Marks the collectives made inside with their reason, for `meshpar.audit`.

    Args:
        name: A name in `ASKED`.
    """
    if name not in ASKED:
        raise KeyError(name)
    return jax.named_scope(ASKED_PREFIX + name)


def zero_from(x: jax.Array) -> Zero:
    """0, as soon as `x` (this device's part, any floating dtype) is there."""
    first = lax.slice(x.reshape(-1), (0,), (1,)).astype(jnp.float32).reshape(())
    bits = lax.bitcast_convert_type(first, jnp.uint32)
    # XLA does not see that one bit shifted out leaves nothing; NaN cannot leak either.
    sign = lax.shift_right_logical(bits, jnp.uint32(31))
    return lax.shift_right_logical(sign, jnp.uint32(1)).astype(jnp.float32)


def zero_on_parts(x: jax.Array, spec: PartitionSpec) -> Zero:
    """`zero_from` of an array that lies so over automatic mesh axes."""
    mesh_axes = {
        axis
        for entry in spec
        if entry is not None
        for axis in ((entry,) if isinstance(entry, str) else entry)
    }
    return on_parts(
        zero_from,
        x,
        specs=(spec,),
        out_specs=PartitionSpec(),
        mesh_axes=mesh_axes,
    )


def follow(x: jax.Array, earlier: Zero | None) -> jax.Array:
    """`x`, no sooner than what `earlier` was made from; `x` itself if that is None."""
    return x if earlier is None else x + earlier.astype(x.dtype)


def on_parts(
    function: Callable[..., Any],
    *arrays: jax.Array,
    specs: tuple[PartitionSpec, ...],
    out_specs: Any,
    mesh_axes: set[str],
) -> Any:
    """`function` of this device's parts over further mesh axes; plain call if none.

    GSPMD replicates the operand of a collective that is manual over other mesh axes;
    making those manual as well keeps it split over them.
    """
    if not mesh_axes:
        return function(*arrays)
    return jax.shard_map(
        function,
        in_specs=specs,
        out_specs=out_specs,
        axis_names=mesh_axes,
        check_vma=False,
    )(*arrays)
