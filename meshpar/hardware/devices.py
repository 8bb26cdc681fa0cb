"""Known devices by each of their names, with the sources of their numbers.

A new device is one entry of `_GPUS`, `_TPUS` or `amd_devices.AMD`.
"""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

from meshpar.hardware.amd_devices import AMD, AMD_ASSUMED
from meshpar.hardware.attention_kernels import (
    AMPERE,
    CUDNN_AMPERE,
    CUDNN_HOPPER,
    HOPPER,
)
from meshpar.hardware.device import Device, Efficiency, Known

# How each number was got:
#   memory_bytes     What a program can have, its CUDA context included, for that is
#                    what has to fit: what CUDA reports, as OpenXLA's target
#                    configurations have it (`xla/backends/gpu/target_config/specs`,
#                    2026; `meshpar.audit.gpu_targets` holds those compiled for). Data
#                    sheets round: of an H100's 80 GB, 80 GiB of chips, nvidia-smi shows
#                    79.6 GiB and CUDA has 79.1. The H200's there is no card's report:
#                    its data sheet's 141 as GiB. An H800's is taken to be an H100's.
#   matmul           Fitted: A100 to one layer of Megatron-LM (Korthikanti et al. 2022,
#                    table 4, ten times), with what Python adds to a launch there
#                    (`Execution.launch_s`); 0.75 without that fits this layer as well.
#                    H100 to step times of the nanotron grid (the rows that
#                    `meshpar plan --validate` marks). Blackwell to one step each, of
#                    the sustained clocks that their power allows, marked there too:
#                    GB200 to Llama 3.1 405B in bf16, B200 to Llama 3 8B and GB300 to
#                    Llama 3 70B in fp8 with the same fraction of fp8's peak; B300 takes
#                    GB300's. 50 other rows of dense models on Blackwell, in bf16, fp8
#                    and MXFP8, are 5 % off on average; many were in view.
#   tuned_matmul     H100: fitted to two steps of MaxText, of llama2-7b on 8 and of
#                    llama2-70b on 128 (the rows that `meshpar plan --validate` marks);
#                    the others are held out. For Megatron-LM and PyTorch on the same
#                    cards `matmul` fits. Of an A100 no such step was found.
#   launch_s         The time between two kernels. A100: taken, by order of magnitude.
#                    H100: fitted to the same rows as its matmuls, nanotron's `host_s`
#                    too.
#   attention, attention_head_dim
#                    `meshpar.hardware.attention_kernels`.
#                    Blackwell's is taken to be Hopper's: cuDNN 9.13 reaches 1,613 / 1.3
#                    of a B200's 2,250 TFLOP/s with heads of 128 (Zadouri et al. 2026,
#                    "FlashAttention-4", abstract), 0.55 where Hopper's gives 0.52.
#   memory           Taken: what streaming kernels achieve, norms and masks among them;
#                    the layer times above fit as well with 0.8 as with 0.9.
#   link_bytes_per_s, network_bytes_per_s
#                    Half the NVLink figure of NVIDIA's data sheets, which
#                    count both directions (A100 2021-06, H100 and H800 2023-03, H200
#                    2024-11, B200 2025-02); one network port for each, as in a DGX
#                    (200 Gb/s A100, 400 Gb/s later).
#   link             nccl-tests' bus bandwidth in a host: 235 of 300 GB/s (DGX A100),
#                    360 of 450 GB/s (DGX H100, rings), 757 of 900 GB/s (72 GB200 of a
#                    rack, 2 GiB, coreweave/nccl-tests, pull request 43).
#   network          Taken: the line rate less headers and imperfect routes.
#   hop_s, network_hop_s
#                    A step of a ring: 3.4 us over NVLink, 14 us over InfiniBand (NCCL,
#                    `src/graph/tuning.cc`, `hwLat`, simple protocol), 20 us over EFA,
#                    on which the nanotron grid ran (aws-ofi-nccl's tuner: 19.8).
#                    Between many hosts these are what achieved bandwidth falls by.
#   collective_cores NCCL's channels have a core each: 24 of 108 on a DGX A100 (NCCL's
#                    log), 20 of 132 (DeepSeek-AI 2024, section 3.2.1).
#   host_bytes_per_s Of the device, not achieved: PCIe x16, half of the data sheet's
#                    both directions (gen 4 A100, gen 5 H100 to B200); GB200 a half of
#                    its CPU's 450 GB/s NVLink-C2C.
#   compute_capability
#                    NVIDIA's table of CUDA GPUs (2025): 8.0, 9.0, 10.0.
#   spread           Taken: equal devices differ by some tenths of a percent.
_A100 = Efficiency(
    matmul=0.78,
    attention=CUDNN_AMPERE.whole,
    attention_head_dim=CUDNN_AMPERE.head_dim,
    memory=0.8,
    link=0.78,
    network=0.9,
    hop_s=3.4e-6,
    network_hop_s=14e-6,
    launch_s=4e-6,
    spread=0.003,
    collective_cores=0.22,
)
_H100 = replace(
    _A100,
    matmul=0.62,
    tuned_matmul=0.69,
    attention=CUDNN_HOPPER.whole,
    attention_head_dim=CUDNN_HOPPER.head_dim,
    link=0.8,
    network_hop_s=20e-6,
    launch_s=1e-6,
    collective_cores=0.15,
)

_GB200 = replace(_H100, matmul=0.52, tuned_matmul=0.0)
_B200 = replace(_GB200, matmul=0.56)
_GB300 = replace(_GB200, matmul=0.655)


# JAX takes 75 % of a GPU's memory at start unless XLA_PYTHON_CLIENT_MEM_FRACTION says
# otherwise (its documentation, "GPU memory allocation"). Taken: 0.92 of it, which
# leaves 6.8 of an H100's 84.9 GB for the context, kernels and NCCL's buffers.
_RESERVE = 0.08


def _gpu_peaks(bf16: float) -> dict[str, float]:
    """FLOP/s by dtype: fp32 at JAX's default precision is TF32, half as fast."""
    return {"bf16": bf16, "fp32": bf16 / 2}


def _fp8_peaks(bf16: float) -> dict[str, float]:
    """The same of a device whose tensor cores have fp8, twice as fast as bf16."""
    return {**_gpu_peaks(bf16), "fp8": 2 * bf16}


def _mxfp8_peaks(bf16: float) -> dict[str, float]:
    """The same with scales of 32 values each, as Blackwell's have, at no cost."""
    return {**_fp8_peaks(bf16), "mxfp8": 2 * bf16}


# NVIDIA A100 data sheet, 2021-06: bf16 312, TF32 156 TFLOP/s dense, HBM2e 2,039 GB/s
# (80 GB SXM), HBM2 1,555 GB/s (40 GB).
_A100_80GB = Device(
    name="a100-80gb",
    peak_flops=_gpu_peaks(312e12),
    memory_bytes=85_100_068_864,
    memory_bytes_per_s=2.039e12,
    domain_devices=8,
    link_bytes_per_s=300e9,
    network_bytes_per_s=25e9,
    host_bytes_per_s=32e9,
    efficiency=_A100,
    attention_kernels=AMPERE,
    reserve=_RESERVE,
    compute_capability=8.0,
)
_A100_40GB = replace(
    _A100_80GB,
    name="a100-40gb",
    memory_bytes=42_331_013_120,
    memory_bytes_per_s=1.555e12,
)

# NVIDIA H100 data sheet, 2023-03 (SXM; half of the numbers with sparsity).
_H100_80GB = Device(
    name="h100-80gb",
    peak_flops=_fp8_peaks(989.4e12),
    memory_bytes=84_942_979_072,
    memory_bytes_per_s=3.35e12,
    domain_devices=8,
    link_bytes_per_s=450e9,
    network_bytes_per_s=50e9,
    host_bytes_per_s=64e9,
    efficiency=_H100,
    attention_kernels=HOPPER,
    reserve=_RESERVE,
    compute_capability=9.0,
)
# The H800 is an H100 whose NVLink is cut to 400 GB/s in both directions (DeepSeek-AI
# 2025, "Insights into DeepSeek-V3", section 4.1).
_H800_80GB = replace(_H100_80GB, name="h800-80gb", link_bytes_per_s=200e9)
# An H100 of 96 GB and 2.4 TB/s of HBM2e, limited to 500 W: TorchTitan's report of
# December 2024 ran on it (`benchmarks/llama3_h100_202412_torchtitan.md`), whose peak it
# puts between that of this card and that of the H100 NVL (835.5 at 400 W, data sheet).
# Taken: their mean.
_H100_96GB = replace(
    _H100_80GB,
    name="h100-96gb",
    peak_flops=_fp8_peaks(912e12),
    memory_bytes=101_931_575_705,
    memory_bytes_per_s=2.4e12,
)
# NVIDIA H200 data sheet, 2024-11: the H100's peaks, 4.8 TB/s.
_H200_141GB = replace(
    _H100_80GB,
    name="h200-141gb",
    memory_bytes=151_397_597_184,
    memory_bytes_per_s=4.8e12,
)

# NVIDIA DGX B200 data sheet, 2025-02: 8 GPUs with 72 PFLOP/s fp8 with sparsity and
# 64 TB/s together.
_B200_180GB = replace(
    _H100_80GB,
    name="b200-180gb",
    peak_flops=_mxfp8_peaks(2.25e15),
    memory_bytes=191_514_411_008,
    memory_bytes_per_s=8e12,
    link_bytes_per_s=900e9,
    efficiency=_B200,
    compute_capability=10.0,
)
# NVIDIA DGX B300 data sheet, 2025-03: 8 GPUs of 288 GB, 8 TB/s each, 72 PFLOP/s fp8
# with sparsity together; two 400 Gb/s ports each. It achieves GB300's fractions, taken.
_B300_288GB = replace(
    _B200_180GB,
    name="b300-288gb",
    memory_bytes=288e9,
    taken_from="gb300-288gb",
    network_bytes_per_s=100e9,
    efficiency=_GB300,
    compute_capability=10.3,
)
# NVIDIA GB200 NVL72 data sheet, 2024-03: 72 GPUs with 360 PFLOP/s bf16 with sparsity
# and 576 TB/s together, one NVLink domain of the B200's ports.
_GB200_186GB = replace(
    _B200_180GB,
    name="gb200-186gb",
    peak_flops=_mxfp8_peaks(2.5e15),
    memory_bytes=197_897_748_480,
    host_bytes_per_s=225e9,
    domain_devices=72,
    efficiency=_GB200,
)
# NVIDIA GB300 NVL72 data sheet, 2025-03: 72 GPUs of 288 GB, 8 TB/s each, 360 PFLOP/s
# bf16 and 720 PFLOP/s fp8 with sparsity together; two 400 Gb/s ports each.
_GB300_288GB = replace(
    _GB200_186GB,
    name="gb300-288gb",
    memory_bytes=288e9,
    network_bytes_per_s=100e9,
    efficiency=_GB300,
    compute_capability=10.3,
)


_GPUS = (
    Known(_A100_80GB, "A100", other_name="a100", target="gpu:a100"),
    Known(_A100_40GB, "A100"),
    Known(_H100_80GB, "H100", other_name="h100", target="gpu:h100"),
    Known(_H100_96GB, "H100"),
    Known(_H800_80GB, "H800", other_name="h800", target="gpu:h100"),
    Known(_H200_141GB, "H200", other_name="h200", target="gpu:h200"),
    Known(_B200_180GB, "B200", other_name="b200", target="gpu:b200"),
    Known(_B300_288GB, "B300", other_name="b300"),
    Known(_GB200_186GB, "GB200", other_name="gb200"),
    Known(_GB300_288GB, "GB300", other_name="gb300"),
)


# How each number was got:
#   memory_bytes     What a program can have, for that is what has to fit: what libtpu
#                    (of jax 0.10.2, 2026-11-22) calls available when it refuses a
#                    program that is too large. Of a v5e's 16 GiB it keeps 0.25 itself,
#                    of 32 GiB 0.75 (v6e) or 1.25 (v4); Google's pages say 95 GB (v5p).
#   peak_flops, memory_bytes_per_s, link_bytes_per_s, network_bytes_per_s
#                    Cloud TPU documentation, system architecture pages (read 2025, v7x
#                    2026-11): ICI per chip over its 6 (v4, v5p, v7x) or 4 (v5e, v6e)
#                    ports. The network is a host's NICs over its chips: 2 x 100 Gb/s
#                    over 8 (v5e), 4 x 200 over 8 (v6e); 200 Gb/s over 4 (v4, v5p); 100
#                    for each (v7x).
#   chip_devices, chip_bytes_per_s
#                    A v7x's two TensorCores are a device of JAX each, with half of the
#                    chip's memory and FLOP/s (the same pages). What joins them is "six
#                    times faster than a 1D ICI link": 6 x 100 GB/s in each direction.
#   pod_devices      Most chips of one slice: a v4 pod 4096, a v5e or v6e pod 256, of a
#                    v5p pod's 8960 a job has at most 6144, a v7x pod 9216, which are
#                    two devices each (the same pages).
#   host_bytes_per_s "How to Scale Your Model" (Austin et al. 2025, chapter 2); a v7x
#                    chip's is taken to be a v6e's, for both its devices.
#
#   attention        Fitted to a step of MaxText on v5p at 4M tokens, of which attention
#                    is 98 % (the row that `meshpar plan --validate` marks), with
#                    attention_head_dim as taken; its kernels are Tokamax's, which stem
#                    from JAX's that we run. v7x: fitted, with attention_head_dim, to
#                    two steps, of an 8B model with heads of 256 at 4M tokens and of
#                    llama3.1-70b with heads of 128 at 131,072: with five times the
#                    FLOP/s of a v5p's TensorCores, softmax takes as long as matmuls of
#                    134, not of 24. Of the other chips it is taken.
#
#   matmul           v6e: fitted to two steps of MaxText, of llama3.1-8b on 4x4 and of
#                    llama3.1-70b on 8x16 (the rows that `meshpar plan --validate`
#                    marks); the twelve others are 3 % off on average. v7x: to one, of
#                    llama3.1-70b on 4x4x4. The eleven others of dense models, in fp8
#                    and up to 10M tokens, are 2 % off on average. Google's benchmark of
#                    bf16 matmuls has 0.77 (of 4096) to 0.83 (of 32768) of the peak.
#   link             v6e: Google's benchmark of collectives, whose all-reduce of 0.6 GB
#                    over 16x16 moves 235.8 GB/s a chip of the 400 of its four links
#                    (AI-Hypercomputer/tpu-recipes, microbenchmarks/trillium, read
#                    2026-11). v7x: an all-gather of four chips moves 178.8 GB/s a chip
#                    of the 200 of its two links (accelerator-microbenchmarks of the
#                    same, Ironwood/guides/collectives, read 2026-11).
#   host             A chip copies over a port of its own, so that it achieves what one
#                    copy does (`device.SHARED_HOST_LINK`): taken. At half of it
#                    llama3.1-8b would take 3.75 s on v6e 2x4, where it took 3.44.
#
# TPUs run one compiled program: no launches, and engines of their own move what
# collectives send. No published step times calibrate the rest: taken, with the
# fractions of ICI and matmuls that "How to Scale Your Model" (Austin et al. 2025) calls
# usual; the twelve steps of MaxText's README on v5e and v5p, none of which fitted
# anything, are 5 % off on average and 14 % at most.
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
    host=0.8,
)


def _tpu_peaks(bf16: float) -> dict[str, float]:
    """FLOP/s by dtype: fp32 at JAX's default precision is one bf16 pass of the MXU."""
    return {"bf16": bf16, "fp32": bf16}


def _gib(size: float) -> int:
    return round(size * 2**30)


_V4 = Device(
    name="tpu-v4",
    peak_flops=_tpu_peaks(275e12),
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
    peak_flops=_tpu_peaks(459e12),
    memory_bytes=_gib(95.74),
    memory_bytes_per_s=2.765e12,
    link_bytes_per_s=100e9,
    pod_devices=6144,
    efficiency=replace(_TPU, attention=0.89),
)
_V5E = Device(
    name="tpu-v5e",
    peak_flops=_tpu_peaks(197e12),
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
    peak_flops=_tpu_peaks(918e12),
    memory_bytes=_gib(31.25),
    memory_bytes_per_s=1.638e12,
    link_bytes_per_s=100e9,
    network_bytes_per_s=12.5e9,
    host_bytes_per_s=32e9,
    efficiency=replace(_TPU, matmul=0.68, link=0.59),
)
# A v7x runs at this part of its clock with `--xla_tpu_dvfs_p_state=7`, of which its
# peaks are: one step of MaxText at 4M tokens takes 186.48 s so, 213.68 s without.
_V7X_CLOCK = 0.873
_V7X = replace(
    _V5P,
    name="tpu-v7x",
    peak_flops={**_tpu_peaks(1153.5e12), "fp8": 2307e12},
    memory_bytes=_gib(94.75),
    memory_bytes_per_s=3.69e12,
    domain_devices=8,
    chip_devices=2,
    chip_bytes_per_s=600e9,
    network_bytes_per_s=6.25e9,
    pod_devices=18_432,
    efficiency=replace(
        _TPU, matmul=0.75, attention=0.79, attention_head_dim=134, link=0.89
    ),
)
_V7X_P7 = replace(
    _V7X,
    name="tpu-v7x-p7",
    efficiency=replace(
        _V7X.efficiency, matmul=0.75 / _V7X_CLOCK, attention=0.79 / _V7X_CLOCK
    ),
)


_TPUS = (
    Known(_V4, "TPU v4", other_name="v4", target="tpu:v4"),
    Known(_V5E, "TPU v5 lite", other_name="v5e", target="tpu:v5e"),
    Known(_V5P, "TPU v5", other_name="v5p", target="tpu:v5p"),
    Known(_V6E, "TPU v6 lite", other_name="v6e", target="tpu:v6e"),
    Known(_V7X, "TPU7x", other_name="v7x", target="tpu:v7x"),
    Known(_V7X_P7, "TPU7x"),
)

_KNOWN = (*_GPUS, *AMD, *_TPUS)

DEVICES = {known.device.name: known.device for known in _KNOWN}
"""Name for `--hardware` -> device."""

_FRACTIONS = ("matmul", "attention", "memory", "link", "network")
_CALIBRATED = (
    _A100_80GB,
    _A100_40GB,
    _H100_80GB,
    _H100_96GB,
    _H800_80GB,
    _H200_141GB,
)
_MATMULS_CALIBRATED = (_B200_180GB, _GB200_186GB, _GB300_288GB)

ASSUMED = {
    **dict.fromkeys(DEVICES, _FRACTIONS),
    **dict.fromkeys((device.name for device in _CALIBRATED), ("memory", "network")),
    "tpu-v6e": ("attention", "memory", "network"),
    **dict.fromkeys((_V7X.name, _V7X_P7.name), ("memory", "network")),
    **AMD_ASSUMED,
    **dict.fromkeys(
        (device.name for device in _MATMULS_CALIBRATED),
        ("attention", "memory", "network"),
    ),
}
"""Name of a device -> its fractions that the comments above call taken. A device of
one's own has none: its file says what it achieves."""

OTHER_NAMES = {known.other_name: known.device for known in _KNOWN if known.other_name}
"""Shorter name -> device."""

TARGET_NAMES = {known.device.name: known.target for known in _KNOWN if known.target}
"""Name of a device -> its name for `meshpar audit --target`, without sizes."""

# An H800 is compiled for as an H100, whose entry comes first.
TARGETS = {known.target: known.device for known in reversed(_KNOWN) if known.target}
"""Name for `meshpar audit --target`, without sizes -> device."""

# Words of a device kind whose figures are others: cards on PCIe, NVL cards (bridged to
# few others, not to the whole host), slices of a card (MIG has no NVLink).
_OTHER_CARDS = {"PCIE", "NVL", "MIG"}


def device_from_kind(device_kind: str) -> Device | None:
    """Return the device that JAX calls so; None if it is not known.

    Cards of one name and several memory sizes are alike but for that size.

    Example:
        >>> device_from_kind("NVIDIA GB200").name, device_from_kind("NVIDIA H100 PCIe")
        ('gb200-186gb', None)
        >>> device_from_kind("TPU v5 lite").name
        'tpu-v5e'
    """
    words = set(re.split(r"[^A-Z0-9]+", device_kind.upper()))
    names = set() if words & _OTHER_CARDS else {*words, device_kind}
    return next((known.device for known in _KNOWN if known.kind in names), None)


def compute_capability(device: Any) -> float:
    """Return the compute capability of a `jax.Device`; 0 if it is no NVIDIA GPU.

    Example:
        >>> from types import SimpleNamespace
        >>> compute_capability(SimpleNamespace(compute_capability="9.0"))
        9.0
        >>> compute_capability(SimpleNamespace(compute_capability="gfx942"))  # AMD
        0.0
    """
    try:
        return float(getattr(device, "compute_capability", None) or 0)
    except ValueError:
        return 0.0
