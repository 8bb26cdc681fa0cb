"""AMD's accelerators, with the sources of their numbers.

How each number was got:
    peak_flops       AMD's data sheets (MI300X 2023-12, MI325X 2024-10, MI355X 2025-06),
                     dense. fp32 is that of their matrix cores, as no TF32 stands in
                     for it: an MI355X has none.
    memory_bytes     What ROCm reports (`hip mem usage` in logs of Primus, 2025-11 and
                     2026-02): 191.98, 255.98 and 287.98 GiB.
    memory_bytes_per_s, host_bytes_per_s, network_bytes_per_s
                     The same data sheets, PCIe gen 5 x16, and a 400 Gb/s port each.
    link_bytes_per_s Seven links to the other devices of a host, without a switch: 64
                     GB/s a direction each (MI300X, MI325X), 76.8 (MI355X).
    link             RCCL's all-reduce on an Azure ND MI300X v5: a bus bandwidth of
                     316.8 GB/s (AI-benchmarking-guide, `ND_MI300X_v5_results.md`).
    memory           Its copy there: 4.11 of 5.3 TB/s.
    attention        Its FlashAttention-2 there: 328.6 TFLOP/s with heads of 64, 8,192
                     tokens; how it grows with heads is taken from an A100's.
    matmul           Fitted to one step of Llama 3.1 8B in bf16 each, on eight MI300X
                     and on eight MI325X (the rows that `meshpar plan --validate`
                     marks); six other rows, two of them in fp8, test them.
                     `torch.matmul` reached 493 to 546 TFLOP/s on an MI300X, 0.38 to
                     0.42 of its peak (ROCm/TransformerEngine, issue 73). An MI325X has
                     the same cores, and may draw 1,000 W instead of 750.
    launch_s, collective_cores, network, hop_s, network_hop_s, spread
                     Taken: as an A100's, or a little less.
"""

from __future__ import annotations

from dataclasses import replace

from meshpar.hardware.attention_kernels import Kernel
from meshpar.hardware.device import Device, Efficiency, Known

_COMPOSABLE = Kernel(0.346, 24)
_CDNA3 = Efficiency(
    matmul=0.405,
    attention=_COMPOSABLE.whole,
    attention_head_dim=_COMPOSABLE.head_dim,
    memory=0.78,
    link=0.7,
    network=0.9,
    hop_s=3.4e-6,
    network_hop_s=20e-6,
    launch_s=4e-6,
    spread=0.003,
    collective_cores=0.1,
)
_MI300X = Device(
    name="mi300x-192gb",
    peak_flops={"bf16": 1307.4e12, "fp32": 163.4e12, "fp8": 2614.9e12},
    memory_bytes=206_141_650_000,
    memory_bytes_per_s=5.3e12,
    domain_devices=8,
    link_bytes_per_s=7 * 64e9,
    meshed=True,
    network_bytes_per_s=50e9,
    host_bytes_per_s=64e9,
    efficiency=_CDNA3,
    fused_attention="composable-kernel",
    attention_kernels={"composable-kernel": _COMPOSABLE},
    reserve=0.08,  # as a GPU's of NVIDIA
)
_MI325X = replace(
    _MI300X,
    name="mi325x-256gb",
    memory_bytes=round(255.98 * 2**30),
    memory_bytes_per_s=6e12,
    efficiency=replace(_CDNA3, matmul=0.48),
)
_MI355X = replace(
    _MI325X,
    name="mi355x-288gb",
    peak_flops={"bf16": 2.5e15, "fp32": 157.3e12, "fp8": 5e15},
    memory_bytes=round(287.98 * 2**30),
    memory_bytes_per_s=8e12,
    link_bytes_per_s=7 * 76.8e9,
    taken_from="mi325x-256gb",
)

AMD = (
    Known(_MI300X, "MI300X", other_name="mi300x"),
    Known(_MI325X, "MI325X", other_name="mi325x"),
    Known(_MI355X, "MI355X", other_name="mi355x"),
)
"""AMD's devices. XLA compiles for none of them without the device."""

AMD_ASSUMED = {
    "mi300x-192gb": ("network",),
    "mi325x-256gb": ("attention", "memory", "link", "network"),
}
"""Name of a device -> its fractions that are taken."""
