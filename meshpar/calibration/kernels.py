"""Trials of what one device does alone: matmuls by shape, streams, tiny kernels."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import jax
import jax.numpy as jnp
from jax import lax

from meshpar.calibration.trial import Trial, mesh_of, trial

TINY_OPS = 16
"""Kernels of one round of the launch trial."""

_MIB = 2**20
_ROW = 512
_DTYPES = {"fp32": jnp.float32, "bf16": jnp.bfloat16}


@dataclass(frozen=True, kw_only=True)
class KernelSizes:
    """What is worth measuring on a kind of device.

    Args:
        matmuls: (rows, inner, columns) of each shape.
        stream_bytes: Of the arrays that elementwise kernels read and write.
        flops: Of one run of a matmul trial, about.
    """

    matmuls: tuple[tuple[int, int, int], ...]
    stream_bytes: tuple[int, ...]
    flops: float


# A CPU's devices share its cores and caches; what an accelerator streams has to be
# larger than its caches (50 MB of L2 on an H100).
CPU_SIZES = KernelSizes(
    matmuls=(
        (64, 64, 256),
        (256, 128, 384),
        (256, 256, 1024),
        (512, 256, 256),
        (512, 512, 1536),
    ),
    stream_bytes=(_MIB // 4, _MIB, 4 * _MIB),
    flops=4e8,
)
ACCELERATOR_SIZES = KernelSizes(
    matmuls=(
        (1024, 1024, 4096),
        (4096, 2048, 8192),
        (8192, 4096, 14_336),
        (8192, 8192, 8192),
        (16_384, 8192, 28_672),
    ),
    stream_bytes=(128 * _MIB, 512 * _MIB),
    flops=2e14,
)


def matmul_trial(
    devices: Sequence[jax.Device],
    shape: tuple[int, int, int],
    dtype: str,
    sizes: KernelSizes,
) -> Trial:
    """A matmul of that shape and one back; half of its time is one matmul's."""
    rows, inner, columns = shape
    kind = _DTYPES[dtype]
    there = jnp.full((inner, columns), 1 / inner, kind)
    back = jnp.full((columns, inner), 1 / columns, kind)
    flops = 4 * rows * inner * columns
    return trial(
        f"matmul {rows} x {inner} x {columns} {dtype}",
        mesh_of(devices, 1),
        lambda x, there, back: (x @ there) @ back,
        [jnp.ones((rows, inner), kind), there, back],
        repeats=max(2, min(512, round(sizes.flops / flops))),
    )


def stream_trial(devices: Sequence[jax.Device], num_bytes: int) -> Trial:
    """A kernel that reads and writes so many bytes, half of them each."""
    values = num_bytes // 2 // 4
    return trial(
        f"stream of {num_bytes / _MIB:g} MiB",
        mesh_of(devices, 1),
        lambda x: x * 0.5 + 0.5,
        [jnp.ones(values, jnp.float32)],
        repeats=max(8, min(256, 64 * _MIB // num_bytes)),
    )


def elementwise_trials(devices: Sequence[jax.Device], num_bytes: int) -> list[Trial]:
    """The elementwise kernels of a block, each of which reads and writes so much."""
    rows = num_bytes // 2 // 4 // _ROW
    return [
        trial(
            f"{name} of {num_bytes / _MIB:g} MiB",
            mesh_of(devices, 1),
            kernel,
            [jnp.ones((rows, _ROW), jnp.float32)],
            repeats=max(4, min(64, 16 * _MIB // num_bytes)),
        )
        for name, kernel in (
            ("norm", _norm),
            ("softmax", jax.nn.softmax),
            ("activation", jax.nn.silu),
        )
    ]


def _norm(x: jax.Array) -> jax.Array:
    return x * lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + 1e-6)


def launch_trial(devices: Sequence[jax.Device]) -> Trial:
    """`TINY_OPS` kernels of next to no work, one behind the other."""

    def tiny(x: jax.Array, w: jax.Array) -> jax.Array:
        for _ in range(TINY_OPS):
            x = x @ w
        return x

    small = jnp.full((8, 8), 1 / 8)
    return trial("tiny kernels", mesh_of(devices, 1), tiny, [small, small], repeats=64)


def attention_trial(device: Sequence[jax.Device], head_dim: int, seq: int) -> Trial:
    """Fused causal attention of one sequence, 2048 wide, in bf16."""
    heads = 2048 // head_dim
    query = jnp.ones((1, seq, heads, head_dim), jnp.bfloat16)
    return trial(
        f"attention of {heads} heads of {head_dim}, {seq} tokens",
        mesh_of(device, 1),
        lambda q, k: jax.nn.dot_product_attention(
            q, k, k, is_causal=True, implementation="cudnn"
        ),
        [query, query],
        repeats=32,
    )
