"""Platforms: what differs between CPUs, GPUs and TPUs, one entry each.

Code that depends on the kind of device asks one of these facts, never the name.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib.util import find_spec

LEAST_TOKENS = 2048
"""Fewest tokens of a part of the batch. Below it the 7 hops of a gather over 8 H100
(24 us) take as long as its bytes do (2048 x 4096 in bf16: 42 us), and its matmuls no
longer fill the device."""


@dataclass(frozen=True, kw_only=True)
class Platform:
    """One kind of device, and how programs for it differ.

    Args:
        name: JAX's name of it.
        is_host: True for the host's own processor: its memory is the host's, its
            devices share the cores, and one process can emulate several.
        overlaps_collectives: True if its compiler starts collectives ahead of their
            use, beside other kernels.
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
    sums_16_bits: bool = True
    has_ragged_all_to_all: bool = True
    has_torus: bool = False
    fused_attention: str = ""
    max_batch_parts: int = 1
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
            (4, 1)
        """
        most = min(self.max_batch_parts, tokens // LEAST_TOKENS)
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
    fused_attention="cudnn",
    max_batch_parts=4,
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
