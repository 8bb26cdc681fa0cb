"""Training programs: ours, and those whose published runs test the planner.

`--execution` takes one by name, or a TOML file.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from meshpar.errors import InputError, nearest
from meshpar.foreign_files import read_toml
from meshpar.hardware.attention_kernels import (
    OWN_KERNEL,
    PLATFORM_KERNEL,
)
from meshpar.planner.machine.clusters import check_fields
from meshpar.planner.machine.program import Execution as Execution
from meshpar.planner.workload.workload import Workload

# Calibrated with the A100's matmuls: one layer of Korthikanti et al. 2022, table 4.
_MEGATRON_LAUNCH_S = 8e-6

# Megatron-LM waits for the whole device after a hop. Calibrated: Qi et al. 2024 profile
# 0.60 ms for hops of 28 MB inside a host, whose bytes take 0.12 ms, and 0.38 ms for
# those of 10 MB, one in eight of them between hosts, whose bytes take 0.09.
_MEGATRON_HOP_S = 0.35e-3

MESHPAR = Execution(
    name="meshpar",
    fused_attention=True,  # for half precision: cuDNN on GPUs, splash on TPUs
    attention_kernel=OWN_KERNEL,
    fused_activation=True,  # XLA fuses elementwise chains
    dropout=False,
    lock_step=True,
    uneven_shares=True,
    shared_ends=True,
    tensor_overlap=False,
    reduction_overlap=False,  # but where a run prefetches
    gather_overlap=False,
    splits_stored=True,
    measured_overlap=True,  # what XLA hides is read from what it compiles
    hop_overlap=False,
    hop_split=False,
    fused_accumulation=True,
    keeps_gathered=False,
    weight_bytes=4,  # parameters are stored in fp32 and cast for use
    gradient_bytes=4,
    reduction_bytes=4,
    state_bytes=8,  # Adam's two moments; the parameters are their own masters
    logit_bytes=8,  # fp32 logits and their gradient
    host_s=0.0,
    eager=False,
)
"""`make_train_step` of this library, with Adam."""

MESHPAR_CPU = replace(
    MESHPAR, name="meshpar-cpu", fused_attention=False, measured_overlap=False
)
"""The same on emulated devices: XLA:CPU has no fused attention, and does one thing
after another (`meshpar.emulate`)."""

MEGATRON_2021 = Execution(
    name="megatron-2021",
    fused_attention=False,
    fused_activation=True,
    dropout=True,
    lock_step=False,
    shared_ends=False,
    tensor_overlap=False,
    reduction_overlap=False,
    gather_overlap=False,
    hop_overlap=False,
    hop_split=True,
    fused_accumulation=False,
    keeps_gathered=False,
    weight_bytes=2,
    gradient_bytes=2,
    reduction_bytes=2,
    state_bytes=12,
    logit_bytes=12,
    host_s=0.0,
    eager=True,
    hop_wait_s=_MEGATRON_HOP_S,
    launch_s=_MEGATRON_LAUNCH_S,
)
"""Megatron-LM of Narayanan et al. 2021 (section 4: fused kernels, scatter/gather)."""

MEGATRON_2022 = replace(
    MEGATRON_2021,
    name="megatron-2022",
    tensor_overlap=True,
    fused_accumulation=True,
    gradient_bytes=4,
    reduction_bytes=4,
)
"""Megatron-LM of Korthikanti et al. 2022 (section 4.2.2: collectives overlapped with
weight gradients; 18 bytes a parameter)."""

MEGATRON_2023 = replace(
    MEGATRON_2022,
    name="megatron-2023",
    gradient_bytes=2,
    reduction_bytes=2,
    reserve=0.055,  # calibrated: `published.others.CALIBRATES_RESERVE`
)
"""Megatron-LM in fp16, whose gradients are fp16 too, as Qi et al. 2024 ran it."""

MEGATRON_2024 = replace(
    MEGATRON_2023,
    name="megatron-2024",
    fused_attention=True,
    attention_kernel="flash-attention-2",
    dropout=False,
)
"""The same with FlashAttention-2 and no dropout, as Yeung et al. 2024 ran it."""

NANOTRON = Execution(
    name="nanotron",
    fused_attention=True,
    fused_activation=False,
    dropout=False,
    lock_step=False,
    shared_ends=False,
    tensor_overlap=True,
    reduction_overlap=True,
    gather_overlap=False,
    hop_overlap=False,
    hop_split=False,
    fused_accumulation=False,
    keeps_gathered=True,
    weight_bytes=2,
    gradient_bytes=4,
    reduction_bytes=4,
    state_bytes=12,
    logit_bytes=12,
    attention_kernel="flash-attention-2",
    bucket_copy_bytes=2,  # DistributedDataParallel's, beside the sums in fp32
    bucket_bytes=25 * 2**20,  # DistributedDataParallel's default
    host_s=0.07,  # calibrated: `published.others.CALIBRATES_HOST`
    eager=True,
)
"""nanotron of the "Ultra-Scale Playbook" (Tazi et al. 2025): eager PyTorch with
FlashAttention-2, DistributedDataParallel and fp32 gradient accumulation."""

MEGATRON_CORE = replace(
    MEGATRON_2022,
    name="megatron-core",
    fused_attention=True,
    attention_kernel="cudnn",
    dropout=False,
    tensor_ring=True,
    reduction_overlap=True,
    update_overlap=True,
    hop_overlap=True,
    hop_split=False,
    bucket_bytes=160e6,
    hop_wait_s=0.0,
    reserve=MEGATRON_2023.reserve,
    host_s=0.08,  # calibrated: `published.megatron.CALIBRATES_HOST`
)
"""Megatron-Core on Hopper: data, tensor and pipeline parallel overlapped, attention of
Transformer Engine. The distributed optimizer is `zero=1` of a layout.

Reference: Megatron Core's user guide, "Communication Overlap" (read 2025): reductions
and gathers in buckets of 40 million parameters beside the backward and the forward
(`DistributedDataParallelConfig`), tensor parallel collectives in chunks beside the
matmuls that they feed, sends of interleaved stages beside computation.
"""

# Calibrated: Qwen3-30B-A3B on 8 B200 (`published.json`, "Bridge experts in fp8"), one
# sequence a microbatch, waits for the host all the time: 8.8 ms for a block's 165
# kernels and the matmuls of 16 experts (of four sequences, the device decides).
_BRIDGE_KERNEL_HOST_S = 48.7e-6

# Calibrated: Qwen3-30B-A3B on 16 H100 (26.02) and Qwen3-235B-A22B on 64 B200 (25.11),
# the mean of both. To run one microbatch's exchanges beside another's matmuls, a block
# is launched in parts, its weight gradients apart.
_OVERLAP_KERNEL_HOST_S = 83e-6

# Calibrated: GPT-OSS-120B on 64 GB200, with nine other rows of it in view. Its experts
# alone have biases, and its step takes what no count of bytes explains. One rate serves
# H100, B200 and GB200, as that of kernels which do not use the tensor cores would.
_BIASED_GRAD_FLOPS = 320e12

# Calibrated: Llama 3 8B on 8 B200 (`published.json`, "Bridge dense fp8", 25.11), which
# takes 4.44 s in MXFP8 and 4.28 s with a scale for each tensor. One kernel that reads
# 16 bits and writes two copies moves 4.1 bytes: it achieves half of what others do, for
# it finds the largest of 32 values along both dims.
_MXFP8_CAST_BYTES = 8.0

MEGATRON_BRIDGE = replace(
    MEGATRON_CORE,
    name="megatron-bridge",
    gradient_bytes=2,
    reduction_bytes=2,
    fp8=True,
    keeps_fp8=True,
    keeps_expert_outputs=False,
    whole_experts=True,
    fused_loss=True,
    trains_mtp=True,
    expert_overlap=False,
    mxfp8_cast_bytes=_MXFP8_CAST_BYTES,
    kernel_host_s=_BRIDGE_KERNEL_HOST_S,
    adds_biases_apart=True,
    biased_grad_flops=_BIASED_GRAD_FLOPS,
)
"""Megatron Bridge's recipes for performance: Megatron-Core with gradients kept and
summed in 16 bits (`grad_reduce_in_fp32=False`), tokens sent to their experts by an
all-to-all that no work hides (`moe_a2a_overlap=False`), no CUDA graphs."""

NEMO_2024 = replace(
    MEGATRON_BRIDGE,
    name="nemo-2024",
    mxfp8_cast_bytes=0.0,
    keeps_expert_outputs=True,
    whole_experts=False,
    fused_loss=False,
    trains_mtp=False,
)
"""NeMo 24.09 to early 2025, the same but for what Megatron-Core did not have yet: a
fused loss of Transformer Engine, experts apart from `tensor`, weights of the router
before the experts' last matmul (NVIDIA/dgxc-benchmarking, `grok1_314b.yaml`)."""

MEGATRON_BRIDGE_OVERLAP = replace(
    MEGATRON_BRIDGE,
    name="megatron-bridge-overlap",
    exchange_overlap=True,
    kernel_host_s=_OVERLAP_KERNEL_HOST_S,
)
"""The same with `moe_a2a_overlap=True`, as its recipes of Qwen3-235B for H100 have."""

PRIMUS = replace(MEGATRON_CORE, name="primus", fused_accumulation=False, fp8=True)
"""Megatron-Core as AMD's Primus runs it, whose recipes switch the fused accumulation of
gradients off (AMD-AGI/Primus, `examples/megatron/configs`, 2025)."""

DEEPSPEED_ZERO3 = replace(
    MEGATRON_2021,
    name="deepspeed-zero3",
    gradient_bytes=2,
    reduction_bytes=2,
    reduction_overlap=True,
    gather_overlap=True,
    gathers_again=True,
    rails=1,  # calibrated: `published.others.CALIBRATES_RAILS`
)
"""DeepSpeed ZeRO-3 as Narayanan et al. 2021 ran it (section 5.2), with Megatron-LM's
kernels: 16-bit parameters gathered for every use, a layer ahead (Rajbhandari et al.
2021, "ZeRO-Infinity", section 6.2), for what is recomputed and for its backward too."""

TORCH_FSDP2 = replace(
    NANOTRON,
    name="torch-fsdp2",
    fused_norms=False,
    gather_overlap=True,
    repacks=True,
    stops_early=True,
    selects_matmuls=True,
    weight_bytes=4,  # shards in fp32, which are their own masters
    state_bytes=8,
    loss_bytes=52,
    bucket_copy_bytes=0,
    bucket_bytes=0.0,
    host_s=0.0,
    fp8=True,
    # torchao's dynamic scales: the largest value (read 2), cast (2, 1), and transposed
    # for the backward (1, 1).
    cast_bytes=7,
    reserve=MEGATRON_2023.reserve,
    learned_positions="llm-foundry",
)
"""PyTorch's fully sharded data parallel (Zhao et al. 2023) as TorchTitan and fms-fsdp
run Llamas, eager, with FlashAttention-2: weights gathered in 16 bits a layer ahead, for
the backward too, gradients scattered in fp32.

Reference: TorchTitan (`torchtitan/models/llama`, `parallelisms/parallelize_llama.py`,
2024) has the operations of norms, positions and loss, and what "selective op" keeps;
`torch.utils.checkpoint.set_checkpoint_early_stop` what is not recomputed.
"""

TORCH_FSDP2_COMPILE = replace(
    TORCH_FSDP2,
    name="torch-fsdp2-compile",
    fused_activation=True,
    fused_norms=True,
)
"""The same with `torch.compile` of each block."""

LLM_FOUNDRY = replace(
    TORCH_FSDP2,
    name="llm-foundry",
    attention_kernel="flash-attention-1",
    selects_matmuls=False,
    logit_bytes=4,
    cast_bytes=NANOTRON.cast_bytes,  # Transformer Engine's
    keeps_fp8=True,
    learned_positions="",
)
"""LLM Foundry of 2023, as its benchmarks train MPT models: PyTorch's first fully
sharded data parallel, with the Triton kernel of FlashAttention (`attn_impl=triton`) and
linear layers of Transformer Engine in fp8 (`fc_type=te`).

Its loss keeps logits and their gradient in 16 bits (`loss_fn=fused_crossentropy`: reads
4 forward, reads 2 and writes 2 backward); two metrics of each microbatch
(`use_train_metrics`) convert the logits and take their softmax in fp32, 22 bytes each.
"""

MAXTEXT = replace(
    MESHPAR,
    name="maxtext",
    attention_kernel=PLATFORM_KERNEL,
    uneven_shares=False,
    tensor_overlap=True,
    gather_overlap=True,
    scans_blocks=True,
    waits_for_scatters="tpu",
    scatters_whole=False,
    tunes_matmuls=True,
    splits_stored=False,
    measured_overlap=False,
    fp8=True,
    cast_bytes=6,
)
"""MaxText: splash attention on TPUs and cuDNN's on GPUs, around a ring too, and XLA's
asynchronous collective fusion.

On TPUs its recipes fuse gathers with matmuls, not reduce-scatters, and set layouts in
which XLA scatters (MaxText, `benchmarks/xla_flags_library.py`: `CF_FOR_ALL_GATHER`,
`LAYOUT_FOR_ALL_REDUCE_SCATTER`). Published steps say so too: on v6e what they take
above their arithmetic grows with the gradients' bytes, and as much over 8x8 as over
4x8. They run collectives over `tensor` whole, beside the weights' gradients only. Its
blocks are one `nn.scan` (`scan_layers`), each under `nn.remat`.

In fp8 (`quantization=fp8_full`) weights, activations and gradients are clipped and cast
with fixed scales (`*_quantization_calibration_method=fixed,-224,224`), once for each of
the two matmuls that take a value: one fused kernel reads 2 bytes and writes 1.
"""

MAXTEXT_BF16 = replace(
    MAXTEXT,
    name="maxtext-bf16",
    weight_bytes=2,
    gradient_bytes=2,
    reduction_bytes=2,
    state_bytes=4,
)
"""The same with `weight_dtype=bfloat16`: parameters, gradients and AdamW's two moments
in 16 bits, without a master (`mu_dtype` is `weight_dtype` if absent)."""

MAXTEXT_BF16_GRADS = replace(
    MAXTEXT,
    name="maxtext-bf16-grads",
    gradient_bytes=2,
    reduction_bytes=2,
    state_bytes=6,
)
"""The same with `grad_dtype=bfloat16` and `mu_dtype=bfloat16` alone."""

MAXTEXT_DROPPING = replace(MAXTEXT, name="maxtext-dropping", expert_capacity=1.25)
"""The same with experts that drop what is above their capacity, computed whole (its
recipes of Mixtral for v6e: `capacity_factor=1.25`, `sparse_matmul=False`)."""

EXECUTIONS = {
    execution.name: execution
    for execution in (
        MESHPAR,
        MESHPAR_CPU,
        MEGATRON_2021,
        MEGATRON_2022,
        MEGATRON_2023,
        MEGATRON_2024,
        NANOTRON,
        MEGATRON_CORE,
        MEGATRON_BRIDGE,
        MEGATRON_BRIDGE_OVERLAP,
        NEMO_2024,
        PRIMUS,
        DEEPSPEED_ZERO3,
        TORCH_FSDP2,
        TORCH_FSDP2_COMPILE,
        LLM_FOUNDRY,
        MAXTEXT,
        MAXTEXT_BF16,
        MAXTEXT_BF16_GRADS,
        MAXTEXT_DROPPING,
    )
}
"""Name for `--execution` -> execution."""


def execution_for(workload: Workload, execution: Execution) -> Execution:
    """Return the execution that trains a model: another one if it says so."""
    other = execution.learned_positions if workload.learned_positions else ""
    return execution_of(other) if other else execution


def execution_of(name: str) -> Execution:
    """Return the execution of a name, or of a TOML file (`load_execution`).

    Raises:
        InputError: There is none, or the file does not describe one.
    """
    if name.endswith(".toml"):
        return load_execution(name)
    if name not in EXECUTIONS:
        raise InputError(
            f"no execution {name!r}; {nearest(name, EXECUTIONS)}; or name a .toml file",
            key="plan.unknown_execution",
        )
    return EXECUTIONS[name]


def load_execution(path: str | Path) -> Execution:
    """Read an execution from a TOML file.

    The file has fields of `Execution`, and may start from a known one with `like`:

        like = "megatron-core"
        tensor_ring = false
        gradient_bytes = 2

    Its name is the file's, unless it gives one. It trains all models unless it says
    `learned_positions`.

    Raises:
        InputError: The file cannot be read, has a field that is none or a value that
            cannot be, or lacks one without starting from a known execution.
    """
    values = read_toml(path, key="plan.unreadable_toml")
    like = values.pop("like", None)
    if like is not None and like not in EXECUTIONS:
        raise InputError(
            f"{str(path)!r}: no execution {like!r}; {nearest(str(like), EXECUTIONS)}",
            key="plan.unknown_execution",
        )
    base = {} if like is None else vars(EXECUTIONS[like])
    own = {"name": Path(path).stem, "learned_positions": ""}
    merged = {**base, **own, **values}
    start = 'execution with like = "megatron-core"'
    check_fields(Execution, merged, f"{str(path)!r}:", start, room="plan")
    try:
        return Execution(**merged)
    except InputError as error:
        raise InputError(f"{str(path)!r}: {error}", key=error.key) from error
