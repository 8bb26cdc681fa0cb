"""The accelerators that the planner knows, each number with its source."""

from __future__ import annotations

from dataclasses import replace

from meshpar.hardware.link_speeds import NVIDIA_LINKS, card_words
from meshpar.planner.machine.efficiency import Efficiency
from meshpar.planner.machine.hardware import Device

# How each number was got:
#   matmul           Fitted: A100 to one layer of Megatron-LM (Korthikanti et al. 2022,
#                    table 4, ten times), H100 to three step times of the nanotron grid
#                    (the rows that `meshpar plan --validate` marks; of the two numbers
#                    fitted to them the other is nanotron's `host_s`).
#   attention        FlashAttention-2, heads of 128: 50 to 73 % of an A100 (Dao 2023,
#                    abstract), 35 % of an H100 (Shah et al. 2024, abstract).
#   attention_head_dim
#                    FlashAttention-2 with heads of 64 against 128 (Dao 2023, figure 4).
#   memory           Taken: what streaming kernels achieve, norms and masks among them;
#                    the layer times above fit as well with 0.8 as with 0.9.
#   link             nccl-tests' bus bandwidth in a host: 235 of 300 GB/s (DGX A100),
#                    360 of 450 GB/s (DGX H100, rings).
#   network          Taken: the line rate less headers and imperfect routes.
#   hop_s, network_hop_s, launch_s
#                    Taken, microseconds by order of magnitude: a step of a collective,
#                    and the time between two kernels (1.5 % of the layer times above).
#   host_bytes_per_s Of the device, not achieved: PCIe x16, half of the data sheet's
#                    both directions (gen 4 A100, gen 5 H100 to B200); GB200 a half of
#                    its CPU's 450 GB/s NVLink-C2C; TPUs from "How to Scale Your Model"
#                    (Austin et al. 2025, chapter 2).
#   spread           Taken: equal devices differ by some tenths of a percent.
_A100 = Efficiency(
    matmul=0.75,
    attention=0.71,  # 0.6 at heads of 128
    attention_head_dim=24,
    memory=0.8,
    link=0.78,
    network=0.9,
    hop_s=4e-6,
    network_hop_s=12e-6,
    launch_s=4e-6,
    spread=0.003,
)
_H100 = replace(_A100, matmul=0.66, attention=0.42, link=0.8)
# No published step times calibrate these: Blackwell takes Hopper's fractions.
_B200 = _H100
# TPUs run one compiled program: no launches. No published step times calibrate these:
# taken, with the fractions of ICI and matmuls that "How to Scale Your Model" (Austin et
# al. 2025) calls usual.
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


def _nvidia(
    name: str,
    kind: str,
    *,
    bf16: float,
    fp32: float,
    fp8: float | None,
    memory_bytes: float,
    memory_bytes_per_s: float,
    host_bytes_per_s: float,
    efficiency: Efficiency,
    domain_devices: int = 8,
) -> Device:
    links = NVIDIA_LINKS[kind]
    return Device(
        name=name,
        peak_flops={"bf16": bf16, "fp32": fp32, **({"fp8": fp8} if fp8 else {})},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        domain_devices=domain_devices,
        link_bytes_per_s=links.host_bytes_per_s,
        network_bytes_per_s=links.network_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        efficiency=efficiency,
    )


def _tpu(
    name: str,
    *,
    bf16: float,
    memory_bytes: float,
    memory_bytes_per_s: float,
    link_bytes_per_s: float,
    network_bytes_per_s: float,
    host_bytes_per_s: float,
    devices_per_host: int,
    torus_dims: int,
    wraps: int,
) -> Device:
    # The MXU multiplies bf16; fp32 at JAX's default precision is one bf16 pass.
    return Device(
        name=name,
        peak_flops={"bf16": bf16, "fp32": bf16},
        memory_bytes=memory_bytes,
        memory_bytes_per_s=memory_bytes_per_s,
        domain_devices=devices_per_host,
        link_bytes_per_s=link_bytes_per_s,
        network_bytes_per_s=network_bytes_per_s,
        host_bytes_per_s=host_bytes_per_s,
        torus_dims=torus_dims,
        wraps=wraps,
        platform="tpu",
        efficiency=_TPU,
    )


DEVICES = {
    device.name: device
    for device in (
        # NVIDIA A100 data sheet, 2021-06: bf16 312, TF32 156 TFLOP/s dense, HBM2e
        # 2,039 GB/s (80 GB SXM), HBM2 1,555 GB/s (40 GB).
        _nvidia(
            "a100-80gb",
            "A100",
            bf16=312e12,
            fp32=156e12,
            fp8=None,
            memory_bytes=80e9,
            memory_bytes_per_s=2.039e12,
            host_bytes_per_s=32e9,
            efficiency=_A100,
        ),
        _nvidia(
            "a100-40gb",
            "A100",
            bf16=312e12,
            fp32=156e12,
            fp8=None,
            memory_bytes=40e9,
            memory_bytes_per_s=1.555e12,
            host_bytes_per_s=32e9,
            efficiency=_A100,
        ),
        # NVIDIA H100 data sheet, 2023-03 (SXM; half of the numbers with sparsity).
        _nvidia(
            "h100-80gb",
            "H100",
            bf16=989.4e12,
            fp32=494.7e12,
            fp8=1978.9e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            host_bytes_per_s=64e9,
            efficiency=_H100,
        ),
        # The H800 is an H100 whose NVLink is cut to 400 GB/s in both directions
        # (DeepSeek-AI 2025, "Insights into DeepSeek-V3", section 4.1).
        _nvidia(
            "h800-80gb",
            "H800",
            bf16=989.4e12,
            fp32=494.7e12,
            fp8=1978.9e12,
            memory_bytes=80e9,
            memory_bytes_per_s=3.35e12,
            host_bytes_per_s=64e9,
            efficiency=_H100,
        ),
        # NVIDIA H200 data sheet, 2024-11: the H100's peaks, 141 GB at 4.8 TB/s.
        _nvidia(
            "h200-141gb",
            "H200",
            bf16=989.4e12,
            fp32=494.7e12,
            fp8=1978.9e12,
            memory_bytes=141e9,
            memory_bytes_per_s=4.8e12,
            host_bytes_per_s=64e9,
            efficiency=_H100,
        ),
        # NVIDIA DGX B200 data sheet, 2025-02: 8 GPUs with 72 PFLOP/s fp8 with
        # sparsity, 1,440 GB and 64 TB/s together.
        _nvidia(
            "b200-180gb",
            "B200",
            bf16=2.25e15,
            fp32=1.125e15,
            fp8=4.5e15,
            memory_bytes=180e9,
            memory_bytes_per_s=8e12,
            host_bytes_per_s=64e9,
            efficiency=_B200,
        ),
        # NVIDIA GB200 NVL72 data sheet, 2024-03: 72 GPUs with 360 PFLOP/s bf16 with
        # sparsity, 13.4 TB and 576 TB/s together, one NVLink domain.
        _nvidia(
            "gb200-186gb",
            "B200",  # the same NVLink ports, joined across the rack
            bf16=2.5e15,
            fp32=1.25e15,
            fp8=5e15,
            memory_bytes=186e9,
            memory_bytes_per_s=8e12,
            host_bytes_per_s=225e9,
            efficiency=_B200,
            domain_devices=72,
        ),
        # Cloud TPU documentation, system architecture pages (read 2025): bf16 peak,
        # HBM, ICI per chip over its 6 (v4, v5p) or 4 (v5e, v6e) ports. The network is a
        # host's NICs over its chips: 2 x 100 Gb/s over 8 (v5e), 4 x 200 over 8 (v6e);
        # 200 Gb/s over 4 chips (v4, v5p).
        _tpu(
            "tpu-v4",
            bf16=275e12,
            memory_bytes=32 * 2**30,
            memory_bytes_per_s=1.2e12,
            link_bytes_per_s=50e9,
            network_bytes_per_s=6.25e9,
            host_bytes_per_s=16e9,
            devices_per_host=4,
            torus_dims=3,
            wraps=4,
        ),
        _tpu(
            "tpu-v5e",
            bf16=197e12,
            memory_bytes=16e9,
            memory_bytes_per_s=819e9,
            link_bytes_per_s=50e9,
            network_bytes_per_s=3.125e9,
            host_bytes_per_s=16e9,
            devices_per_host=8,
            torus_dims=2,
            wraps=16,
        ),
        _tpu(
            "tpu-v5p",
            bf16=459e12,
            memory_bytes=95e9,
            memory_bytes_per_s=2.765e12,
            link_bytes_per_s=100e9,
            network_bytes_per_s=6.25e9,
            host_bytes_per_s=16e9,
            devices_per_host=4,
            torus_dims=3,
            wraps=4,
        ),
        _tpu(
            "tpu-v6e",
            bf16=918e12,
            memory_bytes=32e9,
            memory_bytes_per_s=1.638e12,
            link_bytes_per_s=100e9,
            network_bytes_per_s=12.5e9,
            host_bytes_per_s=32e9,
            devices_per_host=8,
            torus_dims=2,
            wraps=16,
        ),
    )
}
"""What `--hardware` knows by name."""


def device_of_kind(device_kind: str) -> Device | None:
    """The accelerator that JAX calls so; None if it is none of these.

    Cards of one name and several memory sizes are alike but for that size.

    Example:
        >>> device_of_kind("NVIDIA GB200").name, device_of_kind("NVIDIA H100 PCIe")
        ('gb200-186gb', None)
    """
    words = {word.lower() for word in card_words(device_kind)}
    return next(
        (device for name, device in DEVICES.items() if name.split("-")[0] in words),
        None,
    )
