"""The library's own collectives: their reasons, dtypes and manual mesh axes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.xla_metadata import set_xla_metadata

from meshpar.hardware.platforms import platform_named

ASKED = {
    "parameter_gather": ("all-gather", "FSDP gather of parameters before their use"),
    "gradient_scatter": ("reduce-scatter", "FSDP reduce-scatter of gradients"),
    "gradient_gather": ("all-gather", "summed gradients, of the devices' shares"),
    "gradient_reduction": ("all-reduce", "gradient reduction over the batch axes"),
    "host_scatter": ("reduce-scatter", "gradients summed inside a host, a share each"),
    "host_gather": ("all-gather", "summed gradients, of the host's shares"),
    "outer_gradient": ("all-reduce", "outer gradient, averaged over the replicas"),
    "optimizer": ("any", "an optimizer that needs more than its own shard"),
    "owner_dispatch": (
        "all-to-all",
        "shards of matrices, to the devices that own them",
    ),
    "owner_return": ("all-to-all", "owners' matrices, back to the shards"),
    "owner_gather": ("all-gather", "matrices of all owners, to all copies"),
    "uneven_rows": ("all-gather", "rows of the batch, for uneven parts of data"),
    "loss_sum": ("all-reduce", "loss and weights summed over the global batch"),
    "batch_sum": ("all-reduce", "statistics of the global batch"),
    "gradient_norm": ("all-reduce", "global norm of the gradients"),
    "input_gradient": ("all-reduce", "gradient of an input, from the ranks' shares"),
    "stage_forward": ("collective-permute", "activations to the next stage"),
    "stage_backward": ("collective-permute", "gradients to the stage before"),
    "embed_gather": ("all-gather", "embedding shared by the ranks, to the first stage"),
    "embed_scatter": ("reduce-scatter", "embedding's gradient, shared by the ranks"),
    "head_scatter": ("reduce-scatter", "last stage's output, shared by the ranks"),
    "head_gather": ("all-gather", "loss's gradient, back to the last stage"),
    "token_gather": ("collective-permute", "tokens to a column-parallel matmul"),
    "token_scatter": ("collective-permute", "partial sums of a row-parallel matmul"),
    "vocab_lookup": ("all-reduce", "embedding rows from a split vocabulary"),
    "vocab_loss": ("all-reduce", "cross-entropy over a split vocabulary"),
    "head_input_gather": ("all-gather", "sequence gathered before the head's matmul"),
    "head_input_gradient": ("all-reduce", "gradient from a head split by vocabulary"),
    "head_input_gradient_scatter": (
        "reduce-scatter",
        "gradient from a head split by vocabulary, scattered along the sequence",
    ),
    "expert_dispatch": ("all-to-all", "tokens to their experts"),
    "expert_combine": ("all-to-all", "experts' results back to the tokens"),
    "expert_combine_gradient": ("all-to-all", "gradients of results, to the experts"),
    "expert_dispatch_gradient": ("all-to-all", "gradients of tokens, from the experts"),
    "expert_dispatch_host": (
        "collective-permute",
        "tokens to the hosts of their experts",
    ),
    "expert_combine_host": (
        "collective-permute",
        "sums of experts' results back to the tokens' hosts",
    ),
    "expert_combine_gradient_host": (
        "collective-permute",
        "gradients of results, to the hosts of the experts",
    ),
    "expert_dispatch_gradient_host": (
        "collective-permute",
        "sums of tokens' gradients, from the hosts of the experts",
    ),
    "expert_rounds": ("all-reduce", "rounds that the fullest device needs"),
    "expert_sum": ("all-reduce", "parts of split experts added up"),
    "context_ring": ("collective-permute", "keys and values along the ring"),
    "context_ring_gradient": (
        "collective-permute",
        "gradients of keys and values along the ring",
    ),
    "context_gather": ("all-gather", "keys and values of the whole sequence"),
    "context_scatter": ("reduce-scatter", "gradients of gathered keys and values"),
    "sequence_gather": ("all-gather", "choices of tokens, of the whole sequence"),
    "sequence_sum": ("all-reduce", "counts over a split sequence"),
    "context_heads": ("all-to-all", "a split sequence for split heads, or back"),
    "cache_softmax": ("all-reduce", "softmax over a sequence whose cache is split"),
    "last_stage": ("all-reduce", "the last stage's output, to every rank"),
    "fft": ("all-to-all", "asked by fft: a split dim made whole, or back"),
    "triangle": ("all-to-all", "asked by a triangle: pairs split otherwise, or back"),
    "triangle_bias": ("all-gather", "asked by a triangle: some of all pairs' bias"),
    "grid_halo": ("collective-permute", "asked by a convolution: halo of the grid"),
    "kernel_gradient": ("all-reduce", "gradient of a kernel, over split space"),
    "table_ids": ("all-to-all", "ids to the devices that hold their rows"),
    "table_ids_gather": (
        "all-gather",
        "ids to all devices, of tables split by columns",
    ),
    "table_rows": ("all-to-all", "rows back to the devices that look them up"),
    "table_row_gradients": ("all-to-all", "rows' gradients, to the holders"),
    "table_rounds": ("all-reduce", "how much of the ids goes in a round"),
    "table_replicas": ("all-gather", "ids and gradients of replicated tables' rows"),
    "table_norms": ("all-reduce", "squares of gradients split by columns"),
    "table_batch_gather": ("all-gather", "looked up rows, over the axes beside batch"),
    "token_sum": ("all-reduce", "loss and table's gradient over a split sequence"),
}
"""Kind of each of the library's own collectives, and its reason in words."""

ASKED_PREFIX = "asked-"


def asked(name: str) -> AbstractContextManager:
    """Mark the collectives made inside with their reason, for `meshpar.audit`.

    Args:
        name: A name in `ASKED`.

    Raises:
        KeyError: It is not there.
    """
    if name not in ASKED:
        raise KeyError(name)
    return jax.named_scope(ASKED_PREFIX + name)


def own_lane() -> AbstractContextManager:
    """Let the permutes made inside run beside other collectives on GPUs.

    XLA:GPU schedules one collective at a time, or as many as an option says, and runs
    all on one stream: a short permute waits for a long gather that started before it.
    These attributes name another resource of its scheduler and another stream of its
    runtime (read from XLA's source; the scheduled program shows the first). Other
    compilers ignore them.
    """
    return set_xla_metadata(
        _xla_gpu_collective_stream="p2p", _xla_stream_annotation="1"
    )


RUNNING_TIMES = "running-times-"


def running_times(number: int) -> AbstractContextManager:
    """Tell `meshpar.audit` how often a loop made inside runs.

    For one whose devices differ in that: the number of the device with the most work.
    For one that only uneven data runs: 0.
    """
    return jax.named_scope(f"{RUNNING_TIMES}{number}")


def sum_dtype(dtype: Any, platform: str) -> Any:
    """Return the dtype in which devices of a platform sum values of `dtype`.

    XLA:CPU aborts on sums of 16 bits in a partly manual region.

    Example:
        >>> sum_dtype(jnp.bfloat16, "cpu").__name__
        'float32'
        >>> sum_dtype(jnp.bfloat16, "tpu").__name__
        'bfloat16'
    """
    if platform_named(platform).sums_16_bits:
        return dtype
    narrow = jnp.dtype(dtype).itemsize < 4 and jnp.issubdtype(dtype, jnp.floating)
    return jnp.float32 if narrow else dtype


def summed(tree: Any, mesh_axes: Any, platform: str) -> Any:
    """Sum arrays over manual mesh axes by one all-reduce; keep their dtypes.

    Args:
        tree: This device's arrays, or numbers.
        mesh_axes: Name of a mesh axis, or names of several.
        platform: Whose `sum_dtype` they are added up in.
    """
    tree = jax.tree.map(jnp.asarray, tree)
    wide = jax.tree.map(lambda x: x.astype(sum_dtype(x.dtype, platform)), tree)
    found = jax.lax.psum(wide, mesh_axes)
    return jax.tree.map(lambda x, like: x.astype(like.dtype), found, tree)


def on_parts(
    function: Callable[..., Any],
    *arrays: jax.Array,
    specs: tuple[Any, ...],
    out_specs: Any,
    mesh_axes: set[str],
) -> Any:
    """Run a function on this device's parts over further mesh axes, if there are any.

    GSPMD replicates the operand of a collective that is manual over other mesh axes;
    making those manual as well keeps it split over them.

    Args:
        function: Takes and returns this device's parts.
        arrays: Its arguments.
        specs: How each lies over those mesh axes, a tree of `PartitionSpec`.
        out_specs: How its result does.
        mesh_axes: The further mesh axes.
    """
    if not mesh_axes:
        return function(*arrays)
    return jax.shard_map(
        function,
        in_specs=specs,
        out_specs=out_specs,
        axis_names=made_manual(mesh_axes),
        check_vma=False,
    )(*arrays)


def made_manual(mesh_axes: set[str]) -> set[str]:
    """Return the mesh axes to make manual in a nested region that needs `mesh_axes`.

    From jax 0.11 on XLA ends the process ("Manual axes must be sorted by mesh axis
    index") where an outer region's axis follows one of an inner's in the mesh, unless
    all are manual: then all that are left are, which hold copies there.
    """
    mesh = jax.sharding.get_abstract_mesh()
    order = [
        at
        for manual in (set(mesh.manual_axes), mesh_axes)
        for at, axis in enumerate(mesh.axis_names)
        if axis in manual
    ]
    if jax.__version_info__ < (0, 11) or order == sorted(order):
        return mesh_axes
    return set(mesh.axis_names) - set(mesh.manual_axes)
