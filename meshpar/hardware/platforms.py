"""Platforms: what differs between CPUs, GPUs and TPUs, one entry each.

Code that depends on the kind of device asks one of these facts, never the name. XLA's
options for a step on each platform are one table of rows, each with its reason.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import KW_ONLY, dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any

from meshpar.errors import InputError

LEAST_TOKENS = 2048
"""Fewest tokens of a part of the batch. Below it the 7 hops of a gather over 8 H100
(24 us) take as long as its bytes do (2048 x 4096 in bf16: 42 us), and its matmuls no
longer fill the device."""


LEAST_CHUNKED_TOKENS = 8192
"""The same where matmuls run in chunks of tokens, of which a part has as many as the
whole: in two parts of 4,096 tokens the matmuls of llama3-8b, which read their weights
for each chunk, took 6 % longer on H100s, and no more was hidden."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One kind of device, and how programs for it differ.

    Args:
        name: JAX's name of it.
        is_host: True for the host's own processor: its memory is the host's, its
            devices share the cores, and one process can emulate several.
        overlaps_collectives: True if its compiler starts collectives ahead of their
            use, beside other kernels.
        overlaps_all_to_alls: True if these are among them. XLA:TPU waits for each one
            where it stands (libtpu of jax 0.10.2).
        overlaps_last_microbatch: True if sums of gradients are reduced beside the last
            microbatch's backward by default. XLA:TPU hid none of it, and needed more
            memory (`docs/guides/audit.md`).
        sums_16_bits: True if its compiler adds up 16-bit values in partly manual
            regions and in loops.
        has_ragged_all_to_all: True if its compiler has that collective.
        has_torus: True if links between neighbours join its devices.
        fused_attention: Kernel of `attention_kernels` that attention runs in; empty for
            none.
        max_batch_parts: Most parts of the batch that a block takes one after another,
            so that one hides another's collectives. At the ends of a block the first
            part's gather and the last's scatter stay exposed: of two parts a half, of
            four a quarter.
        chunks_matmuls: True if matmuls of sequence parallelism run in chunks of tokens,
            which devices send one another (`parallel.collective_matmul`).
        lanes: The last dim of an array takes a multiple of so many values.
        heap_over_arrays: Room of arrays of ever coarser volumes, gaps between them
            included, over their bytes.
        scatter_columns: Columns, or a multiple, of a matrix whose rows its compiler
            reduce-scatters in every case that was tried.
        longest_scores: Longest sequence in tokens whose softmax one device keeps for
            the backward where no kernel runs; longer ones use attention in tiles
            (`meshpar.parallel.context.tiles`), whose memory is linear in the sequence.
        largest_tile: Most queries or keys of such a tile. At head_dim 128 a tile of
            1,024 does 4 x 128 x 1024 FLOPs for each score's row of 512 KiB, enough to
            be bound by arithmetic; on a CPU the scores of 256 stay in its cache.
        probe_size: Rows of the square matmul that times one device.
        export_name: `jax.export`'s name of it; empty for the same name.
        compiler_module: Python module that contains its compiler.
        has_own_xla: True if that compiler is another XLA than jaxlib's.
    """

    name: str
    is_host: bool = False
    overlaps_collectives: bool = True
    overlaps_all_to_alls: bool = False
    overlaps_last_microbatch: bool = False
    sums_16_bits: bool = True
    has_ragged_all_to_all: bool = True
    has_torus: bool = False
    fused_attention: str = ""
    max_batch_parts: int = 1
    chunks_matmuls: bool = False
    lanes: int = 1
    heap_over_arrays: float = 1.0
    scatter_columns: int = 1
    longest_scores: int = 8192
    largest_tile: int = 1024
    probe_size: int = 1024
    export_name: str = ""
    compiler_module: str = ""
    has_own_xla: bool = False

    def num_batch_parts(self, num_examples: int, tokens: int) -> int:
        """Parts in which a block takes its batch: a divisor of the examples.

        Args:
            num_examples: Examples of one microbatch on one device.
            tokens: Tokens of all these examples.

        Example:
            >>> gpu = PLATFORMS["gpu"]
            >>> gpu.num_batch_parts(4, 4 * 4096), gpu.num_batch_parts(1, 4096)
            (2, 1)
        """
        least = LEAST_CHUNKED_TOKENS if self.chunks_matmuls else LEAST_TOKENS
        most = min(self.max_batch_parts, tokens // least)
        divisors = (parts for parts in range(most, 1, -1) if num_examples % parts == 0)
        return next(divisors, 1)

    @property
    def missing_modules(self) -> list[str]:
        """Modules that compiling for its absent devices needs, and that are missing."""
        needed = (self.compiler_module, "flatbuffers")
        return [module for module in needed if not _is_importable(module)]


def _is_importable(module: str) -> bool:
    try:
        return find_spec(module) is not None
    except (ImportError, ValueError):
        return False


_GPU = Platform(
    name="gpu",
    overlaps_all_to_alls=True,
    overlaps_last_microbatch=True,
    fused_attention="cudnn",
    max_batch_parts=4,
    chunks_matmuls=True,
    probe_size=8192,
    export_name="cuda",
    compiler_module="jax_plugins.xla_cuda13",
)
_TPU = Platform(
    name="tpu",
    has_torus=True,
    fused_attention="splash",
    max_batch_parts=4,
    lanes=128,
    # Five U-Nets compiled for a v5p: 1.16 to 1.21 (`docs/guides/volumes.md`).
    heap_over_arrays=1.17,
    scatter_columns=2048,
    probe_size=8192,
    compiler_module="libtpu",
    has_own_xla=True,
)
_CPU = Platform(
    name="cpu",
    is_host=True,
    overlaps_collectives=False,
    sums_16_bits=False,  # XLA:CPU aborts on them
    has_ragged_all_to_all=False,
    longest_scores=512,
    largest_tile=256,
    probe_size=256,
    compiler_module="jax",
)

PLATFORMS = {each.name: each for each in (_GPU, _TPU, _CPU)}
"""Platforms by JAX's name."""


def platform_named(name: str) -> Platform:
    """Return the platform of JAX's name; a plain one if it is none of ours."""
    return PLATFORMS.get(name) or Platform(name=name)


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
        if_by_host: True if only steps that send tokens once to each host have it.
        if_several_kinds: True if only meshes of several kinds of devices have it.
    """

    platform: str
    name: str
    value: Value
    why: str
    _: KW_ONLY
    if_prefetching: bool = False
    if_sequence_parallel: bool = False
    if_by_host: bool = False
    if_several_kinds: bool = False


SPARSE_CORE_OFFLOAD = "xla_tpu_enable_sparse_core_collective_offload"
"""Beginning of options that end with a kind of collective, such as `_all_gather`."""

_tpu = partial(CompilerOption, "tpu")
_prefetching_gpu = partial(CompilerOption, "gpu", if_prefetching=True)
_sequence_parallel_gpu = partial(CompilerOption, "gpu", if_sequence_parallel=True)
_prefetching_beside_tensor = partial(
    CompilerOption, "gpu", if_prefetching=True, if_sequence_parallel=True
)

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
    _sequence_parallel_gpu(
        "xla_gpu_all_gather_combine_threshold_bytes",
        0,
        "gathers of two parts of the batch stay apart: joined, both wait for the later "
        "part, and no matmul is left to stand beside them (`model.block_run`)",
    ),
    _sequence_parallel_gpu(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        0,
        "the same of scatters",
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
    _prefetching_gpu(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        2,
        "two collectives under way, such as one over the batch axes and one over "
        "`tensor`, whose links are others: one after another, matmuls had passed "
        "before half of them began",
    ),
    CompilerOption(
        "gpu",
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        8,
        "beside the matmuls of a part of the experts' rows, others go between hosts "
        "and inside of them, there and back: with two under way at a time, the matmuls "
        "of most parts stood beside one of these",
        if_by_host=True,
    ),
    CompilerOption(
        "gpu",
        "xla_gpu_enable_analytical_sol_latency_estimator",
        False,
        "programs of several kinds of GPU start their collectives in one order: with "
        "a kind's own latencies those of an H100 and an A100 differ, and wait for each "
        "other for ever (jax 0.10.2)",
        if_several_kinds=True,
    ),
    _tpu(
        "xla_jf_spmd_threshold_for_windowed_einsum_mib",
        1_000_000,
        "no matmul is cut into hops around `tensor`, each over one link of a chip: a "
        "gather takes all of them, and parts of the batch stand beside it",
        if_sequence_parallel=True,
    ),
    _sequence_parallel_gpu(
        "xla_gpu_dot_merger_threshold_mb",
        0,
        "matmuls of a weight and of chunks of tokens stay apart: joined, all wait for "
        "the chunk that arrives last (`parallel.collective_matmul`)",
    ),
    _sequence_parallel_gpu(
        "xla_gpu_collective_permute_combine_threshold_bytes",
        0,
        "the same of the sends of those chunks",
    ),
    _sequence_parallel_gpu(
        "xla_gpu_experimental_parallel_collective_overlap_limit",
        3,
        "a gather, a scatter and a small sum under way, beside the sends of chunks, "
        "which do not count",
    ),
    _prefetching_beside_tensor(
        "xla_gpu_reduce_scatter_combine_threshold_bytes",
        1 << 29,
        "a block's gradients are one reduce-scatter, as its parameters are one gather: "
        "of one sequence a device they take longer than its matmuls",
    ),
    _prefetching_beside_tensor(
        "xla_gpu_experimental_collective_start_as_early_as_possible",
        True,
        "those start at the beginning of a block, where a barrier has their operands "
        "ready (`parallel.prefetch`), not as late as a faster network would allow",
    ),
)
"""Rows of all platforms; of one name the last row that applies counts."""


def compiler_options_for(
    platform: str,
    given: Mapping[str, Any] | None = None,
    *,
    prefetching: bool = False,
    sequence_parallel: bool = False,
    by_host: bool = False,
    several_kinds: bool = False,
) -> dict[str, Any]:
    """Return the options of a step: the platform's rows, and the caller's over them.

    Args:
        platform: `cpu`, `gpu` or `tpu`; others have no rows.
        given: The caller's name -> value; None as a value leaves that name out.
        prefetching: True if the step's blocks prefetch.
        sequence_parallel: True if the layout splits the residual stream's sequence.
        by_host: True if devices that share experts are on several hosts.
        several_kinds: True if the mesh has devices of several kinds.

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
        and (by_host or not row.if_by_host)
        and (several_kinds or not row.if_several_kinds)
    }
    return {
        name: value for name, value in {**rows, **given}.items() if value is not None
    }
