"""TPUs: each one's facts, and what programs achieve of them, with their sources."""

from __future__ import annotations

from dataclasses import replace

from meshpar.hardware.device import Device, Known
from meshpar.hardware.efficiency import Efficiency

# How each number was got:
#   memory_bytes     What a program can have, for that is what has to fit: what libtpu
#                    (of jax 0.10.2, 2026-11-22) calls available when it refuses a
#                    program that is too large. Of a v5e's 16 GiB it keeps 0.25 itself,
#                    of 32 GiB 0.75 (v6e) or 1.25 (v4); Google's pages say 95 GB (v5p).
#   peak_flops, memory_bytes_per_s, link_bytes_per_s, network_bytes_per_s
#                    Cloud TPU documentation, system architecture pages (read 2025): ICI
#                    per chip over its 6 (v4, v5p) or 4 (v5e, v6e) ports. The network is
#                    a host's NICs over its chips: 2 x 100 Gb/s over 8 (v5e), 4 x 200
#                    over 8 (v6e); 200 Gb/s over 4 chips (v4, v5p).
#   pod_devices      Most chips of one slice: a v4 pod 4096, a v5e or v6e pod 256, of a
#                    v5p pod's 8960 a job has at most 6144 (the same pages).
#   host_bytes_per_s "How to Scale Your Model" (Austin et al. 2025, chapter 2).
#
# TPUs run one compiled program: no launches, and engines of their own move what
# collectives send. No published step times calibrate these: taken, with the fractions
# of ICI and matmuls that "How to Scale Your Model" (Austin et al. 2025) calls usual.
_TPU = Efficiency(
    matmul=0.9,
    attention=0.6,
    attention_head_dim=24,
    memory=0.85,
    link=0.9,
    network=0.8,
    hop_s=1e-6,
    network_hop_s=30e-6,
    launch_s=0.0,
    spread=0.001,
)


LANES = 128
"""Places of an array's last dim that XLA:TPU lays side by side; fewer take as much."""

HEAP_OVER_ARRAYS = 1.17
"""Room of arrays of ever coarser volumes, gaps between them included, over their bytes.

Of five U-Nets compiled for a v5p: 1.16 to 1.21 (`docs/guides/volumes.md`).
"""


def _peaks(bf16: float) -> dict[str, float]:
    """FLOP/s by dtype: fp32 at JAX's default precision is one bf16 pass of the MXU."""
    return {"bf16": bf16, "fp32": bf16}


def _gib(size: float) -> int:
    return round(size * 2**30)


_V4 = Device(
    name="tpu-v4",
    peak_flops=_peaks(275e12),
    memory_bytes=_gib(30.75),
    memory_bytes_per_s=1.2e12,
    domain_devices=4,
    link_bytes_per_s=50e9,
    network_bytes_per_s=6.25e9,
    host_bytes_per_s=16e9,
    torus_dims=3,
    wraps=4,
    pod_devices=4096,
    platform="tpu",
    efficiency=_TPU,
)
_V5P = replace(
    _V4,
    name="tpu-v5p",
    peak_flops=_peaks(459e12),
    memory_bytes=_gib(95.74),
    memory_bytes_per_s=2.765e12,
    link_bytes_per_s=100e9,
    pod_devices=6144,
)
_V5E = Device(
    name="tpu-v5e",
    peak_flops=_peaks(197e12),
    memory_bytes=_gib(15.75),
    memory_bytes_per_s=819e9,
    domain_devices=8,
    link_bytes_per_s=50e9,
    network_bytes_per_s=3.125e9,
    host_bytes_per_s=16e9,
    torus_dims=2,
    wraps=16,
    pod_devices=256,
    platform="tpu",
    efficiency=_TPU,
)
_V6E = replace(
    _V5E,
    name="tpu-v6e",
    peak_flops=_peaks(918e12),
    memory_bytes=_gib(31.25),
    memory_bytes_per_s=1.638e12,
    link_bytes_per_s=100e9,
    network_bytes_per_s=12.5e9,
    host_bytes_per_s=32e9,
)


TPUS = (
    Known(_V4, "TPU v4", other_name="v4", target="tpu:v4"),
    Known(_V5E, "TPU v5 lite", other_name="v5e", target="tpu:v5e"),
    Known(_V5P, "TPU v5", other_name="v5p", target="tpu:v5p"),
    Known(_V6E, "TPU v6 lite", other_name="v6e", target="tpu:v6e"),
)
