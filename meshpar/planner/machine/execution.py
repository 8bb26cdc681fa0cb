"""Training programs: ours, and those whose published runs test the planner.

`--execution` takes one by name, or a TOML file.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields, replace
from pathlib import Path

from meshpar.errors import InputError, nearest
from meshpar.foreign_files import read_toml
from meshpar.hardware.attention_kernels import (
    KERNELS,
    OWN_KERNEL,
    PLATFORM_KERNEL,
    is_number,
)
from meshpar.planner.machine.clusters import check_fields
from meshpar.planner.workload.workload import Workload


@dataclass(frozen=True, kw_only=True)
class Execution:
    """One training program.

    Args:
        name: Its name for `--execution`.
        fused_attention: True if one kernel does attention without storing the scores,
            and skips what a causal mask hides (FlashAttention), where the device has
            one: `Run.attention`.
        attention_kernel: Name in `meshpar.hardware.attention_kernels` of that kernel;
            `platform` for splash attention on TPUs and cuDNN's on GPUs; or `own` for
            the one that this library takes on the device.
        fused_activation: True if one kernel does the MLP's bias, activation and gate.
        fused_norms: True if one kernel does a norm, and one the rotary positions; else
            those of gated models run as Llama's reference code writes them, operation
            by operation and in fp32, which also repeats shared keys and values.
        dropout: True if blocks drop values, whose masks are kept.
        lock_step: True if all pipeline ranks move together, tick by tick, idle ones too
            (`meshpar.parallel.pipeline`); else each waits for its inputs.
        shared_ends: True if all pipeline ranks share embedding and head; else the first
            has the embedding and the last the head.
        tensor_overlap: True if the backward's collectives over `tensor` run beside the
            matmuls for the weight gradients.
        tensor_ring: True if they, and the forward's, run in chunks around a ring, each
            beside the matmul of another chunk.
        reduction_overlap: True if gradients are reduced beside the last backward.
        expert_overlap: True if that holds for the gradients of experts too, and what
            follows for their parameters.
        update_overlap: True if updated parameters are gathered beside the next forward.
        gather_overlap: True if weights split over `fsdp` are gathered one layer ahead.
        gathers_again: True if they are gathered once more for what a block recomputes.
        waits_for_scatters: Kind of device, such as `tpu`, on which no work hides the
            scattering of their gradients, though it hides the gathers; empty for none.
        scatters_whole: True if it all-reduces where XLA:TPU would by default instead of
            reduce-scattering (`Link.scatters_whole`).
        repacks: True if what is gathered is copied out of one buffer for the layer's
            matrices, and their gradients into one, in fp32, of which the device keeps
            its shard's sum; else gradients are added to a sum of the whole layer.
        stops_early: True if a block recomputes no more than its backward reads, so not
            the last matmul, under `remat=full` too.
        selects_matmuls: True if `remat=selective` keeps attention's output and that of
            every second matmul of a block, and recomputes the others.
        expert_capacity: Rows that an expert computes for each that is evenly its own: 1
            where none is dropped, above where it has room for so many and drops others.
        tunes_matmuls: True if its compiler times several kernels for each matmul and
            takes the fastest (`Efficiency.tuned_matmul`).
        splits_stored: True if ZeRO-1 and 2 split parameters between steps too, and
            gather them in the forward, not after the update.
        measured_overlap: True if the hidden share of a step's collectives is measured
            in compiled programs (`hidden_share`), not a yes or no of the options above.
        rails: Network ports of a host that one collective uses at once; 0 for all.
        hop_overlap: True if activations hop between stages beside computation.
        hop_split: True if a hop is split over `tensor` and gathered after it.
        fused_accumulation: True if the matmul that makes a weight gradient adds it to
            its sum.
        keeps_gathered: True if what sequence parallelism gathers is kept for the
            backward; else it is gathered again.
        weight_bytes: Bytes of a parameter as it is stored for use.
        gradient_bytes: Bytes of a parameter's gradient sum.
        bucket_copy_bytes: Bytes per parameter of copies of its gradient in the buckets
            that collectives sum.
        reduction_bytes: Bytes per parameter in the reduction over `data`.
        state_bytes: Bytes per parameter of optimizer state, its master included.
        logit_bytes: Bytes per logit at the loss, all its copies together: fp32 logits
            and their gradient (8); in Megatron-LM and nanotron 16-bit logits, the fp32
            copy, its softmax, and a 16-bit gradient (12).
        loss_bytes: Bytes that the loss reads and writes for each logit, both ways: 36
            if its gradient is made at once; 52 if softmax's is read and written with
            it, and made from a mask of zeros.
        launch_s: Time that launching a kernel of a forward takes from Python besides
            the device's (`Efficiency.launch_s`).
        host_s: Time of the host between steps that no device work hides.
        kernel_host_s: Time that the host takes for each kernel of a block, Python,
            autograd and checks included: a device that is faster waits for it.
        adds_biases_apart: True if biases of experts' outputs are added one expert after
            another, in fp32.
        biased_grad_flops: FLOP/s of experts' weight gradients that sum a bias's
            gradient too, where those are slower than other matmuls; 0 where not.
        exchange_overlap: True if tokens travel to and from experts beside matmuls of
            another microbatch.
        hop_wait_s: Time of each hop between stages besides its bytes: the host waits
            for it and starts the device again.
        bucket_bytes: Bytes of the gradients that one collective over data-parallel
            devices sums, and of the parameters that one gathers after an update; 0 for
            all.
        reserve: Bytes that the allocator holds besides what is counted, as a fraction
            of that: rounding, fragments, temporaries of library calls.
        eager: True if operations run one by one, as written; else a compiler fuses
            them, casts parameters for use, and drops what no result needs.
        fp8: True if it can train with `precision=fp8`: the matmuls of blocks with
            operands of 8 bits, gathered weights too; the rest as in bf16.
        cast_bytes: Bytes that casting a value to 8 bits reads and writes: 4 for one
            kernel that reads 16 bits and writes two copies (Transformer Engine 2.x,
            `Float8Quantizer` and `MXFP8Quantizer`).
        learned_positions: Name of the execution of models with learned positions, where
            another program trains them; empty for this one.

    Raises:
        InputError: A value of another type, or outside of what it can be.
    """

    name: str
    fused_attention: bool
    fused_activation: bool
    dropout: bool
    lock_step: bool
    shared_ends: bool
    tensor_overlap: bool
    reduction_overlap: bool
    gather_overlap: bool
    hop_overlap: bool
    hop_split: bool
    fused_accumulation: bool
    keeps_gathered: bool
    weight_bytes: int
    gradient_bytes: int
    reduction_bytes: int
    state_bytes: int
    logit_bytes: float
    host_s: float
    eager: bool
    fp8: bool = False
    cast_bytes: float = 4.0
    launch_s: float = 0.0
    kernel_host_s: float = 0.0
    adds_biases_apart: bool = False
    biased_grad_flops: float = 0.0
    exchange_overlap: bool = False
    attention_kernel: str = "cudnn"
    tensor_ring: bool = False
    update_overlap: bool = False
    expert_overlap: bool = True
    gathers_again: bool = False
    waits_for_scatters: str = ""
    scatters_whole: bool = True
    repacks: bool = False
    stops_early: bool = False
    selects_matmuls: bool = False
    fused_norms: bool = True
    loss_bytes: float = 36.0
    tunes_matmuls: bool = False
    expert_capacity: float = 1.0
    splits_stored: bool = False
    measured_overlap: bool = False
    rails: int = 0
    hop_wait_s: float = 0.0
    bucket_bytes: float = 0.0
    bucket_copy_bytes: int = 0
    reserve: float = 0.0
    learned_positions: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            _check(self.name, field.name, str(field.type), getattr(self, field.name))

    @property
    def update_bytes(self) -> int:
        """Bytes that the update reads and writes for each parameter.

        The sum's norm reads it, Adam reads it and reads and writes its state. Compiled,
        the parameter is read and written. Operation by operation, clipping reads and
        writes the sum, the master is read to write the parameter, and the sum is set to
        zero; one of 16 bits is first copied to fp32.
        """
        adam = 2 * 4 + 2 * self.state_bytes
        if not self.eager:
            return adam + 2 * self.weight_bytes
        copied = 2 + 4 if self.gradient_bytes == 2 else 0
        return adam + 2 * 4 + 4 + self.weight_bytes + self.gradient_bytes + copied


# Least and most of each number.
_RANGES = {
    "weight_bytes": (1, 8),
    "gradient_bytes": (0, 8),
    "bucket_copy_bytes": (0, 8),
    "reduction_bytes": (0, 8),
    "state_bytes": (0, 32),
    "logit_bytes": (0, 64),
    "loss_bytes": (0, 256),
    "cast_bytes": (0, 64),
    "host_s": (0, 3600),
    "launch_s": (0, 1),
    "kernel_host_s": (0, 1),
    "biased_grad_flops": (0, math.inf),
    "hop_wait_s": (0, 1),
    "bucket_bytes": (0, math.inf),
    "reserve": (0, 1),
    "rails": (0, 72),
    "expert_capacity": (1, 1000),
}
_KINDS = {
    "bool": (lambda value: isinstance(value, bool), "true or false"),
    "str": (lambda value: isinstance(value, str), "text, in quotes"),
    "int": (
        lambda value: is_number(value) and float(value).is_integer(),
        "a whole number",
    ),
    "float": (is_number, "a number"),
}


def _check(name: object, field: str, kind: str, value: object) -> None:
    is_kind, words = _KINDS[kind]
    if not is_kind(value):
        raise InputError(
            f"execution {name!r}: {field}={value!r} must be {words}",
            key="plan.wrong_field_type",
        )
    kernels = (*KERNELS, PLATFORM_KERNEL, OWN_KERNEL)
    if field == "attention_kernel" and value not in kernels:
        raise InputError(
            f"execution {name!r}: no attention_kernel {value!r}; "
            f"{nearest(str(value), kernels)}",
            key="plan.unknown_attention_kernel",
        )
    if field in _RANGES:
        least, most = _RANGES[field]
        if not least <= value <= most:  # type: ignore[operator]
            raise InputError(
                f"execution {name!r}: {field}={value!r} must be at least {least} and "
                f"at most {most}",
                key="plan.field_out_of_range",
            )


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
# sequence a microbatch, waits for the host all the time: 8.8 ms for a block's 198
# kernels as counted here (of four sequences, the device decides).
_BRIDGE_KERNEL_HOST_S = 44e-6

# Calibrated: GPT-OSS-120B on 64 GB200. Its experts alone have biases, and its step
# takes what no count of bytes explains. One rate serves H100, B200 and GB200, as that
# of kernels which do not use the tensor cores of these would.
_BIASED_GRAD_FLOPS = 320e12

MEGATRON_BRIDGE = replace(
    MEGATRON_CORE,
    name="megatron-bridge",
    gradient_bytes=2,
    reduction_bytes=2,
    fp8=True,
    expert_overlap=False,
    kernel_host_s=_BRIDGE_KERNEL_HOST_S,
    adds_biases_apart=True,
    biased_grad_flops=_BIASED_GRAD_FLOPS,
)
"""Megatron Bridge's recipes for performance: Megatron-Core with gradients kept and
summed in 16 bits (`grad_reduce_in_fp32=False`), tokens sent to their experts by an
all-to-all that no work hides (`moe_a2a_overlap=False`), no CUDA graphs."""

MEGATRON_BRIDGE_OVERLAP = replace(
    MEGATRON_BRIDGE, name="megatron-bridge-overlap", exchange_overlap=True
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
    tensor_overlap=True,
    gather_overlap=True,
    waits_for_scatters="tpu",
    scatters_whole=False,
    tunes_matmuls=True,
    splits_stored=False,
    measured_overlap=False,
)
"""MaxText: splash attention on TPUs and cuDNN's on GPUs, around a ring too, and XLA's
asynchronous collective fusion.

On TPUs its recipes fuse gathers with matmuls, not reduce-scatters, and set layouts in
which XLA scatters (MaxText, `benchmarks/xla_flags_library.py`: `CF_FOR_ALL_GATHER`,
`LAYOUT_FOR_ALL_REDUCE_SCATTER`). Published steps say so too: on v6e what they take
above their arithmetic grows with the gradients' bytes, and as much over 8x8 as over
4x8. They run collectives over `tensor` whole, beside the weights' gradients only.
"""

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
        PRIMUS,
        DEEPSPEED_ZERO3,
        TORCH_FSDP2,
        TORCH_FSDP2_COMPILE,
        LLM_FOUNDRY,
        MAXTEXT,
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
