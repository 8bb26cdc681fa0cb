"""XLA's options for a step on each platform, and why: one table of rows.

A step of `make_train_step` is compiled with the rows of its platform. The caller's
value of the same name replaces a row's, and None leaves the name out:

    make_train_step(..., compiler_options={"xla_tpu_...": None})

Every row changed a program compiled with it, for TPU v5p or the H100; other generations
were not compiled. docs/guides/audit.md has the shares of communication that the rows
hide. CPUs have no rows: XLA:CPU starts no collective ahead.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

from meshpar.errors import InputError

Value = bool | int | str


@dataclass(frozen=True)
class CompilerOption:
    """One option of a platform's compiler.

    Args:
        platform: `gpu` or `tpu`.
        name: XLA's name of it.
        value: Value for a step.
        why: Its effect on a program.
        if_prefetching: True if only steps whose blocks prefetch have it
            (`Layout.fsdp_prefetch`).
        if_sequence_parallel: True if only layouts that split the residual stream's
            sequence over `tensor` have it.
    """

    platform: str
    name: str
    value: Value
    why: str
    _: KW_ONLY
    if_prefetching: bool = False
    if_sequence_parallel: bool = False


SPARSE_CORE_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
"""Beginning of options that end with a kind of collective, such as `_all_gather`."""

_tpu = partial(CompilerOption, "tpu")
_prefetching_gpu = partial(CompilerOption, "gpu", if_prefetching=True)
_sequence_parallel_gpu = partial(CompilerOption, "gpu", if_sequence_parallel=True)

# The other way, a TensorCore that moves an all-gather inside of its matmuls
# (`xla_tpu_enable_async_collective_fusion_fuse_all_gather` and its kin), is what v5e
# does by default; elsewhere the libtpu of jax 0.12 refuses it: "might lead to incorrect
# results". On GPUs XLA starts each collective by itself, one at a time; with
# `xla_gpu_enable_latency_hiding_scheduler`, `xla_gpu_threshold_for_windowed_einsum_mib`
# or `xla_gpu_multi_streamed_windowed_einsum` it compiled the same program (2026-11-22).
COMPILER_OPTIONS: tuple[CompilerOption, ...] = (
    _tpu(
        f"{SPARSE_CORE_OFFLOAD}_all_gather",
        True,
        "the SparseCores of v5p and v6e move all-gathers while the TensorCore computes",
    ),
    _tpu(
        f"{SPARSE_CORE_OFFLOAD}_3d_all_gather",
        True,
        "and those over all three dims of a torus",
    ),
    _tpu(
        f"{SPARSE_CORE_OFFLOAD}_reduce_scatter",
        True,
        "the same of reduce-scatters",
    ),
    _tpu(
        f"{SPARSE_CORE_OFFLOAD}_nd_reduce_scatter",
        True,
        "and those over several dims of a torus, which are all-reduces of twice the "
        "bytes without it",
    ),
    _tpu(
        f"{SPARSE_CORE_OFFLOAD}_all_reduce",
        True,
        "the same of all-reduces, and of all-gathers over a slice that XLA turns into "
        "them",
    ),
    _tpu(
        "xla_enable_async_all_gather",
        True,
        "all-gathers have a start and a done, which the next row asks for",
    ),
    _tpu(
        "xla_tpu_prefer_async_allgather_to_allreduce",
        True,
        "all-gathers over all of a slice stay all-gathers: XLA:TPU makes all-reduces "
        "of twice the bytes of them otherwise",
    ),
    _prefetching_gpu(
        "xla_gpu_all_gather_combine_threshold_bytes",
        1 << 29,
        "a block's parameters, up to 512 MiB, are one all-gather: of several, one "
        "after another, the scheduler left the first ones beside nothing",
    ),
    _prefetching_gpu(
        "xla_gpu_enable_all_gather_combine_by_dim",
        False,
        "also those that are split along different dims",
    ),
    _tpu(
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        1_000_000,
        "no matmul is cut into hops around `tensor`, each over one link of a chip: a "
        "gather takes all of them, and parts of the batch stand beside it",
        if_sequence_parallel=True,
    ),
    _sequence_parallel_gpu(
        "xla_gpu_all_gather_combine_threshold_bytes",
        0,
        "gathers of two parts of the batch stay apart: joined, both wait for the later "
        "part, and no matmul is left to stand beside them (`model.batch_parts`)",
    ),
    _sequence_parallel_gpu(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        0,
        "the same of scatters",
    ),
)
"""Rows of all platforms; of one name the last row that applies counts."""


def compiler_options_for(
    platform: str,
    given: Mapping[str, Any] | None = None,
    *,
    prefetching: bool = False,
    sequence_parallel: bool = False,
) -> dict[str, Any]:
    """Return the options of a step: the platform's rows, and the caller's over them.

    Args:
        platform: `cpu`, `gpu` or `tpu`; others have no rows.
        given: The caller's name -> value; None as a value leaves that name out.
        prefetching: True if the step's blocks prefetch.
        sequence_parallel: True if the layout splits the residual stream's sequence.

    Raises:
        InputError: `given` is no mapping of names.

    Example:
        >>> compiler_options_for("cpu", {"xla_cpu_enable_fast_math": False})
        {'xla_cpu_enable_fast_math': False}
        >>> name = "xla_tpu_enable_sparse_core_collective_offload_all_gather"
        >>> compiler_options_for("tpu")[name]
        True
        >>> name in compiler_options_for("tpu", {name: None})
        False
    """
    given = {} if given is None else given
    if not isinstance(given, Mapping) or not all(isinstance(n, str) for n in given):
        raise InputError(
            f"compiler_options={given!r}: give a dict of XLA's names and values, such "
            'as {"xla_gpu_enable_latency_hiding_scheduler": True}',
            key="step.wrong_compiler_options",
        )
    rows = {
        row.name: row.value
        for row in COMPILER_OPTIONS
        if row.platform == platform
        and (prefetching or not row.if_prefetching)
        and (sequence_parallel or not row.if_sequence_parallel)
    }
    return {
        name: value for name, value in {**rows, **given}.items() if value is not None
    }
